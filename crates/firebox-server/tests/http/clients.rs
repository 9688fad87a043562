//! Clients that others wrote, unmodified. Each runs where its variable says by what, and is passed over otherwise.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

use crate::client::{Running, gguf};
use crate::tools::{TAGGED, pocket};

/// A server with the small model of random weights, and with the pocket model under a template that knows tools.
fn serving() -> (tempfile::TempDir, Running) {
    let (folder, pocket) = pocket(TAGGED);
    (folder, Running::serve(vec![("llama".into(), gguf("llama")), ("pocket".into(), pocket)], |_| {}))
}

fn drive(variable: &str, script: &str) {
    let Some(program) = std::env::var_os(variable) else {
        println!("passed over: {variable} does not say by what to run {script}");
        return;
    };
    drives(Command::new(&program).arg(ours(script)));
}

/// A client of this project's, by its name.
fn ours(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/clients").join(name)
}

/// Runs a client, and waits for the server to have nothing left to do.
fn drives(client: &mut Command) {
    let (_folder, server) = serving();
    let url = format!("http://{}/v1", server.address);
    let done = client.arg(&url).envs(apart()).output().unwrap();
    let told = [String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr)].concat();
    assert!(done.status.success() && told.contains("done"), "{client:?}: {told}");
    server.comes_to("firebox_running_requests", 0);
}

/// Nothing of what is on this machine is asked by way of another.
fn apart() -> [(&'static str, OsString); 2] {
    [("NO_PROXY", "127.0.0.1".into()), ("no_proxy", "127.0.0.1".into())]
}

/// `FIREBOX_OPENAI_PYTHON` is a Python that has the package `openai`.
#[test]
fn the_official_python_package() {
    drive("FIREBOX_OPENAI_PYTHON", "openai_python.py");
}

/// `FIREBOX_OPENAI_NODE` is a folder in whose `node_modules` the package `openai` is.
#[test]
fn the_official_node_package() {
    let Some(folder) = std::env::var_os("FIREBOX_OPENAI_NODE") else {
        println!("passed over: FIREBOX_OPENAI_NODE does not say where the package is");
        return;
    };
    // Modules are looked for beside the script.
    let script = PathBuf::from(folder).join("firebox-client.mjs");
    std::fs::copy(ours("openai_node.mjs"), &script).unwrap();
    let (_folder, server) = serving();
    let url = format!("http://{}/v1", server.address);
    let done = Command::new("node").arg(&script).arg(&url).envs(apart()).output().unwrap();
    std::fs::remove_file(&script).unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    server.comes_to("firebox_running_requests", 0);
}

/// `FIREBOX_ASYNC_OPENAI` is a folder to build the client with `async-openai` in.
#[test]
fn async_openai() {
    let Some(folder) = std::env::var_os("FIREBOX_ASYNC_OPENAI") else {
        println!("passed over: FIREBOX_ASYNC_OPENAI does not say where to build its client");
        return;
    };
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

/// `FIREBOX_LANGCHAIN_PYTHON` is a Python that has the package `langchain-openai`.
#[test]
fn a_langchain_model() {
    drive("FIREBOX_LANGCHAIN_PYTHON", "langchain_model.py");
}
