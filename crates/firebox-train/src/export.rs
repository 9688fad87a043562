//! What was trained, as models and heads that run.

use std::collections::BTreeMap;
use std::path::Path;

use firebox_model::{HeadForm, Tower, Trained};
use firebox_store::{Checkpoint, Dtype, Encoding, HeadFiles, NewHead, TensorInfo, encode, is_quantized};
use safetensors::tensor::TensorView;
use serde_json::Value;

use crate::error::TrainError;

/// Writes a whole model to a new directory as Hugging Face has them, in f32. `config` is its `config.json`.
pub fn export_model(tower: &Tower, config: &Value, folder: impl AsRef<Path>) -> Result<(), TrainError> {
    let folder = folder.as_ref();
    std::fs::create_dir_all(folder).map_err(|error| TrainError::io(folder, "create", error))?;
    let trained = tower.trained().map_err(TrainError::network)?;
    let bytes: BTreeMap<&str, Vec<u8>> = trained
        .iter()
        .map(|tensor| (tensor.name.as_str(), bytemuck::cast_slice(&tensor.values).to_vec()))
        .collect();
    let path = folder.join("model.safetensors");
    let views = trained.iter().map(|Trained { name, shape, .. }| {
        let view = TensorView::new(safetensors::Dtype::F32, shape.clone(), &bytes[name.as_str()]);
        view.map(|view| (name, view))
    });
    let malformed = |error: safetensors::SafeTensorError| TrainError::malformed(&path, error.to_string());
    let views = views.collect::<Result<Vec<_>, _>>().map_err(malformed)?;
    safetensors::serialize_to_file(views, None, &path).map_err(malformed)?;
    let path = folder.join("config.json");
    let text =
        serde_json::to_string_pretty(config).map_err(|error| TrainError::io(&path, "write", error.into()))?;
    std::fs::write(&path, text + "\n").map_err(|error| TrainError::io(&path, "write", error))
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
    // Vectors are few, and what they scale is much.
    let plain = Encoding::Plain(if shape.len() < 2 { Dtype::F32 } else { dtype });
    let info = TensorInfo {
        name: name.to_owned(),
        shape: shape.to_vec(),
        encoding: plain,
        segment: firebox_store::SegmentId::of(name),
        bytes: 0,
    };
    match trunk.quantization() {
        Some(quantization) if is_quantized(&info) => Encoding::Grouped(quantization),
        _ => plain,
    }
}
