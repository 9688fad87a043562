//! Runs: how they end, what they leave behind, and how they go on.

#![allow(clippy::unwrap_used, reason = "a test that fails here should say so")]

mod support;

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};

use burn::module::Module as _;
use firebox_train::{
    Ending, Evaluation, Lines, Precision, Progress, Record, Run, Schedule, Settings, Silent, Start,
    StepReport, TrainError, Which, train,
};

use support::{MadeUp, Toy, device, fixture, run};

fn settings() -> Settings {
    let mut settings = Settings::new(40, Schedule { peak: 2e-2, warm_up: 4, floor: 1e-3 });
    settings.evaluate_every = 5;
    settings.checkpoint_every = 10;
    settings
}

fn toy() -> Toy {
    Toy::new(&device(), 0.0)
}

/// Sets a flag after so many steps.
struct StopAfter<'a>(u64, &'a AtomicBool);

impl Progress for StopAfter<'_> {
    fn step(&mut self, report: &StepReport<'_>) {
        self.1.store(report.record.step >= self.0, Ordering::Relaxed);
    }
}

#[test]
fn a_run_learns_and_leaves_its_folder() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = settings();
    settings.steps = 300;
    settings.keep = 2;
    let mut opened = Run::create(folder.path(), settings).unwrap();
    let mut text = Vec::new();
    let trained = run(toy(), &mut MadeUp::default(), &mut opened, &mut Lines::new(&mut text, 50)).unwrap();
    assert_eq!((trained.ending, trained.position.step), (Ending::Completed, 300));
    let text = String::from_utf8(text).unwrap();
    assert!(text.contains("step 300 of 300") && text.contains("the best so far"), "{text}");
    assert!(text.ends_with("completed\n"), "{text}");

    let metrics = fs::read_to_string(folder.path().join("metrics.jsonl")).unwrap();
    let records: Vec<Record> = metrics.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let mean =
        |records: &[Record]| records.iter().map(|record| record.loss).sum::<f64>() / records.len() as f64;
    assert!(mean(&records[280..]) < 0.7 * mean(&records[..10]), "{:?}", mean(&records[..10]));
    assert_eq!(records.iter().filter(|record| record.held_out_loss.is_some()).count(), 60);
    assert!(fs::read_to_string(folder.path().join("loss.svg")).unwrap().contains("held out"));

    let best = trained.position.best.unwrap();
    let kept = fs::read_dir(folder.path().join("checkpoints")).unwrap().count();
    assert_eq!(kept, if best.step >= 290 { 2 } else { 3 });
    let (_, position) = opened.restore(toy(), Which::Best).unwrap();
    assert_eq!(position.step, best.step);
    let (last, _) = opened.restore(toy(), Which::Latest).unwrap();
    assert_eq!(last.weights(), trained.network.weights());
    assert!(opened.restore(toy(), Which::Step(7)).is_err());

    drop(opened);
    assert!(matches!(Run::create(folder.path(), self::settings()), Err(TrainError::RunExists { .. })));
    assert!(Run::create_or_open(folder.path(), self::settings()).is_err());
    let opened = Run::open(folder.path()).unwrap();
    assert!(Run::open(folder.path()).unwrap_err().to_string().contains("another process"));
    drop(opened);
    assert!(matches!(Run::open(folder.path().join("x")), Err(TrainError::NoRun { .. })));
}

#[test]
fn a_run_that_was_stopped_goes_on_to_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let mut whole = Run::create(folder.path().join("whole"), settings()).unwrap();
    let expected = run(toy(), &mut MadeUp::default(), &mut whole, &mut Silent).unwrap();
    let stopped = folder.path().join("stopped");
    let mut endings = Vec::new();
    for until in [1, 2, 13, 20, 39, 99] {
        let mut opened = Run::create_or_open(&stopped, settings()).unwrap();
        let stop = AtomicBool::new(false);
        let mut progress = StopAfter(until, &stop);
        // Which weights it is resumed with makes no difference.
        let toy = if until == 1 { toy() } else { Toy::load(&device(), &fixture("toy/initial.safetensors")) };
        let trained = train(toy, &mut MadeUp::default(), &mut opened, &mut progress, &stop).unwrap();
        assert_eq!(trained.position.step, until.min(40));
        endings.push(trained.ending);
        if trained.ending == Ending::Completed {
            assert_eq!(trained.network.weights(), expected.network.weights());
            assert_eq!(trained.position, expected.position);
        }
    }
    assert_eq!(endings, [[Ending::Stopped; 5].as_slice(), &[Ending::Completed]].concat());
    for file in ["weights.safetensors", "optimizer.safetensors"] {
        let bytes = ["whole", "stopped"]
            .map(|run| fs::read(folder.path().join(run).join("checkpoints/step-000040").join(file)).unwrap());
        assert!(bytes[0] == bytes[1], "{file}");
    }
}

#[test]
fn a_torn_checkpoint_is_passed_over() {
    struct Torn(Option<Start>);

    impl Progress for Torn {
        fn started(&mut self, start: &Start) {
            self.0 = Some(start.clone());
        }
    }

    let folder = tempfile::tempdir().unwrap();
    let mut opened = Run::create(folder.path(), settings()).unwrap();
    let expected = run(toy(), &mut MadeUp::default(), &mut opened, &mut Silent).unwrap();
    let checkpoint = folder.path().join("checkpoints/step-000040");
    let whole = fs::read(checkpoint.join("optimizer.safetensors")).unwrap();
    let cases: [&dyn Fn(); 4] = [
        &|| fs::write(checkpoint.join("optimizer.safetensors"), &whole[..whole.len() / 2]).unwrap(),
        &|| fs::remove_file(checkpoint.join("weights.safetensors")).unwrap(),
        &|| {
            let mut flipped = whole.clone();
            flipped[whole.len() / 2] ^= 4;
            fs::write(checkpoint.join("optimizer.safetensors"), flipped).unwrap();
        },
        &|| fs::write(checkpoint.join("weights.safetensors"), b"").unwrap(),
    ];
    for tear in cases {
        tear();
        let mut told = Torn(None);
        let trained = run(toy(), &mut MadeUp::default(), &mut opened, &mut told).unwrap();
        let start = told.0.unwrap();
        assert!(start.step < 40 && start.torn == [checkpoint.clone()], "{start:?}");
        assert_eq!(trained.network.weights(), expected.network.weights());
        assert!(fs::read(checkpoint.join("optimizer.safetensors")).unwrap() == whole);
    }
}

#[test]
fn a_run_that_gets_no_better_ends() {
    struct Count(Vec<Evaluation>);

    impl Progress for Count {
        fn evaluated(&mut self, evaluation: &Evaluation) {
            self.0.push(*evaluation);
        }
    }

    let folder = tempfile::tempdir().unwrap();
    let mut settings = settings();
    (settings.patience, settings.steps) = (Some(3), 400);
    let mut opened = Run::create(folder.path(), settings).unwrap();
    let mut source = MadeUp { worsening: true, ..MadeUp::default() };
    let mut count = Count(Vec::new());
    let trained = run(toy(), &mut source, &mut opened, &mut count).unwrap();
    assert_eq!((trained.ending, trained.position.stale), (Ending::NoBetter, 3));
    let best = count.0.iter().rposition(|evaluation| evaluation.best).unwrap();
    assert_eq!(count.0.len(), best + 4);
    assert!(count.0[best..].iter().all(|evaluation| evaluation.loss >= count.0[best].loss));
    // And stays ended.
    let again = run(toy(), &mut source, &mut opened, &mut Silent).unwrap();
    assert_eq!((again.ending, again.position), (Ending::NoBetter, trained.position));
}

#[test]
fn numbers_that_run_away_are_an_error_that_costs_no_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let mut opened = Run::create(folder.path(), settings()).unwrap();
    let mut source = MadeUp { poisoned: Some((2, 3)), ..MadeUp::default() };
    let error = run(toy(), &mut source, &mut opened, &mut Silent).unwrap_err();
    assert!(matches!(error, TrainError::Diverged { step: 18, .. }), "{error}");
    let (_, position) = opened.restore(toy(), Which::Latest).unwrap();
    assert!((10..=15).contains(&position.step));
}

#[test]
fn an_evaluation_that_is_no_number_is_never_the_best() {
    let folder = tempfile::tempdir().unwrap();
    let mut opened = Run::create(folder.path(), settings()).unwrap();
    let mut source = MadeUp { blind: true, ..MadeUp::default() };
    let trained = run(toy(), &mut source, &mut opened, &mut Silent).unwrap();
    assert_eq!((trained.ending, trained.position.step), (Ending::Completed, 40));
    assert!(trained.position.best.is_none());
    let (_, position) = opened.restore(toy(), Which::Latest).unwrap();
    assert_eq!(position, trained.position);
}

#[test]
fn checkpoints_of_a_run_without_settings_are_not_taken_over() {
    let folder = tempfile::tempdir().unwrap();
    let mut opened = Run::create(folder.path(), settings()).unwrap();
    run(toy(), &mut MadeUp::default(), &mut opened, &mut Silent).unwrap();
    drop(opened);
    fs::remove_file(folder.path().join("run.toml")).unwrap();
    let error = Run::create(folder.path(), settings()).unwrap_err();
    assert!(error.to_string().contains("run.toml"), "{error}");
}

#[test]
fn only_what_has_gradients_is_trained() {
    let folder = tempfile::tempdir().unwrap();
    let mut opened = Run::create(folder.path().join("a"), settings()).unwrap();
    let trained = run(toy().frozen(), &mut MadeUp::default(), &mut opened, &mut Silent).unwrap();
    let (before, after) = (toy().weights(), trained.network.weights());
    assert_eq!(before["first"], after["first"]);
    assert!(["bias", "norm", "second"].iter().all(|name| before[name] != after[name]));
    let weights = opened.checkpoint_folder(Which::Latest).unwrap().join("weights.safetensors");
    let file = firebox_store::TensorFile::open(weights).unwrap();
    assert!(file.dtype("second").is_some() && file.dtype("first").is_none());

    let other = run(toy(), &mut MadeUp::default(), &mut opened, &mut Silent).unwrap_err();
    assert!(matches!(other, TrainError::OtherNetwork { .. }), "{other}");
    let mut opened = Run::create(folder.path().join("b"), settings()).unwrap();
    let nothing = run(toy().no_grad(), &mut MadeUp::default(), &mut opened, &mut Silent).unwrap_err();
    assert!(matches!(nothing, TrainError::NothingToTrain), "{nothing}");
}

#[test]
fn accumulated_batches_are_one_large_batch() {
    use firebox_train::Source;
    use support::Rows;

    /// So many made-up batches as one.
    struct Joined(usize);

    impl Source for Joined {
        type Batch = Rows;

        fn len(&mut self, _: u64) -> usize {
            usize::MAX
        }

        fn batch(&mut self, _: u64, index: usize) -> Result<Rows, TrainError> {
            let parts: Vec<Rows> = (index * self.0..(index + 1) * self.0)
                .map(|index| MadeUp::default().batch(0, index))
                .collect::<Result<_, _>>()?;
            Ok(Rows {
                inputs: parts.iter().flat_map(|part| part.inputs.clone()).collect(),
                targets: parts.iter().flat_map(|part| part.targets.clone()).collect(),
            })
        }

        fn held_out(&mut self, _: usize) -> Result<Rows, TrainError> {
            unreachable!("nothing is held out")
        }
    }

    let folder = tempfile::tempdir().unwrap();
    let mut weights = Vec::new();
    for (accumulate, joined) in [(1, 4), (4, 1), (2, 2)] {
        let mut settings = settings();
        settings.accumulate = accumulate;
        let mut opened = Run::create(folder.path().join(joined.to_string()), settings).unwrap();
        let toy = Toy::new(&device(), 0.0);
        let trained = run(toy, &mut Joined(joined), &mut opened, &mut Silent).unwrap();
        weights.push(trained.network.weights());
    }
    for other in &weights[1..] {
        for (name, expected) in &weights[0] {
            let apart = expected.iter().zip(&other[name]).map(|(one, other)| (one - other).abs());
            assert!(apart.fold(0.0, f32::max) < 1e-4, "{name}");
        }
    }
}

#[test]
fn bf16_rounds_for_the_loss_and_keeps_f32() {
    let folder = tempfile::tempdir().unwrap();
    let mut weights = Vec::new();
    for precision in [Precision::F32, Precision::Bf16] {
        let mut settings = settings();
        settings.precision = precision;
        let mut opened = Run::create(folder.path().join(format!("{precision:?}")), settings).unwrap();
        let trained =
            run(Toy::new(&device(), 0.0), &mut MadeUp::default(), &mut opened, &mut Silent).unwrap();
        weights.push(trained.network.weights());
    }
    let apart = weights[0]["first"].iter().zip(&weights[1]["first"]).map(|(one, other)| (one - other).abs());
    let apart = apart.fold(0.0, f32::max);
    assert!(apart > 0.0 && apart < 0.1, "{apart}");
    assert!(weights[1]["first"].iter().any(|weight| weight.to_bits() & 0xffff != 0));
}
