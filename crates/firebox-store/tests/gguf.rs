//! GGUF files: translations and refusals.
#![allow(clippy::unwrap_used, reason = "a test that fails here should say so")]

mod support;

use firebox_store::gguf::{Header, Model};
use firebox_store::{BlockType, Checkpoint, Encoding, SegmentId, SourceKind, TokenizerSource, import};
use serde_json::json;
use support::{Gguf, expect, f32_bytes, open, refuse, write};
use tempfile::tempdir;

fn attention(mut gguf: Gguf, layers: usize) -> Gguf {
    for layer in 0..layers {
        for (name, shape) in [
            ("attn_norm", vec![64]),
            ("attn_q", vec![64, 64]),
            ("attn_k", vec![32, 64]),
            ("attn_v", vec![32, 64]),
            ("attn_output", vec![64, 64]),
            ("ffn_norm", vec![64]),
            ("ffn_gate", vec![96, 64]),
            ("ffn_up", vec![96, 64]),
            ("ffn_down", vec![64, 96]),
        ] {
            gguf = gguf.f32(&format!("blk.{layer}.{name}.weight"), &shape);
        }
    }
    gguf
}

#[test]
fn llama_becomes_hugging_face() {
    let factors: Vec<f32> = (0..8).map(|i| 1.0 + i as f32).collect();
    let gguf = attention(Gguf::model("llama"), 2)
        .f32("output.weight", &[32, 64])
        .tensor("rope_freqs.weight", &[8], 0, f32_bytes(&factors))
        .int("llama.rope.dimension_count", 16);
    let model = open(&gguf);
    assert_eq!(model.source(), SourceKind::Gguf);
    expect(
        model.config(),
        json!({
            "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 32,
            "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": false,
            "attention_bias": false, "hidden_act": "silu",
            "rope_parameters": {
                "rope_type": "firebox_factors", "rope_theta": 10000.0,
                "factors": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
            },
            "firebox": {"rope_interleaved": true, "source": "gguf"},
        }),
    );
    assert!(model.info("rope_freqs.weight").is_none());
    assert_eq!(model.tensors().count(), 2 * 9 + 3);
    let down = model.weight("model.layers.1.mlp.down_proj.weight").unwrap();
    assert_eq!(down.shape, [64, 96]);
    assert!(down.mapped);
    let ids: Vec<SegmentId> = model.segments().iter().map(|segment| segment.id).collect();
    assert_eq!(ids, [SegmentId::Embed, SegmentId::Layer(0), SegmentId::Layer(1), SegmentId::Final]);
}

#[test]
fn a_sliding_window_identifies_mistral() {
    let model = open(&Gguf::model("llama").int("llama.attention.sliding_window", 16));
    expect(
        model.config(),
        json!({"model_type": "mistral", "sliding_window": 16, "tie_word_embeddings": true}),
    );
    assert_eq!(model.config()["firebox"]["rope_interleaved"], true);
}

#[test]
fn qwen_models() {
    let model = open(&attention(Gguf::model("qwen2"), 1).f32("blk.0.attn_q.bias", &[64]));
    expect(
        model.config(),
        json!({"model_type": "qwen2", "attention_bias": true, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    );
    assert!(model.info("model.layers.0.self_attn.q_proj.bias").is_some());
    assert_eq!(model.config()["firebox"], json!({"source": "gguf"}));

    let yarn = Gguf::model("qwen3")
        .int("qwen3.attention.key_length", 32)
        .int("qwen3.attention.value_length", 32)
        .text("qwen3.rope.scaling.type", "yarn")
        .float("qwen3.rope.scaling.factor", 4.0)
        .int("qwen3.rope.scaling.original_context_length", 64)
        .float("qwen3.rope.scaling.attn_factor", 1.0)
        .f32("blk.0.attn_q_norm.weight", &[32]);
    let model = open(&yarn);
    expect(model.config(), json!({"model_type": "qwen3", "head_dim": 32}));
    expect(
        &model.config()["rope_parameters"],
        json!({
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
            "attention_factor": 0.1 * 4f64.ln() + 1.0,
        }),
    );
    assert!(model.info("model.layers.0.self_attn.q_norm.weight").is_some());

    let yarn = yarn.float("qwen3.rope.scaling.yarn_attn_factor", 1.5);
    assert_eq!(open(&yarn).config()["rope_parameters"]["attention_factor"], 1.5);

    let linear = Gguf::model("qwen3")
        .text("qwen3.rope.scaling.type", "linear")
        .float("qwen3.rope.scaling.factor", 2.0);
    expect(&open(&linear).config()["rope_parameters"], json!({"rope_type": "linear", "factor": 2.0}));
}

#[test]
fn stacked_experts_are_split() {
    let gguf = Gguf::model("qwen3moe")
        .int("qwen3moe.expert_count", 3)
        .int("qwen3moe.expert_used_count", 2)
        .int("qwen3moe.expert_feed_forward_length", 8)
        .f32("blk.0.ffn_gate_inp.weight", &[3, 64])
        .f32("blk.0.ffn_gate_exps.weight", &[3, 8, 64])
        .tensor(
            "blk.0.ffn_down_exps.weight",
            &[3, 4, 32],
            8,
            (0..3 * 4 * 34).map(|i| (i % 120) as u8).collect(),
        );
    let model = open(&gguf);
    expect(
        model.config(),
        json!({
            "model_type": "qwen3_moe", "num_local_experts": 3, "num_experts": 3, "num_experts_per_tok": 2,
            "moe_intermediate_size": 8, "norm_topk_prob": true,
        }),
    );
    assert!(model.info("model.layers.0.mlp.gate.weight").is_some());
    let stack: Vec<f32> = (0..3)
        .flat_map(|expert| {
            let weight =
                model.weight(&format!("model.layers.0.mlp.experts.{expert}.gate_proj.weight")).unwrap();
            assert_eq!(weight.shape, [8, 64]);
            assert!(weight.mapped);
            weight.to_f32().unwrap()
        })
        .collect();
    let file = gguf.build();
    let bytes = f32_bytes(&stack);
    assert!(
        file.windows(bytes.len()).any(|window| window == bytes),
        "experts are slices of the stack, in order"
    );
    let down = model.weight("model.layers.0.mlp.experts.2.down_proj.weight").unwrap();
    assert_eq!((down.encoding, down.data.len()), (Encoding::Block(BlockType::Q8_0), 4 * 34));

    let specks =
        Gguf::model("qwen3moe").int("qwen3moe.expert_count", 3).f32("blk.1.ffn_up_exps.weight", &[3, 1, 4]);
    refuse(&specks.build(), &["blk.1.ffn_up_exps.weight", "16 bytes"]);
    let wrong = gguf.f32("blk.1.ffn_up_exps.weight", &[4, 8, 64]);
    refuse(&wrong.build(), &["blk.1.ffn_up_exps.weight", "expert_count"]);
}

#[test]
fn qwen35_declares_changed_conventions() {
    let base = || {
        Gguf::model("qwen35")
            .int("qwen35.ssm.group_count", 2)
            .int("qwen35.ssm.state_size", 16)
            .int("qwen35.ssm.inner_size", 64)
            .int("qwen35.ssm.conv_kernel", 4)
            .int("qwen35.attention.key_length", 32)
            .int("qwen35.attention.value_length", 32)
            .int("qwen35.rope.dimension_count", 8)
            .f32("blk.0.ssm_a", &[4])
            .f32("blk.0.ssm_dt.bias", &[4])
            .f32("blk.0.ssm_conv1d.weight", &[128, 4])
            .f32("blk.0.attn_qkv.weight", &[128, 64])
            .f32("blk.0.ssm_norm.weight", &[16])
    };
    let model = open(&base().int("qwen35.ssm.time_step_rank", 4).int("qwen35.full_attention_interval", 2));
    expect(
        model.config(),
        json!({
            "model_type": "qwen3_5_text", "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "head_dim": 32,
            "layer_types": ["linear_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
            "firebox": {
                "norm_weight_offset": 0.0, "a_log_negated_exp": true, "v_heads_tiled": true, "source": "gguf",
            },
        }),
    );
    assert_eq!(model.info("model.layers.0.linear_attn.conv1d.weight").unwrap().shape, [128, 1, 4]);
    for name in ["A_log", "dt_bias", "in_proj_qkv.weight", "norm.weight"] {
        assert!(model.info(&format!("model.layers.0.linear_attn.{name}")).is_some(), "{name}");
    }
    let equal = open(&base().int("qwen35.ssm.time_step_rank", 2));
    assert_eq!(equal.config()["firebox"]["v_heads_tiled"], false);

    let drafting = base()
        .int("qwen35.ssm.time_step_rank", 4)
        .int("qwen35.nextn_predict_layers", 1)
        .f32("blk.1.attn_norm.weight", &[64])
        .f32("blk.1.nextn.eh_proj.weight", &[64, 128]);
    let drafting = open(&drafting);
    assert_eq!(drafting.config()["num_hidden_layers"], 1);
    assert_eq!(drafting.info("mtp.fc.weight").unwrap().segment, SegmentId::Other);
    assert!(drafting.info("mtp.layers.0.input_layernorm.weight").is_some());
}

#[test]
fn gemma3_layers_alternate() {
    let gguf = Gguf::model("gemma3")
        .int("gemma3.attention.sliding_window", 16)
        .int("gemma3.attention.key_length", 32)
        .int("gemma3.attention.value_length", 32)
        .int("gemma3.attention.sliding_window_pattern", 2)
        .text("gemma3.rope.scaling.type", "linear")
        .float("gemma3.rope.scaling.factor", 8.0)
        .f32("blk.0.ffn_norm.weight", &[64])
        .f32("blk.0.post_ffw_norm.weight", &[64]);
    let model = open(&gguf);
    expect(
        model.config(),
        json!({
            "model_type": "gemma3_text", "sliding_window": 16, "query_pre_attn_scalar": 32,
            "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": null,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "firebox": {"norm_weight_offset": 0.0, "source": "gguf"},
        }),
    );
    assert!(model.info("model.layers.0.pre_feedforward_layernorm.weight").is_some());
    assert!(model.info("model.layers.0.post_feedforward_layernorm.weight").is_some());
}

#[test]
fn smollm3_phi3_and_bert() {
    let model = open(&Gguf::model("smollm3").int("smollm3.rope.dimension_count", 16));
    expect(
        model.config(),
        json!({"model_type": "smollm3", "no_rope_layers": [1, 1], "firebox": {"rope_interleaved": true, "source": "gguf"}}),
    );

    let phi3 = Gguf::model("phi3")
        .int("phi3.rope.dimension_count", 12)
        .int("phi3.attention.sliding_window", 0)
        .int("phi3.rope.scaling.original_context_length", 64)
        .float("phi3.rope.scaling.attn_factor", 1.25)
        .tensor("rope_factors_long.weight", &[2], 0, f32_bytes(&[2.0, 4.1]))
        .tensor("rope_factors_short.weight", &[2], 0, f32_bytes(&[1.0, 1.1]))
        .f32("blk.0.attn_qkv.weight", &[128, 64])
        .f32("blk.0.ffn_up.weight", &[192, 64]);
    let model = open(&phi3);
    expect(
        model.config(),
        json!({
            "model_type": "phi3", "sliding_window": null, "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope", "long_factor": [2.0, 4.1], "short_factor": [1.0, 1.1],
                "original_max_position_embeddings": 64, "attention_factor": 1.25, "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
            },
        }),
    );
    assert!(model.info("model.layers.0.self_attn.qkv_proj.weight").is_some());
    assert!(model.info("model.layers.0.mlp.gate_up_proj.weight").is_some());

    let bert = Gguf::model("bert")
        .float("bert.attention.layer_norm_epsilon", 1e-12)
        .int("bert.pooling_type", 1)
        .f32("token_types.weight", &[2, 64])
        .f32("token_embd_norm.bias", &[64])
        .f32("blk.0.attn_output_norm.weight", &[64]);
    let model = open(&bert);
    expect(
        model.config(),
        json!({
            "model_type": "bert", "layer_norm_eps": 1e-12, "type_vocab_size": 2, "hidden_act": "gelu",
            "firebox": {"pooling": "mean", "source": "gguf"},
        }),
    );
    let bert = || Gguf::model("bert").float("bert.attention.layer_norm_epsilon", 1e-12);
    for same in [bert(), bert().int("bert.pooling_type", 0)] {
        assert_eq!(open(&same).config()["firebox"]["pooling"], "mean");
    }
    for (number, name) in [(2, "first"), (3, "last")] {
        assert_eq!(open(&bert().int("bert.pooling_type", number)).config()["firebox"]["pooling"], name);
    }
    refuse(&bert().int("bert.pooling_type", 4).build(), &["bert.pooling_type", "not supported", "4", "mean"]);
    assert!(model.info("embeddings.LayerNorm.bias").is_some());
    assert!(model.info("encoder.layer.0.attention.output.LayerNorm.weight").is_some());
}

#[test]
fn encoders_keep_their_windows_bases_and_pooling() {
    let nomic = Gguf::model("nomic-bert")
        .float("nomic-bert.attention.layer_norm_epsilon", 1e-12)
        .int("nomic-bert.pooling_type", 1)
        .f32("token_types.weight", &[2, 64])
        .f32("blk.0.attn_qkv.weight", &[192, 64]);
    let model = open(&nomic);
    expect(
        model.config(),
        json!({
            "model_type": "nomic_bert", "type_vocab_size": 2, "hidden_act": "silu",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "firebox": {"pooling": "mean", "source": "gguf"},
        }),
    );
    assert!(model.info("encoder.layers.0.attn.Wqkv.weight").is_some());
    let modern = || {
        Gguf::model("modern-bert")
            .float("modern-bert.attention.layer_norm_epsilon", 1e-5)
            .int("modern-bert.attention.sliding_window", 128)
            .float("modern-bert.rope.freq_base_swa", 5000.0)
    };
    expect(
        open(&modern().int("modern-bert.pooling_type", 2)).config(),
        json!({
            "model_type": "modernbert", "norm_eps": 1e-5, "hidden_activation": "gelu", "local_attention": 128,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
            "firebox": {"pooling": "first", "source": "gguf"},
        }),
    );
    let refused = modern().int("modern-bert.pooling_type", 4).build();
    refuse(&refused, &["modern-bert.pooling_type", "not supported", "4"]);
    let gemma = Gguf::model("gemma-embedding").int("gemma-embedding.attention.sliding_window", 512);
    expect(
        open(&gemma).config(),
        json!({
            "model_type": "gemma3_text", "use_bidirectional_attention": true, "sliding_window": 512,
            "firebox": {"norm_weight_offset": 0.0, "pooling": "mean", "source": "gguf"},
        }),
    );
}

#[test]
fn messages_stay_short() {
    let long = "x".repeat(5000);
    let short = |gguf: Gguf, word: &str| {
        let error = Model::parse(&gguf.build()).err().unwrap().to_string();
        assert!(error.contains(word) && error.contains("xxx") && error.len() < 300, "{word}: {error}");
    };
    short(Gguf::new().text("general.architecture", &long), "general.architecture");
    short(Gguf::model("llama").text("llama.rope.scaling.type", &long), "rope.scaling.type");
    short(Gguf::model("llama").int(&long, 0).int(&long, 0), "given twice");
    short(Gguf::model("llama").f32(&long, &[8]).at(0).f32(&format!("{long}y"), &[8]).at(0), "overlaps");
}

fn vocabulary(gguf: Gguf) -> Gguf {
    gguf.text("tokenizer.ggml.model", "llama")
        .text("tokenizer.ggml.pre", "default")
        .texts("tokenizer.ggml.tokens", &["<unk>", "<s>", "</s>", "▁a"])
        .list("tokenizer.ggml.scores", 6, 4, &f32_bytes(&[0.0, 0.1, -1e-7, -1234.567]))
        .list("tokenizer.ggml.token_type", 5, 4, &[2, 0, 0, 0, 3, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0, 0])
        .texts("tokenizer.ggml.merges", &["▁ a"])
        .int("tokenizer.ggml.bos_token_id", 1)
        .int("tokenizer.ggml.eos_token_id", 2)
        .raw_key("tokenizer.ggml.padding_token_id", 5, &(-1i32).to_le_bytes())
        .int("tokenizer.ggml.unknown_token_id", 0)
        .flag("tokenizer.ggml.add_bos_token", true)
        .flag("tokenizer.ggml.add_space_prefix", false)
        .list("tokenizer.ggml.precompiled_charsmap", 0, 3, &[1, 2, 255])
        .text("tokenizer.chat_template", "{{ bos_token }}")
        .texts("tokenizer.chat_templates", &["tool_use", "rag"])
        .text("tokenizer.chat_template.tool_use", "{{ tools }}")
        .text("tokenizer.chat_template.rag", "{{ documents }}")
}

#[test]
fn the_vocabulary_and_the_sampling_survive_an_import() {
    let folder = tempdir().unwrap();
    let gguf = vocabulary(attention(Gguf::model("llama"), 1));
    let gguf = gguf.float("general.sampling.temp", 0.7).int("general.sampling.top_k", 20);
    let path = write(folder.path(), "m.gguf", &gguf.build());
    let model = Checkpoint::open(&path).unwrap();
    expect(model.config(), json!({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": null}));
    let bundle = folder.path().join("bundle");
    import(&path, &bundle, &Default::default(), &mut |_| ()).unwrap();
    let bundle = Checkpoint::open(bundle).unwrap();
    assert_eq!(bundle.config(), model.config());
    let sampling = json!({"temperature": 0.7, "top_k": 20, "do_sample": true});
    assert_eq!(open(&Gguf::model("llama")).text().generation_config, None);
    for text in [model.text(), bundle.text()] {
        assert_eq!(text.generation_config.as_ref(), Some(&sampling));
        assert_eq!(text.chat_template.as_deref(), Some("{{ bos_token }}"));
        assert_eq!(text.tools_template.as_deref(), Some("{{ tools }}"));
    }
    let read = |checkpoint: &Checkpoint| match &checkpoint.text().tokenizer {
        Some(TokenizerSource::Gguf(vocabulary)) => vocabulary.clone(),
        other => panic!("{other:?}"),
    };
    let vocabulary = read(&model);
    assert_eq!(vocabulary, read(&bundle));
    assert_eq!(vocabulary.tokens[3], "▁a");
    assert_eq!((vocabulary.bos, vocabulary.pad, vocabulary.unk), (Some(1), None, Some(0)));
    assert_eq!(vocabulary.precompiled_charsmap.as_deref(), Some([1, 2, 255].as_slice()));
    assert_eq!((vocabulary.add_bos, vocabulary.add_eos), (Some(true), None));
    for info in model.tensors() {
        let (a, b) = (model.weight(&info.name).unwrap(), bundle.weight(&info.name).unwrap());
        assert_eq!((a.data, a.shape, a.encoding), (b.data, b.shape, b.encoding), "{}", info.name);
    }
}

#[test]
fn damaged_vocabularies_are_refused() {
    let good = || Gguf::model("llama").text("tokenizer.ggml.model", "llama");
    refuse(&good().build(), &["tokenizer.ggml.tokens"]);
    let tokens = || good().texts("tokenizer.ggml.tokens", &["a", "b"]);
    for (gguf, word) in [
        (tokens().list("tokenizer.ggml.scores", 6, 1, &[0; 4]), "1 entries for 2 tokens"),
        (tokens().list("tokenizer.ggml.scores", 6, 2, &f32_bytes(&[0.0, f32::NAN])), "not a number"),
        (tokens().list("tokenizer.ggml.token_type", 5, 3, &[0; 12]), "3 entries for 2 tokens"),
        (tokens().int("tokenizer.ggml.eos_token_id", 2), "tokenizer.ggml.eos_token_id"),
        (tokens().text("tokenizer.ggml.eos_token_id", "2"), "expected a token id"),
        (tokens().int("tokenizer.ggml.add_bos_token", 1), "expected a truth value"),
        (tokens().text("tokenizer.ggml.merges", "a b"), "expected an array of strings"),
        (
            good().list("tokenizer.ggml.tokens", 8, 1, &[&1u64.to_le_bytes()[..], &[0xFF]].concat()),
            "not UTF-8",
        ),
    ] {
        refuse(&gguf.build(), &[word]);
    }
}

#[test]
fn damaged_configurations_are_refused() {
    let bare = || Gguf::new().text("general.architecture", "llama");
    for (gguf, word) in [
        (Gguf::new(), "general.architecture"),
        (Gguf::new().text("general.architecture", "mamba"), "\"mamba\""),
        (Gguf::new().int("general.architecture", 1), "expected a string"),
        (bare(), "llama.block_count"),
        (bare().int("llama.block_count", 0), "llama.block_count"),
        (bare().int("llama.block_count", 4_000_000_000), "llama.block_count"),
        (bare().float("llama.block_count", 2.0), "expected an integer"),
        (bare().int("llama.block_count", 1).int("llama.nextn_predict_layers", 1), "drafting"),
        (Gguf::model("llama").int("llama.expert_count", 8), "experts"),
        (Gguf::model("llama").text("llama.rope.scaling.type", "su"), "rope.scaling.type"),
        (Gguf::model("llama").text("llama.rope.scaling.type", "linear"), "rope.scaling.factor"),
        (Gguf::model("llama").int("llama.rope.dimension_count", 17), "rope.dimension_count"),
        (Gguf::model("llama").int("llama.attention.key_length", 0), "attention.key_length"),
        (Gguf::model("llama").int("\u{1b}[2J", 0).int("\u{1b}[2J", 0), "\\u{1b}[2J"),
        (Gguf::model("llama").int("split.count", 2), "split"),
        (Gguf::model("llama").f32("rope_freqs.weight", &[2, 2]), "expected a vector"),
        (Gguf::model("llama").tensor("rope_freqs.weight", &[1], 0, f32_bytes(&[f32::NAN])), "positive"),
        (Gguf::model("llama").tensor("rope_freqs.weight", &[2], 1, vec![0; 4]), "of F32"),
        (Gguf::model("phi3").text("phi3.rope.scaling.type", "longrope"), "rope_factors_long"),
        (Gguf::model("gemma3").int("gemma3.attention.sliding_window_pattern", 0), "sliding_window_pattern"),
        (Gguf::model("qwen35").int("qwen35.ssm.group_count", 0), "ssm.group_count"),
    ] {
        refuse(&gguf.build(), &[word]);
    }
    let no_embedding = Gguf::new().text("general.architecture", "llama").int("llama.block_count", 1);
    refuse(&no_embedding.build(), &["token_embd.weight"]);
}

#[test]
fn damaged_headers_are_refused() {
    let good = vocabulary(Gguf::model("llama")).build();
    let header = Header::parse(&good).unwrap();
    let end = header.entries.iter().map(|entry| entry.start + entry.len).max().unwrap();
    // The padding after the last tensor is not part of it.
    for length in 0..end {
        assert!(Model::parse(&good[..length]).is_err(), "{length}");
    }
    let with_version = |version: u32| {
        let mut gguf = Gguf::model("llama");
        gguf.version = version;
        gguf.build()
    };
    assert!(Model::parse(&with_version(2)).is_ok());
    refuse(&with_version(1), &["version", "not supported"]);
    refuse(&with_version(4), &["version", "4"]);
    refuse(&with_version(3u32.swap_bytes()), &["big-endian"]);
    refuse(b"GGUX", &["not a model"]);
    refuse(b"", &["empty"]);

    let counts = |tensors: u64, keys: u64| {
        [&b"GGUF\x03\0\0\0"[..], &tensors.to_le_bytes(), &keys.to_le_bytes(), &[0; 64]].concat()
    };
    for bytes in [counts(u64::MAX, 0), counts(3, 0)] {
        refuse(&bytes, &["tensor_count"]);
    }
    for bytes in [counts(0, u64::MAX), counts(0, 1 << 60), counts(0, 5)] {
        refuse(&bytes, &["metadata_kv_count"]);
    }
    let text = |length: u64, bytes: &[u8]| [&length.to_le_bytes()[..], bytes].concat();
    let nested = |depth: usize| {
        let mut value = Vec::new();
        for _ in 0..depth {
            value.extend(9u32.to_le_bytes());
            value.extend(1u64.to_le_bytes());
        }
        value.extend(0u32.to_le_bytes());
        value.extend(0u64.to_le_bytes());
        value
    };
    for (kind, value, word) in [
        (8, text(u64::MAX, b""), "counts"),
        (8, text(1 << 40, b"x"), "counts"),
        (8, text(2, &[0xC3, 0x28]), "not UTF-8"),
        (7, vec![2], "truth value of 2"),
        (13, vec![], "value type 13"),
        (9, [&13u32.to_le_bytes()[..], &0u64.to_le_bytes()].concat(), "array type 13"),
        (9, [&4u32.to_le_bytes()[..], &u64::MAX.to_le_bytes()].concat(), "counts"),
        (9, [&8u32.to_le_bytes()[..], &(1u64 << 61).to_le_bytes()].concat(), "counts"),
        (9, [&9u32.to_le_bytes()[..], &(1u64 << 61).to_le_bytes()].concat(), "counts"),
        (9, [&12u32.to_le_bytes()[..], &(1u64 << 61).to_le_bytes()].concat(), "counts"),
        (9, nested(5), "deep"),
        (9, nested(100_000), "deep"),
    ] {
        refuse(&Gguf::model("llama").raw_key("key", kind, &value).build(), &["key", word]);
    }
    assert!(Model::parse(&Gguf::model("llama").raw_key("key", 9, &nested(3)).build()).is_ok());
    refuse(&Gguf::model("llama").raw_key("", 7, &[0]).build(), &["metadata key"]);
    refuse(&Gguf::model("llama").int("a", 1).int("a", 1).build(), &["a", "given twice"]);
    for alignment in [0, 3, 24] {
        let gguf = Gguf::model("llama").int("general.alignment", alignment);
        refuse(&gguf.build(), &["general.alignment", "power of two"]);
    }
    let mut wide = Gguf::model("llama").int("general.alignment", 4096);
    wide.alignment = 4096;
    assert!(Model::parse(&wide.build()).is_ok());
    refuse(
        &Gguf::model("llama").raw_key("general.alignment", 10, &(1u64 << 63).to_le_bytes()).build(),
        &["offset"],
    );
}

#[test]
fn damaged_tensor_tables_are_refused() {
    let model = || Gguf::model("llama");
    let zeros = |count: usize| vec![0; count];
    for (gguf, word) in [
        (model().tensor("x", &[], 0, zeros(0)), "dimensions"),
        (model().tensor("x", &[1, 1, 1, 1, 1], 0, zeros(4)), "dimensions"),
        (model().tensor("x", &[4, 0], 0, zeros(0)), "dimensions"),
        (model().tensor("x", &[u64::MAX], 0, zeros(4)), "address space"),
        (model().tensor("x", &[1 << 32, 1 << 32], 0, zeros(4)), "address space"),
        (model().tensor("x", &[1 << 62], 8, zeros(34)), "cut short"),
        (model().tensor("x", &[2, 33], 8, zeros(68)), "multiple of 32"),
        (model().tensor("x", &[2, 128], 12, zeros(288)), "multiple of 256"),
        (model().tensor("x", &[256], 40, zeros(84)), "NVFP4"),
        (model().tensor("x", &[256], 4, zeros(84)), "unknown"),
        (model().tensor("x", &[256], u32::MAX, zeros(84)), "unknown"),
        (model().tensor("x", &[8], 0, zeros(32)).at(0), "overlaps"),
        (model().tensor("x", &[8], 0, zeros(32)).at(8192), "overlaps"),
        (model().tensor("x", &[8], 0, zeros(32)).at(u64::MAX), "alignment"),
        (model().tensor("x", &[8], 0, zeros(32)).at(u64::MAX - 31), "cut short"),
        (model().tensor("x", &[8], 0, zeros(32)).at(1 << 40), "cut short"),
        (model().tensor("x", &[8], 0, zeros(32)).at(9), "alignment"),
        (model().tensor("output_norm.weight", &[64], 0, zeros(256)), "listed twice"),
        (model().tensor("", &[8], 0, zeros(32)), "tensor name"),
    ] {
        refuse(&gguf.build(), &[word]);
    }
    let mut bytes = model().tensor("xyzzy", &[8], 0, zeros(32)).build();
    let at = bytes.windows(5).position(|window| window == b"xyzzy").unwrap();
    bytes[at] = 0xFF;
    refuse(&bytes, &["not UTF-8"]);
    // Two GGUF names that translate to one Hugging Face name.
    let twice =
        model().f32("blk.0.attn_norm.weight", &[4]).f32("model.layers.0.input_layernorm.weight", &[4]);
    refuse(&twice.build(), &["stored twice"]);
}
