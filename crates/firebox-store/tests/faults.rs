//! A disk that fails at every single operation of a change, in every way: what was there is whole, what failed says why, and
//! tried again it is done.
#![allow(clippy::unwrap_used, reason = "a test that fails here should say so")]

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use firebox_store::files::{Fault, Faults};
use firebox_store::gguf::Value;
use firebox_store::{
    Bits, Checkpoint, Dtype, Encoding, GgufDescription, GgufPlan, HEAD, Heads, ImportOptions, NewHead,
    NewTensor, NewTensorFile, Progress, Quantization, ReadMethod, ReadUnit, StoreError, Stream, StreamConfig,
    TensorFile, Tensors, encode, export_safetensors, import, verify,
};
use serde_json::json;
use support::{llama, numbers};
use tempfile::TempDir;

fn quiet(_: Progress) {}

/// In memory, where there is such a place: thousands of files are made durable here, and no disk has to be asked for that.
fn scratch() -> TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// All files of a folder, by their place in it.
fn contents(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = PathBuf::from(path.file_name().unwrap());
        if path.is_dir() {
            all.extend(contents(&path).into_iter().map(|(below, bytes)| (name.join(below), bytes)));
        } else {
            all.insert(name, fs::read(&path).unwrap());
        }
    }
    all
}

/// Has a change fail at one operation after the other, until there is none left that could. `attempt` makes the change on
/// fresh ground, with the faults that it is given, and looks at what is left of it.
fn at_every_operation(
    fault: Fault,
    mut attempt: impl FnMut(&dyn Fn(&Faults)) -> (Result<(), StoreError>, usize),
) {
    for goes_on in [true, false] {
        let mut failed = 0;
        for nth in 0.. {
            assert!(nth < 500, "{fault:?}: there is no end to it");
            let begin = |faults: &Faults| {
                if goes_on { faults.from(nth, fault) } else { faults.once(nth, fault) }
            };
            let (done, struck) = attempt(&begin);
            if struck == 0 {
                done.unwrap();
                break;
            }
            if let Err(error) = done {
                check_error(fault, &error);
                failed += 1;
            }
        }
        assert!(failed > 0, "{fault:?} makes no difference");
    }
}

/// Whether an error says what was wrong with the disk, where, and what to do.
#[track_caller]
fn check_error(fault: Fault, error: &StoreError) {
    let text = error.to_string();
    match (fault, error) {
        (Fault::Full, StoreError::Io { source, .. }) => {
            assert_eq!(source.kind(), ErrorKind::StorageFull);
            assert!(text.contains("make room"), "{text}");
        }
        (Fault::Broken, StoreError::Io { source, .. }) => {
            assert_eq!(source.raw_os_error(), Some(5), "{text}");
            assert!(text.contains("the disk fails"), "{text}");
        }
        (Fault::Short, StoreError::Io { source, .. }) => {
            assert_eq!(source.kind(), ErrorKind::UnexpectedEof);
            assert!(text.contains("put a whole one in its place"), "{text}");
        }
        (Fault::Vanished, StoreError::Io { source, .. }) => {
            assert_eq!(source.kind(), ErrorKind::NotFound);
            assert!(text.contains("where the file went"), "{text}");
        }
        // Files that have lost something are told from their content.
        (
            Fault::Torn | Fault::Short | Fault::Vanished,
            StoreError::Malformed { .. } | StoreError::HashMismatch { .. } | StoreError::NotAModel { .. },
        ) => {}
        (_, error) => panic!("{fault:?} is told as {error:?}"),
    }
}

const CHANGING: [Fault; 2] = [Fault::Full, Fault::Broken];
const READING: [Fault; 3] = [Fault::Broken, Fault::Short, Fault::Vanished];

fn tensors() -> [NewTensor; 2] {
    [("a", vec![70]), ("b", vec![3, 9])].map(|(name, shape)| NewTensor {
        name: name.into(),
        dtype: Dtype::U8,
        shape,
    })
}

fn write_tensors(path: &Path, who: &str, value: u8) -> Result<(), StoreError> {
    let texts = BTreeMap::from([("who".to_owned(), who.to_owned())]);
    let mut file = NewTensorFile::create(path, &texts, &tensors())?;
    file.write(&[value; 70])?;
    file.write(&[value; 27])?;
    file.publish()
}

/// Who wrote it: all of its bytes have to be that one's.
fn who(path: &Path) -> Result<String, StoreError> {
    let file = TensorFile::open(path)?;
    let who = file.text("who")?.to_owned();
    let value = who.len() as u8;
    assert!(file.tensor("a", Dtype::U8)?.data.iter().all(|byte| *byte == value));
    assert!(file.tensor("b", Dtype::U8)?.data.iter().all(|byte| *byte == value));
    Ok(who)
}

#[test]
fn a_file_of_tensors_is_the_old_one_or_the_new_one() {
    for fault in CHANGING {
        at_every_operation(fault, |begin| {
            let (folder, others) = (scratch(), scratch());
            let (path, other) = (folder.path().join("state"), others.path().join("state"));
            write_tensors(&path, "old", 3).unwrap();
            let held = TensorFile::open(&path).unwrap();
            let faults = Faults::below(folder.path());
            begin(&faults);
            let done = write_tensors(&path, "newer", 5);
            write_tensors(&other, "beside", 6).unwrap();
            let struck = faults.lift();
            // A folder that could not be made durable after the renaming has the new one.
            let found = who(&path).unwrap();
            assert!(found == "newer" || found == "old" && done.is_err(), "{found}");
            assert_eq!((held.text("who").unwrap(), who(&other).unwrap().as_str()), ("old", "beside"));
            write_tensors(&path, "again", 5).unwrap();
            assert_eq!(who(&path).unwrap(), "again");
            (done, struck)
        });
    }
}

#[test]
fn a_torn_file_of_tensors_is_found_out_and_written_again() {
    at_every_operation(Fault::Torn, |begin| {
        let folder = scratch();
        let (path, beside) = (folder.path().join("state"), folder.path().join("beside"));
        write_tensors(&beside, "beside", 6).unwrap();
        let faults = Faults::below(folder.path());
        begin(&faults);
        write_tensors(&path, "newer", 5).unwrap();
        let struck = faults.lift();
        let found = who(&path).map(drop);
        assert_eq!(who(&beside).unwrap(), "beside");
        write_tensors(&path, "newer", 5).unwrap();
        assert_eq!(who(&path).unwrap(), "newer");
        (found, struck)
    });
}

#[test]
fn a_file_that_cannot_be_read_is_as_it_was() {
    for fault in READING {
        at_every_operation(fault, |begin| {
            let folder = scratch();
            let path = folder.path().join("state");
            write_tensors(&path, "old", 3).unwrap();
            let faults = Faults::below(folder.path());
            begin(&faults);
            let read = who(&path).map(drop);
            let struck = faults.lift();
            assert_eq!(who(&path).unwrap(), "old");
            (read, struck)
        });
    }
    let folder = scratch();
    let path = folder.path().join("state");
    write_tensors(&path, "old", 3).unwrap();
    let faults = Faults::below(folder.path());
    faults.from(0, Fault::Few);
    assert_eq!(who(&path).unwrap(), "old");
    assert!(faults.failed() > 3, "a whole file takes several reads then");
}

#[test]
fn an_import_leaves_a_whole_bundle_or_none() {
    let quantize = Some(Quantization { bits: Bits::Q8, group: 32 });
    for options in [ImportOptions::default(), ImportOptions::from(quantize)] {
        let undisturbed = scratch();
        let (source, whole) = (llama(&undisturbed.path().join("source")), undisturbed.path().join("bundle"));
        import(&source, &whole, &options, &mut quiet).unwrap();
        let whole = contents(&whole);
        for fault in CHANGING.into_iter().chain([Fault::Torn]) {
            at_every_operation(fault, |begin| {
                let folder = scratch();
                let (out, bundle) = (folder.path().join("out"), folder.path().join("out/bundle"));
                fs::create_dir(&out).unwrap();
                let faults = Faults::below(&out);
                begin(&faults);
                let mut done = import(&source, &bundle, &options, &mut quiet).map(drop);
                let struck = faults.lift();
                Checkpoint::open(&source).unwrap();
                if bundle.exists() {
                    // What is copied for others has no hash; what it lacks is found by who parses it.
                    let verified = verify(&bundle, &mut |_| {}).map(drop);
                    let is_whole = contents(&bundle) == whole;
                    assert_eq!(is_whole, fault != Fault::Torn || struck == 0, "{fault:?}");
                    assert!(verified.is_ok() || !is_whole);
                    done = done.and(verified);
                    fs::remove_dir_all(&bundle).unwrap();
                }
                import(&source, &bundle, &options, &mut quiet).unwrap();
                assert!(contents(&bundle) == whole);
                (done, struck)
            });
        }
    }
}

fn as_safetensors(model: &Checkpoint, folder: &Path) -> Result<(), StoreError> {
    export_safetensors(model, folder, Dtype::BF16, None, &mut quiet).map(drop)
}

fn as_gguf(model: &Checkpoint, file: &Path) -> Result<(), StoreError> {
    let counts = [
        ("block_count", 2),
        ("context_length", 64),
        ("embedding_length", 40),
        ("feed_forward_length", 72),
        ("attention.head_count", 2),
    ];
    let mut keys: Vec<_> = counts.map(|(key, count)| (key, Value::Unsigned(count))).to_vec();
    keys.push(("attention.layer_norm_rms_epsilon", Value::Float(1e-5)));
    let description =
        GgufDescription { architecture: "llama", keys, factors: Vec::new(), tied: false, notes: Vec::new() };
    GgufPlan::new(model, &description, None)?.write(file, &mut quiet).map(drop)
}

#[test]
fn an_export_leaves_all_of_it_or_nothing() {
    let all = |path: &Path| match path.is_dir() {
        true => contents(path),
        false => BTreeMap::from([(PathBuf::new(), fs::read(path).unwrap())]),
    };
    type Export = fn(&Checkpoint, &Path) -> Result<(), StoreError>;
    for export in [as_safetensors as Export, as_gguf] {
        let undisturbed = scratch();
        let model = Checkpoint::open(llama(&undisturbed.path().join("source"))).unwrap();
        let whole = undisturbed.path().join("whole");
        export(&model, &whole).unwrap();
        Checkpoint::open(&whole).unwrap();
        let whole = all(&whole);
        for fault in CHANGING {
            at_every_operation(fault, |begin| {
                let folder = scratch();
                let (out, exported) = (folder.path().join("out"), folder.path().join("out/model"));
                fs::create_dir(&out).unwrap();
                let faults = Faults::below(&out);
                begin(&faults);
                let done = export(&model, &exported);
                let struck = faults.lift();
                if exported.exists() {
                    assert!(all(&exported) == whole, "{fault:?}");
                } else {
                    assert!(done.is_err());
                    export(&model, &exported).unwrap();
                    assert!(all(&exported) == whole);
                }
                (done, struck)
            });
        }
    }
}

/// A bundle of two layers with heads 1 and 2 for the second, of which 1 is installed.
fn with_heads(folder: &Path) -> (PathBuf, [PathBuf; 2]) {
    let source = llama(&folder.join("source"));
    let bundle = folder.join("bundle");
    import(&source, &bundle, &ImportOptions::default(), &mut quiet).unwrap();
    let heads = Heads::open(&bundle).unwrap();
    let paths = [1, 2].map(|seed| folder.join(format!("head-{seed}")));
    for (seed, path) in (1..).zip(&paths) {
        new_head(heads.model(), seed).write(path).unwrap();
    }
    heads.install(&paths[0], "code").unwrap();
    (bundle, paths)
}

fn new_head(trunk: &Checkpoint, seed: u64) -> NewHead {
    let mut head = NewHead::new(trunk, 1, json!({"seed": seed})).unwrap();
    for (name, shape) in
        [("model.layers.1.self_attn.q_proj.weight", &[40, 40][..]), ("model.norm.weight", &[40])]
    {
        let values = numbers(shape.iter().product(), seed);
        head.push(encode(name, &values, shape, Encoding::Plain(Dtype::F32)).unwrap()).unwrap();
    }
    head
}

fn installed(bundle: &Path) -> Option<u64> {
    let heads = Heads::open(bundle).unwrap();
    verify(bundle, &mut |_| {}).unwrap();
    heads.list().unwrap().first().map(|info| {
        let head = heads.head(&info.name).unwrap();
        head.spec()["seed"].as_u64().unwrap()
    })
}

#[test]
fn heads_are_the_old_ones_or_the_new_ones() {
    type Change = fn(&Heads, &[PathBuf; 2]) -> Result<(), StoreError>;
    let changes: [(&str, Change, Option<u64>); 3] = [
        ("install", |heads, [_, second]| heads.install(second, "code").map(drop), Some(2)),
        ("rollback", |heads, _| heads.rollback("code").map(drop), Some(2)),
        ("remove", |heads, _| heads.remove("code"), None),
    ];
    for (name, change, new) in changes {
        for fault in CHANGING.into_iter().chain([Fault::Torn]) {
            at_every_operation(fault, |begin| {
                let folder = scratch();
                let (bundle, paths) = with_heads(folder.path());
                let heads = Heads::open(&bundle).unwrap();
                if name == "rollback" {
                    heads.install(&paths[1], "code").unwrap();
                    heads.rollback("code").unwrap();
                }
                let head = heads.head("code").unwrap();
                let faults = Faults::below(&bundle.join("heads"));
                begin(&faults);
                let done = change(&heads, &paths);
                let struck = faults.lift();
                let found = installed(&bundle);
                assert!(
                    found == new || found == Some(1) && done.is_err(),
                    "{name}, {fault:?}: {found:?}, {done:?}"
                );
                // Who has the head open keeps it.
                assert_eq!(head.spec()["seed"].as_u64(), Some(1));
                let weight = head.weight("model.norm.weight").unwrap();
                assert_eq!(weight.to_f32().unwrap(), numbers(40, 1));
                if found != new {
                    change(&heads, &paths).unwrap();
                    assert_eq!(installed(&bundle), new, "{name}");
                }
                (done, struck)
            });
        }
    }
}

#[test]
fn a_head_is_written_as_a_whole_or_not_at_all() {
    for fault in CHANGING.into_iter().chain([Fault::Torn]) {
        at_every_operation(fault, |begin| {
            let folder = scratch();
            let (bundle, _) = with_heads(folder.path());
            let trunk = Checkpoint::open(&bundle).unwrap();
            let runs = folder.path().join("runs");
            fs::create_dir(&runs).unwrap();
            let path = runs.join("head");
            let faults = Faults::below(&runs);
            begin(&faults);
            let done = new_head(&trunk, 2).write(&path).map(drop);
            let struck = faults.lift();
            assert!(done.is_err() || path.join(HEAD).exists());
            if !path.exists() {
                new_head(&trunk, 2).write(&path).unwrap();
            }
            Heads::open(&bundle).unwrap().install(&path, "code").unwrap();
            assert_eq!(installed(&bundle), Some(2));
            (done, struck)
        });
    }
}

#[test]
fn heads_that_cannot_be_read_are_as_they_were() {
    let folder = scratch();
    let (bundle, _) = with_heads(folder.path());
    for fault in READING {
        at_every_operation(fault, |begin| {
            let heads = Heads::open(&bundle).unwrap();
            let faults = Faults::below(&bundle.join("heads"));
            begin(&faults);
            let read = heads.head("code").map(drop);
            let struck = faults.lift();
            assert_eq!(installed(&bundle), Some(1));
            (read, struck)
        });
    }
}

#[test]
fn a_stream_tells_who_asked_and_goes_on() {
    let folder = scratch();
    let units = |checkpoint: &Checkpoint| -> Vec<Arc<ReadUnit>> {
        let names = checkpoint.tensors().map(|info| info.name.as_str());
        names.map(|name| Arc::new(checkpoint.read_unit([name]).unwrap())).collect()
    };
    let [one, other] = ["one", "other"].map(|name| {
        let bundle = folder.path().join(name);
        let source = llama(&folder.path().join("source"));
        import(&source, &bundle, &ImportOptions::default(), &mut quiet).unwrap();
        Checkpoint::open(&bundle).unwrap()
    });
    let stream = |checkpoint: &Checkpoint, method| {
        let config = StreamConfig { buffers: 2, readers: 1 };
        let stream = Stream::new(checkpoint.disk(method), units(checkpoint), config).unwrap();
        // Only what is asked for, so that it is known who meets the fault.
        stream.read_ahead(0..0);
        stream
    };
    let check = |checkpoint: &Checkpoint, stream: &Stream, unit: usize| {
        let loaded = stream.take(unit)?;
        let name = loaded.names().next().unwrap().to_owned();
        assert_eq!(loaded.weight(&name).unwrap().data, checkpoint.weight(&name).unwrap().data, "{name}");
        Ok::<_, StoreError>(())
    };
    for method in ReadMethod::ALL {
        let (streams, count) =
            ([&one, &other].map(|checkpoint| stream(checkpoint, method)), one.tensors().count());
        for fault in [Fault::Broken, Fault::Short, Fault::Few] {
            let faults = Faults::below(one.path());
            faults.from(0, fault);
            for unit in 0..count {
                match check(&one, &streams[0], unit) {
                    Ok(()) => assert_eq!(fault, Fault::Few),
                    Err(error) => check_error(fault, &error),
                }
                check(&other, &streams[1], unit).unwrap();
            }
            assert!(faults.lift() >= count);
            (0..count).for_each(|unit| check(&one, &streams[0], unit).unwrap());
        }
    }
}
