//! Names of a directory's tensors that are not the usual ones of its family: those of a family that names its parts otherwise
//! than all others, and those from before the library it was made with renamed its own.

use serde_json::Value;

use crate::segment::SegmentId;
use crate::tensor_index::{Place, TensorInfo};

/// Beginnings of names of Mistral 3, and what they became.
const MISTRAL3: [(&str, &str); 4] = [
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head.", "lm_head."),
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
];

/// Parts of names of LFM2 behind the layer's number, and the usual ones.
const LFM2: [(&str, &str); 9] = [
    (".feed_forward.", ".mlp."),
    (".w1.", ".gate_proj."),
    (".w3.", ".up_proj."),
    (".w2.", ".down_proj."),
    (".self_attn.out_proj.", ".self_attn.o_proj."),
    (".self_attn.q_layernorm.", ".self_attn.q_norm."),
    (".self_attn.k_layernorm.", ".self_attn.k_norm."),
    (".operator_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
];

/// Parts of names of Granite's mixtures behind the layer's number, and the usual ones.
const GRANITE: [(&str, &str); 3] = [
    (".block_sparse_moe.router.layer.", ".mlp.gate."),
    (".block_sparse_moe.input_linear.", ".mlp.experts.gate_up_proj."),
    (".block_sparse_moe.output_linear.", ".mlp.experts.down_proj."),
];

/// Parts of names of Nemotron's mixtures behind the layer's number, and the usual ones.
const NEMOTRON: [(&str, &str); 3] = [
    (".mixer.gate.", ".mlp.gate."),
    (".mixer.experts.", ".mlp.experts."),
    (".mixer.shared_experts.", ".mlp.shared_experts."),
];

/// Returns whether the names of a family's directories are other than the usual ones.
pub(crate) fn has_own(config: &Value) -> bool {
    let family = config.get("model_type").and_then(Value::as_str).unwrap_or_default();
    ["lfm2", "lfm2_moe", "granitemoe", "granitemoehybrid", "nemotron_h"].contains(&family)
}

/// Gives tensors their usual names. Scales and other parts of packed tensors are renamed with them.
pub(crate) fn rename(config: &Value, tensors: &mut [(TensorInfo, Place)]) {
    // Saved without the head that continues text, as models are that embed it.
    if tensors.iter().any(|(info, _)| info.name == "embed_tokens.weight") {
        rename_all(tensors, |name| (!name.starts_with("lm_head.")).then(|| format!("model.{name}")));
    }
    match config.get("model_type").and_then(Value::as_str) {
        Some("mistral3") => rename_all(tensors, |name| {
            let (old, new) = MISTRAL3.iter().find(|(old, _)| name.starts_with(old))?;
            Some(name.replacen(old, new, 1))
        }),
        Some("gpt2") if tensors.iter().any(|(info, _)| info.name == "wte.weight") => {
            rename_all(tensors, |name| {
                (!name.starts_with("lm_head.")).then(|| format!("transformer.{name}"))
            });
        }
        Some("lfm2" | "lfm2_moe") => rename_all(tensors, |name| {
            if let Some(part) = name.strip_prefix("model.embedding_norm.") {
                return Some(format!("model.norm.{part}"));
            }
            usual(name, &LFM2)
        }),
        Some("granitemoe" | "granitemoehybrid") => rename_all(tensors, |name| usual(name, &GRANITE)),
        Some("nemotron_h") => rename_all(tensors, |name| usual(name, &NEMOTRON)),
        Some("gemma4" | "gemma4_text") => rename_all(tensors, |name| {
            let own = name.contains(".layers.") && !name.contains(".mlp.");
            own.then(|| name.replace(".experts.", ".mlp.experts."))
        }),
        _ => {}
    }
}

/// Returns a layer's name with its own parts replaced by the usual ones.
fn usual(name: &str, parts: &[(&str, &str)]) -> Option<String> {
    let replaced = |name: String, (own, usual): &(&str, &str)| name.replace(own, usual);
    name.contains(".layers.").then(|| parts.iter().fold(name.to_owned(), replaced))
}

fn rename_all(tensors: &mut [(TensorInfo, Place)], new: impl Fn(&str) -> Option<String>) {
    for (info, _) in tensors {
        if let Some(name) = new(&info.name) {
            info.segment = SegmentId::from_tensor_name(&name);
            info.name = name;
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::encoding::{Dtype, Encoding};
    use crate::tensor_index::Span;

    #[test]
    fn own_names_are_translated_within_layers() {
        let names = [
            (
                "lfm2_moe",
                "model.layers.1.feed_forward.experts.4.w2.weight",
                "model.layers.1.mlp.experts.4.down_proj.weight",
            ),
            ("lfm2_moe", "model.layers.1.feed_forward.w1.scales", "model.layers.1.mlp.gate_proj.scales"),
            (
                "lfm2_moe",
                "model.layers.1.self_attn.out_proj.weight",
                "model.layers.1.self_attn.o_proj.weight",
            ),
            ("lfm2_moe", "model.layers.1.conv.out_proj.weight", "model.layers.1.conv.out_proj.weight"),
            ("lfm2_moe", "model.embedding_norm.weight", "model.norm.weight"),
            (
                "granitemoe",
                "model.layers.1.block_sparse_moe.input_linear.weight",
                "model.layers.1.mlp.experts.gate_up_proj.weight",
            ),
            (
                "granitemoehybrid",
                "model.layers.1.block_sparse_moe.router.layer.weight",
                "model.layers.1.mlp.gate.weight",
            ),
        ];
        for (family, own, usual) in names {
            let info = TensorInfo {
                segment: SegmentId::from_tensor_name(own),
                name: own.into(),
                shape: vec![4, 4],
                encoding: Encoding::Plain(Dtype::F32),
                bytes: 64,
            };
            let place = Place { data: Span { file: 0, start: 0, len: 64 }, scales: None };
            let mut tensors = [(info, place)];
            rename(&json!({"model_type": family}), &mut tensors);
            assert_eq!(tensors[0].0.name, usual);
            assert_eq!(tensors[0].0.segment, SegmentId::from_tensor_name(usual));
        }
    }
}
