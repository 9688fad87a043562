//! GGUF files of dense families, and directories with names of older files.
#![allow(clippy::unwrap_used, reason = "a test that fails here should say so")]

mod support;

use firebox_store::{Checkpoint, SegmentId};
use serde_json::json;
use support::{Gguf, directory, expect, f32_bytes, open, refuse, safetensors};

const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";

#[test]
fn windows_make_olmo2_an_olmo3() {
    expect(open(&Gguf::model("olmo2")).config(), json!({"model_type": "olmo2", "rms_norm_eps": 1e-6}));
    let windowed = || Gguf::model("olmo2").int("olmo2.attention.sliding_window", 7);
    let scaled = windowed()
        .list("olmo2.attention.sliding_window_pattern", 7, 2, &[1, 0])
        .text("olmo2.rope.scaling.type", "linear")
        .float("olmo2.rope.scaling.factor", 2.0);
    expect(
        open(&scaled).config(),
        json!({
            "model_type": "olmo3", "sliding_window": 7, "layer_types": [SLIDING, FULL],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        }),
    );
}

#[test]
fn factors_of_granite() {
    let plain = open(&Gguf::model("granite"));
    expect(
        plain.config(),
        json!({
            "model_type": "granite", "attention_multiplier": 0.25, "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0, "logits_scaling": 1.0, "firebox": {"rope_interleaved": true, "source": "gguf"},
        }),
    );
    let scaled = Gguf::model("granite")
        .float("granite.attention.scale", 0.5)
        .float("granite.embedding_scale", 12.0)
        .float("granite.residual_scale", 0.25)
        .float("granite.logit_scale", 8.0);
    expect(
        open(&scaled).config(),
        json!({
            "attention_multiplier": 0.5, "embedding_multiplier": 12.0, "residual_multiplier": 0.25, "logits_scaling": 8.0,
        }),
    );
}

#[test]
fn layer_norms_need_their_epsilon() {
    for (architecture, field) in
        [("cohere2", "layer_norm_eps"), ("starcoder2", "norm_epsilon"), ("gpt2", "layer_norm_epsilon")]
    {
        let key = format!("{architecture}.attention.layer_norm_epsilon");
        refuse(&Gguf::model(architecture).build(), &[&key, "missing"]);
        let model = open(&Gguf::model(architecture).float(&key, 1e-5));
        assert_eq!(model.config()[field], 1e-5);
    }
}

#[test]
fn gpt2_becomes_hugging_face() {
    let gguf = Gguf::model("gpt2")
        .float("gpt2.attention.layer_norm_epsilon", 1e-5)
        .f32("position_embd.weight", &[128, 64])
        .f32("output_norm.bias", &[64])
        .f32("blk.0.attn_qkv.weight", &[192, 64]);
    let model = open(&gguf);
    expect(
        model.config(),
        json!({
            "model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "n_inner": 96, "n_positions": 128,
            "vocab_size": 32, "tie_word_embeddings": true, "activation_function": "gelu_new",
            "firebox": {"transposed": false, "source": "gguf"},
        }),
    );
    assert!(model.config().get("rope_parameters").is_none());
    for (name, segment) in [
        ("transformer.wte.weight", SegmentId::Embed),
        ("transformer.wpe.weight", SegmentId::Embed),
        ("transformer.h.0.attn.c_attn.weight", SegmentId::Layer(0)),
        ("transformer.ln_f.bias", SegmentId::Final),
    ] {
        assert_eq!(model.info(name).unwrap().segment, segment, "{name}");
    }
}

#[test]
fn queries_of_mistral3_grow() {
    let gguf = Gguf::model("mistral3")
        .text("mistral3.rope.scaling.type", "yarn")
        .float("mistral3.rope.scaling.factor", 16.0)
        .int("mistral3.rope.scaling.original_context_length", 64)
        .float("mistral3.rope.scaling.yarn_log_multiplier", 1.0)
        .float("mistral3.attention.temperature_scale", 0.25);
    expect(
        open(&gguf).config(),
        json!({
            "model_type": "ministral3",
            "rope_parameters": {
                "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64, "mscale": 1.0,
                "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.25, "rope_theta": 10000.0,
            },
        }),
    );
}

#[test]
fn biases_and_parts_of_heads_follow_from_the_file() {
    let seed = Gguf::model("seed_oss").f32("blk.0.attn_q.bias", &[64]);
    let seed = open(&seed);
    expect(seed.config(), json!({"attention_bias": true, "attention_out_bias": false}));
    let glm = open(&Gguf::model("glm4").int("glm4.rope.dimension_count", 8));
    assert_eq!(glm.config()["rope_parameters"]["partial_rotary_factor"], 0.5);
    let whole = open(&Gguf::model("glm4").int("glm4.rope.dimension_count", 16));
    assert_eq!(whole.config()["rope_parameters"]["partial_rotary_factor"], 1.0);
    assert_eq!(open(&Gguf::model("ernie4_5")).config()["use_bias"], false);
    let exaone = open(&Gguf::model("exaone4").int("exaone4.attention.sliding_window", 9));
    expect(exaone.config(), json!({"sliding_window": 9, "layer_types": [SLIDING, SLIDING]}));
}

#[test]
fn names_of_older_files_are_renewed() {
    let folder = tempfile::tempdir().unwrap();
    let made = |name: &str, model_type: &str, names: [&str; 3]| {
        let tensors = names.map(|name| (name, "F32", vec![2], f32_bytes(&[1.0, 2.0])));
        let config = json!({"model_type": model_type}).to_string();
        let files = [("model.safetensors", safetensors(&tensors)), ("config.json", config.into_bytes())];
        let files: Vec<(&str, &[u8])> = files.iter().map(|(name, bytes)| (*name, &bytes[..])).collect();
        Checkpoint::open(directory(&folder.path().join(name), &files)).unwrap()
    };
    let gpt2 = made("gpt2", "gpt2", ["wte.weight", "h.3.ln_1.weight", "lm_head.weight"]);
    assert_eq!(gpt2.info("transformer.h.3.ln_1.weight").unwrap().segment, SegmentId::Layer(3));
    assert!(gpt2.info("transformer.wte.weight").is_some() && gpt2.info("lm_head.weight").is_some());
    let names =
        ["language_model.model.norm.weight", "language_model.lm_head.weight", "vision_tower.x.weight"];
    let mistral = made("mistral3", "mistral3", names);
    for name in ["model.language_model.norm.weight", "lm_head.weight", "model.vision_tower.x.weight"] {
        assert!(mistral.info(name).is_some(), "{name}");
    }
    let other = made("other", "llama", names);
    assert!(other.info("language_model.lm_head.weight").is_some(), "of another family");
}
