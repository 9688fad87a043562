//! Choosing the next token from logits.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::collections::HashMap;

use firebox_kernels::likeliest::{MAX_LIKELIEST, Scored};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::RuntimeError;
use crate::decode::SamplerConfig;

/// Chooses tokens, one after the other.
#[derive(Debug, Clone)]
pub struct Sampler {
    config: SamplerConfig,
    random: ChaCha8Rng,
}

/// A token that may be chosen.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    token: u32,
    logit: f32,
    probability: f32,
}

/// The tokens that are left to choose from.
enum Left {
    One(u32),
    Several(Vec<Candidate>),
}

impl Sampler {
    /// Creates a sampler at the beginning of its random sequence.
    pub fn new(config: SamplerConfig) -> Result<Self, RuntimeError> {
        config.check()?;
        Ok(Self { random: ChaCha8Rng::seed_from_u64(config.seed), config })
    }

    /// Creates a sampler at the place of another with equal settings.
    pub(crate) fn resume(config: SamplerConfig, drawn: u64) -> Result<Self, RuntimeError> {
        let mut sampler = Self::new(config)?;
        sampler.random.set_word_pos(drawn.into());
        Ok(sampler)
    }

    /// Returns how much of its random sequence it has used.
    pub(crate) fn drawn(&self) -> u64 {
        // A position counts 32-bit words; 2^64 of them are never drawn.
        self.random.get_word_pos() as u64
    }

    /// Returns the next token, given the logits and the tokens so far. NaN logits are never chosen, unless there is nothing
    /// else.
    pub fn sample(&mut self, logits: &[f32], tokens: &[u32]) -> u32 {
        match self.left(logits, tokens) {
            Left::One(token) => token,
            Left::Several(candidates) => self.draw(&candidates),
        }
    }

    /// Returns how many of the likeliest tokens it chooses from, if it needs no other logits and devices find so many.
    pub(crate) fn candidates_needed(&self) -> Option<usize> {
        match self.config.top_k {
            _ if self.changes_logits() => None,
            _ if self.config.temperature == 0.0 => Some(1),
            k => (1..=MAX_LIKELIEST).contains(&k).then_some(k),
        }
    }

    /// Returns the next token, given [as many](Self::candidates_needed) of the likeliest tokens as it chooses from: the token
    /// that [`sample`](Self::sample) returns, given all logits.
    pub(crate) fn sample_likeliest(&mut self, likeliest: &[Scored]) -> u32 {
        let Some((first, _)) = likeliest.first() else { return 0 };
        if self.config.temperature == 0.0 {
            return *first;
        }
        let kept = likeliest.iter().take(self.config.top_k);
        let candidates = kept.map(|&(token, logit)| Candidate { token, logit, probability: 0.0 }).collect();
        let filtered = self.filtered(candidates);
        self.draw(&filtered)
    }

    /// Returns the tokens that [`sample`](Self::sample) would choose from, likeliest first, with their probabilities.
    pub fn probabilities(&self, logits: &[f32], tokens: &[u32]) -> Vec<(u32, f32)> {
        match self.left(logits, tokens) {
            Left::One(token) => vec![(token, 1.0)],
            Left::Several(mut candidates) => {
                candidates.sort_unstable_by(likelier);
                normalise(&mut candidates);
                candidates.iter().map(|candidate| (candidate.token, candidate.probability)).collect()
            }
        }
    }

    /// Returns the tokens that penalties, biases and filters leave.
    fn left(&self, logits: &[f32], tokens: &[u32]) -> Left {
        let logits = self.adjusted(logits, tokens);
        if self.config.temperature == 0.0 {
            return Left::One(likeliest(&logits));
        }
        let candidates = self.candidates(&logits);
        if candidates.is_empty() {
            return Left::One(likeliest(&logits));
        }
        Left::Several(self.filtered(candidates))
    }

    /// Returns what filters leave of the candidates, with their probabilities at the configured temperature.
    fn filtered(&self, mut candidates: Vec<Candidate>) -> Vec<Candidate> {
        let highest = candidates.iter().fold(f32::NEG_INFINITY, |highest, one| highest.max(one.logit));
        for candidate in &mut candidates {
            let distance = candidate.logit - highest;
            // Infinity minus itself is not a number; two such logits are equally likely.
            let distance = if distance.is_nan() { 0.0 } else { distance };
            candidate.probability = (distance / self.config.temperature).exp();
        }
        normalise(&mut candidates);
        keep_typical(&mut candidates, self.config.typical_p);
        keep_top_p(&mut candidates, self.config.top_p);
        keep_min_p(&mut candidates, self.config.min_p);
        candidates
    }

    /// Returns true if penalties or biases change logits.
    fn changes_logits(&self) -> bool {
        self.penalises() || !self.config.logit_bias.is_empty()
    }

    fn penalises(&self) -> bool {
        let SamplerConfig { repetition_penalty, frequency_penalty, presence_penalty, .. } = self.config;
        repetition_penalty != 1.0 || frequency_penalty != 0.0 || presence_penalty != 0.0
    }

    /// Returns the logits after penalties and biases, copied only where there are any.
    fn adjusted<'l>(&self, logits: &'l [f32], tokens: &[u32]) -> Cow<'l, [f32]> {
        let mut logits = Cow::Borrowed(logits);
        if self.penalises() {
            self.penalise(logits.to_mut(), tokens);
        }
        for (&token, &bias) in &self.config.logit_bias {
            if (token as usize) < logits.len() {
                logits.to_mut()[token as usize] += bias;
            }
        }
        logits
    }

    fn penalise(&self, logits: &mut [f32], tokens: &[u32]) {
        let SamplerConfig { repetition_penalty, frequency_penalty, presence_penalty, penalty_window, .. } =
            self.config;
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

    /// Returns the top-k tokens, in order if they are few: sums of probabilities depend on their order in the last bits, and
    /// tokens that a device has found come in order.
    fn candidates(&self, logits: &[f32]) -> Vec<Candidate> {
        let mut candidates: Vec<Candidate> = logits
            .iter()
            .enumerate()
            .filter(|(_, logit)| !logit.is_nan() && **logit > f32::NEG_INFINITY)
            .map(|(token, &logit)| Candidate { token: token as u32, logit, probability: 0.0 })
            .collect();
        let kept = match self.config.top_k {
            0 => candidates.len(),
            k => k.min(candidates.len()),
        };
        if kept < candidates.len() {
            candidates.select_nth_unstable_by(kept, likelier);
            candidates.truncate(kept);
        }
        if (1..=MAX_LIKELIEST).contains(&self.config.top_k) {
            candidates.sort_unstable_by(likelier);
        }
        candidates
    }

    /// Draws a token by an exponential race (the Gumbel-max trick): each candidate gets a random arrival time with a mean of
    /// one over its probability, and the first to arrive is drawn. Every token has its own random number, so that a draft
    /// model and its model, whose probabilities are similar, mostly draw the same token.
    fn draw(&mut self, candidates: &[Candidate]) -> u32 {
        let key = self.random.next_u64();
        let (mut first, mut arrival) = (0, f64::INFINITY);
        for &Candidate { token, probability, .. } in candidates {
            let random = uniform(key, token);
            // -ln(x) ≥ 1 - x skips most logarithms, which take most of the time.
            if (1.0 - random) < arrival * f64::from(probability) {
                let own = -random.ln() / f64::from(probability);
                if own < arrival || (own == arrival && token < first) {
                    (first, arrival) = (token, own);
                }
            }
        }
        first
    }
}

/// Returns a random number for a token, greater than 0 and less than 1. Its negative logarithm has the exponential
/// distribution with mean 1.
fn uniform(key: u64, token: u32) -> f64 {
    // SplitMix64, at the place of the token in the sequence that begins with the key.
    let mut mixed = key.wrapping_add(0x9E37_79B9_7F4A_7C15_u64.wrapping_mul(u64::from(token) + 1));
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^= mixed >> 31;
    // A double between 0 and 1 holds 53 random bits; the half keeps it off 0.
    ((mixed >> 11) as f64 + 0.5) / (1u64 << 53) as f64
}

/// Returns the index of the largest logit, the first of equal ones.
pub fn likeliest(logits: &[f32]) -> u32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    // Sixteen maxima beside each other are vectorised, and NaN is never larger.
    let mut lanes = [f32::NEG_INFINITY; 16];
    let (pieces, rest) = logits.as_chunks::<16>();
    for piece in pieces {
        for (lane, &logit) in lanes.iter_mut().zip(piece) {
            *lane = larger(*lane, logit);
        }
    }
    let highest = lanes.into_iter().chain(rest.iter().copied()).fold(f32::NEG_INFINITY, larger);
    if highest == f32::NEG_INFINITY {
        return 0;
    }
    logits.iter().position(|logit| *logit == highest).unwrap_or(0) as u32
}

/// Orders likelier candidates first. Ties go to the lower token, so that the order is unique. Both zeros are equal, as the sum
/// with zero is positive.
fn likelier(a: &Candidate, b: &Candidate) -> Ordering {
    (b.logit + 0.0).total_cmp(&(a.logit + 0.0)).then(a.token.cmp(&b.token))
}

fn normalise(candidates: &mut [Candidate]) {
    let total: f64 = candidates.iter().map(|candidate| f64::from(candidate.probability)).sum();
    for candidate in candidates {
        candidate.probability = (f64::from(candidate.probability) / total) as f32;
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
    if let Some(last) = reaching(candidates, share, &mut 0.0) {
        candidates.truncate(last + 1);
    }
    normalise(candidates);
}

fn keep_top_p(candidates: &mut Vec<Candidate>, share: f32) {
    if share >= 1.0 {
        return;
    }
    // A few tokens mostly reach the share together, and ordering a whole vocabulary takes longer than computing its logits.
    let (mut ordered, mut sum) = (0, 0.0);
    while ordered < candidates.len() {
        let piece = (4 * ordered).max(64);
        let rest = &mut candidates[ordered..];
        if piece < rest.len() {
            rest.select_nth_unstable_by(piece, likelier);
        }
        let piece = piece.min(rest.len());
        rest[..piece].sort_unstable_by(likelier);
        if let Some(last) = reaching(&rest[..piece], share, &mut sum) {
            candidates.truncate(ordered + last + 1);
            break;
        }
        ordered += piece;
    }
    normalise(candidates);
}

/// Returns the index of the candidate with which the running `sum` of probabilities reaches a share.
fn reaching(candidates: &[Candidate], share: f32, sum: &mut f32) -> Option<usize> {
    candidates.iter().position(|candidate| {
        *sum += candidate.probability;
        *sum >= share
    })
}

fn keep_min_p(candidates: &mut Vec<Candidate>, ratio: f32) {
    if ratio > 0.0 {
        let highest = candidates.iter().map(|candidate| candidate.probability).fold(0.0, f32::max);
        candidates.retain(|candidate| candidate.probability >= ratio * highest);
    }
}

#[cfg(test)]
mod tests {
    use firebox_kernels::likeliest::reference;
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
    fn probabilities_match_the_frequencies_of_draws() {
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
    fn filters_keep_the_documented_tokens() {
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
    fn invalid_settings_are_refused() {
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

    /// Samples by ordering all candidates and computing every arrival time.
    fn plainly(config: &SamplerConfig, logits: &[f32]) -> u32 {
        let mut random = Sampler::new(config.clone()).unwrap().random;
        let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weight = |logit: f32| f64::from(((logit - highest) / config.temperature).exp());
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        order.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b)));
        if config.top_k > 0 {
            order.truncate(config.top_k);
        }
        let total: f64 = order.iter().map(|token| weight(logits[*token as usize])).sum();
        let mut sum = 0.0;
        let reached = order.iter().position(|token| {
            sum += (weight(logits[*token as usize]) / total) as f32;
            sum >= config.top_p
        });
        order.truncate(reached.map_or(order.len(), |last| last + 1));
        order.retain(|token| weight(logits[*token as usize]) >= f64::from(config.min_p));
        let key = random.next_u64();
        let arrival = |token: u32| -uniform(key, token).ln() / weight(logits[token as usize]);
        order.into_iter().min_by(|a, b| arrival(*a).total_cmp(&arrival(*b))).unwrap()
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
        fn the_likeliest_tokens_alone_give_the_same_draws(
            logits in prop::collection::vec(prop_oneof![12 => (-32i8..32).prop_map(|logit| f32::from(logit) / 4.0),
                1 => Just(f32::NAN), 1 => Just(f32::INFINITY), 1 => Just(f32::NEG_INFINITY), 1 => Just(-0.0)], 1..600),
            temperature in prop_oneof![Just(0f32), 0.01f32..3.0],
            top_k in 1usize..=MAX_LIKELIEST, top_p in 0f32..=1.0, min_p in 0f32..=1.0, typical_p in 0f32..=1.0,
            spare in 0usize..9, seed: u64,
        ) {
            let config = SamplerConfig { temperature, top_k, top_p, min_p, typical_p, seed, ..SamplerConfig::default() };
            let mut sampler = Sampler::new(config.clone()).unwrap();
            let found = reference(&logits, sampler.candidates_needed().unwrap() + spare);
            let sampled: Vec<u32> = (0..5).map(|_| sampler.sample_likeliest(&found)).collect();
            prop_assert_eq!(drawn(config, &logits, 5), sampled);
        }

        #[test]
        fn greedy_is_the_first_largest(logits in prop::collection::vec(-3i8..3, 1..40)) {
            let logits: Vec<f32> = logits.into_iter().map(f32::from).collect();
            let chosen = drawn(SamplerConfig::greedy(), &logits, 1)[0] as usize;
            prop_assert!(logits.iter().all(|&logit| logit <= logits[chosen]));
            prop_assert!(logits[..chosen].iter().all(|&logit| logit < logits[chosen]));
        }

        #[test]
        fn partial_ordering_changes_no_draw(
            // Coarse ones, so that ties and bounds that are met exactly come up.
            logits in prop::collection::vec((-32i8..32).prop_map(|logit| f32::from(logit) / 4.0), 1..3000),
            temperature in 0.3f32..3.0,
            top_k in prop_oneof![Just(0usize), 1..500usize],
            top_p in prop_oneof![Just(1.0f32), 0.05f32..0.999],
            min_p in prop_oneof![Just(0.0f32), 0.01f32..0.5],
            seed in any::<u64>(),
        ) {
            let config = SamplerConfig { temperature, top_k, top_p, min_p, seed, ..warm() };
            prop_assert_eq!(drawn(config.clone(), &logits, 1)[0], plainly(&config, &logits));
        }
    }
}
