//! Tests how many kernels a decode step launches on an accelerator.

#![cfg(feature = "wgpu")]
#![allow(clippy::unwrap_used)]

use std::path::Path;

use firebox::{Model, device};
use firebox_kernels::launches;
use firebox_model::{Input, LogitRows, Pass};

/// Launches of a layer: QKV projections, rope and cache, attention to one span, output, gate and up, down.
const OF_A_LAYER: usize = 6;
/// Launches outside the layers: embedding, norm, unembedding.
const BESIDE: usize = 3;

#[test]
fn a_step_takes_six_launches_a_layer() {
    for family in ["qwen3", "llama", "mistral", "smollm3"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/reference").join(family);
        let model = Model::open(path, &device("wgpu").unwrap()).unwrap();
        let decoder = model.decoder().unwrap().clone();
        let mut cache = decoder.cache();
        // The first page holds sixteen tokens before it grows.
        decoder.encode(Input::new(&[1, 2, 3, 4, 5], 0, 0), &mut cache).unwrap();
        for token in 6..12 {
            let (logits, count) = launches(|| {
                let mut pass = Pass::begin(&decoder, &[Input::new(&[token], cache.position(), 0)]).unwrap();
                while pass.next_layer() < decoder.layers() {
                    pass.step(&decoder, &mut [&mut cache]).unwrap();
                }
                pass.logits(&decoder, LogitRows::Last).unwrap()
            });
            assert_eq!(logits.dims(), [1, decoder.config().vocab_size], "{family}");
            let most = OF_A_LAYER * decoder.layers() + BESIDE;
            assert!(count <= most, "{count} launches of {family} with {} layers", decoder.layers());
        }
    }
}
