//! Files for tests, well formed by default.
#![allow(clippy::unwrap_used, reason = "a test that fails here should say so")]
#![allow(dead_code, reason = "every test file uses its own part")]

use std::fs;
use std::path::{Path, PathBuf};

use firebox_store::{Checkpoint, StoreError};
use serde_json::{Value, json};
use tempfile::tempdir;

/// A tensor to be written: name, safetensors dtype, shape, bytes.
pub type Tensor<'a> = (&'a str, &'a str, Vec<usize>, Vec<u8>);

pub fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Repeatable pseudo-random numbers of the magnitude of weights.
pub fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..count)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            ((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * 0.1
        })
        .collect()
}

/// A safetensors file with the given header and data.
pub fn safetensors_raw(header: &str, data: &[u8]) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(data);
    file
}

pub fn safetensors(tensors: &[Tensor<'_>]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    for (name, dtype, shape, bytes) in tensors {
        let start = data.len();
        data.extend_from_slice(bytes);
        header.insert(
            (*name).into(),
            json!({"dtype": dtype, "shape": shape, "data_offsets": [start, data.len()]}),
        );
    }
    let mut header = Value::Object(header).to_string();
    // Like common writers, begins the data at a multiple of eight.
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }
    safetensors_raw(&header, &data)
}

/// A Hugging Face directory with these files.
pub fn directory(root: &Path, files: &[(&str, &[u8])]) -> PathBuf {
    fs::create_dir_all(root).unwrap();
    for (name, bytes) in files {
        let path = root.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
    root.to_owned()
}

/// A small llama with odd row lengths, so that quantized groups are ragged.
pub fn llama(root: &Path) -> PathBuf {
    let mut tensors: Vec<(String, Vec<usize>)> = vec![
        ("model.embed_tokens.weight".into(), vec![48, 40]),
        ("model.norm.weight".into(), vec![40]),
        ("lm_head.weight".into(), vec![48, 40]),
    ];
    for layer in 0..2 {
        let name = |rest: &str| format!("model.layers.{layer}.{rest}.weight");
        tensors.extend([
            (name("input_layernorm"), vec![40]),
            (name("self_attn.q_proj"), vec![40, 40]),
            (name("mlp.down_proj"), vec![40, 72]),
            (name("mlp.gate"), vec![3, 40]),
        ]);
    }
    let tensors: Vec<Tensor<'_>> = tensors
        .iter()
        .enumerate()
        .map(|(seed, (name, shape))| {
            let bytes = f32_bytes(&numbers(shape.iter().product(), seed as u64 + 1));
            (name.as_str(), "F32", shape.clone(), bytes)
        })
        .collect();
    directory(
        root,
        &[
            ("model.safetensors", &safetensors(&tensors)),
            ("config.json", br#"{"model_type": "llama", "hidden_size": 40, "rms_norm_eps": 1e-05}"#),
            ("tokenizer.json", b"{\"version\": \"1.0\"}"),
            ("tokenizer_config.json", br#"{"chat_template": "{{ messages }}", "bos_token": "<s>"}"#),
            ("generation_config.json", br#"{"eos_token_id": [1, 2]}"#),
        ],
    )
}

#[derive(Clone)]
struct GgufTensor {
    name: String,
    dimensions: Vec<u64>,
    kind: u32,
    bytes: Vec<u8>,
    offset: Option<u64>,
}

/// Writes GGUF files.
#[derive(Clone)]
pub struct Gguf {
    pub version: u32,
    pub alignment: usize,
    keys: Vec<Vec<u8>>,
    tensors: Vec<GgufTensor>,
}

pub fn gguf_text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

impl Gguf {
    pub fn new() -> Self {
        Self { version: 3, alignment: 32, keys: Vec::new(), tensors: Vec::new() }
    }

    pub fn raw_key(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        self.keys.push([&gguf_text(key)[..], &kind.to_le_bytes(), value].concat());
        self
    }

    pub fn int(self, key: &str, value: u32) -> Self {
        self.raw_key(key, 4, &value.to_le_bytes())
    }

    pub fn float(self, key: &str, value: f32) -> Self {
        self.raw_key(key, 6, &value.to_le_bytes())
    }

    pub fn flag(self, key: &str, value: bool) -> Self {
        self.raw_key(key, 7, &[u8::from(value)])
    }

    pub fn text(self, key: &str, value: &str) -> Self {
        self.raw_key(key, 8, &gguf_text(value))
    }

    pub fn list(self, key: &str, kind: u32, count: usize, elements: &[u8]) -> Self {
        let value = [&kind.to_le_bytes()[..], &(count as u64).to_le_bytes(), elements].concat();
        self.raw_key(key, 9, &value)
    }

    pub fn texts(self, key: &str, values: &[&str]) -> Self {
        let elements: Vec<u8> = values.iter().flat_map(|value| gguf_text(value)).collect();
        self.list(key, 8, values.len(), &elements)
    }

    /// Adds a tensor; the shape is given outermost first, as in Hugging Face files.
    pub fn tensor(mut self, name: &str, shape: &[u64], kind: u32, bytes: Vec<u8>) -> Self {
        let dimensions = shape.iter().rev().copied().collect();
        self.tensors.push(GgufTensor { name: name.into(), dimensions, kind, bytes, offset: None });
        self
    }

    pub fn f32(self, name: &str, shape: &[u64]) -> Self {
        let seed =
            name.bytes().fold(7, |seed: u64, byte| seed.wrapping_mul(31).wrapping_add(u64::from(byte)));
        let values = numbers(shape.iter().product::<u64>() as usize, seed);
        self.tensor(name, shape, 0, f32_bytes(&values))
    }

    /// Sets the offset of the last tensor.
    pub fn at(mut self, offset: u64) -> Self {
        self.tensors.last_mut().unwrap().offset = Some(offset);
        self
    }

    pub fn build(&self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(self.version.to_le_bytes());
        file.extend((self.tensors.len() as u64).to_le_bytes());
        file.extend((self.keys.len() as u64).to_le_bytes());
        for key in &self.keys {
            file.extend(key);
        }
        let mut data = Vec::new();
        for GgufTensor { name, dimensions, kind, bytes, offset } in &self.tensors {
            file.extend(gguf_text(name));
            file.extend((dimensions.len() as u32).to_le_bytes());
            for dimension in dimensions {
                file.extend(dimension.to_le_bytes());
            }
            file.extend(kind.to_le_bytes());
            file.extend(offset.unwrap_or(data.len() as u64).to_le_bytes());
            data.extend(bytes);
            data.resize(data.len().next_multiple_of(self.alignment), 0);
        }
        file.resize(file.len().next_multiple_of(self.alignment), 0);
        file.extend(data);
        file
    }

    /// The metadata of a small model of an architecture.
    pub fn model(architecture: &str) -> Self {
        let key = |name: &str| format!("{architecture}.{name}");
        Self::new()
            .text("general.architecture", architecture)
            .int(&key("block_count"), 2)
            .int(&key("context_length"), 128)
            .int(&key("embedding_length"), 64)
            .int(&key("feed_forward_length"), 96)
            .int(&key("attention.head_count"), 4)
            .int(&key("attention.head_count_kv"), 2)
            .float(&key("attention.layer_norm_rms_epsilon"), 1e-6)
            .float(&key("rope.freq_base"), 10_000.0)
            .f32("token_embd.weight", &[32, 64])
            .f32("output_norm.weight", &[64])
    }
}

pub fn write(folder: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder.join(name);
    fs::write(&path, bytes).unwrap();
    path
}

/// Opens a GGUF file as a checkpoint.
pub fn open(gguf: &Gguf) -> Checkpoint {
    let folder = tempdir().unwrap();
    Checkpoint::open(write(folder.path(), "model.gguf", &gguf.build())).unwrap()
}

/// Checks that the configuration has these values.
pub fn expect(config: &Value, expected: Value) {
    for (key, value) in expected.as_object().unwrap() {
        assert_eq!(config.get(key), Some(value), "{key}");
    }
}

/// Checks that a GGUF file is refused with these words.
pub fn refuse(bytes: &[u8], words: &[&str]) {
    let folder = tempdir().unwrap();
    let path = write(folder.path(), "model.gguf", bytes);
    let error: StoreError = Checkpoint::open(Path::new(&path)).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("model.gguf"), "{error}");
    for word in words {
        assert!(error.contains(word), "{error:?} does not mention {word:?}");
    }
}
