//! Damaged tables and heads are refused, whatever is wrong with them.

use std::fs;
use std::path::Path;

use firebox_store::{HEAD, verify};
use serde_json::{Value, json};

use super::*;

/// Every value of a document, by its JSON pointer.
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

/// Variants of the document, each with one value replaced by a wrong one.
fn wrong_variants(good: &Value) -> Vec<(String, Value)> {
    let wrong_values = [
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
        for wrong in &wrong_values {
            let mut document = good.clone();
            let place = document.pointer_mut(&pointer).unwrap();
            if place != wrong {
                *place = wrong.clone();
                documents.push((format!("{pointer} is {wrong}"), document));
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
    // Other false values never cause a panic, and a head that can be read is an installed one.
    let (mut accepted, all) = (Vec::new(), wrong_variants(&good));
    for (wrong, table) in &all {
        fs::write(&path, table.to_string()).unwrap();
        if let Ok(head) = heads.head("code") {
            assert_eq!(head.hash(), before[1].hash, "{wrong}");
            accepted.push(wrong.split(' ').next().unwrap());
        }
    }
    // These have no effect on this head: the program name, the next generation, other heads, the rollback target.
    let harmless = ["/created_by", "/next_generation", "/heads/0", "/heads/1/previous"];
    let consequential =
        accepted.iter().find(|wrong| !harmless.iter().any(|prefix| wrong.starts_with(prefix)));
    assert_eq!(consequential, None);
    assert!(accepted.len() < all.len() / 4, "{} of {} accepted", accepted.len(), all.len());

    // No generation number is left for another head.
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
    // A trunk hash without any tensor.
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
    // False values never cause a panic, and no head is installed whose bytes do not match its manifest.
    for (wrong, head) in wrong_variants(&good) {
        fs::write(&description, head.to_string()).unwrap();
        let accepted = heads.install(&two, "code").is_ok();
        // The description of a head is not interpreted here, and its program name has no effect.
        assert_eq!(
            accepted,
            wrong.starts_with("/spec") || accepted && wrong.starts_with("/created_by"),
            "{wrong}"
        );
    }
    fs::write(&description, good.to_string()).unwrap();
    let before = heads.install(&two, "code").unwrap();

    // A changed bit is detected at installation, and by verification if the head is installed already.
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
    // The manifest is small, so it is hashed whenever the head is opened.
    let text = fs::read_to_string(installed.join(HEAD)).unwrap();
    fs::write(
        installed.join(HEAD),
        text.replace("\"seed\": 2", "\"seed\": 4").replace("\"seed\":2", "\"seed\":4"),
    )
    .unwrap();
    refused(heads.head("code"), &["head.json", "content hash"]);
    // Missing files of the current generation prevent neither a rollback nor a repair.
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
