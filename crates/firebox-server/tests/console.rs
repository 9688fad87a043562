//! Tests the console in a browser. `FIREBOX_PLAYWRIGHT` names a Python with Playwright; `FIREBOX_CHROMIUM` a
//! browser, if Playwright has none; `FIREBOX_AXE` the file `axe.min.js` of the package `axe-core`; and
//! `FIREBOX_PICTURES` a folder for screenshots.

#![allow(clippy::unwrap_used)]

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use firebox_runtime::heads::HeadPoolConfig;
use firebox_runtime::{Model, device};
use firebox_server::{ApiKeys, Server, ServerConfig};

#[test]
fn the_console_chats_and_shows_the_engine() {
    let Some(python) = std::env::var_os("FIREBOX_PLAYWRIGHT") else {
        println!("skipped: FIREBOX_PLAYWRIGHT names no Python that has Playwright");
        return;
    };
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
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
    let mut drive = Command::new(python);
    drive.arg(here.join("tests/console/drive.py")).arg(format!("http://{address}"));
    for (option, variable) in
        [("--chromium", "FIREBOX_CHROMIUM"), ("--axe", "FIREBOX_AXE"), ("--pictures", "FIREBOX_PICTURES")]
    {
        if let Some(value) = std::env::var_os(variable) {
            drive.arg(option).arg(value);
        }
    }
    let driven = drive.status().unwrap();
    stop.stop();
    running.join().unwrap().unwrap();
    assert!(driven.success());
}
