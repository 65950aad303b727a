//! A store that sends other bytes than the object's is found out, whatever it does, and the exit code says so.

mod common;

use common::{Fault, HostileStore, assert_code, bench};

const SIZE: usize = 50_000;

fn download(fault: Fault) -> std::process::Output {
    let honest = HostileStore::start(SIZE, Fault::None);
    let hostile = HostileStore::start(SIZE, fault);
    let size = SIZE.to_string();
    let arguments = ["--objects", "4", "--count", "4", "--size", &size, "--rounds", "1", "--quiet"];
    bench(&[&["download", "--direct", &honest.url, "--accel", &hostile.url][..], &arguments].concat())
}

#[test]
fn the_honest_store_passes() {
    let output = download(Fault::None);
    assert_code(&output, 0);
    assert!(String::from_utf8_lossy(&output.stdout).contains("VALID"));
}

#[test]
fn every_wrong_body_is_found() {
    for fault in [
        Fault::FlippedBit,
        Fault::StaleVersion,
        Fault::ShiftedRange,
        Fault::ShortBody,
        Fault::TruncatedObject,
        Fault::WrongObject,
        Fault::OtherEtag,
        Fault::NoEtag,
    ] {
        let output = download(fault);
        assert_code(&output, 3);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(said.contains("INVALID") && said.contains("WRONG: b/download/"), "{fault:?}: {said}");
    }
}

#[test]
fn failures_that_are_not_wrong_bytes_have_another_code() {
    for fault in [Fault::Unavailable, Fault::Silence] {
        let output = download(fault);
        assert_code(&output, 1);
        assert!(String::from_utf8_lossy(&output.stdout).contains("ERROR: "), "{fault:?}");
    }
}

#[test]
fn bytes_are_not_looked_at_when_only_lengths_are_asked_for_and_the_report_says_so() {
    let honest = HostileStore::start(SIZE, Fault::None);
    let hostile = HostileStore::start(SIZE, Fault::FlippedBit);
    let size = SIZE.to_string();
    let output = bench(&[
        "download",
        "--direct",
        &honest.url,
        "--accel",
        &hostile.url,
        "--objects",
        "4",
        "--count",
        "4",
        "--size",
        &size,
        "--rounds",
        "1",
        "--quiet",
        "--verify",
        "length",
    ]);
    assert_code(&output, 0);
    assert!(String::from_utf8_lossy(&output.stdout).contains("BYTES NOT VERIFIED"));
}
