//! Tests that a prefix opened by two processes is in memory once.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that fails here should say so")]

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use firebox::internals::runtime::Origin;
use firebox::{Model, PersistentPrefix, PrefixOptions, device};

const FOLDER: &str = "FIREBOX_TEST_PREFIX_FOLDER";

fn open(folder: &Path) -> (Model, PersistentPrefix) {
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/reference/llama");
    let path = std::env::var_os("FIREBOX_TEST_MODEL").map_or(tiny, PathBuf::from);
    let model = Model::open(path, &device("cpu").unwrap()).unwrap();
    let tokens: Vec<u32> = (0..512).map(|i| 3 + i * 31 % 150).collect();
    let prefix = PersistentPrefix::open_or_build(folder, &model, &tokens, PrefixOptions::default()).unwrap();
    (model, prefix)
}

/// Returns the kilobytes of a file that are resident in this process, and this process's proportional share of them.
fn of_prefix(process: u32) -> (u64, u64) {
    let maps = std::fs::read_to_string(format!("/proc/{process}/smaps")).unwrap();
    let (mut within, mut sums) = (false, (0, 0));
    for line in maps.lines() {
        let kilobytes = |name: &str| -> Option<u64> {
            line.strip_prefix(name)?.trim().strip_suffix("kB")?.trim().parse().ok()
        };
        if line.split_whitespace().next().is_some_and(|first| first.contains('-')) {
            within = line.ends_with(".kv");
        } else if within {
            sums.0 += kilobytes("Rss:").unwrap_or(0);
            sums.1 += kilobytes("Pss:").unwrap_or(0);
        }
    }
    sums
}

fn rolled_up(process: u32) -> String {
    let rolled_up = std::fs::read_to_string(format!("/proc/{process}/smaps_rollup")).unwrap();
    rolled_up.lines().filter(|line| line.starts_with("Pss:") || line.starts_with("Rss:")).collect()
}

/// Opens a prefix, prints that it has, and holds it until its input ends.
#[test]
#[ignore = "helper: of processes_share_a_prefix"]
fn held_by_another_process() {
    let folder = std::env::var_os(FOLDER).unwrap();
    let (model, prefix) = open(Path::new(&folder));
    assert!(matches!(prefix.origin(), Origin::Opened));
    let mut session = model.session().unwrap().with_prefix(&prefix).unwrap();
    session.feed(&[5]).unwrap();
    println!("\nopened");
    std::io::stdout().flush().unwrap();
    std::io::stdin().lock().read_line(&mut String::new()).unwrap();
}

fn holding(folder: &Path) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "held_by_another_process", "--ignored", "--nocapture"])
        .env(FOLDER, folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line == "opened"));
    child
}

#[test]
fn processes_share_a_prefix() {
    let folder = tempfile::tempdir().unwrap();
    drop(open(folder.path()));
    let mut one = holding(folder.path());
    let alone = of_prefix(one.id());
    let mut two = holding(folder.path());
    let shared = [of_prefix(one.id()), of_prefix(two.id())];
    for child in [&one, &two] {
        println!("process {}: {}", child.id(), rolled_up(child.id()));
    }
    println!("prefix, resident and share in kB: alone {alone:?}, of two {shared:?}");
    for child in [&mut one, &mut two] {
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
    }
    assert_eq!(alone.0, alone.1);
    for (resident, share) in shared {
        assert_eq!(resident, alone.0);
        assert!(share <= resident / 2 + 16, "{share} of {resident}");
    }
}
