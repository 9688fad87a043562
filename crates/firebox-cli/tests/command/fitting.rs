//! A test that a process stays within the memory it is given, and the model it is made with.

use std::collections::HashMap;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::TensorView;

use crate::args;
use crate::support::*;

const LAYERS: usize = 12;
const HIDDEN: usize = 512;
const INNER: usize = 2048;
pub const VOCABULARY: usize = 16_000;

/// A model of 120 MB whose weights say nothing.
pub fn model(folder: &Path) {
    model_of(folder, LAYERS, 7);
}

/// One of so many layers of 8 MB, beside the 16 of its embedding.
pub fn model_of(folder: &Path, layers: usize, seed: u64) {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": layers,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": true
    });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let mut shapes = vec![
        ("model.embed_tokens.weight".to_owned(), vec![VOCABULARY, HIDDEN]),
        ("model.norm.weight".to_owned(), vec![HIDDEN]),
    ];
    for layer in 0..layers {
        for (name, shape) in [
            ("input_layernorm", vec![HIDDEN]),
            ("post_attention_layernorm", vec![HIDDEN]),
            ("self_attn.q_proj", vec![512, HIDDEN]),
            ("self_attn.k_proj", vec![256, HIDDEN]),
            ("self_attn.v_proj", vec![256, HIDDEN]),
            ("self_attn.o_proj", vec![HIDDEN, 512]),
            ("mlp.gate_proj", vec![INNER, HIDDEN]),
            ("mlp.up_proj", vec![INNER, HIDDEN]),
            ("mlp.down_proj", vec![HIDDEN, INNER]),
        ] {
            shapes.push((format!("model.layers.{layer}.{name}.weight"), shape));
        }
    }
    let mut state = seed;
    // Numbers of bf16 between 2⁻⁸ and 2⁻⁶ of either sign, and ones for norms.
    let mut number = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let bits = (state >> 40) as u16;
        (0x3b80 | bits & 0x807f) + (bits >> 8 & 1) * 0x80
    };
    let data: HashMap<String, (Vec<usize>, Vec<u8>)> = shapes
        .into_iter()
        .map(|(name, shape)| {
            let count: usize = shape.iter().product();
            let is_norm = shape.len() == 1;
            let bytes =
                (0..count).flat_map(|_| if is_norm { 0x3f80 } else { number() }.to_le_bytes()).collect();
            (name, (shape, bytes))
        })
        .collect();
    let tensors = data
        .iter()
        .map(|(name, (shape, bytes))| (name, TensorView::new(Dtype::BF16, shape.clone(), bytes).unwrap()));
    safetensors::serialize_to_file(tensors, None, &folder.join("model.safetensors")).unwrap();
}

/// The promise of `--memory`: the whole process stays within it, and says the same.
#[cfg(target_os = "linux")]
#[test]
fn a_process_takes_no_more_memory_than_it_is_given() {
    let folder = tempfile::tempdir().unwrap();
    model(folder.path());
    let ids: Vec<String> = (0..300).map(|at| (at * 7919 % VOCABULARY).to_string()).collect();
    let ids = ids.join(",");
    let run = |more: &[&str]| {
        let all = args!["run", folder.path(), "--ids", &ids, "-n", "24", "--temp", "0", "--json"];
        let all = all.into_iter().chain(more.iter().map(Into::into));
        let json = firebox_with(all).ends_with(0).json();
        (json["tokens"].clone(), json["peak_rss_mib"].as_f64().unwrap())
    };
    let (tokens, plain) = run(&[]);
    assert!(plain > 120.0, "{plain}");
    let mut peaks = Vec::new();
    for (memory, mode) in
        [("150M", "throughput"), ("180M", "balanced"), ("220M", "balanced"), ("400M", "context")]
    {
        let (found, peak) = run(&["--memory", memory, "--mode", mode]);
        assert_eq!(found, tokens, "{memory}");
        let most: f64 = memory.trim_end_matches('M').parse().unwrap();
        assert!(peak <= most, "{peak} MiB of {most}");
        peaks.push(peak);
    }
    assert!(peaks[0] < plain && peaks[0] < peaks[3], "more memory is used where there is more: {peaks:?}");
    let ran = firebox_with(args!["run", folder.path(), "--ids", &ids, "--memory", "60M"]);
    ran.fails(UNUSABLE, &["60 MiB", "too little"]);
}
