//! Crash tests: a process is killed at every single step of a change, and at arbitrary times.

use std::cell::Cell;
use std::collections::{BTreeMap, HashSet};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde_json::json;
use tempfile::{TempDir, tempdir};

use super::*;
use crate::encoding::{Dtype, Encoding};
use crate::heads::NewHead;
use crate::read_unit::Tensors;
use crate::verify::verify;
use crate::weight::Weight;

/// Environment variables of the child: its folder, its task, and the step at which it waits to be killed.
const FOLDER_OF_CHILD: &str = "FIREBOX_HEADS_CHILD";
const CHANGE: &str = "FIREBOX_HEADS_CHANGE";
const LAST_STEP: &str = "FIREBOX_HEADS_STEP";

/// The tasks that the child repeats when it is told to do all.
const ROUND: [&str; 7] = ["2", "1", "rollback", "3", "remove", "1", "2"];

static STEPS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Steps are counted only in the test that runs in the child.
    static COUNTED: Cell<bool> = const { Cell::new(false) };
}

/// Called before every change to the disk.
pub(in crate::heads) fn step() {
    static LAST: OnceLock<Option<u64>> = OnceLock::new();
    if !COUNTED.get() {
        return;
    }
    let step = STEPS.fetch_add(1, Ordering::Relaxed);
    let last = LAST.get_or_init(|| std::env::var(LAST_STEP).ok().and_then(|step| step.parse().ok()));
    if *last == Some(step) {
        say("waiting");
        loop {
            std::thread::park();
        }
    }
}

/// Writes to the parent, bypassing the capture of the test harness.
fn say(word: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n{word}").unwrap();
    out.flush().unwrap();
}

/// A model of three layers, each with one tensor.
fn model(folder: &Path) {
    fs::create_dir(folder).unwrap();
    let tensor = |name: &str, seed: u8| plain(name, seed);
    let mut plan = crate::safetensors_writer::FileLayout::new("model");
    let tensors = [
        tensor("model.embed_tokens.weight", 1),
        tensor("model.layers.0.mlp.up_proj.weight", 2),
        tensor("model.layers.1.mlp.up_proj.weight", 3),
        tensor("model.layers.2.mlp.up_proj.weight", 4),
        tensor("model.norm.weight", 5),
    ];
    for weight in &tensors {
        plan.push_encoded(&weight.name, &weight.shape, weight.encoding).unwrap();
    }
    let mut file =
        crate::safetensors_writer::TensorWriter::create(&folder.join("model.safetensors"), plan).unwrap();
    for weight in &tensors {
        file.next_tensor().unwrap();
        file.write(&weight.data).unwrap();
    }
    file.finish().unwrap();
    fs::write(folder.join("config.json"), r#"{"model_type": "llama"}"#).unwrap();
}

fn plain(name: &str, seed: u8) -> Weight {
    Weight {
        name: name.into(),
        shape: vec![8, 40],
        encoding: Encoding::Plain(Dtype::U8),
        data: Bytes::from(vec![seed; 320]),
        scales: None,
        mapped: false,
    }
}

/// A head whose bytes all equal its seed.
fn head(trunk: &Checkpoint, folder: &Path, seed: u8) -> HeadFiles {
    let mut head = NewHead::new(trunk, 2, json!({"seed": seed})).unwrap();
    head.push(plain("model.layers.2.mlp.up_proj.weight", seed)).unwrap();
    head.push(plain("model.norm.weight", seed)).unwrap();
    head.push(plain("lm_head.weight", seed)).unwrap();
    head.write(folder).unwrap()
}

/// The seed of a head; all of its parts must agree.
fn seed(head: &HeadFiles) -> u8 {
    let seed = head.spec()["seed"].as_u64().unwrap() as u8;
    assert_eq!(head.tensors().count(), 3);
    for name in Tensors::names(head) {
        assert!(head.weight(name).unwrap().data.iter().all(|byte| *byte == seed), "{name} of another head");
    }
    seed
}

/// A model and the heads 1, 2 and 3, of which `installed` are installed as `code`, one after the other.
fn prepared(installed: &[u8]) -> TempDir {
    let folder = tempdir().unwrap();
    model(&folder.path().join("model"));
    let heads = Heads::open(folder.path().join("model")).unwrap();
    for seed in 1..=3 {
        head(heads.model(), &folder.path().join(seed.to_string()), seed);
    }
    for seed in installed {
        heads.install(folder.path().join(seed.to_string()), "code").unwrap();
    }
    folder
}

/// The state that a reader sees: the head in use and the rollback target.
type State = Option<(u8, Option<u8>)>;

fn state(folder: &Path) -> State {
    let heads = Heads::open(folder.join("model")).unwrap();
    verify(folder.join("model"), &mut |_| {}).unwrap();
    let [info] = &heads.list().unwrap()[..] else {
        assert!(matches!(heads.head("code"), Err(StoreError::UnknownHead { .. })));
        return None;
    };
    let active = heads.head("code").unwrap();
    assert_eq!((info.generation, info.hash.as_str()), (active.generation(), active.hash()));
    let previous = info.previous.map(|generation| {
        let within = format!("{FOLDER}/code/{generation}/");
        seed(&HeadFiles::open_within(&heads.folder, &within, generation).unwrap())
    });
    Some((seed(&active), previous))
}

fn change(folder: &Path, change: &str) {
    let heads = Heads::open(folder.join("model")).unwrap();
    match change {
        "rollback" => drop(heads.rollback("code").unwrap()),
        "remove" => heads.remove("code").unwrap(),
        seed => drop(heads.install(folder.join(seed), "code").unwrap()),
    }
}

/// The result of the same change without interruption, which must still be possible.
fn goes_on(folder: &Path) {
    change(folder, "3");
    let found = state(folder);
    assert!(matches!(found, Some((3, _))), "{found:?}");
    let heads = Heads::open(folder.join("model")).unwrap();
    let known: Vec<u64> =
        heads.table().unwrap().heads[0].generations().map(|known| known.generation).collect();
    let mut there: Vec<u64> =
        directories(&heads.path("code")).unwrap().iter().map(|number| number.parse().unwrap()).collect();
    there.sort_unstable();
    assert_eq!(there.len(), known.len(), "{there:?} lie there, {known:?} are known");
    assert!(known.iter().all(|known| there.contains(known)));
    let mut left: Vec<_> =
        fs::read_dir(heads.path("")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, [LOCK, "code", TABLE]);
}

fn child(folder: &Path, change: &str, last: Option<u64>) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["heads::installed::tests::killed_child", "--exact", "--ignored", "--nocapture"]);
    command.env(FOLDER_OF_CHILD, folder).env(CHANGE, change);
    if let Some(last) = last {
        command.env(LAST_STEP, last.to_string());
    }
    command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap()
}

/// The first word that the child prints, if any.
fn first_word(child: &mut Child) -> Option<String> {
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    lines.map(|line| line.unwrap()).find(|line| ["waiting", "begun", "done"].contains(&line.as_str()))
}

/// The child process that the other tests run and kill.
#[test]
#[ignore = "helper: of tests that kill it"]
fn killed_child() {
    let folder = PathBuf::from(std::env::var_os(FOLDER_OF_CHILD).unwrap());
    COUNTED.set(true);
    let changes = std::env::var(CHANGE).unwrap();
    if changes != "all" {
        change(&folder, &changes);
        say("done");
        return;
    }
    say("begun");
    for next in ROUND.iter().cycle() {
        change(&folder, next);
    }
}

#[test]
fn a_process_killed_at_any_step_leaves_the_old_state_or_the_new() {
    let cases: [(&str, &[u8], State); 5] = [
        ("1", &[], Some((1, None))),
        ("2", &[1], Some((2, Some(1)))),
        ("2", &[3, 1], Some((2, Some(1)))),
        ("rollback", &[1, 2], Some((1, Some(2)))),
        ("remove", &[1, 2], None),
    ];
    for (what, installed, new) in cases {
        let (mut seen_old, mut seen_new) = (0, 0);
        for last in 0.. {
            let folder = prepared(installed);
            let old = state(folder.path());
            let mut child = child(folder.path(), what, Some(last));
            let word = first_word(&mut child);
            child.kill().unwrap();
            child.wait().unwrap();
            let found = state(folder.path());
            match word.as_deref() {
                Some("waiting") if found == old => {
                    assert_eq!(seen_new, 0, "{what}: back at step {last}");
                    seen_old += 1;
                }
                Some("waiting") => {
                    assert_eq!(found, new, "{what}, killed at step {last}");
                    seen_new += 1;
                }
                word => {
                    assert_eq!((word, &found), (Some("done"), &new), "{what} at step {last}");
                    break;
                }
            }
            goes_on(folder.path());
        }
        println!("{what} over {installed:?}: killed at {seen_old} steps before the commit, {seen_new} after");
        assert!(seen_old >= 3 && seen_new >= 1, "{what}: {seen_old} old, {seen_new} new");
    }
}

#[test]
fn a_process_killed_at_any_time_leaves_a_whole_state() {
    const KILLS: u64 = 200;
    let folder = prepared(&[1]);
    // Kills are spread over the time that a round takes on this disk.
    let began = Instant::now();
    ROUND.iter().for_each(|next| change(folder.path(), next));
    let round = began.elapsed();
    change(folder.path(), "remove");
    change(folder.path(), "1");
    let mut states = BTreeMap::new();
    let mut random = 0x9E37_79B9_7F4A_7C15u64;
    for _ in 0..KILLS {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let mut child = child(folder.path(), "all", None);
        assert_eq!(first_word(&mut child).as_deref(), Some("begun"));
        std::thread::sleep(round.mul_f64((random >> 11) as f64 / (1u64 << 53) as f64));
        child.kill().unwrap();
        child.wait().unwrap();
        let found = state(folder.path());
        // The states between two changes, of all that these heads allow.
        let possible: [State; 5] =
            [None, Some((1, None)), Some((2, Some(1))), Some((1, Some(2))), Some((3, Some(2)))];
        assert!(possible.contains(&found), "{found:?}");
        *states.entry(format!("{found:?}")).or_insert(0) += 1;
        goes_on(folder.path());
        // Every child starts from the state of the first one.
        change(folder.path(), "remove");
        change(folder.path(), "1");
    }
    println!("{KILLS} kills: {states:?}");
    assert!(states.len() >= 3, "the kills come too early or too late: {states:?}");
}

#[test]
fn readers_never_see_a_half_state() {
    let folder = prepared(&[1, 2]);
    let mut child = child(folder.path(), "all", None);
    assert_eq!(first_word(&mut child).as_deref(), Some("begun"));
    let heads = Heads::open(folder.path().join("model")).unwrap();
    let (mut seen, mut generations) = ([0; 4], HashSet::new());
    let began = Instant::now();
    let mut enough = false;
    while !enough && began.elapsed() < Duration::from_secs(60) {
        enough = began.elapsed() > Duration::from_secs(2) && generations.len() > 5;
        match heads.head("code") {
            Ok(head) => {
                generations.insert(head.generation());
                seen[usize::from(seed(&head))] += 1;
            }
            Err(StoreError::UnknownHead { .. }) => seen[0] += 1,
            Err(error) => panic!("{error}"),
        }
    }
    assert!(child.try_wait().unwrap().is_none(), "the writer has failed");
    child.kill().unwrap();
    child.wait().unwrap();
    println!("absent, 1, 2, 3 seen {seen:?} times, in {} generations", generations.len());
    assert!(enough && seen[1] > 0 && seen[2] > 0, "{seen:?} {generations:?}");
}

#[test]
fn writers_take_turns() {
    let folder = prepared(&[1]);
    std::thread::scope(|scope| {
        for writer in 0..4u64 {
            let folder = folder.path();
            scope.spawn(move || {
                let heads = Heads::open(folder.join("model")).unwrap();
                for _ in 0..5 {
                    heads.install(folder.join("2"), &format!("head{writer}")).unwrap();
                    heads.install(folder.join("3"), "code").unwrap();
                }
            });
        }
    });
    let heads = Heads::open(folder.path().join("model")).unwrap();
    let names: Vec<String> = heads.list().unwrap().into_iter().map(|info| info.name).collect();
    assert_eq!(names, ["code", "head0", "head1", "head2", "head3"]);
    assert_eq!(heads.table().unwrap().next_generation, 1 + 1 + 4 * 10);
    verify(folder.path().join("model"), &mut |_| {}).unwrap();
}
