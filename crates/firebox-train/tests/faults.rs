//! A disk that fails while something is trained: the run ends with an error that says so, and goes on to the same bits once
//! the disk works again.

#![allow(clippy::unwrap_used, reason = "a test that fails here should say so")]

mod support;

use std::io::ErrorKind;

use firebox_store::StoreError;
use firebox_store::files::{Fault, Faults};
use firebox_train::{
    BoundaryCache, BoundaryKey, Progress, Run, Schedule, Settings, Silent, Start, Stored, TrainError,
};

use tempfile::TempDir;

use support::{MadeUp, Toy, device, run};

/// From one operation that fails to the next that does: all of them would take minutes.
const APART: usize = 5;

/// In memory, where there is such a place: thousands of files are made durable here, and no disk has to be asked for that.
fn scratch() -> TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

fn settings() -> Settings {
    let mut settings = Settings::new(8, Schedule { peak: 2e-2, warm_up: 2, floor: 1e-3 });
    settings.evaluate_every = 4;
    settings.checkpoint_every = 4;
    settings
}

fn toy() -> Toy {
    Toy::new(&device(), 0.0)
}

#[track_caller]
fn check_error(fault: Fault, error: &TrainError) {
    let TrainError::Store(store) = error else { panic!("{fault:?} is told as {error:?}") };
    let kind = match fault {
        Fault::Full => ErrorKind::StorageFull,
        Fault::Vanished => ErrorKind::NotFound,
        Fault::Short => ErrorKind::UnexpectedEof,
        _ => std::io::Error::from_raw_os_error(5).kind(),
    };
    match store {
        StoreError::Io { source, .. } => assert_eq!(source.kind(), kind, "{fault:?}: {store}"),
        other => panic!("{fault:?} is told as {other:?}"),
    }
}

#[test]
fn a_run_that_a_disk_ended_goes_on_to_the_same_bits() {
    let whole = scratch();
    let mut opened = Run::create(whole.path(), settings()).unwrap();
    let expected = run(toy(), &mut MadeUp::default(), &mut opened, &mut Silent).unwrap();
    for (offset, fault) in [Fault::Full, Fault::Broken, Fault::Torn].into_iter().enumerate() {
        for goes_on in [true, false] {
            let mut failed = 0;
            for nth in (offset..).step_by(APART) {
                assert!(nth < 2000, "there is no end to it");
                let folder = scratch();
                let faults = Faults::below(folder.path());
                if goes_on {
                    faults.from(nth, fault)
                } else {
                    faults.once(nth, fault)
                }
                let trained = Run::create(folder.path(), settings())
                    .and_then(|mut opened| run(toy(), &mut MadeUp::default(), &mut opened, &mut Silent));
                let struck = faults.lift();
                match trained {
                    Ok(trained) => assert_eq!(trained.network.weights(), expected.network.weights()),
                    Err(error) => {
                        check_error(fault, &error);
                        failed += 1;
                    }
                }
                if !(goes_on && fault == Fault::Torn) {
                    let mut opened = Run::create_or_open(folder.path(), settings()).unwrap();
                    let resumed = run(toy(), &mut MadeUp::default(), &mut opened, &mut Silent).unwrap();
                    assert_eq!(resumed.network.weights(), expected.network.weights(), "{fault:?} at {nth}");
                    assert_eq!(resumed.position, expected.position);
                }
                if struck == 0 {
                    break;
                }
            }
            println!("{fault:?}, going on {goes_on}: {failed} runs ended");
            assert!(failed > 0 || fault == Fault::Torn, "{fault:?} makes no difference");
        }
    }
}

/// Where a run began.
#[derive(Default)]
struct Began(Option<Start>);

impl Progress for Began {
    fn started(&mut self, start: &Start) {
        self.0 = Some(start.clone());
    }
}

#[test]
fn a_checkpoint_that_cannot_be_read_now_is_not_begun_again() {
    let folder = scratch();
    let mut opened = Run::create(folder.path(), settings()).unwrap();
    let expected = run(toy(), &mut MadeUp::default(), &mut opened, &mut Silent).unwrap();
    let faults = Faults::below(&folder.path().join("checkpoints"));
    for fault in [Fault::Broken, Fault::Short] {
        for goes_on in [true, false] {
            for nth in 0.. {
                if goes_on {
                    faults.from(nth, fault)
                } else {
                    faults.once(nth, fault)
                }
                let mut began = Began::default();
                let resumed = run(toy(), &mut MadeUp::default(), &mut opened, &mut began);
                if faults.lift() == 0 {
                    assert!(resumed.is_ok() && nth > 0);
                    break;
                }
                check_error(fault, &resumed.map(drop).unwrap_err());
                assert!(began.0.is_none(), "{:?}", began.0);
            }
        }
    }
    let mut began = Began::default();
    let resumed = run(toy(), &mut MadeUp::default(), &mut opened, &mut began).unwrap();
    assert_eq!(began.0.unwrap().step, 8);
    assert_eq!(resumed.network.weights(), expected.network.weights());
}

#[test]
fn states_that_could_not_be_stored_are_computed_again_and_no_others() {
    const SAMPLES: usize = 12;
    let key =
        || BoundaryKey { trunk: "t".into(), samples: "s".into(), layer: 2, width: 3, stored: Stored::F32 };
    let states = |tokens: &[u32]| tokens.iter().flat_map(|&token| [token as f32, 0.5, -1.0]).collect();
    let tokens = |sample: usize| Ok((0..1 + sample as u32 % 4).collect());
    let whole = scratch();
    let fill = |folder: &std::path::Path, computed: &mut usize| {
        BoundaryCache::fill(folder, key(), SAMPLES, tokens, |tokens| {
            *computed += 1;
            Ok(states(tokens))
        })
    };
    let expected = fill(whole.path(), &mut 0).unwrap();
    for fault in [Fault::Full, Fault::Broken, Fault::Torn] {
        for goes_on in [true, false] {
            let mut failed = 0;
            for nth in 0.. {
                let folder = scratch();
                let faults = Faults::below(folder.path());
                if goes_on {
                    faults.from(nth, fault)
                } else {
                    faults.once(nth, fault)
                }
                let (mut before, mut after) = (0, 0);
                let filled = fill(folder.path(), &mut before).map(drop);
                let struck = faults.lift();
                failed += usize::from(filled.is_err());
                match &filled {
                    Err(TrainError::Malformed { .. }) if fault == Fault::Torn => {
                        // It tells of a file that has to be removed, which is not for it to do.
                        std::fs::remove_dir_all(folder.path()).unwrap();
                    }
                    Err(error) => check_error(fault, error),
                    Ok(()) => {}
                }
                let cache = fill(folder.path(), &mut after).unwrap();
                cache.verify().unwrap();
                let same = |sample| cache.bytes(sample).unwrap() == expected.bytes(sample).unwrap();
                assert!((0..SAMPLES).all(same));
                if struck == 0 {
                    assert_eq!((before, after), (SAMPLES, 0));
                    break;
                }
            }
            println!("{fault:?}, going on {goes_on}: failed {failed} times");
            assert!(failed > 0, "{fault:?} makes no difference");
        }
    }
}
