//! Tests that weights are used in place: running a model maps its file and copies little.
//!
//! It is the only test of its process, because it counts the memory of the whole process.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

use std::io::Write;
use std::path::Path;

use firebox::internals::runtime::{anonymous_bytes, mapped_file_bytes};
use firebox::{Model, device};
use serde_json::{Map, Value, json};

const MIB: u64 = 1 << 20;

/// Writes a llama of 100 MB in f32 as a safetensors file.
fn write_checkpoint(folder: &Path) -> u64 {
    let (vocab, hidden, inner, layers) = (8192, 512, 2048, 4);
    let config = json!({
        "model_type": "llama", "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": 8, "tie_word_embeddings": false,
    });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let mut shapes = vec![
        ("model.embed_tokens.weight".to_owned(), vec![vocab, hidden]),
        ("model.norm.weight".to_owned(), vec![hidden]),
        ("lm_head.weight".to_owned(), vec![vocab, hidden]),
    ];
    for layer in 0..layers {
        let mut add = |name: &str, shape: &[usize]| {
            shapes.push((format!("model.layers.{layer}.{name}.weight"), shape.to_vec()));
        };
        for projection in ["q_proj", "k_proj", "v_proj", "o_proj"] {
            add(&format!("self_attn.{projection}"), &[hidden, hidden]);
        }
        add("mlp.gate_proj", &[inner, hidden]);
        add("mlp.up_proj", &[inner, hidden]);
        add("mlp.down_proj", &[hidden, inner]);
        add("input_layernorm", &[hidden]);
        add("post_attention_layernorm", &[hidden]);
    }
    let mut header = Map::new();
    let mut end = 0;
    for (name, shape) in &shapes {
        let start = end;
        end += 4 * shape.iter().product::<usize>();
        header.insert(name.clone(), json!({"dtype": "F32", "shape": shape, "data_offsets": [start, end]}));
    }
    let mut header = Value::Object(header).to_string();
    while !(header.len() + 8).is_multiple_of(64) {
        header.push(' ');
    }
    let mut file = std::fs::File::create(folder.join("model.safetensors")).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    let block: Vec<u8> =
        (0..1024u32).flat_map(|i| (((i * 37 % 101) as f32 - 50.0) / 2000.0).to_le_bytes()).collect();
    for start in (0..end).step_by(block.len()) {
        file.write_all(&block[..block.len().min(end - start)]).unwrap();
    }
    file.sync_all().unwrap();
    end as u64
}

#[test]
fn a_run_maps_the_file_and_copies_none_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let weights = write_checkpoint(folder.path());
    assert!(weights > 96 * MIB);
    // The thread pool and the allocator are initialized before the measurement. The model stays open, because a
    // readahead thread could release its mapping late, within the measurement.
    let small = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/reference/llama");
    let small = Model::open(small, &device("cpu").unwrap()).unwrap();
    small.session().unwrap().feed(&[5; 16]).unwrap();

    let (anonymous, mapped) = (anonymous_bytes().unwrap(), mapped_file_bytes().unwrap());
    let model = Model::open(folder.path(), &device("cpu").unwrap()).unwrap();
    let mut session = model.session().unwrap();
    session.feed(&[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
    session.feed(&[9]).unwrap();
    let anonymous = anonymous_bytes().unwrap().saturating_sub(anonymous);
    let mapped = mapped_file_bytes().unwrap().saturating_sub(mapped);
    // Only the rows of nine tokens of the embedding are read.
    assert!(mapped > 80 * MIB, "only {mapped} bytes of the file were touched");
    assert!(anonymous < 12 * MIB, "{anonymous} bytes were copied");
}
