//! A deletion of many objects forgets those that it names, and a bucket's settings nobody's bytes.
//!
//! The store is a real S3 server. What the node still holds is seen by taking the objects away behind its back: under
//! `immutable` whatever it has not forgotten it goes on serving.

use forebay_tests::s3::S3Origin;
use forebay_tests::{Engine, Node, NodeSpec, http, on_each_engine};
use std::net::SocketAddr;

const ACCESS: &str = "forebay-test";
const SECRET: &str = "a secret/with+odd=characters";

on_each_engine!(
    a_deletion_of_many_forgets_the_ones_it_names,
    a_list_that_is_not_understood_forgets_all,
    settings_of_a_bucket_forget_nothing,
);

fn a_deletion_of_many_forgets_the_ones_it_names(engine: Engine) {
    let house = House::start(engine);
    house.hold(&["stays", "goes", "a&b c"]);
    let list = "<Delete><Object><Key>goes</Key></Object><Object><Key>a&amp;b c</Key></Object></Delete>";
    let deleted = house.ask("POST", "?delete", &[], list.as_bytes());
    assert_eq!(deleted.status, 200, "{}", deleted.text());
    assert_eq!(house.get("goes").status, 404);
    assert_eq!(house.get("a%26b%20c").status, 404);
    house.take_away("stays");
    let stays = house.get("stays");
    assert_eq!((stays.status, stays.tier()), (200, "ram"));
}

fn a_list_that_is_not_understood_forgets_all(engine: Engine) {
    let house = House::start(engine);
    for (name, list) in [
        ("another language", b"{\"Objects\":[{\"Key\":\"x\"}]}".to_vec()),
        ("too long a list", {
            let blanks = " ".repeat(3 << 20);
            format!("<Delete><Object><Key>x</Key></Object>{blanks}</Delete>").into_bytes()
        }),
    ] {
        house.hold(&["object"]);
        house.take_away("object");
        assert_eq!(house.get("object").tier(), "ram", "{name}");
        house.ask("POST", "?delete", &[], &list);
        assert_eq!(house.get("object").status, 404, "{name}");
    }
}

fn settings_of_a_bucket_forget_nothing(engine: Engine) {
    let house = House::start(engine);
    house.hold(&["object"]);
    house.take_away("object");
    // The server may know some of them and not others; that is between it and its client.
    for (method, query) in
        [("PUT", "?versioning"), ("PUT", "?lifecycle"), ("DELETE", "?policy"), ("PUT", "?acl")]
    {
        house.ask(method, query, &[], b"<Nothing/>");
        assert_eq!(
            (house.get("object").status, house.get("object").tier()),
            (200, "ram"),
            "{method} {query}"
        );
    }
    house.ask("POST", "?no-such-setting", &[], b"<Nothing/>");
    assert_eq!(house.get("object").status, 404);
}

/// A node before an S3 server on a directory.
struct House {
    node: Node,
    root: tempfile::TempDir,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
}

impl House {
    fn start(engine: Engine) -> Self {
        let root = tempfile::tempdir().expect("a temporary directory");
        std::fs::create_dir(root.path().join("bucket")).expect("a bucket");
        let origin = S3Origin::new(root.path(), ACCESS, SECRET).expect("a server");
        let (bound, address) = std::sync::mpsc::channel();
        let (stop, stopped) = tokio::sync::oneshot::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime for the server").block_on(async {
                let localhost = SocketAddr::from(([127, 0, 0, 1], 0));
                tokio::select! {
                    served = origin.serve(localhost, |address| bound.send(address).expect("the test waits")) => {
                        served.expect("a free loopback port");
                    }
                    _ = stopped => {}
                }
            });
        });
        let address = address.recv().expect("a bound server");
        let accelerator =
            format!("bucket=s3://bucket,endpoint=http://{address},region=us-east-1,freshness=immutable");
        let spec = NodeSpec::new(engine)
            .accelerator(accelerator)
            .environment("FOREBAY_ORIGIN_ACCESS_KEY", ACCESS)
            .environment("FOREBAY_ORIGIN_SECRET_KEY", SECRET);
        Self { node: Node::start(&spec), root, stop: Some(stop) }
    }

    /// Stores objects and makes the node hold them.
    #[track_caller]
    fn hold(&self, keys: &[&str]) {
        for key in keys {
            let target = key.replace('&', "%26").replace(' ', "%20");
            let put = self.ask("PUT", &format!("/{target}"), &[], key.as_bytes());
            assert_eq!(put.status, 200, "{}", put.text());
            assert_eq!(self.get(&target).tier(), "miss");
            assert_eq!((self.get(&target).tier(), self.get(&target).text().as_str()), ("ram", *key));
        }
    }

    /// Removes an object at the store, behind the node's back.
    fn take_away(&self, key: &str) {
        std::fs::remove_file(self.root.path().join("bucket").join(key)).expect("an object");
    }

    fn get(&self, target: &str) -> http::Response {
        http::get(self.node.data(), &format!("/bucket/{target}"))
    }

    fn ask(&self, method: &str, target: &str, headers: &[(&str, &str)], body: &[u8]) -> http::Response {
        http::ask(self.node.data(), method, &format!("/bucket{target}"), headers, Some(body))
            .unwrap_or_else(|error| panic!("{method} {target}: {error}"))
    }
}

impl Drop for House {
    fn drop(&mut self) {
        drop(self.stop.take());
    }
}
