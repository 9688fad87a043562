//! Heads: writing, reading, installation and refusals.
#![allow(clippy::unwrap_used, reason = "a test that fails here should say so")]

mod damaged;
#[path = "../support/mod.rs"]
mod support;

use std::fs;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use firebox_store::{
    Bits, BufferPool, Checkpoint, Dtype, Encoding, HEAD, HeadFiles, HeadManifest, HeadTable, Heads,
    ImportOptions, NewHead, Progress, Quantization, SegmentId, StoreError, Tensors, Weight, encode, import,
    is_head_name, is_quantized, trunk_hash, verify,
};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use support::{Gguf, directory, llama, numbers, write};
use tempfile::{TempDir, tempdir};

const Q4: Quantization = Quantization { bits: Bits::Q4, group: 64 };
const UP: &str = "model.layers.1.self_attn.q_proj.weight";
const NORM: &str = "model.norm.weight";

fn quiet(_: Progress) {}

fn plain(name: &str, shape: &[usize], seed: u64) -> Weight {
    let values = numbers(shape.iter().product(), seed);
    encode(name, &values, shape, Encoding::Plain(Dtype::F32)).unwrap()
}

fn head(trunk: &Checkpoint, split: usize, directory: &Path, seed: u64) -> HeadFiles {
    let mut head = NewHead::new(trunk, split, json!({"kind": "blocks", "seed": seed})).unwrap();
    head.push(plain(UP, &[40, 40], seed)).unwrap();
    head.push(plain(NORM, &[40], seed)).unwrap();
    head.write(directory).unwrap()
}

/// A bundle of a model of two layers, and heads 1, 2 and 3 for its second layer.
fn prepared() -> (TempDir, Heads, [PathBuf; 3]) {
    let folder = tempdir().unwrap();
    let source = llama(&folder.path().join("source"));
    let bundle = folder.path().join("bundle");
    import(&source, &bundle, &ImportOptions::default(), &mut quiet).unwrap();
    let heads = Heads::open(&bundle).unwrap();
    let paths = [1, 2, 3].map(|seed| folder.path().join(format!("runs/{seed}/head")));
    for (seed, path) in (1..).zip(&paths) {
        head(heads.model(), 1, path, seed);
    }
    (folder, heads, paths)
}

fn refused(result: Result<impl std::fmt::Debug, StoreError>, words: &[&str]) -> StoreError {
    let error = result.unwrap_err();
    for word in words {
        assert!(error.to_string().contains(word), "{:?} does not mention {word:?}", error.to_string());
    }
    error
}

#[test]
fn a_head_is_read_as_it_was_written() {
    let folder = tempdir().unwrap();
    let model = Checkpoint::open(llama(&folder.path().join("model"))).unwrap();
    let spec = json!({"kind": "adapter", "rank": 4, "scale": 0.5, "targets": ["q_proj"], "none": null});
    let values = numbers(48 * 40, 9);
    let weights = [
        plain("model.layers.1.self_attn.q_proj.lora_A.weight", &[4, 40], 1),
        encode("model.layers.1.mlp.gate.weight", &values[..120], &[3, 40], Encoding::Plain(Dtype::F16))
            .unwrap(),
        encode(NORM, &values[..40], &[40], Encoding::Plain(Dtype::BF16)).unwrap(),
        encode("lm_head.weight", &values, &[48, 40], Encoding::Grouped(Q4)).unwrap(),
        plain("router.weight", &[0, 3], 1),
        // A mapped weight of the model.
        model.weight("model.layers.1.mlp.down_proj.weight").unwrap(),
    ];
    let mut new = NewHead::new(&model, 1, spec.clone()).unwrap();
    for weight in &weights {
        new.push(weight.clone()).unwrap();
    }
    let path = folder.path().join("runs/x/head");
    let head = new.write(&path).unwrap();
    assert_eq!((head.spec(), head.split(), head.quantization()), (&spec, 1, Some(Q4)));
    assert_eq!((head.path(), head.generation()), (path.as_path(), 0));
    assert_eq!(head.trunk(), trunk_hash(&model, 1).unwrap());
    assert_eq!(head.hash(), blake3::hash(&fs::read(path.join(HEAD)).unwrap()).to_hex().as_str());
    let tensors: &dyn Tensors = &head;
    assert_eq!(tensors.names().count(), weights.len());
    for before in &weights {
        let after = tensors.weight(&before.name).unwrap();
        assert_eq!((&after.shape, after.encoding), (&before.shape, before.encoding));
        assert_eq!((&after.data, &after.scales), (&before.data, &before.scales), "{}", before.name);
        assert!(after.mapped && (after.data.as_ptr() as usize).is_multiple_of(64));
        let info = tensors.info(&before.name).unwrap();
        assert_eq!(info.bytes as usize, after.data.len() + after.scales.map_or(0, |scales| scales.len()));
    }
    assert!(matches!(tensors.weight("lm_head"), Err(StoreError::MissingTensor { .. })));
    let segments: Vec<SegmentId> = head.tensors().map(|info| info.segment).collect();
    assert!(segments.is_sorted() && segments.contains(&SegmentId::Other));

    // The `safetensors` crate reads its files too.
    let mut bytes = 0;
    for file in ["layer-0001.safetensors", "final.safetensors", "other.safetensors"] {
        let file = fs::read(path.join(file)).unwrap();
        SafeTensors::deserialize(&file).unwrap();
        bytes += file.len() as u64;
    }
    assert_eq!(head.bytes(), bytes);
    let mut hashed = 0;
    head.verify(&mut |bytes| hashed += bytes).unwrap();
    assert_eq!(hashed, bytes);
    // An existing directory is not overwritten.
    let error = NewHead::new(&model, 1, json!(1)).unwrap();
    assert!(matches!(error.write(&path), Err(StoreError::DestinationExists { .. })));
}

#[test]
fn tensors_that_cannot_be_part_of_a_head_are_refused() {
    let folder = tempdir().unwrap();
    let model = Checkpoint::open(llama(&folder.path().join("model"))).unwrap();
    let new = || NewHead::new(&model, 1, Value::Null).unwrap();
    let mut head = new();
    for (name, word) in [
        ("model.embed_tokens.weight", "embed belongs to the trunk"),
        ("model.layers.0.self_attn.q_proj.weight", "layer-0000 belongs to the trunk"),
        ("", "empty"),
        ("__pad_0", "means something else"),
        ("__metadata__", "means something else"),
    ] {
        refused(head.push(plain(name, &[4], 1)), &[word]);
    }
    head.push(plain(UP, &[40, 40], 1)).unwrap();
    refused(head.push(plain(UP, &[40, 40], 1)), &["has it already"]);
    let q8 = Quantization { bits: Bits::Q8, group: 64 };
    let grouped = |name: &str, scheme| encode(name, &numbers(1600, 1), &[40, 40], Encoding::Grouped(scheme));
    head.push(grouped("lm_head.weight", Q4).unwrap()).unwrap();
    refused(head.push(grouped("score.weight", q8).unwrap()), &["one scheme"]);
    let mut short = plain(NORM, &[40], 1);
    short.data = Bytes::from(vec![0; 159]);
    refused(head.push(short), &["159 bytes"]);
    let mut scaled = plain(NORM, &[40], 1);
    scaled.scales = Some(Bytes::from(vec![0; 2]));
    refused(head.push(scaled), &["scales"]);
    // A tensor named like the scales of another.
    head.push(plain("lm_head.weight.scales", &[1], 1)).unwrap();
    refused(head.write(folder.path().join("head")), &["taken"]);
    refused(new().write(folder.path().join("head")), &["without tensors"]);
    assert!(!folder.path().join("head").exists());

    refused(NewHead::new(&model, 3, Value::Null), &["2 layers", "0 to 2"]);
    NewHead::new(&model, 2, Value::Null).unwrap();
    for (values, shape, encoding, word) in [
        (vec![1.0; 3], vec![2], Encoding::Plain(Dtype::F32), "3 values"),
        (vec![1e6], vec![1], Encoding::Plain(Dtype::F16), "beyond f16"),
        (vec![1.0], vec![1], Encoding::Plain(Dtype::I8), "I8"),
        (vec![1.0], vec![1], Encoding::Grouped(Q4), "[out, in]"),
    ] {
        refused(encode("x", &values, &shape, encoding), &[word]);
    }
    // Matrices are worth quantizing in a head as in a model; the factors of an adapter are not.
    let info = |name: &str| {
        let mut info = model.info("lm_head.weight").unwrap().clone();
        info.name = name.to_owned();
        is_quantized(&info)
    };
    assert!(info(UP) && !info("model.layers.1.self_attn.q_proj.lora_A.weight"));
}

#[test]
fn a_trunk_is_identified_by_its_weights() {
    let folder = tempdir().unwrap();
    let source = llama(&folder.path().join("source"));
    let model = Checkpoint::open(&source).unwrap();
    let bundle_of = |name: &str, quantize| {
        let path = folder.path().join(name);
        import(&source, &path, &ImportOptions::from(quantize), &mut quiet).unwrap();
        Checkpoint::open(path).unwrap()
    };
    let bundle = bundle_of("bundle", None);
    for split in 0..=2 {
        // Computed from the weights of one and from the manifest of the other.
        assert_eq!(trunk_hash(&model, split).unwrap(), trunk_hash(&bundle, split).unwrap());
        assert_eq!(trunk_hash(&bundle, split).ok(), bundle.trunk_hash(split));
    }
    let hash = trunk_hash(&model, 1).unwrap();
    assert_ne!(hash, trunk_hash(&bundle_of("quantized", Some(Q4)), 1).unwrap());

    // Every byte of the trunk counts, also in a directory without hashes; bytes of later layers do not.
    let file = source.join("model.safetensors");
    let good = fs::read(&file).unwrap();
    for (name, differs) in [
        ("model.embed_tokens.weight", true),
        ("model.layers.0.mlp.gate.weight", true),
        ("model.layers.1.mlp.gate.weight", false),
        (NORM, false),
    ] {
        let data = model.weight(name).unwrap().data;
        let at = good.windows(data.len()).position(|window| window == data).unwrap();
        let mut bad = good.clone();
        bad[at + data.len() / 2] ^= 1;
        let changed = directory(
            &folder.path().join(name),
            &[("model.safetensors", &bad), ("config.json", &fs::read(source.join("config.json")).unwrap())],
        );
        let found = trunk_hash(&Checkpoint::open(changed).unwrap(), 1).unwrap();
        assert_eq!(found != hash, differs, "{name}");
    }
    let gguf = write(folder.path(), "m.gguf", &Gguf::model("llama").build());
    let gguf = Checkpoint::open(gguf).unwrap();
    assert!(matches!(trunk_hash(&gguf, 1), Err(StoreError::HeadsNeedImport { .. })));
    refused(Heads::of(gguf), &["m.gguf", "import"]);
}

#[test]
fn heads_are_installed_updated_and_removed() {
    let (_folder, heads, [one, two, three]) = prepared();
    assert_eq!(heads.list().unwrap(), []);
    let first = heads.install(&one, "code").unwrap();
    assert_eq!((first.generation, first.previous, first.split), (1, None, 1));
    let opened = heads.head("code").unwrap();
    assert_eq!(opened.hash(), HeadFiles::open(&one).unwrap().hash());
    assert_eq!((opened.hash(), opened.generation()), (first.hash.as_str(), 1));
    refused(heads.rollback("code"), &["\"code\"", "generation 1 only"]);

    // Open handles are not affected by an update or by anything later.
    let weight = opened.weight(UP).unwrap();
    let second = heads.install(&two, "code").unwrap();
    assert_eq!((second.generation, second.previous), (2, Some(1)));
    let third = heads.install(&three, "code").unwrap();
    assert_eq!((third.generation, third.previous), (3, Some(2)));
    assert!(!one.join("gone").exists() && !opened.path().exists());
    assert_eq!(weight.data, plain(UP, &[40, 40], 1).data);
    assert_eq!(opened.weight(NORM).unwrap().data, plain(NORM, &[40], 1).data);

    let back = heads.rollback("code").unwrap();
    assert_eq!((back.generation, back.previous, &back.hash), (2, Some(3), &second.hash));
    assert_eq!(heads.head("code").unwrap().spec()["seed"], 2);
    assert_eq!(heads.rollback("code").unwrap(), third);

    // Installing the generation in use again renews its files and keeps the rollback target.
    let again = heads.install(&three, "code").unwrap();
    assert_eq!((again.generation, again.previous, &again.hash), (4, Some(2), &third.hash));
    let other = heads.install(&one, "a.b-c_9").unwrap();
    assert_eq!(heads.list().unwrap(), [other, again]);
    // Another handle, as of another process, sees the same state.
    assert_eq!(Heads::open(heads.model().path()).unwrap().list().unwrap(), heads.list().unwrap());

    heads.remove("code").unwrap();
    refused(heads.head("code"), &["\"code\"", "there are: a.b-c_9"]);
    refused(heads.remove("code"), &["no head"]);
    refused(heads.rollback("code"), &["no head"]);
    heads.remove("a.b-c_9").unwrap();
    assert_eq!(heads.list().unwrap(), []);
    refused(heads.head("code"), &["the model has none"]);
    // No generation is reused, even after all traces of it are gone.
    assert_eq!(heads.install(&one, "code").unwrap().generation, 6);
    assert_eq!(opened.weight(UP).unwrap().data, weight.data);
}

#[test]
fn a_head_needs_its_trunk_and_the_common_split() {
    let (folder, heads, [one, ..]) = prepared();
    // The manifest's split and trunk are compared before anything is created.
    let source = folder.path().join("source");
    let quantized = folder.path().join("quantized");
    import(&source, &quantized, &ImportOptions::from(Some(Q4)), &mut quiet).unwrap();
    let elsewhere = Heads::open(&quantized).unwrap();
    let error = refused(elsewhere.install(&one, "code"), &["runs/1/head", "quantized", "train the head"]);
    assert!(matches!(error, StoreError::WrongTrunk { split: 1, .. }));
    assert!(!quantized.join("heads").exists());
    // The directory that the bundle was imported from has the same trunk.
    let unpacked = Heads::open(&source).unwrap();
    unpacked.install(&one, "code").unwrap();
    assert_eq!(unpacked.head("code").unwrap().hash(), HeadFiles::open(&one).unwrap().hash());
    assert_eq!(verify(&source, &mut quiet).unwrap().heads, unpacked.list().unwrap());

    heads.install(&one, "code").unwrap();
    let late = folder.path().join("late");
    let mut new = NewHead::new(heads.model(), 2, Value::Null).unwrap();
    new.push(plain(NORM, &[40], 1)).unwrap();
    new.write(&late).unwrap();
    for name in ["chat", "code"] {
        let error = refused(heads.install(&late, name), &["layer 2", "layer 1: code", "remove"]);
        assert!(matches!(error, StoreError::WrongSplit { split: 2, installed: 1, .. }));
    }
    heads.remove("code").unwrap();
    heads.install(&late, "chat").unwrap();
    refused(heads.install(&one, "code"), &["layer 1", "layer 2: chat"]);

    // The trunk is replaced under an installed head.
    let bundle = heads.model().path().to_owned();
    fs::rename(bundle.join("heads"), folder.path().join("kept")).unwrap();
    fs::rename(folder.path().join("kept"), quantized.join("heads")).unwrap();
    refused(Heads::open(&quantized).unwrap().head("chat"), &["quantized/heads/chat/2", "hash up to layer 2"]);
    refused(verify(&quantized, &mut quiet), &["hash up to layer 2"]);
    let file = source.join("model.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let embeddings = unpacked.model().weight("model.embed_tokens.weight").unwrap().data;
    let at = bytes.windows(embeddings.len()).position(|window| window == embeddings).unwrap();
    bytes[at] ^= 1;
    drop(embeddings);
    fs::remove_file(&file).unwrap();
    fs::write(&file, bytes).unwrap();
    assert!(matches!(verify(&source, &mut quiet), Err(StoreError::WrongTrunk { .. })));
}

#[test]
fn names_and_links_do_not_lead_outside() {
    let (folder, heads, [one, ..]) = prepared();
    for good in ["a", "_", "9", "code", "a..b", "x.y-z_0", "heads", &"a".repeat(64)] {
        assert!(is_head_name(good), "{good}");
    }
    let long = "a".repeat(65);
    for bad in [
        "",
        ".",
        "..",
        "../x",
        "a/b",
        "/etc",
        "a\\b",
        "-rf",
        ".lock",
        ".hidden",
        "Code",
        "cöde",
        "a b",
        "a\0",
        "a\n",
        "heads.json",
        &long,
    ] {
        assert!(!is_head_name(bad), "{bad}");
        for result in
            [heads.install(&one, bad).map(drop), heads.head(bad).map(drop), heads.rollback(bad).map(drop)]
        {
            assert!(matches!(result, Err(StoreError::HeadName { .. })), "{bad}: {result:?}");
        }
        assert!(matches!(heads.remove(bad), Err(StoreError::HeadName { .. })), "{bad}");
    }
    // Links in place of the directories to be written.
    let outside = directory(&folder.path().join("outside"), &[("precious", b"x")]);
    let place = heads.model().path().join("heads");
    std::os::unix::fs::symlink(&outside, &place).unwrap();
    refused(heads.install(&one, "code"), &["refuses to follow", "outside"]);
    fs::remove_file(&place).unwrap();
    heads.install(&one, "code").unwrap();
    std::os::unix::fs::symlink(&outside, place.join("chat")).unwrap();
    refused(heads.install(&one, "chat"), &["refuses to follow", "outside"]);
    fs::remove_file(place.join("chat")).unwrap();
    fs::create_dir(place.join("chat")).unwrap();
    std::os::unix::fs::symlink(&outside, place.join("chat/7")).unwrap();
    heads.install(&one, "chat").unwrap();
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 1);
    // Files of the user stay, even in the head's directory.
    fs::write(place.join("chat/notes"), "mine").unwrap();
    fs::create_dir(place.join("chat/07")).unwrap();
    heads.remove("chat").unwrap();
    assert!(place.join("chat/notes").exists() && place.join("chat/07").exists());
    // A head whose files lie elsewhere.
    let file = one.join("final.safetensors");
    fs::rename(&file, outside.join("final.safetensors")).unwrap();
    std::os::unix::fs::symlink(outside.join("final.safetensors"), &file).unwrap();
    refused(heads.install(&one, "code"), &["refuses to follow"]);
    assert_eq!(heads.list().unwrap().len(), 1);
}

#[test]
fn manifests_and_tables_round_trip() {
    let (_folder, heads, [one, ..]) = prepared();
    heads.install(&one, "code").unwrap();
    let table = HeadTable::parse(&fs::read(heads.model().path().join("heads/heads.json")).unwrap()).unwrap();
    assert_eq!(HeadTable::parse(&serde_json::to_vec(&table).unwrap()), Ok(table));
    let head = HeadManifest::parse(&fs::read(one.join(HEAD)).unwrap()).unwrap();
    assert_eq!(HeadManifest::parse(&serde_json::to_vec(&head).unwrap()), Ok(head));
}

#[test]
fn an_import_reports_the_heads_it_leaves_out() {
    let (folder, heads, [one, two, _]) = prepared();
    heads.install(&one, "code").unwrap();
    heads.install(&two, "chat").unwrap();
    let mut items = Vec::new();
    let report = verify(heads.model().path(), &mut |progress| items.push(progress)).unwrap();
    assert_eq!((report.segments.len(), report.heads), (4, heads.list().unwrap()));
    assert!(items.iter().any(|progress| progress.item == "head chat"));
    let last = items.last().unwrap();
    assert_eq!((last.done, last.total), (report.bytes, report.bytes));

    let copy = folder.path().join("copy");
    let report = import(heads.model().path(), &copy, &ImportOptions::default(), &mut quiet).unwrap();
    assert_eq!(report.heads_left, ["chat", "code"]);
    assert!(!copy.join("heads").exists());
    // Unchanged weights have the same trunk hash.
    let copied = Heads::open(&copy).unwrap();
    copied.install(heads.head("code").unwrap().path(), "code").unwrap();
    assert_eq!(copied.head("code").unwrap().hash(), heads.head("code").unwrap().hash());
    let packed = folder.path().join("packed");
    import(heads.model().path(), &packed, &ImportOptions::from(Some(Q4)), &mut quiet).unwrap();
    let packed = Heads::open(&packed).unwrap().install(&one, "code");
    assert!(matches!(packed, Err(StoreError::WrongTrunk { .. })));
}

#[test]
#[cfg(target_os = "linux")]
fn buffers_of_heads_are_reused() {
    let folder = tempdir().unwrap();
    let model = Checkpoint::open(llama(&folder.path().join("model"))).unwrap();
    let mut new = NewHead::new(&model, 1, Value::Null).unwrap();
    let large = plain("lm_head.weight", &[2048, 1024], 3);
    new.push(large.clone()).unwrap();
    let head = new.write(folder.path().join("head")).unwrap();
    assert_eq!(head.weight("lm_head.weight").unwrap().data, large.data);
    assert_eq!(head.resident_bytes(), Some(head.bytes()));
    head.release().unwrap();
    let cold = head.resident_bytes().unwrap();
    // In-memory file systems cannot evict their pages.
    if cold == head.bytes() {
        println!("this file system does not give pages back");
    } else {
        assert_eq!(cold, 0);
    }
    let pool = BufferPool::of_largest();
    let loaded = head.read(&pool).unwrap();
    assert_eq!(loaded.weight("lm_head.weight").unwrap().data, large.data);
    assert_eq!(pool.bytes(), 0);
    drop(loaded);
    assert!(pool.bytes() as u64 >= head.bytes());
    let weight = head.read(&pool).unwrap().weight("lm_head.weight").unwrap();
    assert_eq!(pool.bytes(), 0, "as long as one of its tensors is there");
    assert_eq!(weight.data, large.data);
    drop(weight);
    let loaded = head.read(&pool).unwrap();
    assert!(loaded.detach_flag().unwrap().detach());
    drop(loaded);
    assert_eq!(pool.bytes(), 0);
}
