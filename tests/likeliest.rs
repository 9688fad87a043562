//! Tests that tokens which an accelerator chooses from are those that the CPU chooses from, to the last bit.

#![cfg(feature = "wgpu")]
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::tensor::{Tensor, TensorData};
use firebox::engine::{Engine, EngineConfig, Request};
use firebox::internals::eval::compare_devices;
use firebox::{Generation, GenerationConfig, Model, SamplerConfig, device};
use firebox_kernels::likeliest::{MAX_LIKELIEST, likeliest, reference};
use firebox_kernels::transfers::transfers;

/// Transfers are counted in all threads, so that only one test may run at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn model(family: &str) -> Model {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/reference").join(family);
    Model::open(path, &device("wgpu").unwrap()).unwrap()
}

/// Logits with ties, both zeros, and numbers that are none.
fn logits(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state >> 33
    };
    let special = [f32::NAN, -f32::NAN, f32::NEG_INFINITY, -0.0, 0.0, f32::MAX, f32::MIN];
    let logit = |random: u64| match random % 16 {
        0 => special[(random / 16) as usize % special.len()],
        1..5 => ((random / 16) % 40) as f32 / 4.0 - 5.0,
        _ => (random / 16) as f32 / (1 << 20) as f32 - 64.0,
    };
    (0..count).map(|_| logit(next())).collect()
}

/// Asserts that the device finds what the reference finds in every row.
fn check(rows: &[Vec<f32>], most: usize) {
    let (count, vocab) = (rows.len(), rows[0].len());
    let data = TensorData::new(rows.concat(), [count, vocab]);
    let found = likeliest(Tensor::from_data(data, &device("wgpu").unwrap()), most).unwrap();
    for read in [1, most.div_ceil(2), most] {
        for (row, found) in found.read(read).unwrap().into_iter().enumerate() {
            let bits = |scored: Vec<(u32, f32)>| -> Vec<(u32, u32)> {
                scored.into_iter().map(|(token, logit)| (token, logit.to_bits())).collect()
            };
            let expected = bits(reference(&rows[row], read));
            assert_eq!(bits(found), expected, "row {row} of {count}, {read} of {most} of {vocab}");
        }
    }
}

#[test]
fn a_device_finds_what_the_reference_finds() {
    let _alone = alone();
    for (vocab, count) in [(1, 1), (3, 2), (64, 3), (255, 1), (2048, 2), (2049, 5), (9001, 16), (151_937, 1)]
    {
        let rows: Vec<Vec<f32>> = (0..count).map(|row| logits(vocab, (vocab + row) as u64)).collect();
        for most in [1, 2, 7, MAX_LIKELIEST] {
            check(&rows, most);
        }
    }
    // More than the least logits of a chunk.
    check(&[logits(600_001, 1)], 9);
}

#[test]
fn ties_go_to_the_first_and_what_is_no_number_is_never_found() {
    let _alone = alone();
    for most in [1, 5, MAX_LIKELIEST] {
        check(&[vec![0.25; 5000], vec![f32::NAN; 5000], vec![f32::NEG_INFINITY; 5000]], most);
        let mut few = vec![f32::NEG_INFINITY; 5000];
        (few[4999], few[2047], few[2048]) = (-0.0, 0.0, f32::NAN);
        check(&[few, vec![f32::INFINITY; 5000], vec![f32::MIN; 5000]], most);
    }
}

fn prompt(from: u32, count: u32) -> Vec<u32> {
    (0..count).map(|index| 3 + (from + index * 31) % 150).collect()
}

fn samplers() -> [SamplerConfig; 4] {
    let warm = SamplerConfig::default().with_temperature(0.9);
    [
        SamplerConfig::greedy(),
        warm.clone().with_top_k(5).with_seed(3),
        warm.clone().with_top_k(40).with_top_p(0.9).with_min_p(0.01).with_seed(4),
        warm.with_top_k(64).with_typical_p(0.8).with_seed(5),
    ]
}

fn config(sampler: SamplerConfig, most: usize) -> GenerationConfig {
    GenerationConfig::new().with_max_tokens(most).with_ignore_end(true).with_sampler(sampler)
}

fn generated(model: &Model, prompt: &[u32], config: GenerationConfig) -> Vec<u32> {
    let mut session = model.session().unwrap();
    Generation::begin(&mut session, None, prompt, config).unwrap().complete().unwrap().tokens
}

#[test]
fn answers_are_those_that_are_chosen_from_all_logits() {
    let _alone = alone();
    // One is recorded, one has layers that are not fused.
    for family in ["qwen3", "gemma3_text"] {
        let model = model(family);
        let vocab = model.decoder().unwrap().config().vocab_size;
        for sampler in samplers() {
            let prompt = prompt(7, 9);
            let run = |config| transfers(|| generated(&model, &prompt, config));
            // Log-probabilities are of all logits.
            let (expected, all) = run(config(sampler.clone(), 24).with_logprobs(0));
            let (found, few) = run(config(sampler.clone(), 24));
            assert_eq!(found, expected, "{family} with {sampler:?}");
            let candidates = if sampler.temperature == 0.0 { 1 } else { sampler.top_k };
            assert_eq!(all.bytes_read, 24 * vocab * size_of::<f32>());
            assert!(few.bytes_read <= 24 * 8 * candidates, "{few:?} for {candidates} candidates");
        }
    }
}

#[test]
fn answers_of_a_batch_are_those_of_sequences_alone() {
    let _alone = alone();
    let model = model("qwen3");
    let engine = Engine::start(EngineConfig::default()).unwrap();
    engine.add("model", model.clone()).unwrap();
    let penalised = SamplerConfig::greedy().with_presence_penalty(0.5);
    // A batch whose sequences all choose from few tokens, and one in which one needs all logits.
    for samplers in [samplers().to_vec(), [samplers().to_vec(), vec![penalised]].concat()] {
        let asked: Vec<_> =
            (0..).zip(samplers).map(|(at, sampler)| (prompt(5 * at, 12), config(sampler, 16))).collect();
        let ask = |(prompt, config): &(Vec<u32>, GenerationConfig)| {
            engine.generate(Request::new("model", prompt.clone()).with_config(config.clone()))
        };
        let answering: Vec<_> = asked.iter().map(ask).collect();
        for (answering, (prompt, config)) in answering.into_iter().zip(asked) {
            let found = answering.wait().unwrap().summary.tokens;
            assert_eq!(found, generated(&model, &prompt, config.clone()), "{config:?}");
        }
    }
}

#[test]
fn predictions_hardly_differ_from_those_on_the_cpu() {
    let _alone = alone();
    for family in ["qwen3", "llama"] {
        let model = model(family);
        let reference = Model::open(model.checkpoint().path(), &device("cpu").unwrap()).unwrap();
        let found = compare_devices(&model, &reference, &prompt(3, 40)).unwrap();
        assert_eq!(found.positions, 40);
        assert!(found.mean_kl_bits < 1e-6 && found.same_greedy >= 39, "{family}: {found:?}");
    }
}
