//! Tests of families beyond their reference checkpoints: batches, older files, and what only some families have.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use firebox::internals::model::{Architecture, Decoder, DecoderConfig, Input, LogitRows};
use firebox::internals::store::{Bits, Checkpoint, Encoding, ImportOptions, Quantization, import};
use firebox::{Model, device};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::{Value, json};

const FAMILIES: [&str; 19] = [
    "cohere2",
    "deepseek_v3",
    "ernie4_5",
    "exaone4",
    "gemma4_text",
    "glm4",
    "glm4_moe_lite",
    "gpt2",
    "gpt_oss",
    "granite",
    "granitemoehybrid",
    "hunyuan_v1_dense",
    "mamba2",
    "ministral3",
    "nemotron_h",
    "olmo2",
    "olmo3",
    "seed_oss",
    "starcoder2",
];

fn fixture(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/reference").join(family)
}

fn open(path: &Path) -> Model {
    Model::open(path, &device("cpu").unwrap()).unwrap()
}

fn tokens(start: u32, count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| 3 + (start + i * 31) % 150).collect()
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

/// Writes a checkpoint that differs from a fixture in its configuration, in names, and in what `change` does to tensors.
fn changed(
    family: &str,
    folder: &Path,
    config: impl FnOnce(&mut Value),
    name: impl Fn(&str) -> String,
    change: impl Fn(&str, &mut [f32]),
) -> PathBuf {
    std::fs::create_dir_all(folder).unwrap();
    let mut said = read_config(family);
    config(&mut said);
    std::fs::write(folder.join("config.json"), said.to_string()).unwrap();
    let bytes = std::fs::read(fixture(family).join("model.safetensors")).unwrap();
    let mut tensors = BTreeMap::new();
    for (old, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
        let mut values: Vec<f32> =
            view.data().as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        change(&old, &mut values);
        let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        tensors.insert(name(&old), (view.dtype(), view.shape().to_vec(), data));
    }
    let views = tensors
        .iter()
        .map(|(name, (dtype, shape, data))| (name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
    folder.to_owned()
}

fn read_config(family: &str) -> Value {
    serde_json::from_slice(&std::fs::read(fixture(family).join("config.json")).unwrap()).unwrap()
}

fn decoder_config(config: &Value) -> DecoderConfig {
    match Architecture::from_json(config).unwrap() {
        Architecture::Decoder(config) => config,
        Architecture::Encoder(_) => panic!("an encoder"),
    }
}

fn logits(model: &Model) -> Vec<u32> {
    bits(&model.session().unwrap().feed(&tokens(1, 40)).unwrap())
}

#[test]
fn a_row_does_not_depend_on_its_batch() {
    for family in FAMILIES {
        let model = open(&fixture(family));
        let decoder = model.decoder().unwrap();
        let prompts: Vec<Vec<u32>> = (0..5).map(|at| tokens(at * 7, 3 + 9 * at as usize)).collect();
        let mut alone: Vec<_> = prompts.iter().map(|_| decoder.cache()).collect();
        let mut together: Vec<_> = prompts.iter().map(|_| decoder.cache()).collect();
        for step in 0..3 {
            let fed: Vec<Vec<u32>> =
                if step == 0 { prompts.clone() } else { prompts.iter().map(|p| p[..1].to_vec()).collect() };
            let inputs: Vec<_> =
                fed.iter().zip(&together).map(|(fed, cache)| Input::new(fed, cache.position(), 0)).collect();
            let mut caches: Vec<_> = together.iter_mut().collect();
            let found = decoder.forward_together(&inputs, &mut caches, LogitRows::Last).unwrap();
            let found = found.try_into_vec_as::<f32>().unwrap();
            let expected = fed.iter().zip(&mut alone).flat_map(|(fed, cache)| forward(&decoder, fed, cache));
            assert_eq!(bits(&found), bits(&expected.collect::<Vec<_>>()), "{family}, step {step}");
        }
    }
}

fn forward(decoder: &Decoder, fed: &[u32], cache: &mut firebox::internals::cache::SequenceCache) -> Vec<f32> {
    let position = cache.position();
    let logits = decoder.forward(fed, position, cache, LogitRows::Last).unwrap();
    logits.try_into_vec_as::<f32>().unwrap()
}

/// A table of positions ends; a feed beyond it changes nothing.
#[test]
fn learned_positions_end() {
    let model = open(&fixture("gpt2"));
    let mut session = model.session().unwrap();
    session.feed(&tokens(1, 500)).unwrap();
    let error = session.feed(&tokens(2, 13)).unwrap_err().to_string();
    assert!(error.contains("513") && error.contains("512"), "{error}");
    let mut other = model.session().unwrap();
    other.feed(&tokens(1, 500)).unwrap();
    let [found, expected] =
        [&mut session, &mut other].map(|session| bits(&session.feed(&tokens(3, 12)).unwrap()));
    assert_eq!(found, expected);
}

/// The queries of the second window of positions are those of a model whose query weights are larger by the factor.
#[test]
fn queries_grow_with_positions() {
    const ORIGINAL: usize = 16;
    let folder = tempfile::tempdir().unwrap();
    let factor = 1.0 + 0.5 * std::f32::consts::LN_2;
    let growing = |rate: f64| {
        move |config: &mut Value| {
            let rope = &mut config["rope_parameters"];
            (rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"]) =
                (json!(rate), json!(ORIGINAL));
        }
    };
    let make = |name: &str, rate: f64, factor: f32| {
        let scale = |name: &str, values: &mut [f32]| {
            if name.ends_with("q_proj.weight") {
                values.iter_mut().for_each(|value| *value *= factor);
            }
        };
        let name = folder.path().join(name);
        open(&changed("ministral3", &name, growing(rate), str::to_owned, scale)).decoder().unwrap()
    };
    let (grows, plain, large) =
        (make("grows", 0.5, 1.0), make("plain", 0.0, 1.0), make("large", 0.0, factor));
    let mut expected = plain.cache();
    forward(&plain, &tokens(1, ORIGINAL), &mut expected);
    let expected = forward(&large, &tokens(2, ORIGINAL), &mut expected);
    for pieces in [1, 3, 2 * ORIGINAL] {
        let all = [tokens(1, ORIGINAL), tokens(2, ORIGINAL)].concat();
        let mut cache = grows.cache();
        let found =
            all.chunks(all.len() / pieces).map(|fed| forward(&grows, fed, &mut cache)).last().unwrap();
        let range = expected.iter().fold(0f32, |range, value| range.max(value.abs()));
        for (found, expected) in found.iter().zip(&expected) {
            assert!((found - expected).abs() < 1e-4 * range, "{found} instead of {expected}");
        }
    }
}

#[test]
fn text_models_of_multimodal_ones_run() {
    let folder = tempfile::tempdir().unwrap();
    let expected = logits(&open(&fixture("ministral3")));
    let wrapped = |config: &mut Value| {
        let text = config.take();
        *config = json!({"model_type": "mistral3", "text_config": text, "vision_config": {}});
    };
    let new = |name: &str| name.replacen("model.", "model.language_model.", 1);
    let old = |name: &str| format!("language_model.{name}");
    let new = changed("ministral3", &folder.path().join("new"), wrapped, new, |_, _| ());
    let old = changed("ministral3", &folder.path().join("old"), wrapped, old, |_, _| ());
    for path in [new, old] {
        assert_eq!(logits(&open(&path)), expected, "{}", path.display());
    }
}

#[test]
fn the_text_model_of_a_multimodal_gemma4_runs() {
    let folder = tempfile::tempdir().unwrap();
    let wrapped = |config: &mut Value| {
        let text = config.take();
        *config = json!({"model_type": "gemma4", "text_config": text, "vision_config": {}});
    };
    let name = |name: &str| name.replacen("model.", "model.language_model.", 1);
    let path = changed("gemma4_text", folder.path(), wrapped, name, |_, _| ());
    assert_eq!(logits(&open(&path)), logits(&open(&fixture("gemma4_text"))));
}

/// Released configurations give the width of full layers' heads, newer ones list those layers.
#[test]
fn gemma4_heads_may_be_listed_or_follow_from_the_kind_of_layer() {
    let mut config = read_config("gemma4_text");
    let expected = decoder_config(&config);
    config.as_object_mut().unwrap().remove("per_layer_config");
    config["global_head_dim"] = json!(32);
    assert_eq!(decoder_config(&config), expected);
    let refused = |field: &str, value: Value| {
        let mut config = read_config("gemma4_text");
        config[field] = value;
        let error = Architecture::from_json(&config).unwrap_err().to_string();
        assert!(error.contains(field), "{error}");
    };
    refused("per_layer_config", json!({"1": {"intermediate_size": 32}}));
    refused("per_layer_config", json!({"full_attention": {"head_dim": 32}}));
    refused("per_layer_config", json!({"1": {"head_dim": 32}}));
    refused("num_kv_shared_layers", json!(6));
    refused("num_kv_shared_layers", json!(5));
    refused("use_bidirectional_attention", json!("all"));
    refused("vocab_size_per_layer_input", json!(319));
}

#[test]
fn old_files_without_a_prefix_open() {
    let folder = tempfile::tempdir().unwrap();
    let bare = |name: &str| name.trim_start_matches("transformer.").to_owned();
    let path = changed("gpt2", folder.path(), |_| (), bare, |_, _| ());
    assert_eq!(logits(&open(&path)), logits(&open(&fixture("gpt2"))));
}

#[test]
fn patterns_may_be_letters() {
    for family in ["exaone4", "cohere2", "olmo3"] {
        let mut config = read_config(family);
        let expected = decoder_config(&config);
        config.as_object_mut().unwrap().remove("layer_types");
        for pattern in [json!("LLLG"), json!(4), Value::Null] {
            config["sliding_window_pattern"] = pattern;
            assert_eq!(decoder_config(&config), expected, "{family}");
        }
    }
}

#[test]
fn models_without_windows_rotate_all_layers() {
    let without = |family| {
        let mut config = read_config(family);
        config["sliding_window"] = Value::Null;
        config.as_object_mut().unwrap().remove("layer_types");
        config
    };
    for block in decoder_config(&without("exaone4")).blocks {
        assert_eq!(serde_json::to_value(&block.mixer).unwrap()["rope"], 0);
    }
    let error = Architecture::from_json(&without("cohere2")).unwrap_err().to_string();
    assert!(error.contains("sliding_window"), "{error}");
}

#[test]
fn hunyuan_stretches_its_base_by_alpha() {
    let mut config = read_config("hunyuan_v1_dense");
    config["rope_parameters"] =
        json!({"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 1e4});
    let ropes = decoder_config(&config).ropes;
    assert!((ropes[0].theta / (1e4 * 1000f64.powf(16.0 / 14.0)) - 1.0).abs() < 1e-12);
    assert_eq!(serde_json::to_value(&ropes[0].scaling).unwrap()["kind"], "none");
}

/// One scaling in an older configuration is that of full layers.
#[test]
fn olmo3_scales_full_layers_only() {
    let mut config = read_config("olmo3");
    config.as_object_mut().unwrap().remove("rope_parameters");
    config["rope_theta"] = json!(500_000.0);
    config["rope_scaling"] = json!({"rope_type": "linear", "factor": 4.0});
    let config = decoder_config(&config);
    let kinds: Vec<_> = config
        .ropes
        .iter()
        .map(|rope| serde_json::to_value(&rope.scaling).unwrap()["kind"].clone())
        .collect();
    assert_eq!(kinds, ["linear", "none"]);
    let used = config.blocks.iter().map(|block| serde_json::to_value(&block.mixer).unwrap()["rope"].clone());
    assert_eq!(used.collect::<Vec<_>>(), [1, 1, 1, 0]);
}

/// The magnitudes of a float of four bits.
const LEVELS: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The outputs of a stack of gpt-oss's matrices `[experts, inputs, outputs]`.
fn outputs_of_stack(name: &str) -> Option<usize> {
    match name.rsplit_once(".experts.")?.1 {
        "gate_up_proj" => Some(320),
        "down_proj" => Some(64),
        _ => None,
    }
}

/// The code in MXFP4 that is nearest to a number, and the exponent of its block, which depends on the output alone here.
fn mxfp4(value: f32, output: usize) -> (u8, u8) {
    let exponent = 123 + (output % 2) as u8;
    let distance = |code: u8| (LEVELS[usize::from(code)] * scale(exponent) - value.abs()).abs();
    let code = (0..8).min_by(|a, b| distance(*a).total_cmp(&distance(*b))).unwrap();
    (code | (u8::from(value < 0.0) << 3), exponent)
}

fn scale(exponent: u8) -> f32 {
    (f32::from(exponent) - 127.0).exp2()
}

/// Writes the stacks of a checkpoint, whose numbers MXFP4 has, as published ones are: in MXFP4.
fn packed(plain: &Path, folder: &Path) -> PathBuf {
    std::fs::create_dir_all(folder).unwrap();
    let bytes = std::fs::read(plain.join("model.safetensors")).unwrap();
    let mut tensors = BTreeMap::new();
    for (name, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
        let Some(outputs) = outputs_of_stack(&name) else {
            tensors.insert(name, (view.dtype(), view.shape().to_vec(), view.data().to_vec()));
            continue;
        };
        let (experts, inputs) = (view.shape()[0], view.shape()[1]);
        let (mut blocks, mut scales) =
            (vec![0u8; experts * outputs * inputs / 2], vec![0; experts * outputs * inputs / 32]);
        for (at, bytes) in view.data().as_chunks::<4>().0.iter().enumerate() {
            let (row, output) = (at / outputs, at % outputs);
            let to = (row / inputs * outputs + output) * inputs + row % inputs;
            let (code, exponent) = mxfp4(f32::from_le_bytes(*bytes), output);
            blocks[to / 2] |= code << (to % 2 * 4);
            scales[to / 32] = exponent;
        }
        let shape = vec![experts, outputs, inputs / 32];
        tensors.insert(format!("{name}_blocks"), (Dtype::U8, [&shape[..], &[16]].concat(), blocks));
        tensors.insert(format!("{name}_scales"), (Dtype::U8, shape, scales));
    }
    let views = tensors
        .iter()
        .map(|(name, (dtype, shape, data))| (name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
    let mut config = read_config("gpt_oss");
    let fields = config.as_object_mut().unwrap();
    let rope = fields.remove("rope_parameters").unwrap();
    fields.insert("rope_theta".into(), rope["rope_theta"].clone());
    fields.insert("rope_scaling".into(), rope);
    fields.insert("quantization_config".into(), json!({"quant_method": "mxfp4"}));
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    folder.to_owned()
}

/// Experts in MXFP4, quantized ones and plain ones that lie as `[inputs, outputs]` give the same logits, as closely as their
/// products are computed.
#[test]
fn experts_may_be_packed_and_transposed() {
    let folder = tempfile::tempdir().unwrap();
    let to_levels = |name: &str, values: &mut [f32]| {
        let Some(outputs) = outputs_of_stack(name) else { return };
        for (at, value) in values.iter_mut().enumerate() {
            let (code, exponent) = mxfp4(*value, at % outputs);
            *value = (LEVELS[usize::from(code & 7)] * scale(exponent)).copysign(*value);
        }
    };
    let plain = changed("gpt_oss", &folder.path().join("plain"), |_| (), str::to_owned, to_levels);
    let packed = packed(&plain, &folder.path().join("packed"));
    assert!(Checkpoint::open(&packed).unwrap_err().to_string().contains("firebox import"));
    let imported = |name: &str, source: &Path, quantize| {
        let bundle = folder.path().join(name);
        import(source, &bundle, &ImportOptions::from(quantize), &mut |_| {}).unwrap();
        open(&bundle)
    };
    let q8 = Some(Quantization { bits: Bits::Q8, group: 32 });
    let logits = |model: &Model| model.session().unwrap().feed(&tokens(1, 40)).unwrap();
    let expected = logits(&open(&plain));
    assert_eq!(bits(&logits(&imported("bundle", &plain, None))), bits(&expected));
    let range = expected.iter().fold(0f32, |range, value| range.max(value.abs()));
    let found = logits(&imported("blocks", &packed, None));
    let off = found.iter().zip(&expected).map(|(found, expected)| (found - expected).abs() / range);
    let off = off.fold(0f32, f32::max);
    // 0.015 was measured.
    assert!(off < 0.02, "{off}");
    // Quantized anew, where routers may choose other experts.
    let [plain, packed] =
        [("q8", &plain), ("blocks-q8", &packed)].map(|(name, source)| logits(&imported(name, source, q8)));
    assert_eq!(bits(&packed), bits(&plain));
}

/// Rounds every 32 numbers of a row to multiples of a power of two, the largest to `levels` of it: what quantizing them keeps.
fn to_levels(values: &mut [f32], width: usize, levels: f32) {
    for group in values.chunks_mut(width).flat_map(|row| row.chunks_mut(32)) {
        let at = (0..group.len()).max_by(|a, b| group[*a].abs().total_cmp(&group[*b].abs())).unwrap();
        let step = (group[at].abs() / levels).log2().ceil().exp2();
        group.iter_mut().for_each(|value| *value = (*value / step).round() * step);
        group[at] = (levels * step).copysign(group[at]);
    }
}

/// Heads use parts of a matrix that an import packs as a whole. All experts are chosen: rounding cannot choose others.
#[test]
fn factors_of_heads_may_be_packed() {
    let folder = tempfile::tempdir().unwrap();
    let read = |model: &Model| model.session().unwrap().feed(&tokens(1, 40)).unwrap();
    // 0.0003 and 0.12 were measured; activations are rounded to 16 and to 8 bits.
    for (bits, levels, most) in [(Bits::Q8, 127.0, 1e-3), (Bits::Q4, 7.0, 0.2)] {
        let folder = folder.path().join(format!("{bits:?}"));
        let all_chosen = |config: &mut Value| {
            config["num_experts_per_tok"] = config["n_routed_experts"].clone();
            config["topk_group"] = config["n_group"].clone();
        };
        let rounded = |name: &str, values: &mut [f32]| {
            let narrow = name.contains("q_b_proj") || name.contains("expert") && name.contains("down_proj");
            to_levels(values, if narrow { 48 } else { 32 }, levels);
        };
        let plain = changed("deepseek_v3", &folder, all_chosen, str::to_owned, rounded);
        let expected = read(&open(&plain));
        let bundle = folder.join("bundle");
        let options = ImportOptions::from(Some(Quantization { bits, group: 32 }));
        import(&plain, &bundle, &options, &mut |_| ()).unwrap();
        let model = open(&bundle);
        let encoding = model.checkpoint().info("model.layers.1.self_attn.kv_b_proj.weight").unwrap().encoding;
        assert!(!matches!(encoding, Encoding::Plain(_)));
        let found = read(&model);
        let length = |numbers: &mut dyn Iterator<Item = f32>| numbers.map(|n| n * n).sum::<f32>().sqrt();
        let off = length(&mut found.iter().zip(&expected).map(|(found, expected)| found - expected));
        let share = off / length(&mut expected.iter().copied());
        assert!(share > 0.0 && share < most, "{bits:?}: off by {share}");
    }
}

/// Settings of latent attention that the reference checkpoints do not have.
#[test]
fn deepseek_refuses_what_it_does_not_compute() {
    let refused = |field: &str, value: Value| {
        let mut config = read_config("deepseek_v3");
        config[field] = value;
        let error = Architecture::from_json(&config).unwrap_err().to_string();
        assert!(error.contains(field), "{error}");
    };
    refused("scoring_func", json!("softmax"));
    refused("topk_method", json!("group_limited_greedy"));
    refused("moe_layer_freq", json!(2));
    refused("mlp_layer_types", json!(["dense"]));
    refused("mlp_layer_types", json!(["dense", "sparse", "sparse", "linear"]));
    let config = |family| decoder_config(&read_config(family));
    let dense = |config: &DecoderConfig| -> Vec<bool> {
        let kinds = config.blocks.iter().map(|block| serde_json::to_value(&block.feed_forward).unwrap());
        kinds.map(|feed_forward| feed_forward["kind"] == "gated").collect()
    };
    assert_eq!(dense(&config("deepseek_v3")), [true, false, false, false]);
    let mut lite = read_config("glm4_moe_lite");
    lite["mlp_layer_types"] = json!(["dense", "sparse", "dense", "sparse"]);
    assert_eq!(dense(&decoder_config(&lite)), [true, false, true, false]);
}
