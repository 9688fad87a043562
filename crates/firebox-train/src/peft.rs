//! Low-rank adapters in the directories of the `peft` package.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use firebox_store::files;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Map, Value, json};

use crate::error::TrainError;
use crate::files::{create_folder, write_bytes, write_text};

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
/// The prefix that `peft` puts before the names of a model's modules.
const PREFIX: &str = "base_model.model.";
const A: &str = ".lora_A.weight";
const B: &str = ".lora_B.weight";

/// Settings that change what an adapter computes in ways that are not supported, unless they are off. Settings that are
/// in neither this list nor read below are about how the adapter was trained.
const UNSUPPORTED: [&str; 15] = [
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "layer_replication",
    "rank_pattern",
    "alpha_pattern",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
];

/// Values of `init_lora_weights` that leave the model's own weights as they are. Others, as `pissa`, take from them what
/// they put into the adapter.
const PLAIN_BEGINNINGS: [&str; 3] = ["gaussian", "eva", "orthogonal"];

/// A low-rank adapter: to the output of each of its modules it adds `scale · B(A x)`.
#[derive(Debug, Clone, PartialEq)]
pub struct Adapter {
    /// The rank.
    pub rank: usize,
    /// The factor of the product: `lora_alpha / r`, or `lora_alpha / √r` for rank-stabilised adapters.
    pub scale: f32,
    /// The model it was made for, as the directory names it. It may be empty.
    pub base_model: String,
    /// Its matrices, in the order of their modules' names.
    pub pairs: Vec<AdapterPair>,
}

/// The matrices for one module.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterPair {
    /// The module's name in the checkpoint, as `model.layers.0.self_attn.q_proj`.
    pub module: String,
    /// `[rank, inputs]`, row after row.
    pub a: Vec<f32>,
    /// `[outputs, rank]`, row after row.
    pub b: Vec<f32>,
}

impl AdapterPair {
    /// The width of the module's input.
    pub fn inputs(&self, rank: usize) -> usize {
        self.a.len() / rank.max(1)
    }

    /// The width of its output.
    pub fn outputs(&self, rank: usize) -> usize {
        self.b.len() / rank.max(1)
    }
}

impl Adapter {
    /// Reads a directory with `adapter_config.json` and `adapter_model.safetensors`.
    pub fn read(folder: impl AsRef<Path>) -> Result<Self, TrainError> {
        let path = folder.as_ref().join(CONFIG);
        let text = files::read_to_string(&path).map_err(|error| TrainError::io(&path, "read", error))?;
        let config: Map<String, Value> =
            serde_json::from_str(&text).map_err(|error| TrainError::malformed(&path, error.to_string()))?;
        let (rank, scale) = rank_and_scale(&config, &path)?;
        let base_model = config.get("base_model_name_or_path").and_then(Value::as_str);

        let path = folder.as_ref().join(WEIGHTS);
        let bytes = files::read(&path).map_err(|error| TrainError::io(&path, "read", error))?;
        let pairs = pairs(&bytes, rank, &path)?;
        Ok(Self { rank, scale, base_model: base_model.unwrap_or_default().to_owned(), pairs })
    }

    /// Writes such a directory, in f32.
    pub fn write(&self, folder: impl AsRef<Path>) -> Result<(), TrainError> {
        let folder = folder.as_ref();
        create_folder(folder)?;
        let mut tensors = BTreeMap::new();
        let path = folder.join(WEIGHTS);
        for pair in &self.pairs {
            let AdapterPair { module, a, b } = pair;
            let (inputs, outputs) = (pair.inputs(self.rank), pair.outputs(self.rank));
            for (suffix, shape, values) in [(A, vec![self.rank, inputs], a), (B, vec![outputs, self.rank], b)]
            {
                let view = TensorView::new(Dtype::F32, shape, bytemuck::cast_slice(values));
                let view =
                    view.map_err(|error| TrainError::malformed(&path, format!("{module}{suffix}: {error}")))?;
                tensors.insert(format!("{PREFIX}{module}{suffix}"), view);
            }
        }
        let metadata = [("format".to_owned(), "pt".to_owned())].into();
        let bytes = safetensors::serialize(tensors, Some(metadata))
            .map_err(|error| TrainError::malformed(&path, error.to_string()))?;
        write_bytes(&path, &bytes)?;
        let config = serde_json::to_string_pretty(&self.config())
            .map_err(|error| TrainError::malformed(&path, error.to_string()))?;
        write_text(&folder.join(CONFIG), &config)
    }

    fn config(&self) -> Value {
        let (modules, layers) = self.targets();
        json!({
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base_model,
            "r": self.rank,
            "lora_alpha": f64::from(self.scale) * self.rank as f64,
            "use_rslora": false,
            "lora_dropout": 0.0,
            "bias": "none",
            "inference_mode": true,
            "target_modules": modules,
            "layers_to_transform": layers,
        })
    }

    /// The modules as `peft` is told of them: kinds and layers where every kind is adapted in every one of those layers,
    /// and otherwise all names.
    fn targets(&self) -> (BTreeSet<String>, Option<BTreeSet<usize>>) {
        let (mut kinds, mut layers) = (BTreeSet::new(), BTreeSet::new());
        for pair in &self.pairs {
            let parts: Vec<&str> = pair.module.split('.').collect();
            let layer = parts.iter().position(|part| part.parse::<usize>().is_ok());
            let Some(layer) = layer.filter(|at| at + 1 < parts.len()) else {
                return (self.pairs.iter().map(|pair| pair.module.clone()).collect(), None);
            };
            layers.extend(parts[layer].parse::<usize>());
            kinds.insert(parts[layer + 1..].join("."));
        }
        if kinds.len() * layers.len() == self.pairs.len() {
            return (kinds, Some(layers));
        }
        (self.pairs.iter().map(|pair| pair.module.clone()).collect(), None)
    }
}

fn rank_and_scale(config: &Map<String, Value>, path: &Path) -> Result<(usize, f32), TrainError> {
    let unsupported = |field: &str, reason| {
        let value = config.get(field).map_or_else(|| "missing".into(), Value::to_string);
        TrainError::AdapterUnsupported { file: path.to_owned(), field: field.into(), value, reason }
    };
    let text = |field: &str| config.get(field).and_then(Value::as_str);
    if text("peft_type") != Some("LORA") {
        return Err(unsupported("peft_type", "only LORA is"));
    }
    if text("task_type").is_some_and(|task| task != "CAUSAL_LM") {
        return Err(unsupported("task_type", "only CAUSAL_LM is"));
    }
    if text("bias").is_some_and(|bias| bias != "none") {
        return Err(unsupported("bias", "train without biases (\"none\")"));
    }
    if let Some(field) = UNSUPPORTED.iter().find(|field| config.get(**field).is_some_and(is_on)) {
        return Err(unsupported(field, "merge the adapter into its model, or train without it"));
    }
    if let Some(Value::String(initial)) = config.get("init_lora_weights")
        && !PLAIN_BEGINNINGS.contains(&initial.as_str())
    {
        let reason = "it may change the model's own weights; save it with peft's path_initial_model_for_weight_conversion";
        return Err(unsupported("init_lora_weights", reason));
    }
    let wrong = |field, reason: &str| TrainError::malformed(path, format!("{field}: {reason}"));
    let rank = config.get("r").and_then(Value::as_u64).filter(|rank| (1..=1 << 16).contains(rank));
    let rank = rank.ok_or_else(|| wrong("r", "it has to be a rank"))? as usize;
    let alpha = config.get("lora_alpha").and_then(Value::as_f64);
    let alpha = alpha.ok_or_else(|| wrong("lora_alpha", "it has to be a number"))?;
    let divisor = match config.get("use_rslora").is_some_and(is_on) {
        true => (rank as f64).sqrt(),
        false => rank as f64,
    };
    Ok((rank, (alpha / divisor) as f32))
}

fn is_on(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(on) => *on,
        Value::Array(list) => !list.is_empty(),
        Value::Object(map) => !map.is_empty(),
        _ => true,
    }
}

fn pairs(bytes: &[u8], rank: usize, path: &Path) -> Result<Vec<AdapterPair>, TrainError> {
    let wrong = |name: &str, reason: String| TrainError::malformed(path, format!("{name}: {reason}"));
    let file = SafeTensors::deserialize(bytes).map_err(|error| wrong("header", error.to_string()))?;
    let mut found: BTreeMap<String, [Option<Vec<f32>>; 2]> = BTreeMap::new();
    for (name, tensor) in file.iter() {
        let short = name.strip_prefix(PREFIX).unwrap_or(name);
        let (module, side) = match (short.strip_suffix(A), short.strip_suffix(B)) {
            (Some(module), _) => (module, 0),
            (_, Some(module)) => (module, 1),
            _ => {
                return Err(TrainError::AdapterUnsupported {
                    file: path.to_owned(),
                    field: name.to_owned(),
                    value: format!("{} {:?}", tensor.dtype(), tensor.shape()),
                    reason: "only the lora_A and lora_B of linear layers are",
                });
            }
        };
        let ranks = match tensor.shape() {
            [first, second] => [*first, *second][side],
            _ => 0,
        };
        if ranks != rank {
            return Err(wrong(name, format!("its shape is {:?}, but r is {rank}", tensor.shape())));
        }
        let values = numbers(&tensor).ok_or_else(|| TrainError::AdapterUnsupported {
            file: path.to_owned(),
            field: name.to_owned(),
            value: tensor.dtype().to_string(),
            reason: "F32, F16 and BF16 are",
        })?;
        found.entry(module.to_owned()).or_default()[side] = Some(values);
    }
    if found.is_empty() {
        return Err(wrong("tensors", "there are none".into()));
    }
    let paired = found.into_iter().map(|(module, sides)| match sides {
        [Some(a), Some(b)] => Ok(AdapterPair { module, a, b }),
        _ => Err(wrong(&module, "it has one of lora_A and lora_B without the other".into())),
    });
    paired.collect()
}

/// The numbers of a tensor, whose bytes may lie anywhere.
fn numbers(tensor: &TensorView<'_>) -> Option<Vec<f32>> {
    let data = tensor.data();
    match tensor.dtype() {
        Dtype::F32 => Some(bytemuck::pod_collect_to_vec(data)),
        Dtype::F16 => Some(bytemuck::pod_collect_to_vec::<u8, f16>(data).to_f32_vec()),
        Dtype::BF16 => Some(bytemuck::pod_collect_to_vec::<u8, bf16>(data).to_f32_vec()),
        _ => None,
    }
}

/// Returns whether a folder has the files of an adapter.
pub fn is_adapter(folder: impl AsRef<Path>) -> bool {
    let files: [PathBuf; 2] = [CONFIG, WEIGHTS].map(|name| folder.as_ref().join(name));
    files.iter().all(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn adapter(modules: &[&str]) -> Adapter {
        let pair = |(number, module): (usize, &&str)| AdapterPair {
            module: (*module).to_owned(),
            a: (0..2 * 3).map(|value| (value + number) as f32).collect(),
            b: (0..4 * 2).map(|value| value as f32 / 8.0).collect(),
        };
        let pairs = modules.iter().enumerate().map(pair).collect();
        Adapter { rank: 2, scale: 1.5, base_model: "m".into(), pairs }
    }

    #[test]
    fn what_is_written_is_read() {
        let folder = tempfile::tempdir().unwrap();
        for (modules, kinds, layers) in [
            (&["model.layers.1.mlp.up_proj", "model.layers.2.mlp.up_proj"][..], 1, Some(2)),
            (&["model.layers.1.mlp.up_proj", "model.layers.2.self_attn.q_proj"], 2, None),
            (&["lm_head", "model.layers.2.self_attn.q_proj"], 2, None),
        ] {
            let adapter = adapter(modules);
            let (named, in_layers) = adapter.targets();
            assert_eq!((named.len(), in_layers.map(|layers| layers.len())), (kinds, layers));
            adapter.write(folder.path()).unwrap();
            assert!(is_adapter(folder.path()));
            assert_eq!(Adapter::read(folder.path()).unwrap(), adapter);
        }
    }

    #[test]
    fn what_is_not_supported_is_named() {
        let folder = tempfile::tempdir().unwrap();
        adapter(&["model.layers.1.mlp.up_proj"]).write(folder.path()).unwrap();
        let path = folder.path().join(CONFIG);
        let config: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        let read = |field: &str, value: Value| {
            let mut config = config.clone();
            config[field] = value;
            fs::write(&path, config.to_string()).unwrap();
            Adapter::read(folder.path())
        };
        for (field, value) in [
            ("use_dora", json!(true)),
            ("modules_to_save", json!(["lm_head"])),
            ("rank_pattern", json!({"q_proj": 4})),
            ("peft_type", json!("IA3")),
            ("task_type", json!("SEQ_CLS")),
            ("bias", json!("all")),
            ("init_lora_weights", json!("pissa_niter_4")),
        ] {
            let error = read(field, value).unwrap_err();
            assert!(matches!(error, TrainError::AdapterUnsupported { .. }), "{error}");
            assert!(error.to_string().contains(field), "{error}");
        }
        for (field, value) in [("r", json!(0)), ("r", json!(3)), ("lora_alpha", Value::Null)] {
            assert!(matches!(read(field, value), Err(TrainError::Malformed { .. })), "{field}");
        }
        assert_eq!(read("use_rslora", json!(true)).unwrap().scale, (3.0 / 2f64.sqrt()) as f32);
        assert_eq!(read("modules_to_save", Value::Null).unwrap().scale, 1.5);
        let weights = folder.path().join(WEIGHTS);
        let bytes = fs::read(&weights).unwrap();
        fs::write(&weights, &bytes[..bytes.len() - 1]).unwrap();
        assert!(Adapter::read(folder.path()).is_err());
    }
}
