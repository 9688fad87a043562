//! A stress test that runs a model while another process in its control group takes and releases memory.

use std::process::Command;
use std::time::{Duration, Instant};

use crate::args;
use crate::fitting::model;
use crate::support::*;
use firebox_testing::control_group::ControlGroup;

/// The memory of the model, the helper and their group, in MiB.
const MEMORY: usize = 170;
const MOST_TAKEN: usize = 100;
const LIMIT: u64 = 232;

/// Runs under pressure may be slower than runs that keep nothing by this much, which is less than two runs of the same
/// kind differ by.
const TOLERANCE: f64 = 0.85;

/// Takes and releases memory at random; the storm starts it as a process of its own.
#[test]
#[ignore = "helper: of the storm"]
fn helper() {
    if std::env::var_os("FIREBOX_STORM_HELPER").is_none() {
        return;
    }
    let mut state = u64::from(std::process::id());
    let mut random = |most: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % most
    };
    loop {
        let held = vec![1u8; (random(MOST_TAKEN as u64) as usize) << 20];
        std::thread::sleep(Duration::from_millis(200 + random(3000)));
        drop(std::hint::black_box(held));
    }
}

/// No run is killed or says another token, and runs that keep layers are not slower than runs that keep none.
#[test]
#[ignore = "soak: ten minutes (FIREBOX_STORM_SECONDS for others) and the right to make control groups"]
fn a_storm_of_memory_pressure_is_weathered() {
    let seconds = std::env::var("FIREBOX_STORM_SECONDS").map_or(600, |text| text.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    model(folder.path());
    let memory = format!("{MEMORY}M");
    let common = args!["run", folder.path(), "--ids", "5,6,7", "-n", "150", "--temp", "0", "--json"];
    let plain = firebox_with(&common).ends_with(0).json()["tokens"].clone();
    let group = ControlGroup::new("storm", LIMIT << 20).expect("the right to make control groups");
    let mut helper = Command::new(std::env::current_exe().unwrap());
    helper.args(["--exact", "storm::helper", "--ignored"]).env("FIREBOX_STORM_HELPER", "1");
    let mut helper = group.spawn(&mut helper).unwrap();
    let run = |more: &[&str]| {
        let child = group.spawn(firebox().args(&common).args(["--memory", &memory]).args(more)).unwrap();
        let ran = Ran::from(child.wait_with_output().unwrap()).ends_with(0).json();
        assert_eq!(ran["tokens"], plain);
        ran["decode_tps"].as_f64().unwrap()
    };
    let (mut kept, mut streamed) = (Vec::new(), Vec::new());
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(seconds) {
        kept.push(run(&["--read", "direct"]));
        streamed.push(run(&["--read", "direct", "--keep-layers", "0"]));
        assert!(helper.try_wait().unwrap().is_none(), "the helper takes less than the group has");
    }
    helper.kill().unwrap();
    helper.wait().unwrap();
    let median = |times: &mut Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    };
    let slowest = kept.iter().copied().fold(f64::INFINITY, f64::min);
    let (kept, streamed) = (median(&mut kept), median(&mut streamed));
    assert!(
        kept >= streamed && slowest >= TOLERANCE * streamed,
        "{kept}, at worst {slowest}, and {streamed}"
    );
}
