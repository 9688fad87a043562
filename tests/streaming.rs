//! Tests that a model that is streamed from disk computes what it computes when resident, whatever is resident and
//! whatever happens to the files.

#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use firebox::internals::cache::SequenceCache;
use firebox::internals::model::{
    Decoder, Input, LogitRows, ModelError, StreamedConfig, StreamedDecoder, StreamedWeights,
};
use firebox::internals::runtime::pressure::{Level, Pressure};
use firebox::internals::runtime::thermal::Thermometer;
use firebox::internals::store::{
    Bits, Checkpoint, ImportOptions, Quantization, ReadAt, ReadMethod, StoreError, StreamConfig, import,
};
use firebox::residency::ResidencyOptions;
use firebox::{KvType, Model, PagePool, Role, RuntimeError, Session, available_devices, device};
use proptest::prelude::*;

const PROMPT: usize = 11;
const STEPS: usize = 4;

fn fixtures(folder: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(folder)
}

/// Returns every family as a directory, a GGUF file, and bundles of 32-, 8- and 4-bit numbers.
fn checkpoints(scratch: &Path) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(fixtures("gguf")).unwrap() {
        let folder = entry.unwrap().path();
        let family = folder.file_name().unwrap().to_str().unwrap().to_owned();
        let own = folder.join("hf");
        let is_own = own.exists();
        let places = [own, fixtures("reference").join(&family), fixtures("variants").join(&family)];
        let directory = places.into_iter().find(|place| place.exists()).unwrap();
        paths.push(directory.clone());
        // Families with the layout of others are read from their directory alone; GPT-2 has one of its own.
        if !is_own && family != "gpt2" {
            continue;
        }
        paths.push(folder.join("model.gguf"));
        let schemes = [
            ("f32", None),
            ("q8", Some(Quantization { bits: Bits::Q8, group: 32 })),
            ("q4", Some(Quantization { bits: Bits::Q4, group: 32 })),
        ];
        for (name, quantize) in schemes.into_iter().skip(if is_own { 0 } else { 2 }) {
            let bundle = scratch.join(format!("{family}-{name}"));
            import(&directory, &bundle, &ImportOptions::from(quantize), &mut |_| ()).unwrap();
            paths.push(bundle);
        }
    }
    // Layers of Gemma 4 read rows of a table and what earlier layers store.
    let bundle = scratch.join("gemma4_text-q4");
    let quantize = Some(Quantization { bits: Bits::Q4, group: 32 });
    import(fixtures("reference/gemma4_text"), &bundle, &ImportOptions::from(quantize), &mut |_| ()).unwrap();
    paths.push(bundle);
    assert_eq!(paths.len(), 14 * 5 + 21 + 2 + 1);
    paths
}

fn streamed(path: &Path, device_name: &str, config: &StreamedConfig) -> StreamedDecoder {
    let checkpoint = Checkpoint::open(path).unwrap();
    StreamedDecoder::open(&checkpoint, &device(device_name).unwrap(), config).unwrap()
}

fn parts(decoder: &Decoder) -> &StreamedWeights {
    decoder.streamed().unwrap()
}

fn config(buffers: usize) -> StreamedConfig {
    let stream = StreamConfig { buffers, ..StreamConfig::default() };
    StreamedConfig { stream, method: Some(ReadMethod::Buffered), ..StreamedConfig::default() }
}

fn keep(decoder: &Decoder, kept: impl Fn(usize) -> bool) {
    for part in 0..parts(decoder).parts() {
        if kept(part) {
            parts(decoder).load(part).unwrap();
        } else {
            parts(decoder).evict(part);
        }
    }
}

/// Returns the logits after each of some steps of `batch` sequences that are fed a prompt in two pieces and then their
/// likeliest tokens. `between` runs before every pass.
fn run(decoder: &Decoder, batch: usize, mut between: impl FnMut(usize)) -> Vec<Vec<f32>> {
    let vocab = decoder.config().vocab_size as u32;
    let pool = PagePool::new(decoder.layout(KvType::F16));
    let mut caches: Vec<_> = (0..batch).map(|_| SequenceCache::new(&pool)).collect();
    let mut next: Vec<Vec<u32>> = (0..batch as u32)
        .map(|sequence| (0..PROMPT as u32).map(|i| (3 + sequence * 17 + i * 31) % vocab).collect())
        .collect();
    for (tokens, cache) in next.iter_mut().zip(&mut caches) {
        between(0);
        let first: Vec<u32> = tokens.drain(..PROMPT - 4).collect();
        decoder.encode(Input::new(&first, cache.position(), PROMPT), cache).unwrap();
    }
    let mut steps = Vec::new();
    for step in 0..=STEPS {
        between(step);
        let inputs: Vec<_> =
            next.iter().zip(&caches).map(|(tokens, cache)| Input::new(tokens, cache.position(), 0)).collect();
        let mut caches: Vec<_> = caches.iter_mut().collect();
        let logits = decoder.forward_together(&inputs, &mut caches, LogitRows::Last).unwrap();
        let logits = logits.try_into_vec_as::<f32>().unwrap();
        next = logits
            .chunks(vocab as usize)
            .map(|row| vec![firebox::internals::runtime::likeliest(row)])
            .collect();
        steps.push(logits);
    }
    steps
}

#[test]
fn residency_changes_no_number() {
    let scratch = tempfile::tempdir().unwrap();
    for path in checkpoints(scratch.path()) {
        let plain = Decoder::load(&Checkpoint::open(&path).unwrap(), &device("cpu").unwrap()).unwrap();
        let expected = [1, 4].map(|batch| run(&plain, batch, |_| ()));
        let decoder = streamed(&path, "cpu", &config(2));
        let count = parts(&decoder).parts();
        let placements: [&dyn Fn(usize, usize) -> bool; 3] =
            [&|part, kept| part < kept, &|part, kept| part + kept >= count, &|part, kept| {
                (part + 1) * kept / count > part * kept / count
            }];
        for kept in 0..=count {
            for (index, placement) in placements.iter().enumerate() {
                keep(&decoder, |part| placement(part, kept));
                assert_eq!((0..count).filter(|part| parts(&decoder).is_resident(*part)).count(), kept);
                for (batch, expected) in [1, 4].into_iter().zip(&expected) {
                    let found = run(&decoder, batch, |_| ());
                    assert!(found == *expected, "{}, {kept} kept, placement {index}", path.display());
                }
            }
        }
        assert!(parts(&decoder).report().bytes > 0);
    }
}

/// Pieces of a block are resident independently of each other, and are multiplied together.
#[test]
fn blocks_in_pieces_compute_the_same() {
    let scratch = tempfile::tempdir().unwrap();
    for path in checkpoints(scratch.path()) {
        let plain = Decoder::load(&Checkpoint::open(&path).unwrap(), &device("cpu").unwrap()).unwrap();
        let expected = [1, 4].map(|batch| run(&plain, batch, |_| ()));
        for pieces in [2, 3, 4, 99] {
            let decoder = streamed(&path, "cpu", &StreamedConfig { pieces, ..config(2) });
            let streamed = parts(&decoder);
            let is_mixture = streamed.has_experts();
            assert!(streamed.blocks().iter().all(|block| block.len() <= pieces));
            assert!(streamed.blocks().iter().all(|block| (block.len() > 1) != is_mixture));
            assert!(streamed.blocks().iter().cloned().flatten().eq(0..streamed.block_parts()));
            let placements: [&dyn Fn(usize) -> bool; 5] = [
                &|_| false,
                &|part| part % 2 == 0,
                &|part| part % 5 > 1,
                &|part| streamed.blocks().iter().all(|block| block.start != part),
                &|_| true,
            ];
            for (index, placement) in placements.iter().enumerate() {
                keep(&decoder, placement);
                for (batch, expected) in [1, 4].into_iter().zip(&expected) {
                    let found = run(&decoder, batch, |_| ());
                    assert!(found == *expected, "{}, {pieces} pieces, placement {index}", path.display());
                }
            }
        }
    }
}

/// Parts can be evicted under memory pressure without waiting for the end of a pass.
#[test]
fn parts_may_go_and_come_in_the_middle_of_a_pass() {
    let path = fixtures("gguf/llama/hf");
    let plain = Decoder::load(&Checkpoint::open(&path).unwrap(), &device("cpu").unwrap()).unwrap();
    let expected = run(&plain, 2, |_| ());
    for pieces in [1, 3] {
        change_in_the_middle(&streamed(&path, "cpu", &StreamedConfig { pieces, ..config(2) }), &expected);
    }
}

fn change_in_the_middle(decoder: &Decoder, expected: &[Vec<f32>]) {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let count = parts(decoder).parts();
            for at in (0..).take_while(|_| !done.load(Ordering::Relaxed)) {
                let part = at * 7 % count;
                match at % 3 {
                    0 => parts(decoder).load(part).unwrap(),
                    1 => parts(decoder).evict(part),
                    _ => parts(decoder).set_buffers(at % 4),
                }
            }
        });
        let same = (0..20).all(|_| run(decoder, 2, |_| ()) == expected);
        done.store(true, Ordering::Relaxed);
        assert!(same);
    });
}

#[test]
fn all_devices_stream() {
    let path = fixtures("gguf/qwen3/hf");
    for name in available_devices() {
        let checkpoint = Checkpoint::open(&path).unwrap();
        let plain = Decoder::load(&checkpoint, &device(name).unwrap()).unwrap();
        let expected = run(&plain, 2, |_| ());
        let decoder = streamed(&path, name, &config(2));
        for kept in [0, 1, parts(&decoder).parts()] {
            keep(&decoder, |part| part < kept);
            let found = run(&decoder, 2, |_| ());
            let (expected, found) = (expected.concat(), found.concat());
            let range = expected.iter().fold(0f32, |range, logit| range.max(logit.abs()));
            let worst = expected.iter().zip(&found).fold(0f32, |worst, (a, b)| worst.max((a - b).abs()));
            assert!(worst <= 1e-5 * range, "{name}, {kept} kept: {worst} of {range}");
        }
    }
}

/// Returns the bytes read since `from`, and the bytes of all parts.
fn read_bytes(decoder: &Decoder, from: u64) -> (u64, u64) {
    let streamed = parts(decoder);
    let round = (0..streamed.parts()).filter(|part| !streamed.is_resident(*part));
    (streamed.report().bytes - from, round.map(|part| streamed.units()[part].bytes()).sum())
}

#[test]
fn resident_parts_are_not_read_and_no_part_is_read_twice() {
    for pieces in [1, 4] {
        let config = StreamedConfig { pieces, ..config(3) };
        read_once_a_round(&streamed(&fixtures("gguf/llama/hf"), "cpu", &config));
    }
}

fn read_once_a_round(decoder: &Decoder) {
    run(decoder, 1, |_| ());
    let before = parts(decoder).report().bytes;
    run(decoder, 4, |_| ());
    let (read, round) = read_bytes(decoder, before);
    // Four prefill passes leave out the unembedding. A few parts more than needed may have been read ahead.
    let passes = (4 + STEPS + 1) as u64;
    let ahead = 3 * parts(decoder).units().iter().map(|unit| unit.bytes()).max().unwrap();
    assert!(read + ahead >= (STEPS as u64 + 1) * round, "{read} of rounds of {round}");
    assert!(read <= passes * round + ahead, "{read} of rounds of {round}");
    keep(decoder, |_| true);
    let before = parts(decoder).report().units;
    run(decoder, 1, |_| ());
    assert!(parts(decoder).report().units - before <= 3, "only parts that were being read ahead");
}

/// Only active experts are read, and those that fit stay resident.
#[test]
fn experts_are_read_when_they_are_chosen_and_hot_ones_stay() {
    let path = fixtures("gguf/qwen3_moe/hf");
    let checkpoint = Checkpoint::open(&path).unwrap();
    let expected = run(&Decoder::load(&checkpoint, &device("cpu").unwrap()).unwrap(), 1, |_| ());
    let decoder = streamed(&path, "cpu", &config(2));
    let read = |room: u64| {
        parts(&decoder).set_expert_room(room);
        let before = parts(&decoder).expert_report().bytes;
        assert!(run(&decoder, 1, |_| ()) == expected, "room for {room}");
        assert!(parts(&decoder).expert_bytes() <= room);
        parts(&decoder).expert_report().bytes - before
    };
    let whole: u64 =
        checkpoint.tensors().filter(|info| info.name.contains(".mlp.experts.")).map(|info| info.bytes).sum();
    let none = read(0);
    assert!(none > 0);
    let (_, again) = (read(1 << 40), read(1 << 40));
    let little = read(whole / 3);
    assert!(again < little && little < none, "{again}, {little} and {none}");
    assert!(parts(&decoder).expert_bytes() > 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// Parts and buffers come and go between passes.
    #[test]
    fn residency_may_change_between_passes(
        (buffers, pieces) in (1usize..5, 1usize..6),
        changes in prop::collection::vec((0usize..20, any::<bool>(), 1usize..5), 1..30),
    ) {
        for fixture in [
            "gguf/qwen3_5_text/hf",
            "gguf/gemma3_text/model.gguf",
            "gguf/qwen3_moe/hf",
            "reference/qwen3_5_moe_text",
            "reference/qwen3_next",
            "reference/glm4_moe",
            "reference/gpt_oss",
            "reference/deepseek_v3",
            "reference/lfm2_moe",
        ] {
            let path = fixtures(fixture);
            let plain = Decoder::load(&Checkpoint::open(&path).unwrap(), &device("cpu").unwrap()).unwrap();
            let decoder = streamed(&path, "cpu", &StreamedConfig { pieces, ..config(buffers) });
            let mut changes = changes.iter().cycle();
            let found = run(&decoder, 2, |_| {
                for &(part, kept, buffers) in changes.by_ref().take(3) {
                    let part = part % parts(&decoder).parts();
                    if kept { parts(&decoder).load(part).unwrap() } else { parts(&decoder).evict(part) }
                    parts(&decoder).set_buffers(buffers);
                    parts(&decoder).set_expert_room(10_000 * part as u64);
                }
            });
            prop_assert_eq!(found, run(&plain, 2, |_| ()));
        }
    }
}

/// Several threads that run the same model at once do not deadlock.
#[test]
fn passes_side_by_side_take_turns() {
    let path = fixtures("gguf/llama/hf");
    let plain = Decoder::load(&Checkpoint::open(&path).unwrap(), &device("cpu").unwrap()).unwrap();
    let expected = run(&plain, 1, |_| ());
    for (buffers, pieces) in [(1, 1), (2, 1), (3, 1), (1, 4), (3, 4)] {
        let decoder = Arc::new(streamed(&path, "cpu", &StreamedConfig { pieces, ..config(buffers) }));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..5 {
                        assert!(run(&decoder, 1, |_| ()) == expected);
                    }
                });
            }
        });
    }
}

/// Files with injected faults.
#[derive(Debug)]
struct Failing {
    files: Arc<dyn ReadAt>,
    fault: Mutex<Option<Fault>>,
}

#[derive(Debug, Clone, Copy)]
enum Fault {
    Error,
    /// Every read returns only a few bytes: valid, but easily forgotten.
    Few,
    /// The file seems to end early.
    Ends,
    /// Only reads of parts fail, not those of embedding rows.
    Ahead,
}

impl ReadAt for Failing {
    fn read_at(&self, file: usize, buffer: &mut [u8], start: u64) -> Result<usize, StoreError> {
        let few = buffer.len().min(1000);
        match *self.fault.lock().unwrap() {
            None => self.files.read_at(file, buffer, start),
            Some(Fault::Few) => self.files.read_at(file, &mut buffer[..few], start),
            Some(Fault::Ends) => Ok(0),
            Some(Fault::Ahead) if std::thread::current().name() != Some("firebox-read") => {
                self.files.read_at(file, buffer, start)
            }
            Some(Fault::Error | Fault::Ahead) => Err(StoreError::Io {
                path: "disk".into(),
                action: "read".into(),
                source: std::io::Error::from_raw_os_error(5),
            }),
        }
    }
}

#[test]
fn a_disk_that_fails_fails_the_request_and_nothing_else() {
    let path = fixtures("gguf/qwen3/hf");
    let checkpoint = Checkpoint::open(&path).unwrap();
    let plain = Decoder::load(&checkpoint, &device("cpu").unwrap()).unwrap();
    let expected = run(&plain, 1, |_| ());
    let files = checkpoint.disk(ReadMethod::Buffered);
    let failing = Arc::new(Failing { files, fault: Mutex::new(None) });
    let config = StreamedConfig { source: Some(failing.clone()), ..config(2) };
    let model = Model::streamed(checkpoint, &device("cpu").unwrap(), &config).unwrap();
    let decoder = model.decoder().unwrap();
    let mut session = model.session().unwrap().with_kv_type(KvType::F32);
    let mut other = session.clone();
    let tokens: Vec<u32> = (3..20).collect();
    let first = session.feed(&tokens).unwrap();
    for (fault, kind) in
        [(Fault::Error, std::io::Error::from_raw_os_error(5).kind()), (Fault::Ends, ErrorKind::UnexpectedEof)]
    {
        *failing.fault.lock().unwrap() = Some(fault);
        // Parts that were read ahead may last for a pass or two.
        let error = (0..9).find_map(|_| session.feed(&[5]).err()).expect("the disk fails");
        let RuntimeError::Model(ModelError::Store(StoreError::Io { source, .. })) = error else {
            panic!("{error:?}")
        };
        assert_eq!(source.kind(), kind);
        *failing.fault.lock().unwrap() = None;
        session.rewind(tokens.len());
        // A read-ahead that failed is reported to the pass that needs it.
        assert!((0..9).any(|_| other.feed(&tokens).is_ok()), "the disk works again");
        other.clear();
    }
    *failing.fault.lock().unwrap() = Some(Fault::Few);
    assert!(run(&decoder, 1, |_| ()) == expected);
    session.clear();
    assert!(session.feed(&tokens).unwrap() == first);
}

fn copied(scratch: &Path) -> PathBuf {
    let copy = scratch.join("model");
    std::fs::create_dir(&copy).unwrap();
    for entry in std::fs::read_dir(fixtures("gguf/qwen3/hf")).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, copy.join(path.file_name().unwrap())).unwrap();
    }
    copy
}

/// Feeds tokens until a feed fails.
fn failure(session: &mut Session) -> Option<RuntimeError> {
    (0..9).find_map(|_| session.feed(&[5]).err())
}

#[test]
fn files_that_change_are_noticed_and_new_ones_under_their_name_are_not_read() {
    let weights = "model.safetensors";
    type Change = fn(&Path);
    let changes: [(&str, Change, bool); 4] = [
        ("shortened", |file| File::options().write(true).open(file).unwrap().set_len(9000).unwrap(), true),
        ("emptied", |file| File::options().write(true).open(file).unwrap().set_len(0).unwrap(), true),
        (
            "written to",
            |file| {
                let mut bytes = std::fs::read(file).unwrap();
                let last = bytes.len() - 1;
                bytes[last] ^= 1;
                std::fs::write(file, bytes).unwrap();
            },
            true,
        ),
        (
            "replaced",
            |file| {
                let other = file.with_extension("other");
                std::fs::write(&other, b"something else").unwrap();
                std::fs::rename(other, file).unwrap();
            },
            false,
        ),
    ];
    for method in ReadMethod::ALL {
        for (name, change, fails) in changes {
            let scratch = tempfile::tempdir().unwrap();
            let path = copied(scratch.path());
            let config = StreamedConfig { method: Some(method), ..config(2) };
            let model = Model::streamed(Checkpoint::open(&path).unwrap(), &device("cpu").unwrap(), &config);
            let mut session = model.unwrap().session().unwrap();
            let undisturbed = Model::open(fixtures("gguf/qwen3/hf"), &device("cpu").unwrap()).unwrap();
            let mut undisturbed = undisturbed.session().unwrap();
            assert!(session.feed(&[3, 4]).unwrap() == undisturbed.feed(&[3, 4]).unwrap());
            change(&path.join(weights));
            let error = failure(&mut session);
            assert_eq!(error.is_some(), fails, "{name}, {method}: {error:?}");
            if let Some(error) = error {
                let changed =
                    matches!(error, RuntimeError::Model(ModelError::Store(StoreError::Changed { .. })));
                assert!(changed, "{name}, {method}: {error:?}");
            }
            // Another model of the same process is not affected.
            assert!(failure(&mut undisturbed).is_none());
        }
    }
}

/// A failed feed changes nothing, wherever it fails: a retry returns the same logits, and turns are unchanged.
#[test]
fn a_feed_that_fails_can_be_tried_again() {
    for fixture in ["gguf/llama/hf", "gguf/qwen3_5_text/hf", "reference/lfm2"] {
        let checkpoint = Checkpoint::open(fixtures(fixture)).unwrap();
        let files = checkpoint.disk(ReadMethod::Buffered);
        let failing = Arc::new(Failing { files, fault: Mutex::new(None) });
        let config = StreamedConfig { source: Some(failing.clone()), ..config(1) };
        let cpu = device("cpu").unwrap();
        let model = Model::streamed(checkpoint.clone(), &cpu, &config).unwrap();
        let mut undisturbed = Model::from_checkpoint(checkpoint, &cpu).unwrap().session().unwrap();
        let mut session = model.session().unwrap();
        let decoder = model.decoder().unwrap();
        let count = parts(&decoder).parts();
        for failing_part in 0..count {
            let tokens = [5 + failing_part as u32, 9, 11];
            let id = session.begin_turn(&[Role::User]).unwrap();
            undisturbed.begin_turn(&[Role::User]).unwrap();
            keep(&decoder, |_| true);
            *failing.fault.lock().unwrap() = Some(Fault::Ahead);
            parts(&decoder).evict(failing_part);
            // Other sessions use up the parts that were read ahead before.
            assert!((0..5).any(|_| session.clone().feed(&tokens).is_err()));
            for _ in 0..2 {
                assert!(session.feed(&tokens).is_err(), "{fixture}, part {failing_part}");
            }
            *failing.fault.lock().unwrap() = None;
            let expected = undisturbed.feed(&tokens).unwrap();
            let found = (0..5).find_map(|_| session.feed(&tokens).ok()).unwrap();
            assert!(found == expected, "{fixture}, part {failing_part}");
            let last = session.cache().turns().last().unwrap();
            assert_eq!((last.tokens, last.id), (tokens.len(), id));
            let turns = |session: &Session| -> Vec<_> {
                session.cache().turns().map(|turn| (turn.tokens, turn.roles.clone())).collect()
            };
            assert_eq!(turns(&session), turns(&undisturbed));
        }
    }
}

/// A program can report memory pressure and temperature of a phone's system, with the effect of the machine's own
/// readings.
#[test]
fn a_program_may_warn_and_say_how_hot_it_is() {
    let options = ResidencyOptions { layers: Some(2), buffers: Some(3), ..ResidencyOptions::new(8 << 30) };
    let path = fixtures("reference/qwen3_5_text");
    let model = Model::open_within(path, &device("cpu").unwrap(), &options).unwrap();
    let (decoder, residency) = (model.decoder().unwrap(), model.residency().unwrap());
    let kept = || (0..parts(&decoder).parts()).filter(|&part| parts(&decoder).is_resident(part)).count();
    assert_eq!((kept(), parts(&decoder).buffers()), (2, 3));
    residency.warn(Pressure { level: Level::Some, available: None });
    assert_eq!(kept(), 1, "a quarter of the parts is evicted, and at least one");
    residency.warn(Pressure { level: Level::Critical, available: None });
    assert_eq!((kept(), residency.resident_bytes()), (0, 0));

    residency.set_thermometer(Thermometer::new(|| Some(100.0)));
    let mut session = model.session().unwrap();
    let until_it_is_read = 0..64;
    until_it_is_read.for_each(|token| drop(session.feed(&[token]).unwrap()));
    assert_eq!(parts(&decoder).buffers(), 1, "it is too hot to read ahead");
}
