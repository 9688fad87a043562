//! How the states of a text's tokens become its vector, as the files of sentence-transformers or the metadata of a GGUF
//! file say.

use std::io::ErrorKind;
use std::num::NonZero;
use std::path::{Component, Path};
use std::sync::{Arc, OnceLock};

use burn::tensor::{Device, Tensor};
use firebox_model::{DenseLayer, Pooling, of_length_one};
use firebox_store::{Checkpoint, StoreError, files};
use serde_json::{Map, Value};

use crate::RuntimeError;
use crate::readback::read_floats;

/// Options of embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EmbedOptions {
    /// Whether to scale every vector to length one, so that dot products are cosines.
    pub normalize: bool,
    /// How the states of tokens become one vector; `None` for what the checkpoint recommends, or the mean.
    pub pooling: Option<Pooling>,
    /// The most elements of a vector, which keeps its first ones; `None` for all. Models that are trained for it lose little.
    pub dimensions: Option<NonZero<usize>>,
}

impl Default for EmbedOptions {
    fn default() -> Self {
        Self { normalize: true, pooling: None, dimensions: None }
    }
}

/// What a checkpoint has behind its network.
#[derive(Debug)]
pub(crate) struct Modules {
    /// Kinds and folders of the modules that `modules.json` lists.
    listed: Vec<(String, String)>,
    dense: Vec<DenseLayer>,
    width: usize,
    /// The pooling that the checkpoint recommends, once it has been read.
    recommended: OnceLock<Option<Pooling>>,
}

/// Pools states into one vector, and takes that through dense layers.
#[derive(Debug)]
pub(crate) struct Readout {
    pooling: Pooling,
    modules: Arc<Modules>,
    options: EmbedOptions,
}

impl Readout {
    /// Pools as asked for, or else as the checkpoint recommends.
    pub fn new(
        checkpoint: &Checkpoint,
        modules: Arc<Modules>,
        options: EmbedOptions,
    ) -> Result<Self, RuntimeError> {
        modules.check(checkpoint)?;
        let pooling = match options.pooling {
            Some(pooling) => pooling,
            None => modules.recommended(checkpoint)?.unwrap_or_default(),
        };
        Ok(Self { pooling, modules, options })
    }

    /// Returns the vector of a text from the states of its tokens, `[tokens, hidden_size]`.
    pub fn vector(&self, states: Tensor<2>) -> Result<Vec<f32>, RuntimeError> {
        let pooled = self.pooling.pool(states);
        let vector = self.modules.dense.iter().fold(pooled, |vector, layer| layer.forward(vector));
        let vector = match self.options.dimensions {
            Some(most) if most.get() < vector.dims()[0] => vector.narrow(0, 0, most.get()),
            _ => vector,
        };
        read_floats(if self.options.normalize { of_length_one(vector) } else { vector })
    }
}

impl Modules {
    /// Reads the modules, and the dense layers behind the pooling of states of `hidden_size` numbers.
    pub fn read(checkpoint: &Checkpoint, hidden_size: usize, device: &Device) -> Result<Self, RuntimeError> {
        let listed = listed(checkpoint)?;
        let mut dense = DenseLayer::beside_encoder(checkpoint, device)?;
        for (kind, folder) in &listed {
            if kind == "Dense" {
                let folder = Checkpoint::open(checkpoint.path().join(folder))?;
                dense.push(DenseLayer::load(&folder, device)?);
            }
        }
        let mut width = hidden_size;
        for layer in &dense {
            if layer.inputs() != width {
                let reason = format!("{}, but {width} numbers come in", layer.inputs());
                return Err(malformed(checkpoint.path(), "in_features", reason));
            }
            width = layer.outputs();
        }
        Ok(Self { listed, dense, width, recommended: OnceLock::new() })
    }

    /// Returns the number of elements of vectors.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Refuses modules that would change the vectors and are not supported.
    fn check(&self, checkpoint: &Checkpoint) -> Result<(), RuntimeError> {
        // In the order in which they may stand.
        const KNOWN: [&str; 5] = ["Transformer", "Pooling", "Dense", "Normalize", "Dropout"];
        const DROPOUT: usize = KNOWN.len() - 1;
        let path = checkpoint.path().join("modules.json");
        let mut places = Vec::new();
        for (kind, _) in &self.listed {
            match KNOWN.iter().position(|known| known == kind) {
                // It drops nothing outside of training.
                Some(DROPOUT) => {}
                Some(place) => places.push(place),
                None => {
                    return Err(malformed(
                        &path,
                        "type",
                        format!("{kind:?} is none of {}", KNOWN.join(", ")),
                    ));
                }
            }
        }
        if places.is_sorted() {
            return Ok(());
        }
        Err(malformed(
            &path,
            "type",
            format!("modules stand in another order than {}", KNOWN[..DROPOUT].join(", ")),
        ))
    }

    /// Returns the pooling that the checkpoint recommends. Another pooling would give wrong vectors without an error.
    fn recommended(&self, checkpoint: &Checkpoint) -> Result<Option<Pooling>, RuntimeError> {
        if let Some(recommended) = self.recommended.get() {
            return Ok(*recommended);
        }
        let listed = self.listed.iter().find(|(kind, _)| kind == "Pooling");
        let folder = listed.map_or("1_Pooling", |(_, folder)| folder);
        let recommended = recommended(checkpoint, folder)?;
        Ok(*self.recommended.get_or_init(|| recommended))
    }
}

/// Returns the kinds and folders of the modules that `modules.json` lists, if there is one.
fn listed(checkpoint: &Checkpoint) -> Result<Vec<(String, String)>, RuntimeError> {
    let path = checkpoint.path().join("modules.json");
    let Some(listed) = read_json::<Vec<Value>>(&path)? else { return Ok(Vec::new()) };
    let module = |module: &Value| {
        let (kind, folder) = (module["type"].as_str()?.rsplit('.').next()?, module["path"].as_str()?);
        let is_below = Path::new(folder).components().all(|part| matches!(part, Component::Normal(_)));
        is_below.then(|| (kind.to_owned(), folder.to_owned()))
    };
    let wrong = || {
        let reason = "and `path` should be a class and a folder of the model in every module";
        malformed(&path, "type", reason.into())
    };
    listed.iter().map(|listed| module(listed).ok_or_else(wrong)).collect()
}

/// Returns the pooling that the checkpoint recommends, or the folder of its pooling.
fn recommended(checkpoint: &Checkpoint, folder: &str) -> Result<Option<Pooling>, RuntimeError> {
    match checkpoint.config()["firebox"]["pooling"].as_str() {
        None => {}
        Some("mean") => return Ok(Some(Pooling::Mean)),
        Some("first") => return Ok(Some(Pooling::First)),
        Some("last") => return Ok(Some(Pooling::Last)),
        Some(name) => {
            let reason = format!("{name:?} is none of mean, first and last");
            return Err(malformed(checkpoint.path(), "firebox.pooling", reason));
        }
    }
    let path = checkpoint.path().join(folder).join("config.json");
    let Some(said) = read_json::<Map<String, Value>>(&path)? else { return Ok(None) };
    let is_on = |(name, value): &(&String, &Value)| {
        name.starts_with("pooling_mode_") && value.as_bool() == Some(true)
    };
    // Newer files name the mode, or list several; older ones have a flag for each.
    let on: Vec<&str> = match said.get("pooling_mode") {
        Some(Value::Array(modes)) => modes.iter().filter_map(Value::as_str).collect(),
        Some(mode) => mode.as_str().into_iter().collect(),
        None => said.iter().filter(is_on).map(|(name, _)| name.as_str()).collect(),
    };
    match on[..] {
        [] => Ok(None),
        ["cls" | "pooling_mode_cls_token"] => Ok(Some(Pooling::First)),
        ["lasttoken" | "pooling_mode_lasttoken"] => Ok(Some(Pooling::Last)),
        ["mean" | "pooling_mode_mean_tokens"] => Ok(Some(Pooling::Mean)),
        _ => {
            let modes = on.join(" with ");
            let reason =
                format!("{modes} is not supported; say with which pooling to go on, the mean for example");
            Err(malformed(
                &path,
                if said.contains_key("pooling_mode") { "pooling_mode" } else { on[0] },
                reason,
            ))
        }
    }
}

/// Reads a file of JSON beside the weights, if there is one.
fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<Option<T>, RuntimeError> {
    match files::read(path) {
        Ok(file) => match serde_json::from_slice(&file) {
            Ok(json) => Ok(Some(json)),
            Err(error) => Err(malformed(path, "JSON", error.to_string())),
        },
        // A GGUF file is not a folder.
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(None),
        Err(error) => Err(StoreError::io(path, "read", error).into()),
    }
}

fn malformed(file: &Path, field: &str, reason: String) -> RuntimeError {
    StoreError::Malformed { file: file.to_owned(), field: field.into(), reason }.into()
}
