//! Block formats against the output of the `gguf` Python package in `fixtures/gguf-blocks`.
#![allow(clippy::unwrap_used, reason = "a test that fails here should say so")]

use std::fs;
use std::path::Path;

use bytes::Bytes;
use firebox_store::{BlockType, Dtype, Encoding, Weight};

#[test]
fn blocks_decode_bit_for_bit() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/gguf-blocks");
    let mut seen = 0;
    for entry in fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "bin") {
            continue;
        }
        let name = path.file_stem().unwrap().to_str().unwrap();
        let block = BlockType::ALL.into_iter().find(|block| block.name() == name).map(Encoding::Block);
        let encoding = block.or(Dtype::from_name(name).map(Encoding::Plain)).unwrap();
        let data = fs::read(&path).unwrap();
        let expected: Vec<u32> = fs::read(path.with_extension("f32"))
            .unwrap()
            .as_chunks::<4>()
            .0
            .iter()
            .map(|bytes| u32::from_le_bytes(*bytes))
            .collect();
        let weight = Weight {
            name: name.into(),
            shape: vec![expected.len()],
            encoding,
            data: Bytes::from(data),
            scales: None,
            mapped: false,
        };
        let found: Vec<u32> = weight.to_f32().unwrap().iter().map(|value| value.to_bits()).collect();
        assert!(!found.is_empty());
        let wrong = found.iter().zip(&expected).position(|(found, expected)| found != expected);
        assert_eq!(wrong, None, "{name}");
        seen += usize::from(block.is_some());
    }
    assert_eq!(seen, BlockType::ALL.len(), "a fixture for each block type in {}", folder.display());
}
