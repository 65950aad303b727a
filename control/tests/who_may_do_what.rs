//! Every endpoint with every role, and what is said to those who may not or who ask for what cannot be. A path that is
//! in the `OpenAPI` document and not in this table fails the test, and so does a document that is not current.

mod house;

use std::collections::BTreeSet;
use std::process::Command;

use house::{Control, PROGRAM, ask_with};
use serde_json::{Value, json};

const ROLES: [&str; 4] = ["admin", "operator", "reader", "node"];

/// Method, path, body, what those who may get, and who may: as the letters of the roles.
fn table() -> Vec<(&'static str, &'static str, Value, u16, &'static str)> {
    let accelerator = json!({"name": "data", "origin": "s3://bucket"});
    let policy = json!({"name": "tables", "rules": [{"match": "**", "freshness": "strict"}]});
    let node = json!({"instance": "node-a-start"});
    let beat = json!({"instance": "node-a-start", "revision": 0, "epoch": 0, "purges_applied": 0});
    vec![
        ("GET", "/v1/status", Value::Null, 200, "aor"),
        ("PUT", "/v1/accelerators/data", accelerator, 200, "ao"),
        ("GET", "/v1/accelerators", Value::Null, 200, "aor"),
        ("GET", "/v1/accelerators/data", Value::Null, 200, "aor"),
        ("PUT", "/v1/policies/tables", policy, 200, "ao"),
        ("GET", "/v1/policies", Value::Null, 200, "aor"),
        ("GET", "/v1/policies/tables", Value::Null, 200, "aor"),
        ("PUT", "/v1/keys/AKTEAM", json!({"secret": "0123456789abcdef"}), 200, "ao"),
        ("GET", "/v1/keys", Value::Null, 200, "aor"),
        ("PUT", "/v1/nodes/node-a", node, 200, "an"),
        ("POST", "/v1/nodes/node-a/heartbeat", beat, 200, "an"),
        ("GET", "/v1/nodes", Value::Null, 200, "aor"),
        ("GET", "/v1/nodes/node-a", Value::Null, 200, "aor"),
        ("POST", "/v1/nodes/node-a/drain", Value::Null, 200, "ao"),
        ("POST", "/v1/nodes/node-a/resume", Value::Null, 200, "ao"),
        ("GET", "/v1/placement", Value::Null, 200, "aorn"),
        ("POST", "/v1/placement/advance", json!({"past": 0}), 200, "a"),
        ("POST", "/v1/prewarms", json!({"accelerator": "data", "prefix": "a/"}), 201, "ao"),
        ("GET", "/v1/prewarms", Value::Null, 200, "aor"),
        ("GET", "/v1/prewarms/0", Value::Null, 404, "aor"),
        ("DELETE", "/v1/prewarms/0", Value::Null, 404, "ao"),
        ("POST", "/v1/purges", json!({"accelerator": "data", "key": "a"}), 201, "ao"),
        ("GET", "/v1/purges", Value::Null, 200, "aor"),
        ("GET", "/v1/purges/0", Value::Null, 404, "aor"),
        ("POST", "/v1/tokens", json!({"role": "reader"}), 201, "a"),
        ("GET", "/v1/tokens", Value::Null, 200, "a"),
        ("DELETE", "/v1/tokens/none", Value::Null, 404, "a"),
        ("DELETE", "/v1/nodes/none", Value::Null, 404, "ao"),
        ("DELETE", "/v1/keys/AKNONE", Value::Null, 404, "ao"),
        ("DELETE", "/v1/policies/none", Value::Null, 404, "ao"),
        ("DELETE", "/v1/accelerators/none", Value::Null, 404, "ao"),
    ]
}

/// Endpoints that ask for no token.
const OPEN: [&str; 2] = ["/healthz", "/v1/openapi.json"];

#[test]
fn each_endpoint_knows_its_roles() {
    let room = tempfile::tempdir().expect("room");
    let control = Control::start(room.path(), &[]);
    let tokens = ROLES.map(|role| control.token(role));
    let table = table();
    for (method, path, body, good, may) in &table {
        let body = (*body != Value::Null).then_some(body);
        for (role, token) in ROLES.iter().zip(&tokens) {
            let (status, answer) = control.ask(method, path, Some(token), body);
            if may.contains(&role[..1]) {
                assert_eq!(status, *good, "{method} {path} as {role}: {answer}");
            } else {
                assert_eq!(
                    (status, answer["code"].as_str()),
                    (403, Some("wrong_role")),
                    "{method} {path} as {role}"
                );
                let named = ROLES.iter().filter(|role| may.contains(&role[..1]));
                for name in named {
                    assert!(answer["remedy"].as_str().expect("a remedy").contains(name), "{answer}");
                }
            }
        }
        for (token, code) in [(None, "no_token"), (Some("fbc_wrong-wrong-wrong"), "wrong_token")] {
            let (status, answer) = control.ask(method, path, token, body);
            assert_eq!((status, answer["code"].as_str()), (401, Some(code)), "{method} {path}: {answer}");
        }
    }
    for path in OPEN {
        assert_eq!(control.ask("GET", path, None, None).0, 200, "{path}");
    }
    // Nothing that answers is missing above.
    let document = control.get("/v1/openapi.json");
    let mut described = BTreeSet::new();
    for (path, operations) in document["paths"].as_object().expect("paths") {
        for method in operations.as_object().expect("operations").keys() {
            described.insert((method.to_uppercase(), path.clone()));
        }
    }
    let pattern_of = |path: &str| {
        let fits = |pattern: &&String| {
            let (pattern, path): (Vec<_>, Vec<_>) = (pattern.split('/').collect(), path.split('/').collect());
            pattern.len() == path.len()
                && pattern.iter().zip(&path).all(|(a, b)| a == b || a.starts_with('{'))
        };
        let patterns: Vec<&String> = described.iter().map(|(_, path)| path).filter(fits).collect();
        patterns.iter().copied().find(|it| *it == path).or(patterns.first().copied()).expect(path).clone()
    };
    let mut asked: BTreeSet<_> = table.iter().map(|row| (row.0.to_owned(), pattern_of(row.1))).collect();
    asked.extend(OPEN.map(|path| ("GET".to_owned(), path.to_owned())));
    assert_eq!(asked, described);
}

#[test]
fn what_is_sent_wrong_is_answered_with_a_problem() {
    let room = tempfile::tempdir().expect("room");
    let control = Control::start(room.path(), &[]);
    let large = "x".repeat((1 << 20) + 1);
    for (method, path, body, status, code, words) in [
        ("PUT", "/v1/accelerators/data", r#"{"name":"data"}"#, 400, "bad_json", "origin"),
        ("PUT", "/v1/accelerators/data", r#"{"name":"data","origin":"s3://b"}"#, 400, "bad_json", "3 to 63"),
        (
            "PUT",
            "/v1/accelerators/data",
            r#"{"name":"data","origin":"s3://bucket","frshness":"strict"}"#,
            400,
            "unknown_field",
            "frshness",
        ),
        (
            "PUT",
            "/v1/accelerators/data",
            r#"{"name":"other","origin":"s3://bucket"}"#,
            400,
            "two_names",
            "`other`",
        ),
        ("PUT", "/v1/accelerators/data", "{} {}", 400, "bad_json", "cannot be read"),
        ("PUT", "/v1/accelerators/DATA", "{}", 400, "bad_name", "DATA"),
        ("PUT", "/v1/accelerators/data", large.as_str(), 413, "too_large", "1048576"),
        ("PUT", "/v1/keys/AKTEAM", r#"{"secret":"a b"}"#, 400, "bad_json", "visible"),
        (
            "PUT",
            "/v1/policies/p",
            r#"{"name":"p","rules":[{"match":"**","freshness":"often"}]}"#,
            400,
            "bad_json",
            "strict, ttl:60s",
        ),
        ("POST", "/v1/tokens", r#"{"role":"king"}"#, 400, "bad_json", "king"),
        ("POST", "/v1/nodes/n/heartbeat?wait=10", "{}", 400, "bad_wait", "whole number with a unit"),
        ("GET", "/v1/purges/first", "", 400, "bad_name", "invalid digit"),
        ("GET", "/v2/status", "", 404, "unknown_path", "nothing at this path"),
        ("PATCH", "/v1/status", "", 405, "bad_method", "does not take"),
    ] {
        let (got, answer) =
            house::ask(&control.url, method, path, Some(&control.admin), Some(body.to_owned()));
        assert_eq!((got, answer["code"].as_str()), (status, Some(code)), "{method} {path}: {answer}");
        assert!(answer["message"].as_str().expect("a message").contains(words), "{method} {path}: {answer}");
        assert!(!answer["remedy"].as_str().expect("a remedy").is_empty(), "{method} {path}: {answer}");
    }
    // A newer node's fields are no mistake.
    let node = json!({"instance": "node-a-start", "colour": "blue"});
    control.send("PUT", "/v1/nodes/node-a", &node);
}

#[test]
fn a_placement_has_its_epoch_as_its_tag() {
    let room = tempfile::tempdir().expect("room");
    let control = Control::start(room.path(), &[]);
    let get = |held: &str| {
        ask_with(&control.url, "GET", "/v1/placement", Some(&control.admin), &[("if-none-match", held)], None)
    };
    control.send("PUT", "/v1/nodes/node-a", &json!({"instance": "node-a-start"}));
    let (status, headers, placement) = get("\"other\"");
    assert_eq!(status, 200);
    let tag = headers["etag"].to_str().expect("text").to_owned();
    assert_eq!(tag, format!("\"epoch-{}\"", placement["epoch"]));
    assert_eq!(get(&format!("\"x\", {tag}")).0, 304);
    control.send("PUT", "/v1/nodes/node-b", &json!({"instance": "node-b-start"}));
    assert_eq!(get(&tag).0, 200);
}

#[test]
fn tokens_of_files_hold_while_the_process_runs_and_the_first_admin_token_is_made_once() {
    use std::os::unix::fs::PermissionsExt;
    let room = tempfile::tempdir().expect("room");
    let file = room.path().join("tokens");
    std::fs::write(&file, "reader a-reader-from-a-file\n").expect("written");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).expect("mode");
    let mut control = Control::start(room.path(), &["--token-file", file.to_str().expect("utf-8")]);
    let mode = std::fs::metadata(&control.admin_file).expect("the file").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(control.ask("GET", "/v1/status", Some("a-reader-from-a-file"), None).0, 200);
    let admin = control.admin.clone();
    assert!(control.terminate().success());
    drop(control);
    let control = Control::start(room.path(), &[]);
    assert_eq!(control.admin, admin);
    assert_eq!(control.get("/v1/tokens").as_array().expect("tokens").len(), 1);
    assert_eq!(control.ask("GET", "/v1/status", Some("a-reader-from-a-file"), None).0, 401);
    // The store has one process.
    let second = Command::new(PROGRAM)
        .args(["serve", "--listen", "127.0.0.1:0", "--store"])
        .arg(format!("embedded:{}", room.path().join("store").display()))
        .output()
        .expect("it runs");
    let words = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(!second.status.success() && words.contains("in use by another process"), "{words}");
}

#[test]
fn commands_say_what_is_wrong_and_show_what_is_there() {
    let room = tempfile::tempdir().expect("room");
    let control = Control::start(room.path(), &[]);
    assert_eq!(control.say(&["accelerator", "list"]), "none\n");
    control.say(&["accelerator", "add", "data=s3://bucket,freshness=ttl:60s"]);
    let list = control.say(&["accelerator", "list"]);
    assert!(list.starts_with("NAME") && list.contains("s3://bucket") && list.contains("ttl:1m"), "{list}");
    let json: Value = serde_json::from_str(&control.say(&["accelerator", "list", "--json"])).expect("json");
    assert_eq!(json[0]["name"], "data");
    control.say(&["policy", "set", "p", "--rule", "**/*.bin,freshness=immutable"]);
    assert!(control.say(&["policy", "list"]).contains("**/*.bin,freshness=immutable"));
    control.send("PUT", "/v1/nodes/node-a", &json!({"instance": "node-a-start"}));
    assert!(control.say(&["placement"]).contains("100.0 %"));
    assert!(control.say(&["placement", "owners", "data", "some/key"]).contains("node-a"));
    assert!(control.say(&["nodes", "drain", "node-a"]).contains("draining"));
    assert!(control.say(&["nodes", "resume", "node-a"]).contains("live"));
    assert!(control.say(&["status"]).contains("1 live"));
    assert!(control.say(&["prewarm", "start", "data", "a/"]).contains("running"));
    assert_eq!(control.say(&["nodes", "remove", "node-a"]), "done\n");
    assert!(control.say(&["prewarm", "list"]).contains("waiting"));
    let tokens = control.say(&["token", "list"]);
    assert!(tokens.contains("admin") && !tokens.contains(&control.admin[..12]), "{tokens}");
    for (arguments, words) in [
        (&["accelerator", "remove", "none"][..], "there is no accelerator `none`"),
        (&["accelerator", "add", "data=s3://bucket,extent=3MiB"], "power of two"),
        (&["policy", "set", "p", "--rule", "a"], "says nothing"),
        (&["purge", "key", "none", "a"], "accelerator list"),
        (&["token", "add", "--role", "king"], "admin, operator, reader, node"),
        (&["prewarm", "show", "99"], "there is no prewarm 99"),
        (&["status", "--url", "https://h"], "TLS"),
        (&["status", "--token-file", "/none/none"], "--token-file: reading /none/none"),
    ] {
        let output = control.command(arguments);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && error.contains(words), "{arguments:?}: {error}");
    }
}

#[test]
fn the_document_is_current() {
    let output = Command::new(PROGRAM).arg("openapi").output().expect("it runs");
    assert!(output.status.success());
    let printed = String::from_utf8(output.stdout).expect("text");
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/openapi.json");
    if std::env::var_os("FOREBAY_REFRESH").is_some() {
        std::fs::write(path, &printed).expect("written");
    }
    let held = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        held == printed,
        "docs/openapi.json is not current: FOREBAY_REFRESH=1 cargo test -p forebay-control the_document"
    );
}
