//! Tests that decode steps which an accelerator replays have the logits of steps that are launched kernel by kernel, whatever
//! happens to the sequences between them.

#![cfg(feature = "wgpu")]
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use firebox::{KvType, Model, PagePool, device};
use firebox_cache::SequenceCache;
use firebox_kernels::launches;
use firebox_kernels::likeliest::reference;
use firebox_model::{Decoder, Head, HeadForm, Input, LogitRows, Pass};
use firebox_store::{Checkpoint, StoreError, TensorInfo, Tensors, Weight};

/// Launches of a replayed step: the copy of its logits.
const REPLAYED: usize = 1;
/// Launches are counted in all threads, so that only one test may run at a time.
static ALONE: Mutex<()> = Mutex::new(());
const FAMILIES: [&str; 4] = ["qwen3", "llama", "mistral", "smollm3"];

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn decoder(family: &str) -> Arc<Decoder> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/reference").join(family);
    Model::open(path, &device("wgpu").unwrap()).unwrap().decoder().unwrap().clone()
}

fn token(decoder: &Decoder, index: usize) -> u32 {
    (5 + index * 31 % (decoder.config().vocab_size - 5)) as u32
}

/// A sequence whose steps may be replayed, and one of the same tokens whose steps are launched.
#[derive(Clone)]
struct Pair {
    replayed: SequenceCache,
    launched: SequenceCache,
    fed: usize,
}

impl Pair {
    fn new(decoder: &Decoder, kept: KvType) -> Self {
        let cache = || SequenceCache::new(&PagePool::new(decoder.layout(kept)));
        Self { replayed: cache(), launched: cache(), fed: 0 }
    }

    fn feed(&mut self, decoder: &Decoder, tokens: usize) {
        let tokens: Vec<u32> = (self.fed..self.fed + tokens).map(|index| token(decoder, index)).collect();
        self.fed += tokens.len();
        for cache in [&mut self.replayed, &mut self.launched] {
            decoder.encode(Input::new(&tokens, cache.position(), 0), cache).unwrap();
        }
    }

    fn rewind(&mut self, tokens: usize) {
        for cache in [&mut self.replayed, &mut self.launched] {
            assert!(cache.rewind(cache.len() - tokens));
        }
    }

    fn evict(&mut self, tokens: std::ops::Range<usize>) {
        for cache in [&mut self.replayed, &mut self.launched] {
            cache.evict(tokens.clone());
        }
    }
}

/// Takes a decode step of several sequences both ways, compares the bits of all logits, and returns how many kernels were
/// launched where a replay was possible.
fn step(decoder: &Decoder, pairs: &mut [Pair]) -> usize {
    step_with(decoder, pairs, None)
}

/// The same with a head.
fn step_with(decoder: &Decoder, pairs: &mut [Pair], head: Option<&Arc<Head>>) -> usize {
    let tokens: Vec<[u32; 1]> = pairs.iter().map(|pair| [token(decoder, pair.fed)]).collect();
    let (mut replayed, mut launched) = (Vec::new(), Vec::new());
    for pair in &mut *pairs {
        pair.fed += 1;
        replayed.push(&mut pair.replayed);
        launched.push(&mut pair.launched);
    }
    let inputs = |caches: &[&mut SequenceCache]| -> Vec<Input<'_>> {
        let input = |(token, cache): (_, &&mut SequenceCache)| Input {
            head,
            ..Input::new(<[u32; 1]>::as_slice(token), cache.position(), 0)
        };
        tokens.iter().zip(caches).map(input).collect()
    };
    let (logits, count) = {
        let inputs = inputs(&replayed);
        launches(|| decoder.forward_together(&inputs, &mut replayed, LogitRows::Last).unwrap())
    };
    let inputs = inputs(&launched);
    let mut pass = Pass::begin(decoder, &inputs).unwrap();
    while pass.next_layer() < decoder.layers() {
        pass.step(decoder, &mut launched).unwrap();
    }
    let expected = pass.logits(decoder, LogitRows::Last).unwrap();
    let bits = |logits: burn::tensor::Tensor<2>| -> Vec<u32> {
        logits.into_data().try_to_vec::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
    };
    let lengths: Vec<usize> = pairs.iter().map(|pair| pair.replayed.len()).collect();
    let (logits, expected) = (bits(logits), bits(expected));
    assert!(logits.iter().any(|bits| *bits != 0), "nothing was computed");
    assert!(logits == expected, "other bits with sequences of {lengths:?}");
    count
}

#[test]
fn two_thousand_replayed_positions_have_the_bits_of_launched_ones() {
    let _alone = alone();
    let decoder = decoder("qwen3");
    let mut pairs = [Pair::new(&decoder, KvType::F16)];
    pairs[0].feed(&decoder, 5);
    let replayed = (0..2000).filter(|_| step(&decoder, &mut pairs) == REPLAYED).count();
    // The last steps of every page are launched, and the first is recorded.
    assert!(replayed > 1700, "{replayed} of 2,000 steps were replayed");
}

#[test]
fn every_family_with_fused_layers_is_replayed() {
    let _alone = alone();
    for family in FAMILIES {
        let decoder = decoder(family);
        let mut pairs = [Pair::new(&decoder, KvType::F32)];
        pairs[0].feed(&decoder, 120);
        let replayed = (0..60).filter(|_| step(&decoder, &mut pairs) == REPLAYED).count();
        assert!(replayed > 40, "{replayed} of 60 steps of {family} were replayed");
    }
}

#[test]
fn one_to_eight_sequences_are_replayed_together() {
    let _alone = alone();
    let decoder = decoder("llama");
    let mut pairs: Vec<Pair> = Vec::new();
    for count in 1..=8 {
        let mut joining = Pair::new(&decoder, KvType::F16);
        joining.feed(&decoder, 3 + 37 * count % 200);
        pairs.push(joining);
        let replayed = (0..24).filter(|_| step(&decoder, &mut pairs) == REPLAYED).count();
        assert!(replayed > 0, "no step of {count} sequences was replayed");
    }
    // A sequence that leaves changes the step of the others.
    pairs.remove(3);
    for _ in 0..20 {
        step(&decoder, &mut pairs);
    }
}

#[test]
fn a_stale_recording_is_never_replayed() {
    let _alone = alone();
    let decoder = decoder("qwen3");
    let mut pairs = [Pair::new(&decoder, KvType::F16)];
    pairs[0].feed(&decoder, 200);
    let run = |pairs: &mut [Pair]| (0..12).map(|_| step(&decoder, pairs)).collect::<Vec<_>>();
    assert_eq!(run(&mut pairs)[1..], [REPLAYED; 11]);

    // Rewinding changes nothing that a recording depends on; tokens that were read at once do.
    pairs[0].rewind(6);
    assert_eq!(run(&mut pairs), [REPLAYED; 12]);
    pairs[0].rewind(3);
    pairs[0].feed(&decoder, 2);
    assert_ne!(run(&mut pairs)[0], REPLAYED);

    pairs[0].evict(20..90);
    assert_ne!(run(&mut pairs)[0], REPLAYED);

    // The fork goes on in a copy of the last page, the first in the page itself.
    let mut fork = [pairs[0].clone()];
    fork[0].fed += 1000;
    for _ in 0..3 {
        run(&mut fork);
        run(&mut pairs);
    }

    // Another sequence may get the pages of one that is gone.
    let pool = pairs[0].replayed.pool().clone();
    pairs[0].replayed.clear();
    pairs[0].launched.clear();
    let mut other = [Pair {
        replayed: SequenceCache::new(&pool),
        launched: SequenceCache::new(&PagePool::new(decoder.layout(KvType::F16))),
        fed: 7,
    }];
    other[0].feed(&decoder, 150);
    assert_ne!(run(&mut other)[0], REPLAYED);
    run(&mut fork);
}

#[test]
fn quantized_caches_and_unfused_layers_are_launched() {
    let _alone = alone();
    for (family, kept) in [("qwen3", KvType::Int8), ("gemma3_text", KvType::F16), ("qwen3_moe", KvType::F16)]
    {
        let decoder = decoder(family);
        let mut pairs = [Pair::new(&decoder, kept)];
        pairs[0].feed(&decoder, 12);
        for _ in 0..4 {
            assert_ne!(step(&decoder, &mut pairs), REPLAYED, "{family}");
        }
    }
}

/// However many of the likeliest tokens are wanted of a step, or logits: a recording that finds fewer is not replayed.
#[test]
fn the_likeliest_tokens_of_a_replayed_step_are_those_of_its_logits() {
    let _alone = alone();
    for family in FAMILIES {
        let decoder = decoder(family);
        let mut pair = Pair::new(&decoder, KvType::F16);
        pair.feed(&decoder, 100);
        let mut replayed = 0;
        for round in 0..60 {
            let most = [1, 1, 8, 3, 20, 1][round / 10];
            let tokens = [token(&decoder, pair.fed)];
            if round % 7 == 6 {
                step(&decoder, std::slice::from_mut(&mut pair));
                continue;
            }
            pair.fed += 1;
            let input = Input::new(&tokens, pair.replayed.position(), 0);
            let (found, count) =
                launches(|| decoder.forward_likeliest(&[input], &mut [&mut pair.replayed], most).unwrap());
            replayed += usize::from(count == 0);
            let mut pass = Pass::begin(&decoder, &[input]).unwrap();
            while pass.next_layer() < decoder.layers() {
                pass.step(&decoder, &mut [&mut pair.launched]).unwrap();
            }
            let logits = pass.logits(&decoder, LogitRows::Last).unwrap();
            let logits = logits.into_data().try_to_vec::<f32>().unwrap();
            assert_eq!(found, [reference(&logits, most)], "step {round} of {family}");
        }
        assert!(replayed > 30, "{replayed} steps of {family} were replayed");
    }
}

/// Tensors of a head: for each of some layers, those of another layer of the model.
#[derive(Debug)]
struct Swapped {
    model: Checkpoint,
    /// A layer of the head, and the one whose tensors it has.
    layers: [(usize, usize); 2],
}

impl Swapped {
    /// The name in the model of a tensor of the head.
    fn source(&self, name: &str) -> Option<String> {
        let layers = self.layers.map(|(to, from)| (format!("layers.{to}."), format!("layers.{from}.")));
        layers.iter().find(|(to, _)| name.contains(to)).map(|(to, from)| name.replace(to, from))
    }
}

impl Tensors for Swapped {
    fn path(&self) -> &Path {
        self.model.path()
    }

    fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.model.info(&self.source(name)?)
    }

    fn weight(&self, name: &str) -> Result<Weight, StoreError> {
        self.model.weight(&self.source(name).unwrap_or_else(|| name.into()))
    }

    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Box::new(self.model.names().filter(|name| self.source(name).is_some()))
    }
}

#[test]
fn steps_of_a_head_are_replayed_and_those_of_another_never() {
    let _alone = alone();
    for family in ["qwen3", "llama"] {
        let decoder = decoder(family);
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/reference").join(family);
        let checkpoint = Checkpoint::open(path).unwrap();
        let (last, split) = (decoder.layers() - 1, decoder.layers() - 2);
        let head = |id: &str, layers| {
            let tensors = Arc::new(Swapped { model: checkpoint.clone(), layers });
            Arc::new(Head::load(id, tensors, &HeadForm::Blocks, split, &decoder, &checkpoint).unwrap())
        };
        let swapped = [(split, last), (last, split)];
        let heads = [Some(head("one", swapped)), None, Some(head("two", [(split, 0), (last, 1)]))];
        let mut pairs = [Pair::new(&decoder, KvType::F16)];
        pairs[0].feed(&decoder, 70);
        for head in heads.iter().cycle().take(6) {
            assert_ne!(step_with(&decoder, &mut pairs, head.as_ref()), 0);
            let replayed =
                (0..6).filter(|_| step_with(&decoder, &mut pairs, head.as_ref()) == REPLAYED).count();
            assert_eq!(replayed, 6, "{family}");
        }
        // Replayed steps have stored the hidden states that another head continues from.
        let tokens: Vec<u32> = (0..pairs[0].fed).map(|index| token(&decoder, index)).collect();
        for cache in [&mut pairs[0].replayed, &mut pairs[0].launched] {
            let pieces = decoder.begin_replay(cache, 64).unwrap();
            decoder.replay(heads[0].as_ref(), &tokens, 0, pieces, cache).unwrap();
        }
        step_with(&decoder, &mut pairs, heads[0].as_ref());
        // A head that is gone is not replayed for one in its place.
        drop(heads);
        let other = head("three", swapped);
        assert_ne!(step_with(&decoder, &mut pairs, Some(&other)), REPLAYED);
    }
}
