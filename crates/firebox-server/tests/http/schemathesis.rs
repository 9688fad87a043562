//! Tests with requests that Schemathesis generates from the OpenAPI document.

use std::process::Command;

use firebox_testing::tool::tool;

use crate::client::Running;
use crate::tools::{TAGGED, pocket};

/// The check that valid data is accepted: no schema can express a vocabulary or a context length.
const EXCLUDED_CHECK: &str = "positive_data_acceptance";

#[test]
#[ignore = "tool: schemathesis"]
fn generated_requests_cause_no_server_error() {
    let program = tool("FIREBOX_SCHEMATHESIS");
    let (_folder, pocket) = pocket(TAGGED);
    let server = Running::serve(vec![("pocket".into(), pocket)], |_| {});
    let folder = tempfile::tempdir().unwrap();
    let done = Command::new(program)
        .arg("run")
        .arg(format!("http://{}/openapi.json", server.address))
        .args(["--checks", "all", "--exclude-checks", EXCLUDED_CHECK, "--max-examples", "40"])
        // It never ends.
        .args(["--exclude-path", "/v1/engine/events"])
        .args(["--request-timeout", "60"])
        .args(["--phases", "examples,coverage,fuzzing", "--seed", "1", "--generation-deterministic"])
        .args(["--suppress-health-check", "all"])
        .env("NO_PROXY", "127.0.0.1")
        .current_dir(folder.path())
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
    server.comes_to_of("firebox_running_requests", "pocket", 0);
}
