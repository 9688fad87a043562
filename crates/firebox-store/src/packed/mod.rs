//! Packed weights of safetensors models: FP8 and integers with scales, as `compressed-tensors`, AWQ, GPTQ, MLX, gpt-oss and
//! `bitsandbytes` store them.
//!
//! `config.json` names the scheme. Several stored tensors make up one of the model's; [importing](crate::import()) unpacks
//! them, row by row.

mod layout;
mod scheme;
mod tensor;
mod view;

use std::collections::BTreeMap;

use serde_json::Value;

use self::layout::Layout;
use self::scheme::Packing;
pub(crate) use self::tensor::{PackedTensor, Stored};
use crate::encoding::Encoding;
use crate::error::Fault;
use crate::mapping::Mapping;
use crate::segment::SegmentId;
use crate::tensor_index::{Place, TensorInfo};

/// Keys of `config.json` that say how weights are packed.
pub(crate) const CONFIG_KEYS: [&str; 2] = ["quantization_config", "quantization"];

/// Replaces the stored tensors of packed weights by the weights, and returns those by name.
pub(crate) fn find(
    config: &Value,
    files: &[Mapping],
    tensors: &mut Vec<(TensorInfo, Place)>,
) -> Result<BTreeMap<String, PackedTensor>, Fault> {
    let Some(packing) = Packing::of(config)? else { return Ok(BTreeMap::new()) };
    let stored = tensors.iter().filter_map(|(info, place)| {
        let Encoding::Plain(dtype) = info.encoding else { return None };
        Some((info.name.clone(), Stored { span: place.data, dtype, shape: info.shape.clone() }))
    });
    let mut layout = Layout { stored: stored.collect(), files, packing };
    let found = layout.take_all()?;
    if found.is_empty() {
        return Ok(BTreeMap::new());
    }
    tensors.retain(|(info, _)| layout.stored.contains_key(&info.name));
    for (name, packed) in &found {
        let spans = packed.spans();
        let info = TensorInfo {
            segment: SegmentId::from_tensor_name(name),
            name: name.clone(),
            shape: packed.shape.clone(),
            encoding: Encoding::Plain(packed.dtype),
            bytes: spans.iter().map(|span| span.len as u64).sum(),
        };
        // Only the first is a place of its own: reading the tensor unpacks it.
        tensors.extend(spans.first().map(|span| (info, Place { data: *span, scales: None })));
    }
    Ok(found.into_iter().collect())
}
