//! Stacks of experts that a directory stores as one tensor, divided into a tensor for each matrix.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::encoding::{Dtype, Encoding};
use crate::error::Fault;
use crate::packed::{PackedTensor, Stored};
use crate::parts::Parts;
use crate::segment::SegmentId;
use crate::tensor_index::{Place, Span, TensorInfo};

type Tensor = (TensorInfo, Place);

/// Families that may store all experts of a layer as `gate_up_proj` and `down_proj` of three dimensions.
const STACKED: [&str; 11] = [
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "glm4_moe",
    "glm4_moe_lite",
    "deepseek_v3",
    "granitemoe",
    "granitemoehybrid",
    "gemma4",
    "gemma4_text",
];

/// The family whose stacks lie as `[experts, inputs, outputs]` or in MXFP4, with a stack of biases for each. Its matrices are named
/// without `.weight` while they lie as `[inputs, outputs]`.
const TRANSPOSED: &str = "gpt_oss";

/// The smallest size of an expert's matrix. Each becomes a tensor of its own: without this bound and that of the name,
/// the names of tiny experts would take many times the file's size.
const MIN_EXPERT: usize = 64;

/// The longest name of a stack of experts.
const MAX_NAME: usize = 256;

/// More experts than any model has.
const MAX_EXPERTS: usize = 65_536;

/// Families that are published with a tensor for each matrix of an expert, whatever else they may store.
const PUBLISHED_APART: [&str; 5] = ["qwen3_moe", "qwen3_next", "glm4_moe", "glm4_moe_lite", "deepseek_v3"];

/// Returns whether a family with experts is published with stacks of them.
pub(crate) fn is_published_stacked(config: &Value) -> bool {
    !PUBLISHED_APART.contains(&family(config))
}

/// Returns the tensors of a directory with one for each matrix.
pub(crate) fn divide(
    config: &Value,
    tensors: Vec<Tensor>,
    packed: &mut BTreeMap<String, PackedTensor>,
) -> Result<Vec<Tensor>, Fault> {
    let family = family(config);
    if !STACKED.contains(&family) && family != TRANSPOSED {
        return Ok(tensors);
    }
    let mut divided = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        match family {
            TRANSPOSED => divide_transposed(tensor, packed, &mut divided)?,
            _ => divide_stack(tensor, &mut divided)?,
        }
    }
    Ok(divided)
}

fn family(config: &Value) -> &str {
    config.get("model_type").and_then(Value::as_str).unwrap_or_default()
}

/// Has matrices of experts that lie as `[inputs, outputs]` transposed when they are read.
pub(crate) fn turn(parts: &mut Parts) {
    if family(&parts.config) != TRANSPOSED {
        return;
    }
    for (info, place) in &mut parts.tensors {
        let (Encoding::Plain(dtype @ (Dtype::F32 | Dtype::F16 | Dtype::BF16)), &[inputs, outputs]) =
            (info.encoding, &info.shape[..])
        else {
            continue;
        };
        let of_expert = info.name.rsplit_once(".experts.").and_then(|(_, name)| name.split_once('.'));
        if of_expert.is_some_and(|(_, projection)| ["gate_up_proj", "down_proj"].contains(&projection)) {
            let stored = Stored { span: place.data, dtype, shape: vec![inputs, outputs] };
            info.name.push_str(".weight");
            info.shape = vec![outputs, inputs];
            parts.packed.insert(info.name.clone(), PackedTensor::transposed(stored, [inputs, outputs]));
        }
    }
}

/// Adds a tensor, or those of every expert if it is a stack of matrices that lie as `[inputs, outputs]` or are packed, or of biases.
fn divide_transposed(
    (info, place): Tensor,
    packed: &mut BTreeMap<String, PackedTensor>,
    tensors: &mut Vec<Tensor>,
) -> Result<(), Fault> {
    let (prefix, part, rank) = match info.name.rsplit_once(".experts.") {
        Some((prefix, part @ ("gate_up_proj" | "down_proj"))) => (prefix, part, 3),
        Some((prefix, "gate_up_proj_bias")) => (prefix, "gate_up_proj.bias", 2),
        Some((prefix, "down_proj_bias")) => (prefix, "down_proj.bias", 2),
        _ => {
            tensors.push((info, place));
            return Ok(());
        }
    };
    let (Some((&experts, shape)), true) = (info.shape.split_first(), info.shape.len() == rank) else {
        let reason = format!("{:?}; expected {rank} dimensions, the first of them experts", info.shape);
        return Err(Fault::new(format!("tensor {:?}: shape", info.name), reason));
    };
    let len = expert_bytes(&info, experts, place.data.len)?;
    let mut add =
        |expert: usize, part: &str, shape: &[usize], encoding: Encoding, start: usize, bytes: u64| {
            let name = format!("{prefix}.experts.{expert}.{part}");
            let segment = SegmentId::from_tensor_name(&name);
            let info = TensorInfo { segment, name: name.clone(), shape: shape.into(), encoding, bytes };
            tensors.push((info, Place { data: Span { start, len, ..place.data }, scales: None }));
            name
        };
    match packed.remove(&info.name) {
        Some(stack) => {
            let part = format!("{part}.weight");
            for (expert, packed_expert) in stack.experts().into_iter().enumerate() {
                let (spans, encoding) = (packed_expert.spans(), packed_expert.encoding());
                let bytes = spans.iter().map(|span| span.len as u64).sum();
                let name = add(expert, &part, &packed_expert.shape, encoding, spans[0].start, bytes);
                packed.insert(name, packed_expert);
            }
        }
        None => {
            for expert in 0..experts {
                add(expert, part, shape, info.encoding, place.data.start + expert * len, len as u64);
            }
        }
    }
    Ok(())
}

/// Checks a stack of experts that takes so many bytes, and returns the bytes of each.
fn expert_bytes(info: &TensorInfo, experts: usize, bytes: usize) -> Result<usize, Fault> {
    let fault = |reason: String| Fault::new(format!("tensor {:?}: shape", info.name), reason);
    if experts == 0 || experts > MAX_EXPERTS {
        return Err(fault(format!("{:?}; expected 1 to {MAX_EXPERTS} experts", info.shape)));
    }
    if info.name.len() > MAX_NAME {
        return Err(fault(format!("a name of {} bytes; expected up to {MAX_NAME}", info.name.len())));
    }
    let len = bytes / experts;
    if len < MIN_EXPERT {
        return Err(fault(format!("experts of {len} bytes; expected {MIN_EXPERT} or more")));
    }
    let Encoding::Plain(_) = info.encoding else {
        return Err(fault(format!("a stack of experts in {}", info.encoding)));
    };
    Ok(len)
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
    if rows % parts != 0 {
        return Err(fault(format!("{:?}; expected rows for {}", info.shape, projections.join(" and "))));
    }
    // The tensor lies within the file, and its matrices are equal parts of it.
    let len = expert_bytes(&info, experts, place.data.len / parts)?;
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
        let found = divide(&json!({"model_type": "qwen3_5_moe"}), stack, &mut BTreeMap::new()).unwrap();
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
            let config = json!({"model_type": "qwen3_moe"});
            assert!(divide(&config, stack, &mut BTreeMap::new()).is_err(), "{name}");
        }
    }

    #[test]
    fn transposed_stacks_and_biases_become_tensors_for_each() {
        let name = "model.layers.3.mlp.experts.";
        let stacks = [("gate_up_proj", &[2, 16, 8][..]), ("gate_up_proj_bias", &[2, 20])];
        let stacks = stacks.map(|(end, shape)| tensor(&format!("{name}{end}"), shape));
        let found = divide(&json!({"model_type": "gpt_oss"}), stacks.to_vec(), &mut BTreeMap::new()).unwrap();
        let found = found.into_iter().map(|(info, place)| (info.name, info.shape, place.data.start));
        let expected = [
            ("0.gate_up_proj", vec![16, 8], 1000),
            ("1.gate_up_proj", vec![16, 8], 1000 + 512),
            ("0.gate_up_proj.bias", vec![20], 1000),
            ("1.gate_up_proj.bias", vec![20], 1000 + 80),
        ];
        let expected = expected.map(|(end, shape, start)| (format!("{name}{end}"), shape, start));
        assert_eq!(found.collect::<Vec<_>>(), expected);
        let flat = vec![tensor(&format!("{name}down_proj"), &[2, 64])];
        assert!(divide(&json!({"model_type": "gpt_oss"}), flat, &mut BTreeMap::new()).is_err());
    }
}
