//! Tests how many kernels a decode step launches on an accelerator, and what it uploads and reads back.

#![cfg(feature = "wgpu")]
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use firebox::{KvType, Model, PagePool, device};
use firebox_cache::SequenceCache;
use firebox_kernels::launches;
use firebox_kernels::transfers::{Transfers, transfers};
use firebox_model::{Decoder, Input, LogitRows, Pass};

/// Launches of a layer: QKV projections, attention to all pages, the merge of its parts, output, gate and up, down.
const OF_A_LAYER: usize = 6;
/// Launches outside the layers: embedding, norm, unembedding.
const BESIDE: usize = 3;
/// Launches that find the likeliest tokens.
const CHOOSING: usize = 2;
/// Bytes that a step reads back for each sequence at most, to choose from eight tokens.
const BYTES: usize = 64;
const FAMILIES: [&str; 4] = ["qwen3", "llama", "mistral", "smollm3"];
/// Launches and transfers are counted in all threads, so that only one test may run at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn decoder(family: &str) -> Arc<Decoder> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/reference").join(family);
    Model::open(path, &device("wgpu").unwrap()).unwrap().decoder().unwrap().clone()
}

/// Takes a decode step of all sequences, and returns how many kernels it launched beyond the most that are expected.
fn excess(decoder: &Decoder, caches: &mut [SequenceCache], token: u32) -> usize {
    let tokens = [token];
    let inputs: Vec<Input<'_>> =
        caches.iter().map(|cache| Input::new(&tokens, cache.position(), 0)).collect();
    let mut caches: Vec<&mut SequenceCache> = caches.iter_mut().collect();
    let (logits, count) = launches(|| {
        let mut pass = Pass::begin(decoder, &inputs).unwrap();
        while pass.next_layer() < decoder.layers() {
            pass.step(decoder, &mut caches).unwrap();
        }
        pass.logits(decoder, LogitRows::Last).unwrap()
    });
    assert_eq!(logits.dims(), [caches.len(), decoder.config().vocab_size]);
    count.saturating_sub(OF_A_LAYER * decoder.layers() + BESIDE)
}

#[test]
fn a_step_takes_six_launches_a_layer() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    for family in FAMILIES {
        let decoder = decoder(family);
        let mut caches = [decoder.cache()];
        // The first page holds sixteen tokens before it grows.
        decoder.encode(Input::new(&[1, 2, 3, 4, 5], 0, 0), &mut caches[0]).unwrap();
        for token in 6..12 {
            assert_eq!(excess(&decoder, &mut caches, token), 0, "{family} with {} layers", decoder.layers());
        }
    }
}

#[test]
fn pages_and_sequences_take_no_more_launches() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let decoder = decoder("qwen3");
    let pool = PagePool::new(decoder.layout(KvType::F16));
    let mut caches = Vec::new();
    for tokens in [2000, 100, 130, 200, 5, 300, 380, 17] {
        let mut cache = SequenceCache::new(&pool);
        let tokens: Vec<u32> = (0..tokens).map(|index| 5 + index % 50).collect();
        decoder.encode(Input::new(&tokens, 0, 0), &mut cache).unwrap();
        // As recorded steps do.
        cache.reserve(1).unwrap();
        cache.grow_last_page();
        caches.push(cache);
        assert_eq!(excess(&decoder, &mut caches[..1], 7), 0, "one sequence of {}", caches[0].len());
        assert_eq!(excess(&decoder, &mut caches, 8), 0, "{} sequences", caches.len());
    }
}

#[test]
fn a_launched_step_finds_tokens_in_two_launches() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let decoder = decoder("qwen3");
    let mut cache = decoder.cache();
    decoder.encode(Input::new(&[1, 2, 3, 4, 5], 0, 0), &mut cache).unwrap();
    for most in [1, 8, 64] {
        let (found, count) = launches(|| {
            let input = Input::new(&[6], cache.position(), 0);
            let mut pass = Pass::begin(&decoder, &[input]).unwrap().with_likeliest(most);
            while pass.next_layer() < decoder.layers() {
                pass.step(&decoder, &mut [&mut cache]).unwrap();
            }
            pass.likeliest(&decoder, &[true]).unwrap()
        });
        assert_eq!(found[0].len(), most);
        let limit = OF_A_LAYER * decoder.layers() + BESIDE + CHOOSING;
        assert!(count <= limit, "{count} launches with {} layers", decoder.layers());
    }
}

#[test]
fn a_replayed_step_uploads_once_and_reads_a_few_bytes() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    for family in FAMILIES {
        let decoder = decoder(family);
        for count in [1, 3] {
            let mut caches: Vec<SequenceCache> = (0..count).map(|_| decoder.cache()).collect();
            for cache in &mut caches {
                decoder.encode(Input::new(&[1, 2, 3, 4, 5], 0, 0), cache).unwrap();
            }
            for most in [1, 8] {
                let mut step = |token: u32| {
                    let mut caches: Vec<&mut SequenceCache> = caches.iter_mut().collect();
                    let tokens = [token];
                    let inputs: Vec<Input<'_>> =
                        caches.iter().map(|cache| Input::new(&tokens, cache.position(), 0)).collect();
                    launches(|| transfers(|| decoder.forward_likeliest(&inputs, &mut caches, most).unwrap()))
                };
                // This one is recorded.
                step(6);
                for token in 7..12 {
                    let ((found, moved), launched) = step(token);
                    assert_eq!(found.iter().map(Vec::len).collect::<Vec<_>>(), vec![most; count]);
                    let expected = Transfers { uploads: 1, bytes_read: 8 * most * count };
                    assert_eq!((moved, launched), (expected, 0), "{count} sequences of {family}");
                    assert!(moved.bytes_read <= BYTES * count);
                }
            }
        }
    }
}
