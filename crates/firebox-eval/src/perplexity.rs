//! Measures how well a model predicts text.

use firebox_cache::KvType;
use firebox_runtime::{Model, RuntimeError, Session};
use serde::Serialize;

/// How well a model predicts tokens, and how much its predictions differ from those of another model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Perplexity {
    /// `exp` of the mean negative log-likelihood.
    pub perplexity: f64,
    /// Nats per token.
    pub negative_log_likelihood: f64,
    /// The number of predicted tokens.
    pub tokens: usize,
    /// The comparison with the other model, if one was given.
    pub divergence: Option<Divergence>,
}

/// The difference between the predictions of two models.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Divergence {
    /// The mean of KL(other ‖ this) over all positions, in nats.
    pub mean_kl: f64,
    /// The largest KL divergence of a position.
    pub max_kl: f64,
    /// The share of positions at which both models find the same token most likely.
    pub same_top: f64,
    /// The other model's perplexity.
    pub other_perplexity: f64,
}

#[derive(Debug, Default)]
struct Sums {
    predicted: usize,
    negative_log_likelihood: f64,
    positions: usize,
    kl: f64,
    max_kl: f64,
    same_top: usize,
    other_negative_log_likelihood: f64,
}

/// The number of positions whose logits are held at a time.
const COMPARED_TOGETHER: usize = 64;

/// Measures consecutive windows of `context` tokens. Every token of a window but its first is predicted, and every
/// position is compared. This model stores keys and values as `kv_type`, the other one exactly.
pub fn perplexity(
    model: &Model,
    tokens: &[u32],
    context: usize,
    kv_type: KvType,
    against: Option<&Model>,
) -> Result<Perplexity, RuntimeError> {
    let context = context.max(2);
    if tokens.len() < 2 {
        return Err(RuntimeError::Setting {
            setting: "text",
            value: format!("{} tokens", tokens.len()),
            reason: "needs at least two tokens, one to predict from and one to predict",
        });
    }
    let vocab = model.decoder()?.config().vocab_size;
    if let Some(other) = against
        && other.decoder()?.config().vocab_size != vocab
    {
        return Err(RuntimeError::Setting {
            setting: "against",
            value: other.checkpoint().path().display().to_string(),
            reason: "has another vocabulary, so its predictions cannot be compared",
        });
    }
    model.session()?.check_tokens(tokens)?;
    let mut sums = Sums::default();
    for window in tokens.chunks(context) {
        let open = |model: &Model, kv_type| {
            Ok::<_, RuntimeError>(model.session()?.with_kv_type(kv_type).with_expected_length(window.len()))
        };
        let mut session = open(model, kv_type)?;
        let mut other = against.map(|other| open(other, KvType::F32)).transpose()?;
        // The logits of a whole window would take more memory than the model if the vocabulary is large.
        for start in (0..window.len()).step_by(COMPARED_TOGETHER) {
            let piece = &window[start..window.len().min(start + COMPARED_TOGETHER)];
            let found = logits(&mut session, piece)?;
            let other = other.as_mut().map(|other| logits(other, piece)).transpose()?;
            for offset in 0..piece.len() {
                let row = offset * vocab..(offset + 1) * vocab;
                let found = log_softmax(&found[row.clone()]);
                let other = other.as_ref().map(|logits| log_softmax(&logits[row]));
                let next = window.get(start + offset + 1).map(|&token| token as usize);
                sums.add(&found, other.as_deref(), next);
            }
        }
    }
    Ok(sums.finish(against.is_some()))
}

fn logits(session: &mut Session, tokens: &[u32]) -> Result<Vec<f32>, RuntimeError> {
    let mut all = Vec::new();
    session.feed_each_row(tokens, |rows| all.extend_from_slice(rows))?;
    Ok(all)
}

impl Sums {
    fn add(&mut self, found: &[f64], other: Option<&[f64]>, next: Option<usize>) {
        if let Some(next) = next {
            self.predicted += 1;
            self.negative_log_likelihood -= found[next];
        }
        let Some(other) = other else { return };
        if let Some(next) = next {
            self.other_negative_log_likelihood -= other[next];
        }
        let kl: f64 = other.iter().zip(found).map(|(&other, &found)| other.exp() * (other - found)).sum();
        self.positions += 1;
        self.kl += kl;
        self.max_kl = self.max_kl.max(kl);
        self.same_top += usize::from(top(found) == top(other));
    }

    fn finish(self, compared: bool) -> Perplexity {
        let per_token = |sum: f64| sum / self.predicted as f64;
        let negative_log_likelihood = per_token(self.negative_log_likelihood);
        Perplexity {
            perplexity: negative_log_likelihood.exp(),
            negative_log_likelihood,
            tokens: self.predicted,
            divergence: compared.then(|| Divergence {
                mean_kl: self.kl / self.positions as f64,
                max_kl: self.max_kl,
                same_top: self.same_top as f64 / self.positions as f64,
                other_perplexity: per_token(self.other_negative_log_likelihood).exp(),
            }),
        }
    }
}

pub(crate) fn top(values: &[f64]) -> usize {
    let mut best = 0;
    for (index, value) in values.iter().enumerate() {
        if *value > values[best] {
            best = index;
        }
    }
    best
}

pub(crate) fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let highest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let total: f64 = logits.iter().map(|&logit| (f64::from(logit) - highest).exp()).sum();
    logits.iter().map(|&logit| f64::from(logit) - highest - total.ln()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_distribution_does_not_diverge_from_itself_and_does_from_another() {
        let (a, b) = (log_softmax(&[1.0, 2.0, 3.0]), log_softmax(&[1.0, 2.0, 2.0]));
        let mut sums = Sums::default();
        sums.add(&a, Some(&a), Some(1));
        let same = sums.finish(true);
        assert_eq!(same.divergence.as_ref().unwrap().mean_kl, 0.0);
        assert!((same.perplexity - (1.0 + 1f64.exp() + (-1f64).exp())).abs() < 1e-12);
        let mut sums = Sums::default();
        sums.add(&b, Some(&a), None);
        let by_hand: f64 = (0..3).map(|i| a[i].exp() * (a[i] - b[i])).sum();
        assert!(by_hand > 0.0);
        assert_eq!(sums.kl, by_hand);
    }

    #[test]
    fn an_unknown_token_is_an_error_wherever_it_is() {
        let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/reference/llama");
        let model = Model::open(fixture, &firebox_runtime::device("cpu").unwrap()).unwrap();
        for at in [0, 10, COMPARED_TOGETHER, COMPARED_TOGETHER + 1] {
            let mut tokens = vec![5; COMPARED_TOGETHER + 2];
            tokens[at] = 1 << 20;
            let refused = perplexity(&model, &tokens, 256, KvType::F32, None).unwrap_err();
            assert!(
                matches!(refused, RuntimeError::Model(firebox_model::ModelError::Token { .. })),
                "{refused}"
            );
        }
    }
}
