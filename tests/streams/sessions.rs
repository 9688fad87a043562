//! Sessions over fixtures.

use std::path::{Path, PathBuf};

use firebox::{KvType, Model, PagePool, Session, device};

pub fn path(fixture: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(fixture)
}

pub fn session(fixture: &str, kept: KvType) -> Session {
    session_on("cpu", fixture, kept)
}

pub fn session_on(name: &str, fixture: &str, kept: KvType) -> Session {
    let model = Model::open(path(fixture), &device(name).unwrap()).unwrap();
    let decoder = model.decoder().unwrap();
    Session::in_pool(decoder.clone(), &PagePool::new(decoder.layout(kept))).with_chunk(7)
}
