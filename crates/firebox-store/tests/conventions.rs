//! GGUF files: conventions that converters follow for some models only.
#![allow(clippy::unwrap_used, reason = "a test that fails here should say so")]

mod support;

use serde_json::json;
use support::{Gguf, expect, open, refuse};

#[test]
fn feed_forward_biases_are_detected() {
    for architecture in ["llama", "smollm3"] {
        assert_eq!(open(&Gguf::model(architecture)).config()["mlp_bias"], false);
        for projection in ["gate", "up", "down"] {
            let name = format!("blk.1.ffn_{projection}.bias");
            let model = open(&Gguf::model(architecture).f32(&name, &[64]));
            assert_eq!(model.config()["mlp_bias"], true, "{architecture} {projection}");
        }
    }
}

#[test]
fn qwen_windows() {
    const WINDOW: &str = "attention.sliding_window";
    const PATTERN: &str = "attention.sliding_window_pattern";
    let (full, sliding) = ("full_attention", "sliding_attention");
    for architecture in ["qwen2", "qwen3"] {
        let key = |name: &str| format!("{architecture}.{name}");
        let windowed = |window| Gguf::model(architecture).int(&key(WINDOW), window);
        let off = json!({"use_sliding_window": false, "sliding_window": null, "layer_types": [full, full]});
        expect(open(&Gguf::model(architecture)).config(), off.clone());
        expect(open(&windowed(0).list(&key(PATTERN), 7, 2, &[1, 1])).config(), off);
        let on =
            |types: [&str; 2]| json!({"use_sliding_window": true, "sliding_window": 7, "layer_types": types});
        expect(open(&windowed(7)).config(), on([sliding, sliding]));
        expect(open(&windowed(7).list(&key(PATTERN), 7, 2, &[0, 1])).config(), on([full, sliding]));
        expect(open(&windowed(7).int(&key(PATTERN), 2)).config(), on([sliding, full]));
        let short = windowed(7).list(&key(PATTERN), 7, 1, &[1]);
        refuse(&short.build(), &["sliding_window_pattern", "1 entries for 2 layers"]);
    }
    let experts = || {
        Gguf::model("qwen3moe")
            .int("qwen3moe.expert_count", 3)
            .int("qwen3moe.expert_used_count", 2)
            .int("qwen3moe.expert_feed_forward_length", 8)
    };
    let off = json!({"use_sliding_window": false, "sliding_window": null});
    let on = json!({"use_sliding_window": true, "sliding_window": 7});
    let windowed = || experts().int("qwen3moe.attention.sliding_window", 7);
    let patterned = |bytes: &[u8; 2]| windowed().list(&format!("qwen3moe.{PATTERN}"), 7, 2, bytes);
    expect(open(&experts()).config(), off.clone());
    expect(open(&windowed()).config(), on.clone());
    expect(open(&patterned(&[1, 1])).config(), on);
    expect(open(&patterned(&[0, 0])).config(), off);
    refuse(&patterned(&[0, 1]).build(), &["sliding_window_pattern", "not supported", "1 of 2 layers"]);
}

#[test]
fn gemma3_scales_are_reconstructed_exactly() {
    let scalar = |scale: f32| {
        let model = open(&Gguf::model("gemma3").float("gemma3.attention.scale", scale));
        model.config()["query_pre_attn_scalar"].clone()
    };
    for whole in [1u32, 16, 40, 168, 256, 65_537] {
        assert_eq!(scalar(f64::from(whole).powf(-0.5) as f32), json!(whole));
    }
    // Every scale in this list reproduces itself, whether or not it came from an integer.
    for step in 0..200 {
        let scale = 0.001 * 1.05f32.powi(step);
        let back = scalar(scale).as_f64().unwrap().powf(-0.5) as f32;
        assert_eq!(back.to_bits(), scale.to_bits(), "{scale}");
    }
    assert_eq!(open(&Gguf::model("gemma3")).config()["query_pre_attn_scalar"], 16);
    for bad in [0.0, -0.5, 1e-40] {
        refuse(
            &Gguf::model("gemma3").float("gemma3.attention.scale", bad).build(),
            &["gemma3.attention.scale"],
        );
    }
}
