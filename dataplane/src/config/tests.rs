//! The whole of a configuration: defaults, order of precedence, refusals, and the sums of the limits.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use proptest::prelude::*;

use super::cli::chain;
use super::*;

fn host() -> HostFacts {
    HostFacts {
        cores_allowed: vec![0, 1],
        parallelism: 2,
        descriptors_max: 20_000,
        name: Some("host-1".into()),
    }
}

fn settings(accelerators: &[&str]) -> Settings {
    Settings {
        accelerator: accelerators.iter().map(|text| text.parse().expect("a spec")).collect(),
        ..Settings::default()
    }
}

fn minimal() -> Settings {
    settings(&["abc=s3://bucket"])
}

fn load(settings: Settings) -> Result<Config, ConfigError> {
    Config::load(settings, &|_| None, &host())
}

fn refused(settings: Settings) -> String {
    chain(&load(settings).expect_err("refused"))
}

#[test]
fn an_accelerator_is_all_that_must_be_said() {
    let config = load(minimal()).expect("complete");
    assert_eq!(config.listen, [LISTEN_DEFAULT]);
    assert_eq!(config.admin, AdminAddr::Tcp(ADMIN_DEFAULT));
    assert_eq!(config.memory, MEMORY_DEFAULT);
    assert_eq!(config.cores, CoreMap { workers: vec![0, 1], house: None });
    assert!(!config.anonymous && config.drives.is_empty());
    assert!(config.warnings[0].contains("403"), "{:?}", config.warnings);
    Limits::derive(&config).expect("the defaults fit");
    assert!(refused(Settings::default()).contains("--accelerator data=s3://bucket"));
}

#[test]
fn http3_costs_memory_only_where_it_is_spoken() {
    let config = load(minimal()).expect("complete");
    assert_eq!((config.listen_quic.len(), config.alt_svc), (0, AltSvc::Https));
    assert_eq!(Limits::derive(&config).expect("limits").quic_send_bytes_max, 0);
    let mut settings = minimal();
    settings.listen_quic = vec![LISTEN_DEFAULT];
    settings.alt_svc = Some(AltSvc::All);
    let config = load(settings.clone()).expect("UDP and TCP may share a number");
    let limits = Limits::derive(&config).expect("limits");
    assert_eq!(limits.quic_send_bytes_max, 64 << 20);
    let report = check_report(&config, &limits);
    for line in ["listen-quic", "alt-svc", "quic_send_bytes_max", "quic_streams_max"] {
        assert!(report.contains(line), "{line} in {report}");
    }
    assert!(banner(&config, None).contains("HTTP/3    https://127.0.0.1:7070"));
    settings.listen_quic.push(LISTEN_DEFAULT);
    assert!(refused(settings).contains("listen-quic: `127.0.0.1:7070` is given twice"));
    let error = "htps".parse::<AltSvc>().expect_err("a slip").to_string();
    assert!(error.contains("`https`?"), "{error}");
}

#[test]
fn the_same_thing_twice_is_refused() {
    assert!(
        refused(settings(&["abc=s3://one-bucket", "abc=s3://two-bucket"])).contains("`abc` is given twice")
    );
    let mut twice = minimal();
    twice.listen = vec![LISTEN_DEFAULT; 2];
    assert!(refused(twice).contains("listen"));
    let mut kernel_picks = minimal();
    kernel_picks.listen = vec!["127.0.0.1:0".parse().expect("an address"); 2];
    assert!(load(kernel_picks).is_ok());
    let mut twice = minimal();
    twice.drive = vec!["path=/nowhere/a,size=1GiB".parse().expect("a drive"); 2];
    assert!(refused(twice).contains("drive"));
    let mut doors = minimal();
    doors.admin = Some(AdminAddr::Tcp(LISTEN_DEFAULT));
    assert!(refused(doors).contains("its own port"));
}

#[test]
fn an_admin_door_to_the_network_needs_a_token() {
    let folder = tempfile::tempdir().expect("a folder");
    let token = folder.path().join("token");
    let open = || Settings { admin: Some("0.0.0.0:7071".parse().expect("an address")), ..minimal() };
    assert!(refused(open()).contains("--admin-token-file"));
    let with = || Settings { admin_token_file: Some(token.clone()), ..open() };
    assert!(refused(with()).contains("No such file"));
    for bad in ["short\n", "", "two words are not one token\n"] {
        fs::write(&token, bad).expect("written");
        assert!(refused(with()).contains("16 visible characters"), "{bad}");
    }
    fs::write(&token, "0123456789abcdef\n").expect("written");
    let config = load(with()).expect("a token");
    assert_eq!(config.admin_token.expect("read").reveal(), "0123456789abcdef");
}

#[test]
fn drives_are_looked_at() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("drive");
    let with = |size| Settings { drive: vec![DriveArg { path: path.clone(), size }], ..minimal() };
    assert!(refused(with(None)).contains("give its size"));
    let config = load(with(Some(ByteSize::gib(1)))).expect("a new file");
    assert_eq!((config.drives[0].bytes, config.drives[0].exists), (1 << 30, false));

    fs::write(&path, "").expect("made");
    assert!(refused(with(None)).contains("it is empty"), "an empty file is as good as none");
    fs::File::create(&path).expect("made").set_len(512 << 20).expect("sized");
    let config = load(with(None)).expect("an old file");
    assert_eq!((config.drives[0].bytes, config.drives[0].exists), (512 << 20, true));
    let a_folder =
        Settings { drive: vec![DriveArg { path: folder.path().to_owned(), size: None }], ..minimal() };
    assert!(refused(a_folder).contains("it is a folder"));
}

#[test]
fn keys_come_from_the_file_and_the_environment() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("forebay.toml");
    let text = "accelerator = \"abc=s3://bucket\"\nmemory = \"1GiB\"\nengine = \"portable\"\n\
                [[keys]]\naccess-key = \"AK\"\nsecret-key = \"old-secret\"\n";
    fs::write(&path, text).expect("written");
    let flags =
        || Settings { config: Some(path.clone()), memory: Some(ByteSize::gib(2)), ..Settings::default() };

    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).expect("mode");
    let config = load(flags()).expect("a file");
    assert_eq!(config.memory, ByteSize::gib(2), "the flag wins");
    assert_eq!(config.engine, EngineChoice::Portable, "the file wins over the default");
    assert_eq!(config.keys[0].secret_key.reveal(), "old-secret");
    assert!(config.warnings[0].contains("chmod 600"), "{:?}", config.warnings);

    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("mode");
    let environment = |access: &str| {
        let access = access.to_owned();
        move |name: &str| match name {
            "FOREBAY_ACCESS_KEY" => Some(access.clone()),
            "FOREBAY_SECRET_KEY" => Some("new-secret".to_owned()),
            _ => None,
        }
    };
    let config = Config::load(flags(), &environment("AK"), &host()).expect("both");
    assert_eq!(config.keys.len(), 1);
    assert_eq!(config.keys[0].secret_key.reveal(), "new-secret");
    assert!(config.warnings.is_empty(), "{:?}", config.warnings);
    let config = Config::load(flags(), &environment("OTHER"), &host()).expect("both");
    assert_eq!(config.keys.len(), 2);

    let half = |name: &str| (name == "FOREBAY_ACCESS_KEY").then(|| "AK".to_owned());
    let error = Config::load(flags(), &half, &host()).expect_err("half");
    assert!(error.to_string().contains("FOREBAY_SECRET_KEY is not"), "{error}");

    fs::write(&path, "memroy = \"1GiB\"").expect("written");
    let error = chain(&load(flags()).expect_err("misspelt"));
    assert!(error.contains("forebay.toml") && error.contains("`memory`?"), "{error}");
}

#[test]
fn what_this_version_cannot_hold_is_refused() {
    let mut rule = minimal();
    rule.accelerator[0].rules =
        vec![forebay_control_api::Rule { pattern: "/a".into(), freshness: None, cache: Some(false) }];
    assert!(refused(rule).contains("do not begin with a slash"));
    let stall = Settings { send_stall: Some(Span::from_millis(10)), ..minimal() };
    assert!(refused(stall).contains("send-stall"));
    let none = Settings { connections: Some(0), ..minimal() };
    assert!(refused(none).contains("at least 1"));
    let cores = Settings { cores: Some(CoreChoice::These(vec![7])), ..minimal() };
    assert!(refused(cores).contains("allowed are 0,1"));
    let twice =
        load(Settings { cores: Some(CoreChoice::These(vec![1, 0, 1])), ..minimal() }).expect("a config");
    assert_eq!(twice.cores.workers, [1, 0, 1]);
    assert!(twice.warnings.iter().any(|warning| warning.contains("core 1 is named more than once")));
}

#[test]
fn too_little_memory_is_refused_with_the_sum() {
    let with = |memory| load(Settings { memory: Some(memory), ..minimal() }).expect("a config");
    let error = Limits::derive(&with(ByteSize::mib(23))).expect_err("too little").to_string();
    // 2 workers x (4 + 4) x 1 MiB, and 8 MiB.
    assert!(error.contains("23MiB is too little; 24MiB are needed: 2 workers"), "{error}");
    assert!(error.contains("= 16MiB, and 8MiB for the RAM tier"), "{error}");
    let limits = Limits::derive(&with(ByteSize::mib(24))).expect("just enough");
    assert_eq!((limits.reads_reserve_bytes, limits.ram_reserve_bytes), (8 << 20, 8 << 20));
    let limits = Limits::derive(&with(ByteSize::mib(64))).expect("enough");
    assert_eq!((limits.fills_max, limits.ram_reserve_bytes), (8, 48 << 20));
}

#[test]
fn too_few_descriptors_are_refused_with_the_remedy() {
    let derive = |connections, descriptors_max| {
        let settings = Settings { connections, ..minimal() };
        let host = HostFacts { descriptors_max, ..host() };
        Limits::derive(&Config::load(settings, &|_| None, &host).expect("a config"))
    };
    assert_eq!(derive(None, 1 << 20).expect("plenty").connections_max, 10_000);
    let few = derive(None, 1_024).expect("fewer connections");
    assert!(few.connections_max < 1_000 && few.connections_max >= 16);
    assert_eq!(derive(Some(few.connections_max), 1_024).expect("all of them"), few);
    let error = derive(Some(few.connections_max + 1), 1_024).expect_err("one more").to_string();
    assert!(error.contains("1025 file descriptors") && error.contains("ulimit"), "{error}");
    assert!(derive(None, 64).is_err());
}

#[test]
fn the_report_shows_every_part_and_no_secret() {
    let environment = |name: &str| match name {
        "FOREBAY_ACCESS_KEY" => Some("AKSHOWN".to_owned()),
        "FOREBAY_SECRET_KEY" => Some("SKHIDDEN".to_owned()),
        _ => None,
    };
    let settings = Settings {
        drive: vec!["path=/nowhere/a,size=1GiB".parse().expect("a drive")],
        listen: vec!["0.0.0.0:7070".parse().expect("an address")],
        anonymous: true,
        ..settings(&["abc=s3://bucket,freshness=ttl:60s"])
    };
    let config = Config::load(settings, &environment, &host()).expect("a config");
    let limits = Limits::derive(&config).expect("limits");
    let report = check_report(&config, &limits);
    for words in [
        "0.0.0.0:7070",
        "abc=s3://bucket,freshness=ttl:1m",
        "/nowhere/a 1GiB, will be made",
        "AKSHOWN",
        "core 1    worker 1",
        "share the workers' cores",
        "send_pinned_bytes_per_connection_max",
        "warning: anonymous",
    ] {
        assert!(report.contains(words), "{words} is not in\n{report}");
    }
    assert!(!report.contains("SKHIDDEN"));
    assert!(!format!("{config:?}").contains("SKHIDDEN"));
}

#[test]
fn the_banner_tells_how_to_connect_or_why_not() {
    let config = load(minimal()).expect("a config");
    let text = banner(&config, None);
    assert!(text.contains("http://127.0.0.1:7070") && text.contains("abc -> s3://bucket, strict"), "{text}");
    assert!(text.contains("403") && !text.contains("boto3"), "{text}");

    let open =
        Settings { anonymous: true, listen: vec!["[::]:7070".parse().expect("an address")], ..minimal() };
    let text = banner(&load(open).expect("a config"), None);
    assert!(text.contains("endpoint_url=\"http://[::1]:7070\""), "{text}");
    assert!(text.contains("signature_version=UNSIGNED") && !text.contains("environ"), "{text}");

    let key = ClientKey::new("AK", "SKHIDDEN").expect("a key");
    let text = banner(&load(Settings { keys: vec![key], ..minimal() }).expect("a config"), None);
    assert!(text.contains("os.environ[\"FOREBAY_SECRET_KEY\"]") && !text.contains("UNSIGNED"), "{text}");
    assert!(!text.contains("SKHIDDEN"), "{text}");
}

#[test]
fn certificate_and_key_come_together_and_for_a_door() {
    let door = || vec!["127.0.0.1:7443".parse().expect("an address")];
    let with = |cert: Option<&str>, key: Option<&str>, listen_tls| Settings {
        cert: cert.map(Into::into),
        key: key.map(Into::into),
        listen_tls,
        ..minimal()
    };
    for (settings, words) in [
        (with(Some("c"), None, door()), "cert: it is given without --key"),
        (with(None, Some("k"), door()), "key: it is given without --cert"),
        (with(Some("c"), Some("k"), vec![]), "--listen-tls ADDR"),
        (Settings { listen: door(), ..with(None, None, door()) }, "its own port"),
        (with(None, None, [door(), door()].concat()), "listen-tls: `127.0.0.1:7443` is given twice"),
        (
            Settings {
                admin: Some("127.0.0.1:7443".parse().expect("an address")),
                ..with(None, None, door())
            },
            "admin",
        ),
    ] {
        let error = refused(settings);
        assert!(error.contains(words), "{words}: {error}");
    }
    let config = load(with(Some("c"), Some("k"), door())).expect("a config");
    assert_eq!(config.tls_files, Some(TlsFiles { cert: "c".into(), key: "k".into() }));
    assert!(config.listen.is_empty(), "a plain door that nobody asked for");
}

#[test]
fn the_banner_tells_how_to_trust_a_certificate_of_our_own() {
    let door: SocketAddr = "0.0.0.0:7443".parse().expect("an address");
    let config = load(Settings { listen_tls: vec![door], anonymous: true, ..minimal() }).expect("a config");
    let certificates = crate::tls::Certificates::self_signed(&[door]).expect("made");
    let text = banner(&config, Some(&certificates));
    assert!(text.contains("serving   https://127.0.0.1:7443   (all addresses"), "{text}");
    assert!(text.contains(&certificates.fingerprint()), "{text}");
    assert!(text.contains("ssl.get_server_certificate((\"127.0.0.1\", 7443))"), "{text}");
    assert_eq!(text.matches("verify=\"forebay.pem\"").count(), 2, "{text}");
    let both = Settings { listen: vec![LISTEN_DEFAULT], listen_tls: vec![door], ..minimal() };
    let program = boto3_snippet(&load(both).expect("a config"));
    assert!(program.contains("http://127.0.0.1:7070") && !program.contains("verify"), "{program}");
}

proptest! {
    /// Whatever is asked for, the parts never exceed the whole, and each is large enough to make progress.
    #[test]
    fn limits_add_up(
        memory in 1u64..(1 << 40),
        cores in 1usize..=64,
        extent_shift in 16u32..=21,
        drive in proptest::option::of((256u64 << 20)..(1 << 44)),
        descriptors in 64u64..(1 << 20),
    ) {
        let mut config = load(settings(&[&format!("abc=s3://bucket,extent={}", 1 << extent_shift)])).expect("a config");
        config.memory = ByteSize::new(memory);
        config.cores.workers = (0..cores).collect();
        config.descriptors_max = descriptors;
        config.drives = drive
            .map(|bytes| Drive { path: "/d".into(), size: None, bytes, exists: true })
            .into_iter()
            .collect();
        let extent = 1u64 << extent_shift;
        if let Ok(limits) = Limits::derive(&config) {
            prop_assert!(limits.arena_bytes <= memory && limits.arena_bytes.is_multiple_of(2 << 20));
            let parts = limits.reads_reserve_bytes + limits.fills_reserve_bytes + limits.ram_reserve_bytes;
            prop_assert_eq!(parts, limits.arena_bytes);
            prop_assert!(limits.reads_reserve_bytes >= cores as u64 * 4 * extent);
            prop_assert!(limits.ram_reserve_bytes >= 8 << 20);
            prop_assert!(u64::from(limits.fills_max) * extent <= limits.fills_reserve_bytes);
            prop_assert!(limits.fills_max >= 4);
            prop_assert!(limits.send_pinned_bytes_per_connection_max >= extent);
            prop_assert!(limits.send_pinned_bytes_per_connection_max <= limits.send_pinned_bytes_max);
            prop_assert_eq!(limits.writer_queue_bytes >= 4 * extent, drive.is_some());
            prop_assert!(u64::from(limits.connections_max) + u64::from(limits.origin_connections_max) < descriptors);
            prop_assert!(limits.objects_max > 0);
        } else {
            let needed = (2 * cores as u64 * 4 * extent).next_multiple_of(4 << 20) + (8 << 20);
            let metres = cores as u64 * 32 + 2_000;
            prop_assert!(memory < needed + (6 << 20) || descriptors < metres, "refused without need");
        }
    }
}
