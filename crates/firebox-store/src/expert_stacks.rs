//! Stacks of experts that a directory stores as one tensor, divided into a tensor for each matrix.

use serde_json::Value;

use crate::encoding::Encoding;
use crate::error::Fault;
use crate::segment::SegmentId;
use crate::tensor_index::{Place, Span, TensorInfo};

type Tensor = (TensorInfo, Place);

/// Families that may store all experts of a layer as `gate_up_proj` and `down_proj` of three dimensions.
const STACKED: [&str; 5] = ["qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text", "glm4_moe"];

/// The smallest size of an expert's matrix. Each becomes a tensor of its own: without this bound and that of the name,
/// the names of tiny experts would take many times the file's size.
const MIN_EXPERT: usize = 64;

/// The longest name of a stack of experts.
const MAX_NAME: usize = 256;

/// More experts than any model has.
const MAX_EXPERTS: usize = 65_536;

/// Returns the tensors of a directory with one for each matrix.
pub(crate) fn divide(config: &Value, tensors: Vec<Tensor>) -> Result<Vec<Tensor>, Fault> {
    let family = config.get("model_type").and_then(Value::as_str).unwrap_or_default();
    if !STACKED.contains(&family) {
        return Ok(tensors);
    }
    let mut divided = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        divide_stack(tensor, &mut divided)?;
    }
    Ok(divided)
}

/// Adds a tensor, or the matrices of every expert if it is a stack of them.
fn divide_stack((info, place): Tensor, tensors: &mut Vec<Tensor>) -> Result<(), Fault> {
    let name = info.name.strip_suffix(".weight").unwrap_or(&info.name);
    let (prefix, projections): (_, &[&str]) = match name.rsplit_once(".experts.") {
        Some((prefix, "gate_up_proj")) => (prefix, &["gate_proj", "up_proj"]),
        Some((prefix, "down_proj")) => (prefix, &["down_proj"]),
        _ => {
            tensors.push((info, place));
            return Ok(());
        }
    };
    let fault = |reason: String| Fault::new(format!("tensor {:?}: shape", info.name), reason);
    let [experts, rows, inputs] = *info.shape else {
        return Err(fault(format!("{:?}; expected [experts, outputs, inputs]", info.shape)));
    };
    let parts = projections.len();
    if experts == 0 || experts > MAX_EXPERTS || rows % parts != 0 {
        return Err(fault(format!(
            "{:?}; expected 1 to {MAX_EXPERTS} experts, and rows for {}",
            info.shape,
            projections.join(" and ")
        )));
    }
    // The tensor lies within the file, and its matrices are equal parts of it.
    let len = place.data.len / experts / parts;
    if info.name.len() > MAX_NAME {
        return Err(fault(format!("a name of {} bytes; expected up to {MAX_NAME}", info.name.len())));
    }
    if len < MIN_EXPERT {
        return Err(fault(format!("experts of {len} bytes; expected {MIN_EXPERT} or more")));
    }
    let Encoding::Plain(_) = info.encoding else {
        return Err(fault(format!("a stack of experts in {}", info.encoding)));
    };
    for expert in 0..experts {
        for (part, projection) in projections.iter().enumerate() {
            let name = format!("{prefix}.experts.{expert}.{projection}.weight");
            let matrix = TensorInfo {
                segment: SegmentId::from_tensor_name(&name),
                name,
                shape: vec![rows / parts, inputs],
                encoding: info.encoding,
                bytes: len as u64,
            };
            let start = place.data.start + (expert * parts + part) * len;
            tensors.push((matrix, Place { data: Span { start, len, ..place.data }, scales: None }));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::encoding::Dtype;

    fn tensor(name: &str, shape: &[usize]) -> Tensor {
        let len = 4 * shape.iter().product::<usize>();
        let info = TensorInfo {
            segment: SegmentId::from_tensor_name(name),
            name: name.into(),
            shape: shape.into(),
            encoding: Encoding::Plain(Dtype::F32),
            bytes: len as u64,
        };
        (info, Place { data: Span { file: 2, start: 1000, len }, scales: None })
    }

    #[test]
    fn a_stack_of_experts_becomes_a_matrix_for_each() {
        let name = "model.language_model.layers.3.mlp.experts.";
        let stack = vec![
            tensor(&format!("{name}gate_up_proj"), &[3, 8, 16]),
            tensor(&format!("{name}down_proj"), &[3, 16, 4]),
        ];
        let found = divide(&json!({"model_type": "qwen3_5_moe"}), stack).unwrap();
        assert_eq!(found.len(), 9);
        let start = |name: &str| {
            let (info, place) = found.iter().find(|(info, _)| info.name == name).unwrap();
            assert_eq!((place.data.file, info.segment), (2, SegmentId::Layer(3)));
            (info.shape.clone(), place.data.start, place.data.len)
        };
        assert_eq!(start(&format!("{name}0.gate_proj.weight")), (vec![4, 16], 1000, 256));
        assert_eq!(start(&format!("{name}1.up_proj.weight")), (vec![4, 16], 1000 + 3 * 256, 256));
        assert_eq!(start(&format!("{name}2.down_proj.weight")), (vec![16, 4], 1000 + 2 * 256, 256));
    }

    #[test]
    fn a_stack_that_cannot_be_divided_is_refused() {
        for (name, shape) in [("gate_up_proj", vec![3, 7, 16]), ("down_proj", vec![3, 16])] {
            let stack = vec![tensor(&format!("model.layers.0.mlp.experts.{name}"), &shape)];
            assert!(divide(&json!({"model_type": "qwen3_moe"}), stack).is_err(), "{name}");
        }
    }
}
