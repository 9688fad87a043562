//! Hugging Face directories: opening and refusals.
#![allow(clippy::unwrap_used, reason = "a test that fails here should say so")]

mod support;

use std::fs;
use std::os::unix::fs::symlink;

use firebox_store::{
    Checkpoint, Dtype, Encoding, SegmentId, SourceKind, StoreError, TokenizerSource, Weight,
};
use support::{directory, f32_bytes, llama, safetensors, safetensors_raw};
use tempfile::tempdir;

const CONFIG: (&str, &[u8]) = ("config.json", b"{\"model_type\": \"llama\"}");

#[test]
fn a_directory_opens() {
    let folder = tempdir().unwrap();
    let model = Checkpoint::open(llama(folder.path())).unwrap();
    assert_eq!(model.source(), SourceKind::HuggingFace);
    assert_eq!(model.config()["hidden_size"], 40);
    assert_eq!(model.tensors().count(), 11);
    let info = model.info("model.layers.1.mlp.down_proj.weight").unwrap();
    assert_eq!((info.shape.as_slice(), info.bytes), ([40, 72].as_slice(), 40 * 72 * 4));
    assert_eq!(info.segment, SegmentId::Layer(1));
    let ids: Vec<String> = model.segments().iter().map(|segment| segment.id.to_string()).collect();
    assert_eq!(ids, ["embed", "layer-0000", "layer-0001", "final"]);
    let weight = model.weight("model.norm.weight").unwrap();
    assert!(weight.mapped);
    assert_eq!(f32_bytes(&weight.to_f32().unwrap()), weight.data);
    assert_eq!(model.text().chat_template.as_deref(), Some("{{ messages }}"));
    assert!(matches!(model.text().tokenizer, Some(TokenizerSource::Json(_))));
    assert!(model.hash().is_none() && model.quantization().is_none());
    assert!(matches!(model.weight("nothing"), Err(StoreError::MissingTensor { .. })));
    for segment in model.segments() {
        model.prefetch(segment.id).unwrap();
        model.release(segment.id).unwrap();
    }
    assert_eq!(f32_bytes(&weight.to_f32().unwrap()), weight.data, "released pages are read again");
}

#[test]
fn a_checkpoint_is_shared_between_threads() {
    let folder = tempdir().unwrap();
    let model = Checkpoint::open(llama(folder.path())).unwrap();
    let other = model.clone();
    let weight: Weight = std::thread::spawn(move || other.weight("lm_head.weight").unwrap()).join().unwrap();
    assert_eq!(weight.data, model.weight("lm_head.weight").unwrap().data);
}

#[test]
fn every_dtype_widens() {
    let folder = tempdir().unwrap();
    let bytes = safetensors(&[
        ("f64", "F64", vec![1], 1.5f64.to_le_bytes().into()),
        ("i64", "I64", vec![1], (-3i64).to_le_bytes().into()),
        ("u64", "U64", vec![1], 3u64.to_le_bytes().into()),
        ("f32", "F32", vec![1], 0.25f32.to_le_bytes().into()),
        ("i32", "I32", vec![1], (-5i32).to_le_bytes().into()),
        ("u32", "U32", vec![1], 5u32.to_le_bytes().into()),
        ("f16", "F16", vec![1], 0x3E00u16.to_le_bytes().into()),
        ("bf16", "BF16", vec![1], 0x3FC0u16.to_le_bytes().into()),
        ("i16", "I16", vec![1], (-7i16).to_le_bytes().into()),
        ("u16", "U16", vec![1], 7u16.to_le_bytes().into()),
        ("i8", "I8", vec![1], vec![0xFF]),
        ("u8", "U8", vec![1], vec![0xFF]),
        ("bool", "BOOL", vec![2], vec![1, 0]),
        ("empty", "F32", vec![0, 4], vec![]),
        ("scalar", "U8", vec![], vec![9]),
    ]);
    let model = Checkpoint::open(directory(folder.path(), &[CONFIG, ("model.safetensors", &bytes)])).unwrap();
    for (name, expected) in [
        ("f64", vec![1.5]),
        ("i64", vec![-3.0]),
        ("u64", vec![3.0]),
        ("f32", vec![0.25]),
        ("i32", vec![-5.0]),
        ("u32", vec![5.0]),
        ("f16", vec![1.5]),
        ("bf16", vec![1.5]),
        ("i16", vec![-7.0]),
        ("u16", vec![7.0]),
        ("i8", vec![-1.0]),
        ("u8", vec![255.0]),
        ("bool", vec![1.0, 0.0]),
        ("empty", vec![]),
        ("scalar", vec![9.0]),
    ] {
        assert_eq!(model.weight(name).unwrap().to_f32().unwrap(), expected, "{name}");
    }
}

#[test]
fn an_unaligned_tensor_is_copied() {
    let folder = tempdir().unwrap();
    let header = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F64","shape":[1],"data_offsets":[1,9]}}"#;
    let data = [&[7u8][..], &2.5f64.to_le_bytes()].concat();
    for padding in 0..8 {
        let header = format!("{header}{}", " ".repeat(padding));
        let bytes = safetensors_raw(&header, &data);
        let path =
            directory(&folder.path().join(padding.to_string()), &[CONFIG, ("model.safetensors", &bytes)]);
        let weight = Checkpoint::open(path).unwrap().weight("b").unwrap();
        assert_eq!(weight.data.as_ptr() as usize % 8, 0);
        assert_eq!(weight.mapped, (8 + header.len() + 1).is_multiple_of(8));
        assert_eq!(weight.to_f32().unwrap(), [2.5]);
    }
}

#[test]
fn shards_open_as_one() {
    let folder = tempdir().unwrap();
    let a = safetensors(&[("model.embed_tokens.weight", "U8", vec![2], vec![1, 2])]);
    let b = safetensors(&[("model.norm.weight", "U8", vec![1], vec![3])]);
    let index = br#"{"metadata": {"total_size": 3}, "weight_map":
        {"model.embed_tokens.weight": "a.safetensors", "model.norm.weight": "b.safetensors"}}"#;
    let path = directory(
        folder.path(),
        &[CONFIG, ("a.safetensors", &a), ("b.safetensors", &b), ("model.safetensors.index.json", index)],
    );
    let model = Checkpoint::open(&path).unwrap();
    assert_eq!(model.tensors().count(), 2);
    assert_eq!(model.segments()[0].files, [path.join("a.safetensors")]);

    fs::remove_file(path.join("b.safetensors")).unwrap();
    refuse(&path, &["model.safetensors.index.json", "b.safetensors", "download it again"]);
    fs::write(path.join("b.safetensors"), &a).unwrap();
    refuse(&path, &["model.norm.weight", "does not have it"]);
    let both = safetensors(&[
        ("model.embed_tokens.weight", "U8", vec![2], vec![1, 2]),
        ("model.norm.weight", "U8", vec![1], vec![3]),
    ]);
    fs::write(path.join("b.safetensors"), both).unwrap();
    refuse(&path, &["model.embed_tokens.weight", "stored twice"]);
}

#[test]
fn an_index_cannot_lead_outside() {
    let folder = tempdir().unwrap();
    let file = safetensors(&[("x", "U8", vec![1], vec![1])]);
    fs::write(folder.path().join("x.safetensors"), &file).unwrap();
    let absolute = folder.path().join("x.safetensors").display().to_string();
    for name in
        ["../x.safetensors", "sub/../../x.safetensors", "./x.safetensors", "", ".", "..", &absolute, "a\\b"]
    {
        let index = serde_json::json!({"weight_map": {"x": name}}).to_string();
        let path = directory(
            &folder.path().join("model"),
            &[CONFIG, ("x.safetensors", &file), ("model.safetensors.index.json", index.as_bytes())],
        );
        // A leading "./" leaves the path plain, and is harmless.
        if name == "./x.safetensors" {
            continue;
        }
        assert!(matches!(Checkpoint::open(path), Err(StoreError::UnsafePath { .. })), "{name:?}");
    }
    for map in [
        "{}",
        "{\"weight_map\": 1}",
        "{\"weight_map\": {\"x\": 1}}",
        "[]",
        "{\"weight_map\": {\"x\": [\"y\"]}}",
    ] {
        let path =
            directory(&folder.path().join("model"), &[("model.safetensors.index.json", map.as_bytes())]);
        assert!(matches!(Checkpoint::open(path), Err(StoreError::Malformed { .. })), "{map}");
    }
}

#[test]
fn links_stay_within_the_model() {
    let folder = tempdir().unwrap();
    let outside = llama(&folder.path().join("outside"));
    let linked = directory(&folder.path().join("linked"), &[CONFIG]);
    symlink(outside.join("model.safetensors"), linked.join("model.safetensors")).unwrap();
    assert!(matches!(Checkpoint::open(&linked), Err(StoreError::UnsafePath { .. })));

    // The hub's cache links from a snapshot to the blobs of the same repository.
    let repository = folder.path().join("hub/models--org--name");
    let snapshot = directory(&repository.join("snapshots/abc"), &[]);
    fs::create_dir(repository.join("blobs")).unwrap();
    for (name, blob) in [("model.safetensors", "b1"), ("config.json", "b2")] {
        fs::copy(outside.join(name), repository.join("blobs").join(blob)).unwrap();
        symlink(format!("../../blobs/{blob}"), snapshot.join(name)).unwrap();
    }
    assert_eq!(Checkpoint::open(&snapshot).unwrap().tensors().count(), 11);
    let part = directory(&snapshot.join("part"), &[CONFIG]);
    symlink("../../../blobs/b1", part.join("model.safetensors")).unwrap();
    Checkpoint::open(part).unwrap();
    // A link to the snapshot is a path of the user's choice.
    symlink(&snapshot, folder.path().join("shortcut")).unwrap();
    Checkpoint::open(folder.path().join("shortcut")).unwrap();

    symlink(outside.join("tokenizer.json"), snapshot.join("tokenizer.json")).unwrap();
    assert!(matches!(Checkpoint::open(&snapshot), Err(StoreError::UnsafePath { .. })));
    // The same layout without the hub's naming is not a cache.
    let fake = directory(&folder.path().join("fake/snapshots/abc"), &[CONFIG]);
    directory(&folder.path().join("fake/blobs"), &[("b1", b"")]);
    symlink("../../blobs/b1", fake.join("model.safetensors")).unwrap();
    assert!(matches!(Checkpoint::open(&fake), Err(StoreError::UnsafePath { .. })));
    // A link to nothing and a link to itself.
    let broken = directory(&folder.path().join("broken"), &[CONFIG]);
    symlink("nowhere", broken.join("model.safetensors")).unwrap();
    assert!(matches!(Checkpoint::open(&broken), Err(StoreError::Io { .. })));
    let cycle = directory(&folder.path().join("cycle"), &[CONFIG]);
    symlink("model.safetensors", cycle.join("model.safetensors")).unwrap();
    assert!(matches!(Checkpoint::open(&cycle), Err(StoreError::Io { .. })));
}

#[test]
fn a_path_without_a_model_is_refused_with_a_hint() {
    let folder = tempdir().unwrap();
    refuse(&folder.path().join("missing"), &["missing", "open"]);
    let path = directory(&folder.path().join("empty"), &[]);
    refuse(&path, &["not a model", "model.safetensors"]);
    let path = directory(&folder.path().join("gguf"), &[("m.gguf", b"GGUF")]);
    refuse(&path, &["m.gguf", "cut short"]);
    let path = directory(&folder.path().join("ggufs"), &[("m.gguf", b"GGUF"), ("n.gguf", b"GGUF")]);
    refuse(&path, &["GGUF file itself", "m.gguf, n.gguf"]);
    let path = directory(&folder.path().join("torch"), &[("pytorch_model.bin", b"PK")]);
    refuse(&path, &["convert them to safetensors"]);
    let file = safetensors(&[("x", "U8", vec![1], vec![1])]);
    let path = directory(&folder.path().join("bare"), &[("model.safetensors", &file)]);
    refuse(&path, &["config.json is missing"]);
    refuse(&path.join("model.safetensors"), &["give the directory"]);
    for config in ["[]", "{", "1", "{\"a\": \u{0}}", "{\"a\": 1e999}"] {
        let path = directory(&path, &[("config.json", config.as_bytes())]);
        refuse(&path, &["config.json"]);
    }
    let deep = "[".repeat(100_000);
    let path = directory(&path, &[("config.json", deep.as_bytes())]);
    refuse(&path, &["config.json", "recursion limit"]);
    let long = " ".repeat(17 << 20);
    let path = directory(&path, &[("config.json", long.as_bytes())]);
    refuse(&path, &["config.json", "longer than"]);
    let path = directory(&folder.path().join("folder"), &[CONFIG, ("model.safetensors/x", b"")]);
    refuse(&path, &["regular file"]);
}

#[test]
fn chat_templates_are_found() {
    let folder = tempdir().unwrap();
    let weights = safetensors(&[("x", "U8", vec![1], vec![1])]);
    let template = |name: &str, files: &[(&str, &[u8])]| {
        let mut all = vec![CONFIG, ("model.safetensors", weights.as_slice())];
        all.extend_from_slice(files);
        let model = Checkpoint::open(directory(&folder.path().join(name), &all)).unwrap();
        model.text().chat_template.clone()
    };
    let listed: &[u8] = br#"{"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}"#;
    assert_eq!(template("a", &[]), None);
    assert_eq!(template("b", &[("tokenizer_config.json", listed)]).as_deref(), Some("d"));
    let beside: &[u8] = b"beside";
    let both = [("tokenizer_config.json", listed), ("chat_template.jinja", beside)];
    assert_eq!(template("c", &both).as_deref(), Some("beside"));
    assert_eq!(
        template("d", &[("chat_template.json", br#"{"chat_template": "old"}"#)]).as_deref(),
        Some("old")
    );
    assert_eq!(template("e", &[("tokenizer_config.json", br#"{"chat_template": 3}"#)]), None);
}

/// Template files take precedence over the configuration, as in `transformers`.
#[test]
fn tool_templates_are_found() {
    let folder = tempdir().unwrap();
    let weights = safetensors(&[("x", "U8", vec![1], vec![1])]);
    let templates = |name: &str, files: &[(&str, &[u8])]| {
        let mut all = vec![CONFIG, ("model.safetensors", weights.as_slice())];
        all.extend_from_slice(files);
        let model = Checkpoint::open(directory(&folder.path().join(name), &all)).unwrap();
        let text = model.without_tokenizer();
        [text.text().chat_template.clone(), text.text().tools_template.clone()]
    };
    let some = |templates: [&str; 2]| templates.map(|template| Some(template.to_owned()));
    let listed: (&str, &[u8]) = (
        "tokenizer_config.json",
        br#"{"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}"#,
    );
    let one: (&str, &[u8]) = ("tokenizer_config.json", br#"{"chat_template": "one"}"#);
    let own: (&str, &[u8]) = ("chat_template.jinja", b"own");
    let tools: (&str, &[u8]) = ("additional_chat_templates/tool_use.jinja", b"tools");
    assert_eq!(templates("a", &[listed]), some(["d", "t"]));
    assert_eq!(templates("b", &[own, tools]), some(["own", "tools"]));
    assert_eq!(templates("c", &[listed, own, tools]), some(["own", "tools"]));
    assert_eq!(templates("d", &[listed, own]), [Some("own".to_owned()), None]);
    assert_eq!(templates("e", &[one, tools]), some(["one", "tools"]));
    assert_eq!(templates("f", &[one]), [Some("one".to_owned()), None]);
}

#[test]
fn damaged_safetensors_are_refused() {
    let entry = |dtype: &str, shape: &str, offsets: &str| {
        format!("{{\"x\":{{\"dtype\":\"{dtype}\",\"shape\":{shape},\"data_offsets\":{offsets}}}}}")
    };
    let good = safetensors(&[("x", "F32", vec![2, 3], vec![0; 24]), ("y", "F16", vec![4], vec![0; 8])]);
    for length in 0..good.len() {
        refuse_file(&good[..length], &[]);
    }
    refuse_file(&[&good[..], &[0]].concat(), &["data", "belong to no tensor"]);
    refuse_file(&u64::MAX.to_le_bytes(), &["header length", "18446744073709551615"]);
    refuse_file(&100_000_001u64.to_le_bytes(), &["header length"]);
    refuse_file(&10u64.to_le_bytes(), &["header length", "cut short"]);
    for (header, expected) in [
        ("", "header"),
        ("{", "header"),
        ("[]", "header"),
        ("null", "header"),
        ("{\"x\":1}", "tensor \"x\""),
        ("{\"x\":{\"dtype\":\"F32\"}}", "shape"),
        ("{} {}", "trailing"),
        (&entry("F32", "[1]", "[0,4,8]"), "tensor \"x\""),
        (&entry("F32", "[-1]", "[0,4]"), "tensor \"x\""),
        (&entry("F32", "[1]", "[-4,0]"), "tensor \"x\""),
        (&entry("F32", "[1.5]", "[0,4]"), "tensor \"x\""),
        (&entry("F32", "[1e30]", "[0,4]"), "tensor \"x\""),
        (&entry("F32", "[1]", "[4,0]"), "not a range"),
        (&entry("F32", "[1]", "[0,18446744073709551615]"), "not a range"),
        (&entry("F32", "[1]", "[18446744073709551612,18446744073709551615]"), "not a range"),
        (&entry("F32", "[2]", "[0,4]"), "takes 8"),
        (&entry("F16", "[1]", "[0,4]"), "takes 2"),
        (&entry("F32", "[18446744073709551615]", "[0,4]"), "address space"),
        (&entry("F32", "[4294967296,4294967296]", "[0,4]"), "address space"),
        (&entry("F32", "[0,18446744073709551615,2]", "[0,0]"), "address space"),
        (&entry("F32", "[4611686018427387904]", "[0,0]"), "address space"),
        (&entry("F32", &format!("[{}1]", "1,".repeat(100)), "[0,4]"), "101 dimensions"),
        (&entry("F8_E5M2", "[4]", "[0,4]"), "not supported"),
        (&entry("f32", "[1]", "[0,4]"), "not supported"),
    ] {
        refuse_file(&safetensors_raw(header, &[0; 4]), &[expected]);
    }
    let two = |a: &str, b: &str, offsets: &str| {
        format!(
            "{{\"{a}\":{{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}},\
             \"{b}\":{{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":{offsets}}}}}"
        )
    };
    refuse_file(&safetensors_raw(&two("a", "b", "[2,6]"), &[0; 8]), &["\"b\"", "overlaps"]);
    refuse_file(&safetensors_raw(&two("a", "b", "[0,4]"), &[0; 4]), &["overlaps"]);
    refuse_file(&safetensors_raw(&two("a", "b", "[6,10]"), &[0; 10]), &["\"b\"", "hole"]);
    refuse_file(&safetensors_raw(&two("a", "a", "[4,8]"), &[0; 8]), &["\"a\"", "listed twice"]);
    let mut bytes = safetensors_raw("{\"aa\":1}", &[]);
    bytes[10] = 0xFF;
    refuse_file(&bytes, &["not UTF-8"]);
    let deep = format!("{{\"x\":{}", "[".repeat(50_000));
    refuse_file(&safetensors_raw(&deep, &[]), &["header"]);
    let deep = format!("{{\"__metadata__\":{}", "{\"a\":".repeat(50_000));
    refuse_file(&safetensors_raw(&deep, &[]), &["header"]);
    refuse_file(b"", &["empty"]);
}

#[test]
fn empty_tensors_and_metadata_are_allowed() {
    let folder = tempdir().unwrap();
    let header = r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}"#;
    let bytes = safetensors_raw(header, &[1, 2]);
    let model = Checkpoint::open(directory(folder.path(), &[CONFIG, ("model.safetensors", &bytes)])).unwrap();
    assert_eq!(model.info("a").unwrap().encoding, Encoding::Plain(Dtype::F32));
    assert!(model.weight("a").unwrap().data.is_empty());
    assert_eq!(model.weight("b").unwrap().data, [1u8, 2][..]);
}

fn refuse(path: &std::path::Path, words: &[&str]) {
    let error = Checkpoint::open(path).unwrap_err().to_string();
    for word in words {
        assert!(error.contains(word), "{error:?} does not mention {word:?}");
    }
}

fn refuse_file(bytes: &[u8], words: &[&str]) {
    let folder = tempdir().unwrap();
    let path = directory(folder.path(), &[CONFIG, ("model.safetensors", bytes)]);
    refuse(&path, words);
    refuse(&path, &["model.safetensors"]);
}

#[test]
fn messages_stay_short() {
    let folder = tempdir().unwrap();
    let long = "x".repeat(5000);
    let short = |index: Option<serde_json::Value>, header: serde_json::Value, config: &str, word: &str| {
        let weights = safetensors_raw(&header.to_string(), &[]);
        let index = index.map(|map| serde_json::json!({"weight_map": map}).to_string());
        let name = if index.is_some() { "a.safetensors" } else { "model.safetensors" };
        let mut files = vec![(name, weights.as_slice()), ("config.json", config.as_bytes())];
        files.extend(index.as_ref().map(|index| ("model.safetensors.index.json", index.as_bytes())));
        let place = folder.path().join(word.replace(' ', "-"));
        let error = Checkpoint::open(directory(&place, &files)).unwrap_err().to_string();
        assert!(error.contains(word) && error.contains("xxx"), "{word}: {error}");
        assert!(error.len() < 400 + place.as_os_str().len(), "{word}: {error}");
    };
    let json = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
    let none = || json("{}");
    let of = |name: &str, dtype: &str| serde_json::json!({name: {"dtype": dtype, "shape": [9], "data_offsets": [0, 0]}});
    short(Some(serde_json::json!({"a": [&long]})), none(), "{}", "expected a file name");
    short(Some(serde_json::json!({&long: "a.safetensors"})), none(), "{}", "does not have it");
    short(Some(serde_json::json!({"a": format!("../{long}")})), none(), "{}", "plain path");
    short(Some(serde_json::json!({"a": long})), none(), "{}", "download it again");
    short(None, of("a", &long), "{}", "known are");
    short(None, of(&long, "F32"), "{}", "of shape [9]");
    short(None, serde_json::json!({"a": long}), "{}", "invalid type");
    let shape = serde_json::json!({"xxx": {"dtype": "F32", "shape": vec![1; 3000], "data_offsets": [0, 0]}});
    short(None, shape, "{}", "3000 dimensions");
}
