//! Export of trained networks as models and heads.

use std::path::Path;

use firebox_model::{HeadForm, Tower, Trained};
use firebox_store::{
    Checkpoint, Dtype, Encoding, HeadFiles, NewHead, SegmentId, TensorInfo, Tensors as _, encode,
    is_quantized,
};
use safetensors::tensor::TensorView;
use serde_json::Value;

use crate::error::TrainError;
use crate::files::{create_folder, write_bytes, write_text};
use crate::peft::{Adapter, AdapterPair};

/// Writes a whole model to a new directory as Hugging Face has them, its matrices in `dtype`. `config` is its `config.json`.
pub fn export_model(
    tower: &Tower,
    config: &Value,
    dtype: Dtype,
    folder: impl AsRef<Path>,
) -> Result<(), TrainError> {
    let folder = folder.as_ref();
    create_folder(folder)?;
    let path = folder.join("model.safetensors");
    let malformed = |error: safetensors::SafeTensorError| TrainError::malformed(&path, error.to_string());
    let mut weights = Vec::new();
    for Trained { name, shape, values } in tower.trained().map_err(TrainError::network)? {
        weights.push(encode(&name, &values, &shape, plain(&shape, dtype))?);
    }
    let views = weights.iter().map(|weight| {
        let dtype = match weight.encoding {
            Encoding::Plain(Dtype::F16) => safetensors::Dtype::F16,
            Encoding::Plain(Dtype::BF16) => safetensors::Dtype::BF16,
            Encoding::Plain(Dtype::F64) => safetensors::Dtype::F64,
            _ => safetensors::Dtype::F32,
        };
        Ok((&weight.name, TensorView::new(dtype, weight.shape.clone(), &weight.data)?))
    });
    let views = views.collect::<Result<Vec<_>, _>>().map_err(malformed)?;
    // As PyTorch's own programs mark their files, without which some refuse them.
    let about = [("format".to_owned(), "pt".to_owned())].into();
    write_bytes(&path, &safetensors::serialize(views, Some(about)).map_err(malformed)?)?;
    let path = folder.join("config.json");
    let text =
        serde_json::to_string_pretty(config).map_err(|error| TrainError::io(&path, "write", error.into()))?;
    write_text(&path, &(text + "\n"))
}

/// Vectors are few, and what they scale is much.
fn plain(shape: &[usize], dtype: Dtype) -> Encoding {
    Encoding::Plain(if shape.len() < 2 { Dtype::F32 } else { dtype })
}

/// Writes a head to a new directory. Its matrices are quantized as the trunk's are, so that nothing is quantized twice
/// on the way across; without quantization they are written in `dtype`.
pub fn export_head(
    tower: &Tower,
    form: &HeadForm,
    trunk: &Checkpoint,
    dtype: Dtype,
    folder: impl AsRef<Path>,
) -> Result<HeadFiles, TrainError> {
    let folder = folder.as_ref();
    let spec = serde_json::to_value(form).map_err(|error| TrainError::io(folder, "write", error.into()))?;
    let mut head = NewHead::new(trunk, tower.first(), spec)?;
    for Trained { name, shape, values } in tower.trained().map_err(TrainError::network)? {
        head.push(encode(&name, &values, &shape, encoding(&name, &shape, trunk, dtype))?)?;
    }
    Ok(head.write(folder)?)
}

fn encoding(name: &str, shape: &[usize], trunk: &Checkpoint, dtype: Dtype) -> Encoding {
    let plain = plain(shape, dtype);
    let info = TensorInfo {
        name: name.to_owned(),
        shape: shape.to_vec(),
        encoding: plain,
        segment: SegmentId::from_tensor_name(name),
        bytes: 0,
    };
    match trunk.quantization() {
        Some(quantization) if is_quantized(&info) => Encoding::Grouped(quantization),
        _ => plain,
    }
}

/// Writes a head anew for the same model in other numbers, which is another trunk: its matrices are quantized as those of
/// `model` are. It has not learnt what that does to the hidden states which it reads, so it is worth a measurement.
pub fn rebind_head(
    head: &HeadFiles,
    model: &Checkpoint,
    folder: impl AsRef<Path>,
) -> Result<HeadFiles, TrainError> {
    let mut bound = NewHead::new(model, head.split(), head.spec().clone())?;
    for info in head.tensors() {
        let values = head.weight(&info.name)?.to_f32()?;
        let dtype = match info.encoding {
            Encoding::Plain(dtype) => dtype,
            _ => Dtype::F16,
        };
        let encoding = encoding(&info.name, &info.shape, model, dtype);
        bound.push(encode(&info.name, &values, &info.shape, encoding)?)?;
    }
    Ok(bound.write(folder)?)
}

/// Writes the last layers of a model as a head that computes what the model itself does: a head to change to and from.
/// Returns `None` if the model has no more layers than that.
pub fn cut_head(
    model: &Checkpoint,
    layers: usize,
    folder: impl AsRef<Path>,
) -> Result<Option<HeadFiles>, TrainError> {
    let folder = folder.as_ref();
    let segments = model.segments();
    let all = segments.iter().filter(|segment| matches!(segment.id, SegmentId::Layer(_))).count();
    let Some(split) = all.checked_sub(layers).filter(|split| *split > 0 && layers > 0) else {
        return Ok(None);
    };
    let spec = serde_json::to_value(HeadForm::Blocks)
        .map_err(|error| TrainError::io(folder, "write", error.into()))?;
    let mut head = NewHead::new(model, split, spec)?;
    let own = |id: SegmentId| matches!(id, SegmentId::Layer(layer) if layer >= split);
    for segment in segments.iter().filter(|segment| own(segment.id)) {
        for name in &segment.tensors {
            head.push(model.weight(name)?)?;
        }
    }
    Ok(Some(head.write(folder)?))
}

/// Writes an adapter as a head, over the layers from the first that it changes on, to a new directory.
pub fn export_adapter(
    adapter: &Adapter,
    trunk: &Checkpoint,
    folder: impl AsRef<Path>,
) -> Result<HeadFiles, TrainError> {
    let folder = folder.as_ref();
    let layer = |pair: &AdapterPair| match SegmentId::from_tensor_name(&pair.module) {
        SegmentId::Layer(layer) => Some(layer),
        _ => None,
    };
    let mut first = None;
    for pair in &adapter.pairs {
        let Some(layer) = layer(pair) else {
            return Err(TrainError::AdapterUnsupported {
                file: folder.to_owned(),
                field: pair.module.clone(),
                value: "adapted".into(),
                reason: "heads change layers, and neither embeddings nor the unembedding",
            });
        };
        first = Some(first.map_or(layer, |first: usize| first.min(layer)));
    }
    let form = HeadForm::Adapter { scale: adapter.scale };
    let spec = serde_json::to_value(&form).map_err(|error| TrainError::io(folder, "write", error.into()))?;
    let mut head = NewHead::new(trunk, first.unwrap_or(0), spec)?;
    for pair in &adapter.pairs {
        let shapes = [[adapter.rank, pair.inputs(adapter.rank)], [pair.outputs(adapter.rank), adapter.rank]];
        for ((end, values), shape) in [("A", &pair.a), ("B", &pair.b)].into_iter().zip(shapes) {
            let name = format!("{}.lora_{end}.weight", pair.module);
            head.push(encode(&name, values, &shape, Encoding::Plain(Dtype::F32))?)?;
        }
    }
    Ok(head.write(folder)?)
}

/// The adapter that a head is; nothing if it is of another form. `base_model` is what it is to say that it is for.
pub fn adapter_of(head: &HeadFiles, base_model: &str) -> Result<Option<Adapter>, TrainError> {
    let Ok(HeadForm::Adapter { scale }) = serde_json::from_value(head.spec().clone()) else {
        return Ok(None);
    };
    let mut adapter = Adapter { rank: 0, scale, base_model: base_model.to_owned(), pairs: Vec::new() };
    for info in head.tensors() {
        let Some(module) = info.name.strip_suffix(".lora_A.weight") else { continue };
        adapter.rank = info.shape.first().copied().unwrap_or(0);
        let b = head.weight(&format!("{module}.lora_B.weight"))?.to_f32()?;
        let a = head.weight(&info.name)?.to_f32()?;
        adapter.pairs.push(AdapterPair { module: module.to_owned(), a, b });
    }
    Ok(Some(adapter))
}
