//! Tests that every example runs as it stands, offline, and prints what it should.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Examples and words that each prints if it works.
const SAID: [(&str, &[&str]); 17] = [
    ("axum_embed", &["Hello from the program.", "I am the pocket model", "has ended"]),
    ("branches", &["Your dog is called Biscuit.", "tokens are kept"]),
    ("chat", &["Your dog is called Biscuit.", "tokens were known"]),
    ("embeddings", &["1.000 like the first", "numbers"]),
    (
        "facts",
        &[
            "turns are forgotten",
            "the dog: Your dog is called Biscuit.",
            "and now: Your dog is called Pepper.",
        ],
    ),
    ("generate", &["tokens"]),
    ("heads", &["summarize", "chat, changed in", "Your dog is called Biscuit.", "print me.dog;"]),
    ("larger_than_memory", &["keeps", "read", "of memory"]),
    ("layer_by_layer", &["goes on with"]),
    ("own_component", &["(0 of 0 drafted)", "[6, 8, 12] are left", "gates 1 open: I am the pocket model"]),
    ("pipeline", &["[chat,", "[code,", "[summarize,", "for i = 3 to 12"]),
    ("remembering", &["a fact that has changed", "tokens remain"]),
    ("saved_session", &["restored: Your dog is called Biscuit.", "Built", "Opened: You live in Oslo."]),
    ("several_requests", &["for i = 3 to 12", "Anna: home Oslo."]),
    ("shared_prefix", &["the same one"]),
    ("structured", &["{\"dog\":", "the dog is called"]),
    ("telemetry", &["tokens in", "events on the timeline"]),
];

/// Far longer than any example takes, even beside a build.
const PATIENCE: Duration = Duration::from_secs(120);

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the path where cargo builds an example: next to the folder of this test.
fn built(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let program = test.parent().unwrap().parent().unwrap().join("examples").join(name);
    program.with_extension(std::env::consts::EXE_EXTENSION)
}

fn said(name: &str) -> String {
    let program = built(name);
    assert!(program.exists(), "{} is not built; run `cargo build --examples` first", program.display());
    let began = Instant::now();
    let output = Command::new(program).current_dir(root()).output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{name}: {stdout}\n{stderr}");
    assert!(began.elapsed() < PATIENCE, "{name} took {:?}", began.elapsed());
    println!("{name}: {:.1} s", began.elapsed().as_secs_f64());
    stdout.into_owned()
}

#[test]
fn every_example_does_what_it_says() {
    for (name, words) in SAID {
        let said = said(name);
        for word in words {
            assert!(said.contains(word), "{name}: no {word:?} in\n{said}");
        }
    }
}

#[test]
fn a_head_is_trained_and_used() {
    let said = said("train_head");
    assert!(said.contains("installed as generation"), "{said}");
    let pirate = said.lines().find(|line| line.starts_with("pirate: ")).unwrap();
    let chat = said.lines().find(|line| line.starts_with("chat: ")).unwrap();
    assert!(pirate.contains("Ahoy") && !chat.contains("Ahoy"), "{said}");
}

#[test]
fn no_example_is_forgotten() {
    let files = std::fs::read_dir(root().join("examples")).unwrap();
    let (folders, files): (Vec<_>, Vec<_>) =
        files.map(|file| file.unwrap().path()).partition(|path| path.is_dir());
    let name = |path: &PathBuf| path.file_stem().unwrap().to_string_lossy().into_owned();
    let there: BTreeSet<String> = files.iter().map(name).collect();
    let run: BTreeSet<String> =
        SAID.iter().map(|(name, _)| (*name).to_owned()).chain(["train_head".into()]).collect();
    assert_eq!(there, run);
    // Examples with a package of their own are built by a step of their own.
    let steps = std::fs::read_to_string(root().join(".ci/run")).unwrap();
    for package in folders.iter().map(name) {
        assert!(steps.contains(&format!("examples/{package}/Cargo.toml")), "{package}");
    }
}
