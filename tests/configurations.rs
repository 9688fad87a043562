//! Tests that a wrong value in a `config.json` is an error and never a panic, neither when the model is built nor when
//! it runs.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use firebox::internals::model::{Architecture, Network};
use firebox::{Model, device};
use rayon::prelude::*;
use serde_json::{Value, json};

fn reference() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/reference");
    std::fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path()).collect()
}

fn lies() -> Vec<Value> {
    vec![
        Value::Null,
        json!(0),
        json!(1),
        json!(3),
        json!(-1),
        json!(1e300),
        json!(18_446_744_073_709_551_615u64),
        json!(true),
        json!("full"),
        json!([]),
        json!([1, "x"]),
        json!({}),
        json!({"rope_type": "yarn"}),
        json!({"rope_type": "longrope", "long_factor": [0], "short_factor": []}),
    ]
}

/// Returns every path to a value within the configuration: fields, and fields of its objects.
fn paths(config: &Value) -> Vec<String> {
    let mut paths = Vec::new();
    for (name, value) in config.as_object().unwrap() {
        paths.push(format!("/{name}"));
        if value.is_object() {
            paths.extend(self::paths(value).into_iter().map(|inner| format!("/{name}{inner}")));
        }
    }
    paths
}

fn run(folder: &Path) -> Result<(), String> {
    let model = Model::open(folder, &device("cpu").unwrap()).map_err(|error| error.to_string())?;
    match model.network() {
        Network::Decoder(_) => {
            model.session().unwrap().feed(&[5, 6, 7]).map(drop).map_err(|error| error.to_string())
        }
        Network::Encoder(_) => model.embed_tokens(&[5, 6, 7]).map(drop).map_err(|error| error.to_string()),
    }
}

/// Puts every lie into every field of a checkpoint's configuration, and returns how many were refused, how many ran, and how many
/// change nothing of the network. The latter are run as well if `unread` is set.
fn lie(source: &Path, unread: bool) -> [usize; 3] {
    let scratch = tempfile::tempdir().unwrap();
    let config: Value = serde_json::from_slice(&std::fs::read(source.join("config.json")).unwrap()).unwrap();
    let honest = Architecture::from_json(&config).unwrap();
    std::fs::copy(source.join("model.safetensors"), scratch.path().join("model.safetensors")).unwrap();
    let [mut refused, mut ran, mut same] = [0; 3];
    for path in paths(&config) {
        for lie in lies().into_iter().map(Some).chain([None]) {
            let mut lying = config.clone();
            let (parent, field) = path.rsplit_once('/').unwrap();
            let fields = lying.pointer_mut(parent).unwrap().as_object_mut().unwrap();
            match &lie {
                Some(lie) => fields.insert(field.into(), lie.clone()),
                None => fields.remove(field),
            };
            if !unread && Architecture::from_json(&lying).is_ok_and(|read| read == honest) {
                same += 1;
                continue;
            }
            std::fs::write(scratch.path().join("config.json"), lying.to_string()).unwrap();
            match run(scratch.path()) {
                Ok(()) => ran += 1,
                Err(message) => {
                    assert!(!message.is_empty(), "{path} = {lie:?}");
                    refused += 1;
                }
            }
        }
    }
    [refused, ran, same]
}

#[test]
fn no_lie_in_a_configuration_panics() {
    // Fields that are not the network's mean the same in all families.
    let in_full = |source: &Path| ["llama", "gemma3_embedding"].iter().any(|family| source.ends_with(family));
    let counts = reference().into_par_iter().map(|source| lie(&source, in_full(&source)));
    let [refused, ran, same] = counts.reduce(|| [0; 3], |a, b| std::array::from_fn(|at| a[at] + b[at]));
    // Many fields do not concern the network; those that do must be checked.
    assert!(refused > 500 && ran > 500 && same > 500, "{refused} refused, {ran} ran, {same} changed nothing");
}

#[test]
fn errors_name_what_is_wrong() {
    let scratch = tempfile::tempdir().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/reference/llama");
    std::fs::copy(source.join("model.safetensors"), scratch.path().join("model.safetensors")).unwrap();
    let config: Value = serde_json::from_slice(&std::fs::read(source.join("config.json")).unwrap()).unwrap();
    for (field, value, named) in [
        ("model_type", json!("abacus"), vec!["abacus", "qwen3_5", "gemma3_text"]),
        ("num_hidden_layers", json!(5), vec!["model.layers.4.", "missing"]),
        ("num_hidden_layers", json!(3), vec!["model.layers.3.", "does not account"]),
        ("intermediate_size", json!(96), vec!["mlp.gate_proj.weight", "[96, 64]", "[160, 64]"]),
        ("head_dim", json!(32), vec!["self_attn.q_proj.weight", "[128, 64]", "[64, 64]"]),
        ("num_key_value_heads", json!(3), vec!["num_key_value_heads", "3", "4"]),
        ("hidden_act", json!("magic"), vec!["hidden_act", "magic"]),
        ("vocab_size", json!("many"), vec!["vocab_size", "many"]),
    ] {
        let mut lying = config.clone();
        lying[field] = value;
        std::fs::write(scratch.path().join("config.json"), lying.to_string()).unwrap();
        let message = run(scratch.path()).unwrap_err();
        for part in named {
            assert!(message.contains(part), "{field}: {message:?} does not say {part:?}");
        }
    }
}

#[test]
fn encoders_that_compute_otherwise_are_refused_by_name() {
    let scratch = tempfile::tempdir().unwrap();
    for (family, field, value) in [
        ("nomic_bert", "prenorm", json!(true)),
        ("nomic_bert", "causal", json!(true)),
        ("nomic_bert", "moe_every_n_layers", json!(2)),
        ("nomic_bert", "rotary_emb_fraction", json!(0.5)),
        ("nomic_bert", "rotary_scaling_factor", json!(2.0)),
        ("nomic_bert", "activation_function", json!("gelu")),
        ("nomic_bert", "mlp_fc2_bias", json!(true)),
        ("modernbert", "hidden_activation", json!("magic")),
        ("xlm-roberta", "position_embedding_type", json!("relative_key")),
        ("xlm-roberta", "is_decoder", json!(true)),
        ("xlm-roberta", "max_position_embeddings", json!(2)),
    ] {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/reference").join(family);
        let bytes = std::fs::read(source.join("config.json")).unwrap();
        let mut config: Value = serde_json::from_slice(&bytes).unwrap();
        config[field] = value;
        std::fs::copy(source.join("model.safetensors"), scratch.path().join("model.safetensors")).unwrap();
        std::fs::write(scratch.path().join("config.json"), config.to_string()).unwrap();
        let message = run(scratch.path()).unwrap_err();
        assert!(message.contains(field), "{family}, {field}: {message}");
    }
}
