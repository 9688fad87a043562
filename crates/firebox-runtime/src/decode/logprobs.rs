//! Log-probabilities of tokens.

use serde::Serialize;

/// Log-probabilities by the model's own logits: without temperature, penalties or a grammar.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct LogProbabilities {
    /// That of the chosen token.
    pub token: f32,
    /// The likeliest tokens with theirs, likeliest first; equal ones in the order of their ids.
    pub likeliest: Vec<(u32, f32)>,
}

impl LogProbabilities {
    /// Computes those of `token` and of the `most` likeliest tokens. NaN counts as impossible.
    pub(crate) fn new(logits: &[f32], token: u32, most: usize) -> Self {
        let number = |logit: f32| if logit.is_nan() { f32::NEG_INFINITY } else { logit };
        let highest = logits.iter().copied().map(number).fold(f32::NEG_INFINITY, f32::max);
        // Infinity minus itself is not a number; two such logits are equally likely.
        let distance = |logit: f32| if logit == highest { 0.0 } else { f64::from(logit - highest) };
        let total: f64 = logits.iter().map(|&logit| distance(number(logit)).exp()).sum();
        let of = |logit: f32| match number(logit) {
            f32::NEG_INFINITY => f32::NEG_INFINITY,
            logit => (distance(logit) - total.ln()) as f32,
        };
        let likelier = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        let mut likeliest: Vec<(u32, f32)> = Vec::with_capacity(most.min(logits.len()) + 1);
        for (token, logit) in (0..).zip(logits.iter().copied().map(number)) {
            // Most tokens are less likely than the `most` found so far.
            if likeliest.len() >= most && likeliest.last().is_none_or(|last| logit <= last.1) {
                continue;
            }
            let entry = (token, logit);
            let at = likeliest.partition_point(|kept| likelier(kept, &entry).is_lt());
            likeliest.insert(at, entry);
            likeliest.truncate(most);
        }
        Self {
            token: logits.get(token as usize).map_or(f32::NEG_INFINITY, |&logit| of(logit)),
            likeliest: likeliest.into_iter().map(|(token, logit)| (token, of(logit))).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_likeliest_match_a_sort_of_all_tokens(
            logits in prop::collection::vec(prop_oneof![9 => -4f32..4.0, 1 => Just(f32::NEG_INFINITY), 1 => Just(f32::NAN)], 1..40),
            most in 0usize..50, chosen in any::<prop::sample::Index>(),
        ) {
            prop_assume!(logits.iter().any(|logit| logit.is_finite()));
            let total: f64 = logits.iter().filter(|logit| !logit.is_nan()).map(|&logit| f64::from(logit).exp()).sum();
            let exact = |token: usize| {
                if logits[token].is_nan() { 0.0 } else { f64::from(logits[token]).exp() / total }
            };
            let chosen = chosen.index(logits.len());
            let found = LogProbabilities::new(&logits, chosen as u32, most);
            prop_assert!((f64::from(found.token).exp() - exact(chosen)).abs() < 1e-5);
            prop_assert_eq!(found.likeliest.len(), most.min(logits.len()));
            let mut tokens: Vec<usize> = (0..logits.len()).collect();
            tokens.sort_by(|&a, &b| exact(b).total_cmp(&exact(a)).then(a.cmp(&b)));
            for (at, &(token, logprob)) in found.likeliest.iter().enumerate() {
                prop_assert_eq!(token as usize, tokens[at]);
                prop_assert!((f64::from(logprob).exp() - exact(tokens[at])).abs() < 1e-5);
            }
        }
    }

    #[test]
    fn nan_logits_are_impossible() {
        let found = LogProbabilities::new(&[f32::NAN, f32::NAN], 7, 1);
        assert!(found.token == f32::NEG_INFINITY && found.likeliest.len() == 1);
    }
}
