//! Models with random weights, of any size, in the format of Hugging Face.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use serde_json::{Map, json};

/// The width of a head.
const HEAD: usize = 64;

/// The shape of a model: a Llama or a Qwen3 with tied embeddings and bf16 weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SyntheticModel {
    /// Layers.
    pub layers: usize,
    /// The width of hidden states.
    pub hidden: usize,
    /// The width within feed-forward networks.
    pub inner: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// The width of a head.
    pub head_dim: usize,
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Whether queries and keys are normed, as in Qwen3.
    pub has_normed_heads: bool,
}

impl SyntheticModel {
    /// The shape of Qwen3-0.6B.
    pub const QWEN3_0_6B: Self = Self {
        layers: 28,
        hidden: 1024,
        inner: 3072,
        heads: 16,
        kv_heads: 8,
        head_dim: 128,
        vocab: 151_936,
        has_normed_heads: true,
    };

    /// Returns a Llama of `layers` layers that takes about `bytes`.
    pub fn with_bytes(bytes: usize, layers: usize, vocab: usize) -> Self {
        let with = |hidden: usize| Self {
            layers,
            hidden,
            inner: (hidden * 11 / 4).next_multiple_of(64),
            heads: hidden / HEAD,
            kv_heads: hidden / HEAD / 2,
            head_dim: HEAD,
            vocab,
            has_normed_heads: false,
        };
        let widths = (1..).map(|heads| with(heads * HEAD * 2));
        let mut made = widths.take_while(|made| made.bytes() <= bytes).last().unwrap_or(with(2 * HEAD));
        while made.bytes() + made.layers * 3 * made.hidden * 64 * 2 <= bytes {
            made.inner += 64;
        }
        made
    }

    /// Returns the bytes of its weights.
    pub fn bytes(&self) -> usize {
        self.tensors().iter().map(|(_, shape)| shape.iter().product::<usize>() * 2).sum()
    }

    fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let Self { layers, hidden, inner, heads, kv_heads, head_dim, vocab, has_normed_heads } = *self;
        let (queries, keys) = (heads * head_dim, kv_heads * head_dim);
        let mut tensors = vec![("model.embed_tokens.weight".to_owned(), vec![vocab, hidden])];
        for layer in 0..layers {
            for (name, shape) in [
                ("input_layernorm", vec![hidden]),
                ("post_attention_layernorm", vec![hidden]),
                ("self_attn.q_proj", vec![queries, hidden]),
                ("self_attn.k_proj", vec![keys, hidden]),
                ("self_attn.v_proj", vec![keys, hidden]),
                ("self_attn.o_proj", vec![hidden, queries]),
                ("mlp.gate_proj", vec![inner, hidden]),
                ("mlp.up_proj", vec![inner, hidden]),
                ("mlp.down_proj", vec![hidden, inner]),
            ] {
                tensors.push((format!("model.layers.{layer}.{name}.weight"), shape));
            }
            for name in ["q_norm", "k_norm"].into_iter().filter(|_| has_normed_heads) {
                tensors.push((format!("model.layers.{layer}.self_attn.{name}.weight"), vec![head_dim]));
            }
        }
        tensors.push(("model.norm.weight".to_owned(), vec![hidden]));
        tensors
    }

    /// Writes the model into a new directory.
    pub fn write(&self, folder: &Path, seed: u64) -> io::Result<()> {
        let Self { layers, hidden, inner, heads, kv_heads, head_dim, vocab, has_normed_heads } = *self;
        let (class, family) =
            if has_normed_heads { ("Qwen3ForCausalLM", "qwen3") } else { ("LlamaForCausalLM", "llama") };
        std::fs::create_dir_all(folder)?;
        let config = json!({
            "architectures": [class], "model_type": family, "hidden_act": "silu",
            "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
            "vocab_size": vocab, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        });
        std::fs::write(folder.join("config.json"), config.to_string())?;
        let (mut header, mut at) = (Map::new(), 0);
        let tensors = self.tensors();
        for (name, shape) in &tensors {
            let bytes = shape.iter().product::<usize>() * 2;
            header.insert(
                name.clone(),
                json!({ "dtype": "BF16", "shape": shape, "data_offsets": [at, at + bytes] }),
            );
            at += bytes;
        }
        let mut header = serde_json::to_string(&header)?;
        header.push_str(&" ".repeat(header.len().next_multiple_of(64) - header.len() + 56));
        let mut file = BufWriter::with_capacity(1 << 20, File::create(folder.join("model.safetensors"))?);
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(header.as_bytes())?;
        let mut random = Random(seed.wrapping_mul(2).wrapping_add(1));
        for (_, shape) in &tensors {
            match shape[..] {
                [_, width] => {
                    let scale = (3.0 / width as f32).sqrt();
                    for _ in 0..shape.iter().product() {
                        file.write_all(&bf16(random.next() * scale))?;
                    }
                }
                _ => (0..shape[0]).try_for_each(|_| file.write_all(&bf16(1.0)))?,
            }
        }
        // Pages that were not written yet cannot be dropped from the page cache.
        file.into_inner()?.sync_all()
    }
}

fn bf16(number: f32) -> [u8; 2] {
    ((number.to_bits() >> 16) as u16).to_le_bytes()
}

/// Random numbers from -1 to 1.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}
