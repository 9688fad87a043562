//! Names that published files have from before the library they were made with named their tensors otherwise.

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

/// Gives tensors the names that newer files of the same family have.
pub(crate) fn renew(config: &Value, tensors: &mut [(TensorInfo, Place)]) {
    match config.get("model_type").and_then(Value::as_str) {
        Some("mistral3") => rename(tensors, |name| {
            let (old, new) = MISTRAL3.iter().find(|(old, _)| name.starts_with(old))?;
            Some(name.replacen(old, new, 1))
        }),
        Some("gpt2") if tensors.iter().any(|(info, _)| info.name == "wte.weight") => {
            rename(tensors, |name| (!name.starts_with("lm_head.")).then(|| format!("transformer.{name}")));
        }
        _ => {}
    }
}

fn rename(tensors: &mut [(TensorInfo, Place)], new: impl Fn(&str) -> Option<String>) {
    for (info, _) in tensors {
        if let Some(name) = new(&info.name) {
            info.segment = SegmentId::from_tensor_name(&name);
            info.name = name;
        }
    }
}
