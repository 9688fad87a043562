//! The weights of the replay's models.

use std::f64::consts::TAU;
use std::path::Path;

use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use super::arithmetic::{FeedForward, Matrix, Norm};
use super::attention::{Attention, Rope};
use super::delta::Delta;

/// The weights of a decoder.
#[derive(Debug)]
pub struct Network {
    pub embedding: Matrix,
    pub layers: Vec<Layer>,
    pub norm: Norm,
    /// `None` if the embedding is tied.
    pub unembedding: Option<Matrix>,
    pub rope: Rope,
}

#[derive(Debug)]
pub struct Layer {
    pub mixer_norm: Norm,
    pub mixer: Mixer,
    pub feed_forward_norm: Norm,
    pub feed_forward: FeedForward,
}

#[derive(Debug)]
pub enum Mixer {
    Attention(Attention),
    Delta(Delta),
}

/// Random relative errors of the numbers in a file.
#[derive(Debug, Default, Clone, Copy)]
pub struct Noise {
    pub size: f64,
    pub seed: u32,
}

impl Noise {
    /// Returns a number between minus and plus the size.
    fn at(self, index: u32) -> f64 {
        let mixed = (index ^ self.seed.wrapping_mul(374_761_393)).wrapping_mul(2_654_435_761);
        let hash = (mixed ^ mixed >> 15).wrapping_mul(2_246_822_519);
        (f64::from(hash ^ hash >> 13) / f64::from(u32::MAX) * 2.0 - 1.0) * self.size
    }
}

impl Network {
    pub fn read(folder: &Path, noise: Noise) -> Self {
        let bytes_of = |name: &str| {
            let path = folder.join(name);
            std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
        };
        let config: Value = serde_json::from_slice(&bytes_of("config.json")).unwrap();
        let bytes = bytes_of("model.safetensors");
        let source = Source { config, tensors: SafeTensors::deserialize(&bytes).unwrap(), noise };
        let family = source.config["model_type"].as_str().unwrap_or_default();
        assert!(
            ["llama", "mistral", "qwen3", "qwen3_5_text"].contains(&family),
            "{}: {family:?} is not among the families that can be replayed",
            folder.display()
        );
        for silent in ["attention_bias", "mlp_bias", "use_sliding_window"] {
            assert_ne!(source.config[silent], true, "{silent} cannot be replayed");
        }
        let tied = source.config["tie_word_embeddings"] == true;
        Self {
            embedding: source.matrix("model.embed_tokens"),
            layers: (0..source.count("num_hidden_layers")).map(|index| source.layer(index)).collect(),
            norm: source.norm("model.norm"),
            unembedding: (!tied).then(|| source.matrix("lm_head")),
            rope: source.rope(),
        }
    }
}

struct Source<'a> {
    config: Value,
    tensors: SafeTensors<'a>,
    noise: Noise,
}

impl Source<'_> {
    fn is(&self, family: &str) -> bool {
        self.config["model_type"] == family
    }

    fn count(&self, field: &str) -> usize {
        self.config[field].as_u64().unwrap_or_else(|| panic!("{field} is not a count")) as usize
    }

    fn layer(&self, index: usize) -> Layer {
        let name = |part: &str| format!("model.layers.{index}.{part}");
        let recurrent = self.config["layer_types"][index] == "linear_attention";
        Layer {
            mixer_norm: self.norm(&name("input_layernorm")),
            mixer: if recurrent {
                Mixer::Delta(self.delta(&name("linear_attn")))
            } else {
                Mixer::Attention(self.attention(&name("self_attn")))
            },
            feed_forward_norm: self.norm(&name("post_attention_layernorm")),
            feed_forward: FeedForward {
                gate: self.matrix(&name("mlp.gate_proj")),
                up: self.matrix(&name("mlp.up_proj")),
                down: self.matrix(&name("mlp.down_proj")),
            },
        }
    }

    fn attention(&self, name: &str) -> Attention {
        let head_norm = |part: &str| {
            let name = format!("{name}.{part}");
            self.tensors.tensor(&format!("{name}.weight")).is_ok().then(|| self.norm(&name))
        };
        Attention {
            query: self.matrix(&format!("{name}.q_proj")),
            key: self.matrix(&format!("{name}.k_proj")),
            value: self.matrix(&format!("{name}.v_proj")),
            output: self.matrix(&format!("{name}.o_proj")),
            query_norm: head_norm("q_norm"),
            key_norm: head_norm("k_norm"),
            heads: self.count("num_attention_heads"),
            kv_heads: self.count("num_key_value_heads"),
            head_dim: self.count("head_dim"),
            window: self.is("mistral").then(|| self.count("sliding_window")),
            gated: self.is("qwen3_5_text"),
        }
    }

    fn delta(&self, name: &str) -> Delta {
        Delta {
            mixed: self.matrix(&format!("{name}.in_proj_qkv")),
            gate: self.matrix(&format!("{name}.in_proj_z")),
            step: self.matrix(&format!("{name}.in_proj_b")),
            decay: self.matrix(&format!("{name}.in_proj_a")),
            output: self.matrix(&format!("{name}.out_proj")),
            norm: self.plain_norm(&format!("{name}.norm")),
            taps: self.matrix(&format!("{name}.conv1d")),
            decay_logarithm: self.numbers(&format!("{name}.A_log")).0,
            decay_bias: self.numbers(&format!("{name}.dt_bias")).0,
            key_heads: self.count("linear_num_key_heads"),
            value_heads: self.count("linear_num_value_heads"),
            key_dim: self.count("linear_key_head_dim"),
            value_dim: self.count("linear_value_head_dim"),
        }
    }

    /// Qwen3.5 stores norm weights minus one.
    fn norm(&self, name: &str) -> Norm {
        let mut norm = self.plain_norm(name);
        if self.is("qwen3_5_text") {
            norm.weight.iter_mut().for_each(|weight| *weight += 1.0);
        }
        norm
    }

    fn plain_norm(&self, name: &str) -> Norm {
        let epsilon = self.config["rms_norm_eps"].as_f64().expect("rms_norm_eps is a number");
        Norm { weight: self.numbers(&format!("{name}.weight")).0, epsilon }
    }

    fn rope(&self) -> Rope {
        let scheme = &self.config["rope_parameters"];
        let number =
            |field: &str| scheme[field].as_f64().unwrap_or_else(|| panic!("{field} is not a number"));
        let part = scheme["partial_rotary_factor"].as_f64().unwrap_or(1.0);
        let width = (self.count("head_dim") as f64 * part) as usize;
        let theta = number("rope_theta");
        let plain = (0..width / 2).map(|pair| theta.powf(-2.0 * pair as f64 / width as f64));
        let frequencies = match scheme["rope_type"].as_str() {
            Some("default") => plain.map(|frequency| frequency as f32).collect(),
            Some("llama3") => {
                let factor = number("factor");
                let (low, high) = (number("low_freq_factor"), number("high_freq_factor"));
                let original = number("original_max_position_embeddings");
                let stretched = |frequency: f64| {
                    let turns = original * frequency / TAU;
                    let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                    frequency * kept + frequency / factor * (1.0 - kept)
                };
                plain.map(|frequency| stretched(frequency) as f32).collect()
            }
            other => panic!("rope_type {other:?} cannot be replayed"),
        };
        Rope { frequencies }
    }

    /// Returns a weight as rows; the dimensions after the first are flattened.
    fn matrix(&self, name: &str) -> Matrix {
        let (numbers, rows) = self.numbers(&format!("{name}.weight"));
        Matrix { rows: numbers.chunks(numbers.len() / rows).map(<[f64]>::to_vec).collect() }
    }

    /// Returns the elements of a tensor and the length of its first dimension.
    fn numbers(&self, name: &str) -> (Vec<f64>, usize) {
        let tensor = self.tensors.tensor(name).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(tensor.dtype(), Dtype::F32, "{name}: only f32 is replayed");
        let noisy = |(index, bytes): (usize, &[u8; 4])| {
            f64::from(f32::from_le_bytes(*bytes)) * (1.0 + self.noise.at(index as u32))
        };
        let numbers = tensor.data().as_chunks().0.iter().enumerate().map(noisy);
        (numbers.collect(), tensor.shape()[0])
    }
}
