//! Heads: what is written is read, and what does not belong is refused.
#![allow(clippy::unwrap_used, reason = "a test that fails here should say so")]

mod support;

use std::fs;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use firebox_store::{
    Bits, Checkpoint, Dtype, Encoding, HEAD, HeadFiles, HeadManifest, HeadTable, Heads, ImportOptions,
    NewHead, Progress, Quantization, SegmentId, Spare, StoreError, Tensors, Weight, encode, import,
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
        // The model's own, as it lies there.
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

    // Others read its files too.
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
    // It does not write over anything.
    let error = NewHead::new(&model, 1, json!(1)).unwrap();
    assert!(matches!(error.write(&path), Err(StoreError::DestinationExists { .. })));
}

#[test]
fn what_has_no_place_in_a_head_is_refused() {
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
    // A tensor that is called like the scales of another.
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
    // What is worth quantizing in a model is so in a head; an adapter's factors are not.
    let info = |name: &str| {
        let mut info = model.info("lm_head.weight").unwrap().clone();
        info.name = name.to_owned();
        is_quantized(&info)
    };
    assert!(info(UP) && !info("model.layers.1.self_attn.q_proj.lora_A.weight"));
}

#[test]
fn a_trunk_is_told_by_its_weights() {
    let folder = tempdir().unwrap();
    let source = llama(&folder.path().join("source"));
    let model = Checkpoint::open(&source).unwrap();
    let bundle_of = |name: &str, quantize| {
        let path = folder.path().join(name);
        import(&source, &path, &ImportOptions { quantize }, &mut quiet).unwrap();
        Checkpoint::open(path).unwrap()
    };
    let bundle = bundle_of("bundle", None);
    for split in 0..=2 {
        // Found in the weights of the one and in the manifest of the other.
        assert_eq!(trunk_hash(&model, split).unwrap(), trunk_hash(&bundle, split).unwrap());
        assert_eq!(trunk_hash(&bundle, split).ok(), bundle.trunk_hash(split));
    }
    let hash = trunk_hash(&model, 1).unwrap();
    assert_ne!(hash, trunk_hash(&bundle_of("quantized", Some(Q4)), 1).unwrap());

    // Every byte of the trunk counts, in a directory that carries no hashes too; what is above does not.
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
fn heads_come_change_and_go() {
    let (_folder, heads, [one, two, three]) = prepared();
    assert_eq!(heads.list().unwrap(), []);
    let first = heads.install(&one, "code").unwrap();
    assert_eq!((first.generation, first.previous, first.split), (1, None, 1));
    let opened = heads.head("code").unwrap();
    assert_eq!(opened.hash(), HeadFiles::open(&one).unwrap().hash());
    assert_eq!((opened.hash(), opened.generation()), (first.hash.as_str(), 1));
    refused(heads.rollback("code"), &["\"code\"", "generation 1 only"]);

    // An update leaves what is open as it was, and so does everything after it.
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

    // What is in use, once more: new files, and the same to go back to.
    let again = heads.install(&three, "code").unwrap();
    assert_eq!((again.generation, again.previous, &again.hash), (4, Some(2), &third.hash));
    let other = heads.install(&one, "a.b-c_9").unwrap();
    assert_eq!(heads.list().unwrap(), [other, again]);
    // Another process, or another handle, sees the same.
    assert_eq!(Heads::open(heads.model().path()).unwrap().list().unwrap(), heads.list().unwrap());

    heads.remove("code").unwrap();
    refused(heads.head("code"), &["\"code\"", "there are: a.b-c_9"]);
    refused(heads.remove("code"), &["no head"]);
    refused(heads.rollback("code"), &["no head"]);
    heads.remove("a.b-c_9").unwrap();
    assert_eq!(heads.list().unwrap(), []);
    refused(heads.head("code"), &["the model has none"]);
    // No number comes twice, though nothing of what had it is left.
    assert_eq!(heads.install(&one, "code").unwrap().generation, 6);
    assert_eq!(opened.weight(UP).unwrap().data, weight.data);
}

#[test]
fn a_head_needs_its_trunk_and_the_common_split() {
    let (folder, heads, [one, ..]) = prepared();
    // Another first layer, another model: what a head says is compared before anything is made.
    let source = folder.path().join("source");
    let quantized = folder.path().join("quantized");
    import(&source, &quantized, &ImportOptions { quantize: Some(Q4) }, &mut quiet).unwrap();
    let elsewhere = Heads::open(&quantized).unwrap();
    let error = refused(elsewhere.install(&one, "code"), &["runs/1/head", "quantized", "train the head"]);
    assert!(matches!(error, StoreError::WrongTrunk { split: 1, .. }));
    assert!(!quantized.join("heads").exists());
    // The directory that the bundle was made of has the same trunk.
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
fn names_lead_nowhere() {
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
    // Links in the place of what would be written to.
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
    // What somebody else has put there stays, even where the head goes.
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

/// Every value in a document, by its pointer.
fn pointers(value: &Value, at: String, into: &mut Vec<String>) {
    let children: Vec<(String, &Value)> = match value {
        Value::Object(map) => map.iter().map(|(key, value)| (key.clone(), value)).collect(),
        Value::Array(values) => {
            values.iter().enumerate().map(|(at, value)| (at.to_string(), value)).collect()
        }
        _ => Vec::new(),
    };
    into.push(at.clone());
    for (key, value) in children {
        let key = key.replace('~', "~0").replace('/', "~1");
        pointers(value, format!("{at}/{key}"), into);
    }
}

/// The document with every one of its values replaced by every lie.
fn lies(good: &Value) -> Vec<(String, Value)> {
    let lies = [
        Value::Null,
        json!(-1),
        json!(0),
        json!(7),
        json!(u64::MAX),
        json!(1e300),
        json!(""),
        json!("../../../etc/passwd"),
        json!("0".repeat(64)),
        json!([]),
        json!([[[]]]),
        json!({}),
        json!(true),
    ];
    let mut all = Vec::new();
    pointers(good, String::new(), &mut all);
    let mut documents = Vec::new();
    for pointer in all {
        for lie in &lies {
            let mut document = good.clone();
            let place = document.pointer_mut(&pointer).unwrap();
            if place != lie {
                *place = lie.clone();
                documents.push((format!("{pointer} is {lie}"), document));
            }
        }
    }
    documents
}

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[test]
fn damaged_tables_are_refused() {
    let (_folder, heads, [one, two, three]) = prepared();
    heads.install(&one, "code").unwrap();
    heads.install(&two, "code").unwrap();
    heads.install(&three, "chat").unwrap();
    let path = heads.model().path().join("heads/heads.json");
    let good = read_json(&path);
    let before = heads.list().unwrap();
    let refuse = |table: &str, word: &str| {
        fs::write(&path, table).unwrap();
        let error = refused(heads.head("code"), &[word]).to_string();
        assert!(error.contains("heads/"), "{error}");
    };
    let with = |pointer: &str, value: Value| {
        let mut table = good.clone();
        *table.pointer_mut(pointer).unwrap() = value;
        table.to_string()
    };
    for (table, word) in [
        (String::new(), "JSON"),
        ("[".repeat(10_000), "JSON"),
        (with("/format", json!("firebox-bundle")), "format"),
        (with("/version", json!(2)), "version"),
        (with("/split", json!(null)), "split"),
        (with("/split", json!(0)), "begins at layer 1"),
        (with("/next_generation", json!(3)), "heads[0].active.generation"),
        (with("/heads/0/name", json!("../../x")), "cannot name a head"),
        (with("/heads/0/name", json!("code")), "listed twice"),
        (with("/heads/0/name", json!("zebra")), "out of order"),
        (with("/heads/1/active/generation", json!(1)), "listed twice"),
        (with("/heads/1/active/generation", json!(0)), "generation"),
        (with("/heads/1/previous/generation", json!(2)), "listed twice"),
        (with("/heads/1/active/hash", json!("xyz")), "64 hexadecimal"),
        (with("/heads/1/active/hash", json!("0".repeat(64))), "content hash"),
    ] {
        refuse(&table, word);
    }
    // Whatever else it says, nothing panics, and what is read is a head that is there.
    let (mut accepted, all) = (Vec::new(), lies(&good));
    for (lie, table) in &all {
        fs::write(&path, table.to_string()).unwrap();
        if let Ok(head) = heads.head("code") {
            assert_eq!(head.hash(), before[1].hash, "{lie}");
            accepted.push(lie.split(' ').next().unwrap());
        }
    }
    // Of no consequence to this head: who wrote the table, what comes next, other heads, where one would go back to.
    let harmless = ["/created_by", "/next_generation", "/heads/0", "/heads/1/previous"];
    let consequential = accepted.iter().find(|lie| !harmless.iter().any(|prefix| lie.starts_with(prefix)));
    assert_eq!(consequential, None);
    assert!(accepted.len() < all.len() / 4, "{} of {} accepted", accepted.len(), all.len());

    // No number is left for another.
    fs::write(&path, with("/next_generation", json!(u64::MAX))).unwrap();
    refused(heads.install(&one, "code"), &["next_generation"]);
    fs::write(&path, good.to_string()).unwrap();
    assert_eq!(heads.list().unwrap(), before);
    heads.rollback("code").unwrap();
}

#[test]
fn damaged_heads_are_refused() {
    let (folder, heads, [one, two, three]) = prepared();
    heads.install(&one, "code").unwrap();
    let description = two.join(HEAD);
    let good = read_json(&description);
    let with = |pointer: &str, value: Value| {
        let mut head = good.clone();
        *head.pointer_mut(pointer).unwrap() = value;
        head.to_string()
    };
    // With no tensor that says so.
    let mut with_trunk = good["segments"].as_array().unwrap().clone();
    let (id, file, hash) = ("layer-0000", "layer-0000.safetensors", "a".repeat(64));
    with_trunk.insert(0, json!({"id": id, "file": file, "bytes": 8, "hash": hash, "tensors": []}));
    for (head, word) in [
        (String::new(), "JSON"),
        (with("/segments", json!(with_trunk)), "layer-0000 belongs to the trunk"),
        (with("/format", json!("firebox-heads")), "format"),
        (with("/version", json!(2)), "version"),
        (with("/trunk", json!("abc")), "trunk"),
        (with("/split", json!(2)), "belongs to the trunk"),
        (with("/quantization", json!({"bits": "q8", "group": 33})), "quantization"),
        (with("/segments", json!([])), "without tensors"),
        (with("/segments/0/id", json!("embed")), "file"),
        (with("/segments/0/file", json!("../../final.safetensors")), "segments[0].file"),
        (with("/segments/0/hash", json!("0")), "segments[0].hash"),
        (with("/segments/0/bytes", json!(1)), "the manifest says 1"),
        (with("/segments/0/tensors/0/name", json!("model.norm.bias")), "belongs to final"),
        (with("/segments/0/tensors/0/name", json!("model.layers.0.x")), "belongs to the trunk"),
        (with("/segments/0/tensors/0/name", json!("model.layers.1.x")), "not in the file"),
        (with("/segments/0/tensors/0/shape", json!([40, 41])), "manifest means"),
        (with("/segments/0/tensors/0/shape", json!([u64::MAX, 40])), "address space"),
        (with("/segments/0/tensors/0/encoding", json!({"tiled": {"bits": "q8", "group": 64}})), "one scheme"),
    ] {
        fs::write(&description, head).unwrap();
        refused(HeadFiles::open(&two), &[word, "head"]);
    }
    // Whatever it says: no panic, and no head comes in whose bytes are not those described.
    for (lie, head) in lies(&good) {
        fs::write(&description, head.to_string()).unwrap();
        let accepted = heads.install(&two, "code").is_ok();
        // What a head is for is not this crate's to judge, and who wrote it is of no consequence.
        assert_eq!(accepted, lie.starts_with("/spec") || accepted && lie.starts_with("/created_by"), "{lie}");
    }
    fs::write(&description, good.to_string()).unwrap();
    let before = heads.install(&two, "code").unwrap();

    // A changed bit: found when it comes in, and by a verification when it is there.
    let file = three.join("layer-0001.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, &bytes).unwrap();
    refused(heads.install(&three, "code"), &["layer-0001", "content hash", "install the head again"]);
    fs::write(&file, &bytes[..bytes.len() - 1]).unwrap();
    heads.install(&three, "code").unwrap_err();
    fs::remove_file(&file).unwrap();
    refused(heads.install(&three, "code"), &["layer-0001"]);
    refused(heads.install(folder.path(), "code"), &["no head.json", "directory of a head"]);
    let mut left: Vec<_> = fs::read_dir(heads.model().path().join("heads"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    assert_eq!(left, [".lock", "code", "heads.json"], "a failure leaves nothing");
    assert_eq!(heads.list().unwrap()[..], std::slice::from_ref(&before)[..]);

    let installed = heads.head("code").unwrap().path().to_owned();
    let file = installed.join("final.safetensors");
    let good_bytes = fs::read(&file).unwrap();
    let mut bytes = good_bytes.clone();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    heads.head("code").unwrap();
    refused(verify(heads.model().path(), &mut quiet), &["code", "final", "install the head again"]);
    fs::write(&file, &good_bytes).unwrap();
    // The description is small and hashed whenever the head is opened.
    let text = fs::read_to_string(installed.join(HEAD)).unwrap();
    fs::write(
        installed.join(HEAD),
        text.replace("\"seed\": 2", "\"seed\": 4").replace("\"seed\":2", "\"seed\":4"),
    )
    .unwrap();
    refused(heads.head("code"), &["head.json", "content hash"]);
    // Nothing that is gone stands in the way of going back, nor of putting it right.
    fs::remove_dir_all(&installed).unwrap();
    refused(heads.head("code"), &["code"]);
    heads.install(&two, "code").unwrap();
    heads.head("code").unwrap();
    let previous = heads.list().unwrap()[0].previous.unwrap();
    fs::remove_dir_all(installed.with_file_name(previous.to_string())).unwrap();
    heads.rollback("code").unwrap_err();
    assert_eq!(heads.head("code").unwrap().spec()["seed"], 2, "a rollback that fails changes nothing");
    heads.remove("code").unwrap();
    verify(heads.model().path(), &mut quiet).unwrap();
}

#[test]
fn what_is_parsed_is_written_the_same() {
    let (_folder, heads, [one, ..]) = prepared();
    heads.install(&one, "code").unwrap();
    let table = HeadTable::parse(&fs::read(heads.model().path().join("heads/heads.json")).unwrap()).unwrap();
    assert_eq!(HeadTable::parse(&serde_json::to_vec(&table).unwrap()), Ok(table));
    let head = HeadManifest::parse(&fs::read(one.join(HEAD)).unwrap()).unwrap();
    assert_eq!(HeadManifest::parse(&serde_json::to_vec(&head).unwrap()), Ok(head));
}

#[test]
fn an_import_leaves_heads_behind_and_says_so() {
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
    // Unchanged weights are the same trunk.
    let copied = Heads::open(&copy).unwrap();
    copied.install(heads.head("code").unwrap().path(), "code").unwrap();
    assert_eq!(copied.head("code").unwrap().hash(), heads.head("code").unwrap().hash());
    let packed = folder.path().join("packed");
    import(heads.model().path(), &packed, &ImportOptions { quantize: Some(Q4) }, &mut quiet).unwrap();
    let packed = Heads::open(&packed).unwrap().install(&one, "code");
    assert!(matches!(packed, Err(StoreError::WrongTrunk { .. })));
}

#[test]
#[cfg(target_os = "linux")]
fn a_head_is_read_into_memory_that_is_used_again() {
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
    // The file systems of memory keep what they have nowhere else.
    if cold == head.bytes() {
        println!("this file system does not give pages back");
    } else {
        assert_eq!(cold, 0);
    }
    let spare = Spare::default();
    let loaded = head.read(&spare).unwrap();
    assert_eq!(loaded.weight("lm_head.weight").unwrap().data, large.data);
    assert_eq!(spare.bytes(), 0);
    drop(loaded);
    assert!(spare.bytes() as u64 >= head.bytes());
    let weight = head.read(&spare).unwrap().weight("lm_head.weight").unwrap();
    assert_eq!(spare.bytes(), 0, "as long as one of its tensors is there");
    assert_eq!(weight.data, large.data);
    drop(weight);
    let loaded = head.read(&spare).unwrap();
    assert!(loaded.loan().unwrap().keep());
    drop(loaded);
    assert_eq!(spare.bytes(), 0);
}
