//! Tests the console in a browser. `FIREBOX_PLAYWRIGHT` names a Python with Playwright, `FIREBOX_CHROMIUM` a
//! browser, `FIREBOX_AXE` the file `axe.min.js` of the package `axe-core`, and `FIREBOX_PICTURES` a folder for
//! screenshots, if any are wanted.

#![allow(clippy::unwrap_used)]

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use firebox_runtime::heads::HeadPoolConfig;
use firebox_runtime::{Model, device};
use firebox_server::{ApiKeys, Server, ServerConfig};
use firebox_testing::tool::tool;

#[test]
#[ignore = "tool: Playwright, Chromium and axe-core"]
fn the_console_chats_and_shows_the_engine() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut drive = Command::new(tool("FIREBOX_PLAYWRIGHT"));
    drive.arg(here.join("tests/console/drive.py"));
    drive.arg("--chromium").arg(tool("FIREBOX_CHROMIUM")).arg("--axe").arg(tool("FIREBOX_AXE"));
    if let Some(folder) = std::env::var_os("FIREBOX_PICTURES") {
        drive.arg("--pictures").arg(folder);
    }
    let model = Model::open(here.join("../../assets/pocket"), &device("cpu").unwrap()).unwrap();
    let model = model.with_heads(HeadPoolConfig::patient()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut config = ServerConfig {
        address: SocketAddr::from(([127, 0, 0, 1], 0)),
        keys: ApiKeys::new(["open-sesame".to_owned()]).unwrap(),
        ..ServerConfig::default()
    };
    config.sessions.folder = Some(folder.path().into());
    let server = Server::bind(config, vec![("pocket".into(), model)]).unwrap();
    let (address, stop) = (server.address(), server.stop());
    let running = std::thread::spawn(|| server.run());
    drive.arg(format!("http://{address}"));
    let driven = drive.status().unwrap();
    stop.stop();
    running.join().unwrap().unwrap();
    assert!(driven.success());
}
