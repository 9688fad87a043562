//! A test of `firebox train` with a pocket model that is already trained.

use std::fs;
use std::path::Path;

use crate::args;
use crate::support::*;

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &to);
        } else {
            fs::copy(entry.path(), to).unwrap();
        }
    }
}

/// A model that is made already, so that all that is left is to measure it.
#[test]
fn threads_are_for_making_and_for_measuring() {
    let folder = tempfile::tempdir().unwrap();
    let pocket = fixture("../../assets/pocket");
    copy(&pocket, &folder.path().join("model"));
    let recipe = pocket.join("recipe.toml");
    let args = args!["train", recipe, "--out", folder.path(), "--threads", "2", "--forgotten", "0", "--json"];
    let ran = firebox_with(args.into_iter().chain(args!["--conversations", "1"])).ends_with(0);
    assert!(ran.json()["report"].is_object(), "{}", ran.stdout);
}
