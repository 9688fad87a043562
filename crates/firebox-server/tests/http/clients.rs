//! Tests with unmodified third-party clients, which `.ci/tools` installs.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

use firebox_testing::tool::tool;

use crate::client::{Running, gguf};
use crate::tools::{TAGGED, pocket};

/// Starts a server with a small random model, and the pocket model with a template for tools.
fn serving() -> (tempfile::TempDir, Running) {
    let (folder, pocket) = pocket(TAGGED);
    (folder, Running::serve(vec![("llama".into(), gguf("llama")), ("pocket".into(), pocket)], |_| {}))
}

fn drive(variable: &str, script: &str) {
    drives(Command::new(tool(variable)).arg(ours(script)));
}

/// Returns the path of a client in this repository.
fn ours(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/clients").join(name)
}

/// Runs a client, and waits until the server is idle.
fn drives(client: &mut Command) {
    let (_folder, server) = serving();
    let url = format!("http://{}/v1", server.address);
    let done = client.arg(&url).envs(apart()).output().unwrap();
    let told = [String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr)].concat();
    assert!(done.status.success() && told.contains("done"), "{client:?}: {told}");
    server.comes_to("firebox_running_requests", 0);
}

/// Keeps requests to this machine from using a proxy.
fn apart() -> [(&'static str, OsString); 2] {
    [("NO_PROXY", "127.0.0.1".into()), ("no_proxy", "127.0.0.1".into())]
}

#[test]
#[ignore = "tool: openai for Python"]
fn the_official_python_package() {
    drive("FIREBOX_OPENAI_PYTHON", "openai_python.py");
}

#[test]
#[ignore = "tool: openai for Node"]
fn the_official_node_package() {
    // Node looks for modules beside the script.
    let script = PathBuf::from(tool("FIREBOX_OPENAI_NODE")).join("firebox-client.mjs");
    std::fs::copy(ours("openai_node.mjs"), &script).unwrap();
    let (_folder, server) = serving();
    let url = format!("http://{}/v1", server.address);
    let done = Command::new("node").arg(&script).arg(&url).envs(apart()).output().unwrap();
    std::fs::remove_file(&script).unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    server.comes_to("firebox_running_requests", 0);
}

/// `FIREBOX_ASYNC_OPENAI` names the folder that the client is built in.
#[test]
#[ignore = "tool: async-openai"]
fn async_openai() {
    let folder = tool("FIREBOX_ASYNC_OPENAI");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let built = Command::new(cargo)
        .args(["build", "--locked", "--manifest-path"])
        .arg(ours("async_openai/Cargo.toml"))
        .arg("--target-dir")
        .arg(&folder)
        .status();
    assert!(built.unwrap().success());
    drives(&mut Command::new(PathBuf::from(folder).join("debug/firebox-async-openai")));
}

#[test]
#[ignore = "tool: langchain-openai"]
fn a_langchain_model() {
    drive("FIREBOX_LANGCHAIN_PYTHON", "langchain_model.py");
}
