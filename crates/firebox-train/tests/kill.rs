//! Runs that are killed at any moment, and resumed.

#![allow(clippy::unwrap_used, reason = "a test that fails here should say so")]

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use firebox_train::{Record, Run, Schedule, Settings, Silent, Which};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use support::{MadeUp, Toy, device, run};

const FOLDER: &str = "FIREBOX_TRAIN_TEST_RUN";
const STEPS: u64 = 24;

fn settings() -> Settings {
    let mut settings = Settings::new(STEPS, Schedule { peak: 2e-2, warm_up: 4, floor: 1e-3 });
    // As many checkpoints as there can be, for most kills to meet one.
    settings.checkpoint_every = 1;
    settings.evaluate_every = 5;
    settings.accumulate = 2;
    settings
}

fn train_in(folder: &Path) {
    let mut opened = Run::create_or_open(folder, settings()).unwrap();
    run(Toy::new(&device(), 0.1), &mut MadeUp::default(), &mut opened, &mut Silent).unwrap();
}

/// The child process that the other tests start.
#[test]
#[ignore = "helper: of tests that kill it"]
fn child() {
    if let Some(folder) = std::env::var_os(FOLDER) {
        train_in(Path::new(&folder));
    }
}

fn start(folder: &Path) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["child", "--exact", "--ignored"]).env(FOLDER, folder);
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

/// The files of the last and of the best checkpoint.
fn files(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let opened = Run::open(folder).unwrap();
    let mut files = Vec::new();
    for which in [Which::Latest, Which::Best] {
        let checkpoint = opened.checkpoint_folder(which).unwrap();
        for name in ["weights.safetensors", "optimizer.safetensors"] {
            let path = checkpoint.join(name);
            let bytes = fs::read(&path).unwrap();
            files.push((path.strip_prefix(folder).unwrap().to_owned(), bytes));
        }
    }
    files
}

fn losses(folder: &Path) -> Vec<(u64, f64, Option<f64>)> {
    let text = fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
    let records = text.lines().map(|line| serde_json::from_str::<Record>(line).unwrap());
    records.map(|record| (record.step, record.loss, record.held_out_loss)).collect()
}

/// Says how it went.
fn kill_and_resume(kills: usize) -> String {
    let folder = tempfile::tempdir().unwrap();
    let reference = folder.path().join("reference");
    // The shorter of two: the first may wait for a disk that later ones find ready.
    let takes = [&reference, &folder.path().join("timed")].map(|run| {
        let began = Instant::now();
        assert!(start(run).wait().unwrap().success());
        began.elapsed()
    });
    let takes = takes[0].min(takes[1]);
    let expected = files(&reference);
    assert_eq!(losses(&reference).len(), STEPS as usize);

    let mut random = ChaCha8Rng::seed_from_u64(11);
    let (mut killed, mut amid, mut runs) = (0, 0, 0);
    while killed < kills {
        let run = folder.path().join(format!("run-{runs}"));
        runs += 1;
        loop {
            let mut child = start(&run);
            let share = random.next_u32() as f64 / f64::from(u32::MAX);
            // Most of the time is other processes' and this one's starting; the last runs are left to end.
            std::thread::sleep(takes.mul_f64(0.7 * share));
            if killed < kills && child.try_wait().unwrap().is_none() {
                child.kill().unwrap();
                child.wait().unwrap();
                killed += 1;
                let left = fs::read_dir(run.join("checkpoints"));
                amid += usize::from(left.is_ok_and(|mut left| {
                    left.any(|entry| entry.unwrap().file_name().to_string_lossy().starts_with('.'))
                }));
                continue;
            }
            assert!(child.wait().unwrap().success());
            break;
        }
        assert!(files(&run) == expected, "run {runs} after {killed} kills has other bits");
        assert_eq!(losses(&run), losses(&reference));
    }
    assert!(amid > 0, "no kill met a checkpoint");
    format!("{killed} kills in {runs} runs of {takes:?}, {amid} of them amid a checkpoint")
}

#[test]
fn runs_that_are_killed_go_on_to_the_same_bits() {
    println!("{}", kill_and_resume(40));
}

#[test]
#[ignore = "soak: minutes where syncing files is slow"]
fn runs_that_are_killed_two_hundred_times_go_on_to_the_same_bits() {
    println!("{}", kill_and_resume(200));
}
