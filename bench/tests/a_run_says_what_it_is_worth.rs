//! Exit codes, the JSON and the words of whole runs against the emulator, from no request at all upwards.

mod common;

use common::{Emulator, assert_code, bench};
use serde_json::Value;

fn run(emulator: &Emulator, command: &str, more: &[&str]) -> (std::process::Output, Value) {
    let side = format!("{}/demo", emulator.url);
    let file = tempfile::NamedTempFile::new().expect("a file");
    let path = file.path().to_str().expect("a path").to_owned();
    let first =
        [command, "--direct", &side, "--accel", &side, "--origin-admin", &emulator.url, "--json", &path];
    let output = bench(&[&first[..], more].concat());
    let written = std::fs::read_to_string(file.path()).expect("written");
    let json = serde_json::from_str(&written).expect("JSON");
    (output, json)
}

fn no_number_is_missing_its_value(value: &Value) {
    let text = value.to_string();
    for bad in ["NaN", "inf", "Infinity"] {
        assert!(!text.contains(&format!(":{bad}")), "{bad}");
    }
}

#[test]
fn one_or_two_requests_make_a_report_without_percentiles() {
    let emulator = Emulator::start("raw");
    for count in ["1", "2"] {
        for command in ["bulk", "download"] {
            let more = ["--count", count, "--size", "100KiB", "--rounds", "1", "--cache", "as-is", "--quiet"];
            let (output, json) = run(&emulator, command, &more);
            assert_code(&output, 0);
            no_number_is_missing_its_value(&json);
            let latency = &json["workloads"][0]["sides"]["direct"]["merged"]["metrics"]["latency_us"];
            assert_eq!(latency["n"].to_string(), count);
            assert!(latency.get("p50").is_none() && latency["mean"].is_number());
            assert!(String::from_utf8_lossy(&output.stdout).contains("too few for an interval"));
        }
    }
}

#[test]
fn a_side_that_answers_nothing_makes_a_report_of_no_requests() {
    let emulator = Emulator::start("raw");
    let side = format!("{}/demo", emulator.url);
    // The bucket is known, its objects are declared nowhere: 404 each.
    let declare = format!("[{}]", r#"{"bucket":"demo","prefix":"else/","count":0,"size":0}"#);
    let door = forebay_bench::client::plain::request(
        &emulator.target,
        "PUT",
        "/_emu/datasets",
        b"",
        declare.as_bytes(),
    );
    assert_eq!(door.expect("answered").status, 200);
    let output = bench(&[
        "download", "--direct", &side, "--accel", &side, "--count", "3", "--quiet", "--cache", "as-is",
        "--rounds", "1",
    ]);
    assert_code(&output, 1);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.contains("status 404") && said.contains("(n=0)") && !said.contains("NaN"), "{said}");
}

#[test]
fn an_accelerator_that_lets_requests_through_is_not_warm() {
    let emulator = Emulator::start("raw");
    let (output, json) =
        run(&emulator, "download", &["--count", "5", "--size", "64KiB", "--rounds", "1", "--quiet"]);
    assert_code(&output, 4);
    assert_eq!(json["valid"], false);
    assert_eq!(json["workloads"][0]["origin_during_accel"]["requests"]["GET"], 5);
    assert!(json["invalid_reasons"][0].as_str().is_some_and(|reason| reason.contains("not warm")));
}

#[test]
fn both_workloads_in_one_report_name_the_emulated_origin() {
    let emulator = Emulator::start("raw");
    let (output, json) =
        run(&emulator, "all", &["--scale", "0.001", "--rounds", "2", "--cache", "as-is", "--quiet"]);
    assert_code(&output, 0);
    assert_eq!(json["schema"], "forebay-bench.result/1");
    assert_eq!(json["origin"]["kind"], "emulated");
    assert_eq!(json["origin"]["sha256"].as_str().map(str::len), Some(64));
    let names: Vec<_> =
        json["workloads"].as_array().expect("a list").iter().map(|one| one["name"].clone()).collect();
    assert_eq!(names, ["bulk", "download"]);
    assert_eq!(json["workloads"][0]["sides"]["direct"]["blocks"].as_array().map(Vec::len), Some(2));
    assert_eq!(json["workloads"][0]["sides"]["direct"]["blocks"][0]["http"]["LIST"]["200"], 1);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.contains("ORIGIN: EMULATED profile=raw sha256="), "{said}");
    assert!(said.contains("TOS intranet domain name") && said.contains("TOS accelerated domain name"));
}

#[test]
fn what_cannot_be_meant_is_a_usage_error() {
    let side = "http://127.0.0.1:1/demo";
    for more in [&["--count", "0"][..], &["--scale", "big"], &["--concurrency", "0"], &["--size", "much"]] {
        assert_code(&bench(&[&["bulk", "--direct", side, "--accel", side][..], more].concat()), 2);
    }
    assert_code(&bench(&["bulk", "--direct", "https://x/b", "--accel", side]), 2);
    assert_code(&bench(&["origin", "--listen", "127.0.0.1:0", "--profile", "s4"]), 2);
    let unreachable = bench(&["download", "--direct", side, "--accel", side, "--count", "1", "--quiet"]);
    assert_code(&unreachable, 1);
    assert!(String::from_utf8_lossy(&unreachable.stderr).contains(side));
}

#[test]
fn signed_requests_carry_a_signature_for_every_object() {
    let emulator = Emulator::start("raw");
    let side = format!("{}/demo", emulator.url);
    let arguments =
        ["bulk", "--direct", &side, "--accel", &side, "--origin-admin", &emulator.url, "--count", "20"];
    let more = ["--rounds", "1", "--cache", "as-is", "--quiet", "--sign", "v4"];
    let program = env!("CARGO_BIN_EXE_forebay-bench");
    let mut command = std::process::Command::new(program);
    command
        .args(arguments)
        .args(more)
        .env("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
        .env("AWS_SECRET_ACCESS_KEY", "secret");
    assert_code(&command.output().expect("starts"), 0);
    let mut without = std::process::Command::new(program);
    without.args(arguments).args(more).env_remove("AWS_ACCESS_KEY_ID").env_remove("AWS_SECRET_ACCESS_KEY");
    let output = without.output().expect("starts");
    assert_code(&output, 1);
    assert!(String::from_utf8_lossy(&output.stderr).contains("AWS_ACCESS_KEY_ID"));
}
