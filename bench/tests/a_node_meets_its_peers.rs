//! The comparison with other servers, small: started, warmed, verified, measured, reported; and who is not there is said.

mod common;

use common::{assert_code, bench_command, skip};
use serde_json::Value;

#[test]
fn a_pair_of_blocks_with_nginx_and_a_row_for_who_is_missing() {
    if std::thread::available_parallelism().map_or(1, std::num::NonZero::get) < 2 {
        return skip("comparing a node with its peers needs two cores");
    }
    let file = tempfile::NamedTempFile::new().expect("a file");
    let mut command =
        bench_command(&["peers", "--cells", "1MiB", "--peers", "nginx,caddy", "--pairs", "1", "--quiet"]);
    command.args(["--block", "50ms", "--objects-max", "8", "--json"]).arg(file.path());
    // Servers that Debian keeps in /usr/sbin are found all the same; caddy lies elsewhere.
    let output = command.env("PATH", "/nowhere").output().expect("run");
    assert_code(&output, 0);
    let json: Value =
        serde_json::from_str(&std::fs::read_to_string(file.path()).expect("written")).expect("JSON");
    let rows = json["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 2, "{json:#}");
    assert_eq!(rows[0]["peer"], "nginx", "{json:#}");
    assert!(rows[0]["way"].as_str().is_some_and(|way| way.starts_with("nginx, ")), "{json:#}");
    assert_eq!(rows[0]["tried_cpu_s_per_gb"].as_array().map(Vec::len), Some(2), "{json:#}");
    let pair = rows[0]["pairs"][0].as_array().expect("two blocks");
    assert_eq!(pair.len(), 2, "{json:#}");
    for block in pair {
        let requests = block["requests"].as_u64().expect("a number");
        assert!(requests >= 64 && block["bytes"].as_u64() == Some(requests << 20), "{json:#}");
        assert!(block["cpu_s"].as_f64().is_some_and(|seconds| seconds > 0.0), "{json:#}");
    }
    assert!(rows[0]["holds"].is_null(), "one pair proves nothing: {json:#}");
    let missing = rows[1]["missing"].as_str().expect("a reason");
    assert!(missing.contains("caddy is not installed: apt-get install caddy"), "{missing}");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        said.contains("| 1MiB | nginx, ") && said.contains("not compared: caddy is not installed"),
        "{said}"
    );
}
