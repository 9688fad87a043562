use std::collections::HashMap;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};

use crate::RuntimeError;

/// How the next token is chosen from the logits.
///
/// The steps run in the order of the fields: penalties and biases change logits, the temperature
/// stretches them, and each filter works on what the one before it left.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SamplerConfig {
    /// Divides positive and multiplies negative logits of tokens seen among the last; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted once for each time a token occurs among the last; 0 is off.
    pub frequency_penalty: f32,
    /// Subtracted from tokens that occur among the last; 0 is off.
    pub presence_penalty: f32,
    /// How many of the last tokens penalties look at.
    pub penalty_window: usize,
    /// Added to the logits of single tokens.
    pub logit_bias: HashMap<u32, f32>,
    /// Divides the logits; 0 takes the likeliest token and ignores all filters.
    pub temperature: f32,
    /// Keeps this many of the likeliest; 0 is off.
    pub top_k: usize,
    /// Keeps those whose surprise is closest to the expected, up to this much probability; 1 is off.
    pub typical_p: f32,
    /// Keeps the likeliest up to this much probability; 1 is off.
    pub top_p: f32,
    /// Keeps those at least this many times as likely as the likeliest; 0 is off.
    pub min_p: f32,
    /// The same seed, settings and logits give the same tokens.
    pub seed: u64,
}

impl Default for SamplerConfig {
    fn default() -> Self {
        Self {
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            penalty_window: 64,
            logit_bias: HashMap::new(),
            temperature: 0.0,
            top_k: 0,
            typical_p: 1.0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
        }
    }
}

impl SamplerConfig {
    /// Always the likeliest token.
    pub fn greedy() -> Self {
        Self::default()
    }

    fn check(&self) -> Result<(), RuntimeError> {
        let within = |setting, value: f32, ok: bool, reason| {
            if ok { Ok(()) } else { Err(RuntimeError::Setting { setting, value: value.to_string(), reason }) }
        };
        let share = |value: f32| (0.0..=1.0).contains(&value);
        within(
            "temperature",
            self.temperature,
            self.temperature >= 0.0 && self.temperature.is_finite(),
            "should be 0 or more",
        )?;
        within("top_p", self.top_p, share(self.top_p), "should be between 0 and 1")?;
        within("typical_p", self.typical_p, share(self.typical_p), "should be between 0 and 1")?;
        within("min_p", self.min_p, share(self.min_p), "should be between 0 and 1")?;
        let penalty = self.repetition_penalty;
        within("repetition_penalty", penalty, penalty > 0.0 && penalty.is_finite(), "should be above 0")?;
        within(
            "frequency_penalty",
            self.frequency_penalty,
            self.frequency_penalty.is_finite(),
            "should be finite",
        )?;
        within(
            "presence_penalty",
            self.presence_penalty,
            self.presence_penalty.is_finite(),
            "should be finite",
        )
    }
}

/// Chooses tokens, one after the other.
#[derive(Debug, Clone)]
pub struct Sampler {
    config: SamplerConfig,
    random: ChaCha8Rng,
}

/// A token that is still in the running.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    token: u32,
    logit: f32,
    probability: f32,
}

/// What is left to choose from.
enum Left {
    One(u32),
    Several(Vec<Candidate>),
}

impl Sampler {
    /// A sampler at the beginning of its random sequence.
    pub fn new(config: SamplerConfig) -> Result<Self, RuntimeError> {
        config.check()?;
        Ok(Self { random: ChaCha8Rng::seed_from_u64(config.seed), config })
    }

    /// One that goes on where another of the same settings was.
    pub(crate) fn resume(config: SamplerConfig, drawn: u64) -> Result<Self, RuntimeError> {
        let mut sampler = Self::new(config)?;
        sampler.random.set_word_pos(drawn.into());
        Ok(sampler)
    }

    /// How much of its random sequence it has used.
    pub(crate) fn drawn(&self) -> u64 {
        // A position counts words, and nobody draws as many as that.
        self.random.get_word_pos() as u64
    }

    /// The next token, given the logits and the tokens so far.
    ///
    /// Logits that are not numbers are never chosen, unless there is nothing else.
    pub fn sample(&mut self, logits: &[f32], tokens: &[u32]) -> u32 {
        match self.left(logits, tokens) {
            Left::One(token) => token,
            Left::Several(candidates) => self.draw(&candidates),
        }
    }

    /// What [`sample`](Self::sample) would choose from, likeliest first, with the probability of each.
    pub fn probabilities(&self, logits: &[f32], tokens: &[u32]) -> Vec<(u32, f32)> {
        match self.left(logits, tokens) {
            Left::One(token) => vec![(token, 1.0)],
            Left::Several(mut candidates) => {
                normalise(&mut candidates);
                candidates.iter().map(|candidate| (candidate.token, candidate.probability)).collect()
            }
        }
    }

    /// What penalties, biases and filters leave.
    fn left(&self, logits: &[f32], tokens: &[u32]) -> Left {
        let mut logits = logits.to_vec();
        self.penalise(&mut logits, tokens);
        for (&token, &bias) in &self.config.logit_bias {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit += bias;
            }
        }
        if self.config.temperature == 0.0 {
            return Left::One(likeliest(&logits));
        }
        let mut candidates = self.candidates(&logits);
        if candidates.is_empty() {
            return Left::One(likeliest(&logits));
        }
        keep_typical(&mut candidates, self.config.typical_p);
        keep_top_p(&mut candidates, self.config.top_p);
        keep_min_p(&mut candidates, self.config.min_p);
        Left::Several(candidates)
    }

    fn penalise(&self, logits: &mut [f32], tokens: &[u32]) {
        let SamplerConfig { repetition_penalty, frequency_penalty, presence_penalty, penalty_window, .. } =
            self.config;
        if repetition_penalty == 1.0 && frequency_penalty == 0.0 && presence_penalty == 0.0 {
            return;
        }
        let mut counts: HashMap<u32, u32> = HashMap::new();
        for &token in &tokens[tokens.len().saturating_sub(penalty_window)..] {
            *counts.entry(token).or_default() += 1;
        }
        for (token, count) in counts {
            let Some(logit) = logits.get_mut(token as usize) else { continue };
            *logit = if *logit > 0.0 { *logit / repetition_penalty } else { *logit * repetition_penalty };
            *logit -= frequency_penalty * count as f32 + presence_penalty;
        }
    }

    /// The top-k tokens, likeliest first, with their probabilities at the configured temperature.
    fn candidates(&self, logits: &[f32]) -> Vec<Candidate> {
        let mut candidates: Vec<Candidate> = logits
            .iter()
            .enumerate()
            .filter(|(_, logit)| !logit.is_nan() && **logit > f32::NEG_INFINITY)
            .map(|(token, &logit)| Candidate { token: token as u32, logit, probability: 0.0 })
            .collect();
        // Ties go to the lower token, so that the order does not depend on the sort.
        let likelier = |a: &Candidate, b: &Candidate| b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token));
        let kept = match self.config.top_k {
            0 => candidates.len(),
            k => k.min(candidates.len()),
        };
        if kept < candidates.len() {
            candidates.select_nth_unstable_by(kept, likelier);
            candidates.truncate(kept);
        }
        candidates.sort_unstable_by(likelier);
        let Some(highest) = candidates.first().map(|candidate| candidate.logit) else { return candidates };
        for candidate in &mut candidates {
            let distance = candidate.logit - highest;
            // Infinity minus itself is not a number; two such logits are equally likely.
            let distance = if distance.is_nan() { 0.0 } else { distance };
            candidate.probability = (distance / self.config.temperature).exp();
        }
        normalise(&mut candidates);
        candidates
    }

    /// A race: each candidate arrives after a time of its own, on average the shorter the likelier it is, and the first is
    /// drawn. Every token has its own random number, so that two samplers at the same place of their random sequence
    /// mostly draw the same token from probabilities that are nearly the same, as a draft model's and its model's are.
    fn draw(&mut self, candidates: &[Candidate]) -> u32 {
        let key = self.random.next_u64();
        let arrivals = candidates.iter().map(|candidate| {
            (candidate.token, exponential(key, candidate.token) / f64::from(candidate.probability))
        });
        arrivals.min_by(|(_, a), (_, b)| a.total_cmp(b)).map_or(0, |(token, _)| token)
    }
}

/// A random number for a token, exponentially distributed around 1.
fn exponential(key: u64, token: u32) -> f64 {
    // SplitMix64, at the place of the token in the sequence that begins with the key.
    let mut mixed = key.wrapping_add(0x9E37_79B9_7F4A_7C15_u64.wrapping_mul(u64::from(token) + 1));
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^= mixed >> 31;
    // 53 random bits are what a double between 0 and 1 holds; a half keeps it off 0.
    -(((mixed >> 11) as f64 + 0.5) / (1u64 << 53) as f64).ln()
}

/// The index of the largest logit, the first of several.
pub fn likeliest(logits: &[f32]) -> u32 {
    let mut best = 0;
    let mut highest = f32::NEG_INFINITY;
    for (token, &logit) in logits.iter().enumerate() {
        if logit > highest {
            (best, highest) = (token, logit);
        }
    }
    best as u32
}

fn normalise(candidates: &mut [Candidate]) {
    let total: f32 = candidates.iter().map(|candidate| candidate.probability).sum();
    for candidate in candidates {
        candidate.probability /= total;
    }
}

fn keep_typical(candidates: &mut Vec<Candidate>, share: f32) {
    if share >= 1.0 {
        return;
    }
    let surprise = |candidate: &Candidate| -candidate.probability.max(f32::MIN_POSITIVE).ln();
    let expected: f32 = candidates.iter().map(|candidate| candidate.probability * surprise(candidate)).sum();
    let oddness = |candidate: &Candidate| (surprise(candidate) - expected).abs();
    candidates.sort_by(|a, b| oddness(a).total_cmp(&oddness(b)).then(a.token.cmp(&b.token)));
    keep_share(candidates, share);
    candidates.sort_by(|a, b| b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token)));
    normalise(candidates);
}

fn keep_top_p(candidates: &mut Vec<Candidate>, share: f32) {
    if share < 1.0 {
        keep_share(candidates, share);
        normalise(candidates);
    }
}

/// Keeps the first candidates that together reach `share`, at least one.
fn keep_share(candidates: &mut Vec<Candidate>, share: f32) {
    let mut sum = 0.0;
    let reached = candidates.iter().position(|candidate| {
        sum += candidate.probability;
        sum >= share
    });
    if let Some(last) = reached {
        candidates.truncate(last + 1);
    }
}

fn keep_min_p(candidates: &mut Vec<Candidate>, ratio: f32) {
    if let Some(highest) = candidates.first().map(|candidate| candidate.probability)
        && ratio > 0.0
    {
        candidates.retain(|candidate| candidate.probability >= ratio * highest);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn drawn(config: SamplerConfig, logits: &[f32], count: usize) -> Vec<u32> {
        let mut sampler = Sampler::new(config).unwrap();
        (0..count).map(|_| sampler.sample(logits, &[])).collect()
    }

    fn warm() -> SamplerConfig {
        SamplerConfig { temperature: 1.0, ..SamplerConfig::default() }
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        let probabilities = [0.5f32, 0.25, 0.15, 0.1];
        let logits: Vec<f32> = probabilities.iter().map(|p| p.ln()).collect();
        let draws = drawn(SamplerConfig { seed: 3, ..warm() }, &logits, 20_000);
        let mut chi_square = 0.0;
        for (token, probability) in probabilities.iter().enumerate() {
            let expected = probability * draws.len() as f32;
            let seen = draws.iter().filter(|&&drawn| drawn as usize == token).count() as f32;
            chi_square += (seen - expected).powi(2) / expected;
        }
        // The 99.9 % point of the distribution with three degrees of freedom.
        assert!(chi_square < 16.27, "{chi_square}");
    }

    #[test]
    fn probabilities_are_those_of_what_is_drawn() {
        let logits: Vec<f32> = [0.1f32, 0.4, 0.2, 0.3].iter().map(|p| p.ln()).collect();
        let config = SamplerConfig { top_k: 3, min_p: 0.6, seed: 5, ..warm() };
        let probabilities = Sampler::new(config.clone()).unwrap().probabilities(&logits, &[]);
        assert_eq!(probabilities.iter().map(|(token, _)| *token).collect::<Vec<_>>(), [1, 3]);
        let draws = drawn(config, &logits, 10_000);
        for (token, probability) in probabilities {
            let seen = draws.iter().filter(|&&drawn| drawn == token).count() as f32 / draws.len() as f32;
            assert!((seen - probability).abs() < 0.02, "{token}: {seen} instead of {probability}");
        }
        let greedy = Sampler::new(SamplerConfig::greedy()).unwrap();
        assert_eq!(greedy.probabilities(&logits, &[]), [(1, 1.0)]);
    }

    #[test]
    fn filters_keep_what_they_say() {
        let logits: Vec<f32> = [0.4f32, 0.3, 0.2, 0.1].iter().map(|p| p.ln()).collect();
        let kept = |config: SamplerConfig| {
            let mut tokens = drawn(config, &logits, 500);
            tokens.sort_unstable();
            tokens.dedup();
            tokens
        };
        assert_eq!(kept(warm()), [0, 1, 2, 3]);
        assert_eq!(kept(SamplerConfig { top_k: 2, ..warm() }), [0, 1]);
        assert_eq!(kept(SamplerConfig { top_p: 0.6, ..warm() }), [0, 1]);
        assert_eq!(kept(SamplerConfig { top_p: 0.0, ..warm() }), [0]);
        assert_eq!(kept(SamplerConfig { min_p: 0.45, ..warm() }), [0, 1, 2]);
        // The entropy is 1.28; surprises are 0.92, 1.20, 1.61, 2.30.
        assert_eq!(kept(SamplerConfig { typical_p: 0.25, ..warm() }), [1]);
        assert_eq!(kept(SamplerConfig { typical_p: 0.45, ..warm() }), [1, 2]);
        assert_eq!(kept(SamplerConfig { temperature: 0.01, ..warm() }), [0]);
        assert_eq!(kept(SamplerConfig { logit_bias: [(3, 100.0)].into(), ..warm() }), [3]);
    }

    #[test]
    fn penalties_look_at_the_window() {
        let config = SamplerConfig { presence_penalty: 2.0, penalty_window: 2, ..SamplerConfig::default() };
        let mut sampler = Sampler::new(config).unwrap();
        assert_eq!(sampler.sample(&[1.0, 0.0], &[0, 1, 1]), 0);
        assert_eq!(sampler.sample(&[1.0, 0.0], &[1, 0, 0]), 1);
        let config = SamplerConfig { frequency_penalty: 0.6, ..SamplerConfig::default() };
        let mut sampler = Sampler::new(config).unwrap();
        assert_eq!(sampler.sample(&[1.0, 0.0], &[0]), 0);
        assert_eq!(sampler.sample(&[1.0, 0.0], &[0, 0]), 1);
        let config = SamplerConfig { repetition_penalty: 4.0, ..SamplerConfig::default() };
        let mut sampler = Sampler::new(config).unwrap();
        assert_eq!(sampler.sample(&[1.0, 0.5], &[0]), 1);
        assert_eq!(sampler.sample(&[-1.0, -2.0], &[0]), 1);
    }

    #[test]
    fn nonsense_settings_are_refused() {
        for config in [
            SamplerConfig { temperature: -1.0, ..warm() },
            SamplerConfig { temperature: f32::NAN, ..warm() },
            SamplerConfig { top_p: 1.5, ..warm() },
            SamplerConfig { min_p: -0.1, ..warm() },
            SamplerConfig { repetition_penalty: 0.0, ..warm() },
        ] {
            assert!(Sampler::new(config).is_err());
        }
    }

    proptest! {
        #[test]
        fn any_logits_give_a_token_of_the_vocabulary(
            logits in prop::collection::vec(prop_oneof![8 => -50f32..50.0, 1 => Just(f32::NAN),
                1 => Just(f32::INFINITY), 1 => Just(f32::NEG_INFINITY)], 1..40),
            temperature in prop_oneof![Just(0f32), 0.01f32..3.0],
            top_k in 0usize..10, top_p in 0f32..=1.0, min_p in 0f32..=1.0, typical_p in 0f32..=1.0, seed: u64,
        ) {
            let config = SamplerConfig { temperature, top_k, top_p, min_p, typical_p, seed, ..SamplerConfig::default() };
            let first = drawn(config.clone(), &logits, 5);
            prop_assert!(first.iter().all(|&token| (token as usize) < logits.len()));
            prop_assert_eq!(first, drawn(config, &logits, 5));
        }

        #[test]
        fn greedy_is_the_first_largest(logits in prop::collection::vec(-3i8..3, 1..40)) {
            let logits: Vec<f32> = logits.into_iter().map(f32::from).collect();
            let chosen = drawn(SamplerConfig::greedy(), &logits, 1)[0] as usize;
            prop_assert!(logits.iter().all(|&logit| logit <= logits[chosen]));
            prop_assert!(logits[..chosen].iter().all(|&logit| logit < logits[chosen]));
        }
    }
}
