//! GGUF files of mixtures of experts, and of families that mix attention with other layers.
#![allow(clippy::unwrap_used, reason = "a test that fails here should say so")]

mod support;

use firebox_store::gguf::Model;
use serde_json::json;
use support::{Gguf, expect, f32_bytes, open, refuse};

fn mixture(architecture: &str) -> Gguf {
    let key = |name: &str| format!("{architecture}.{name}");
    Gguf::model(architecture)
        .int(&key("expert_count"), 3)
        .int(&key("expert_used_count"), 2)
        .int(&key("expert_feed_forward_length"), 8)
}

fn with_delta_nets(gguf: Gguf, architecture: &str) -> Gguf {
    let key = |name: &str| format!("{architecture}.{name}");
    gguf.int(&key("ssm.group_count"), 2)
        .int(&key("ssm.time_step_rank"), 4)
        .int(&key("ssm.state_size"), 16)
        .int(&key("ssm.inner_size"), 64)
        .int(&key("ssm.conv_kernel"), 4)
        .f32("blk.0.ssm_a", &[4])
        .f32("blk.0.ssm_conv1d.weight", &[128, 4])
}

/// Key heads of three layers as an array.
fn key_heads(gguf: Gguf, architecture: &str, counts: &[u32]) -> Gguf {
    let bytes: Vec<u8> = counts.iter().flat_map(|count| count.to_le_bytes()).collect();
    gguf.list(&format!("{architecture}.attention.head_count_kv"), 4, counts.len(), &bytes)
}

/// The metadata of a small LFM2, which has key heads in the second of two layers.
fn lfm2(architecture: &str) -> Gguf {
    let key = |name: &str| format!("{architecture}.{name}");
    let gguf = Gguf::new()
        .text("general.architecture", architecture)
        .int(&key("block_count"), 2)
        .int(&key("context_length"), 128)
        .int(&key("embedding_length"), 64)
        .int(&key("feed_forward_length"), 96)
        .int(&key("attention.head_count"), 4)
        .float(&key("attention.layer_norm_rms_epsilon"), 1e-5)
        .float(&key("rope.freq_base"), 1_000_000.0)
        .int(&key("shortconv.l_cache"), 3)
        .f32("token_embd.weight", &[32, 64])
        .f32("token_embd_norm.weight", &[64])
        .f32("blk.0.shortconv.conv.weight", &[64, 3]);
    key_heads(gguf, architecture, &[0, 2])
}

#[test]
fn qwen35moe_has_shared_experts_and_tiled_heads() {
    let gguf = with_delta_nets(mixture("qwen35moe"), "qwen35moe")
        .int("qwen35moe.expert_shared_feed_forward_length", 24)
        .int("qwen35moe.nextn_predict_layers", 1)
        .f32("blk.0.ffn_gate_inp_shexp.weight", &[64])
        .f32("blk.1.ffn_down_exps.weight", &[3, 64, 8])
        .f32("blk.1.nextn.eh_proj.weight", &[64, 128]);
    let model = open(&gguf);
    expect(
        model.config(),
        json!({
            "model_type": "qwen3_5_moe_text", "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 24, "num_hidden_layers": 1, "layer_types": ["linear_attention"],
            "firebox": {
                "norm_weight_offset": 0.0, "a_log_negated_exp": true, "v_heads_tiled": true, "source": "gguf",
            },
        }),
    );
    assert_eq!(model.info("model.layers.0.mlp.shared_expert_gate.weight").unwrap().shape, [1, 64]);
    assert!(model.info("mtp.layers.0.mlp.experts.2.down_proj.weight").is_some());
    let unscaled = gguf.flag("qwen35moe.expert_weights_norm", false);
    refuse(&unscaled.build(), &["qwen35moe.expert_weights_norm", "not supported"]);
}

#[test]
fn projections_of_qwen3next_are_apart_or_grouped() {
    let model = |name: &str, rows: u64| {
        open(&with_delta_nets(mixture("qwen3next"), "qwen3next").f32(name, &[rows, 64]))
    };
    let notes = |separate: bool| {
        json!({
            "norm_weight_offset": 0.0, "a_log_negated_exp": true, "v_heads_tiled": false, "qkvz_separate": separate,
            "source": "gguf",
        })
    };
    let separate = model("blk.0.attn_qkv.weight", 128);
    // Without a width of their own, shared experts are as wide as dense layers.
    expect(
        separate.config(),
        json!({"model_type": "qwen3_next", "shared_expert_intermediate_size": 96, "firebox": notes(true)}),
    );
    let grouped = model("blk.0.ssm_in.weight", 192);
    assert_eq!(grouped.config()["firebox"], notes(false));
    assert!(grouped.info("model.layers.0.linear_attn.in_proj_qkvz.weight").is_some());
}

#[test]
fn glm4moe_keeps_the_numbers_of_layers_that_predict() {
    let gguf = mixture("glm4moe")
        .int("glm4moe.expert_shared_count", 2)
        .int("glm4moe.leading_dense_block_count", 1)
        .int("glm4moe.expert_group_count", 3)
        .int("glm4moe.expert_group_used_count", 2)
        .int("glm4moe.expert_gating_func", 2)
        .float("glm4moe.expert_weights_scale", 2.5)
        .flag("glm4moe.expert_weights_norm", true)
        .int("glm4moe.rope.dimension_count", 8)
        .int("glm4moe.nextn_predict_layers", 1)
        .f32("blk.0.attn_q_norm.weight", &[16])
        .f32("blk.1.exp_probs_b.bias", &[3])
        .f32("blk.1.nextn.eh_proj.weight", &[64, 128]);
    let model = open(&gguf);
    expect(
        model.config(),
        json!({
            "model_type": "glm4_moe", "n_routed_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
            "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5,
            "norm_topk_prob": true, "use_qk_norm": true, "num_hidden_layers": 1, "num_nextn_predict_layers": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        }),
    );
    for name in ["eh_proj.weight", "mlp.gate.e_score_correction_bias"] {
        assert!(model.info(&format!("model.layers.1.{name}")).is_some(), "{name}");
    }
    let softmax = mixture("glm4moe").int("glm4moe.expert_gating_func", 1);
    refuse(&softmax.build(), &["glm4moe.expert_gating_func", "not supported", "1"]);
}

#[test]
fn layers_of_lfm2_without_key_heads_are_convolutions() {
    let model = open(&lfm2("lfm2"));
    expect(
        model.config(),
        json!({
            "model_type": "lfm2", "layer_types": ["conv", "full_attention"], "num_key_value_heads": 2, "norm_eps": 1e-5,
            "conv_L_cache": 3, "conv_bias": false, "block_auto_adjust_ff_dim": false, "intermediate_size": 96,
            "tie_word_embeddings": true,
        }),
    );
    assert_eq!(model.info("model.layers.0.conv.conv.weight").unwrap().shape, [64, 1, 3]);
    assert!(model.info("model.norm.weight").is_some());
    let mixture = lfm2("lfm2moe")
        .int("lfm2moe.expert_count", 3)
        .int("lfm2moe.expert_used_count", 2)
        .int("lfm2moe.expert_feed_forward_length", 8)
        .int("lfm2moe.leading_dense_block_count", 1)
        .int("lfm2moe.expert_gating_func", 2);
    let plain = open(&mixture);
    expect(
        plain.config(),
        json!({
            "model_type": "lfm2_moe", "num_experts": 3, "num_dense_layers": 1, "use_expert_bias": false,
            "routed_scaling_factor": 1.0, "norm_topk_prob": true,
        }),
    );
    let corrected = open(&mixture.f32("blk.1.exp_probs_b.bias", &[3]));
    assert_eq!(corrected.config()["use_expert_bias"], true);
    assert!(corrected.info("model.layers.1.mlp.expert_bias").is_some());
}

#[test]
fn key_heads_of_lfm2_are_one_number_for_each_layer() {
    let damaged = |counts: &[u32]| {
        let without = Gguf::new()
            .text("general.architecture", "lfm2")
            .int("lfm2.block_count", 3)
            .int("lfm2.embedding_length", 64)
            .int("lfm2.attention.head_count", 4)
            .f32("token_embd.weight", &[32, 64]);
        key_heads(without, "lfm2", counts).build()
    };
    refuse(&damaged(&[0, 2]), &["lfm2.attention.head_count_kv", "2 entries for 3 layers"]);
    refuse(&damaged(&[0, 2, 1]), &["lfm2.attention.head_count_kv", "not supported"]);
    refuse(&damaged(&[0, 0, 0]), &["lfm2.attention.head_count_kv", "0"]);
}

#[test]
fn stacks_of_gates_and_ups_are_divided() {
    let values: Vec<f32> = (0..3 * 16 * 64).map(|value| value as f32).collect();
    let gguf =
        mixture("qwen3moe").tensor("blk.0.ffn_gate_up_exps.weight", &[3, 16, 64], 0, f32_bytes(&values));
    let model = open(&gguf);
    for (expert, projection, start) in [(0, "gate_proj", 0), (0, "up_proj", 8), (2, "up_proj", 40)] {
        let name = format!("model.layers.0.mlp.experts.{expert}.{projection}.weight");
        let weight = model.weight(&name).unwrap();
        assert_eq!((weight.shape.as_slice(), weight.mapped), (&[8, 64][..], true));
        assert_eq!(weight.to_f32().unwrap(), values[start * 64..(start + 8) * 64], "{name}");
    }
    let odd = mixture("qwen3moe").f32("blk.0.ffn_gate_up_exps.weight", &[3, 15, 64]);
    refuse(&odd.build(), &["ffn_gate_up_exps", "15 rows"]);
    let scaled = mixture("qwen3moe").float("qwen3moe.expert_weights_scale", 2.5);
    refuse(&scaled.build(), &["expert_weights_scale", "not supported"]);
    assert!(Model::parse(&mixture("qwen3moe").float("qwen3moe.expert_weights_scale", 1.0).build()).is_ok());
}
