use std::sync::Arc;

use firebox_model::{Head, HeadForm};

use crate::{RuntimeError, Session};

/// What a text may be, and how likely that is.
#[derive(Debug, Clone, PartialEq)]
pub struct Likelihood {
    /// What.
    pub label: String,
    /// From 0 to 1.
    pub probability: f32,
}

impl Session {
    /// What a classifier says of this sequence with `tokens` behind it, the likeliest first. The sequence itself stays
    /// where it is, and what it shares with the text goes through the trunk once.
    pub fn classify(&self, head: &Arc<Head>, tokens: &[u32]) -> Result<Vec<Likelihood>, RuntimeError> {
        let HeadForm::Classifier { labels } = head.form() else {
            return Err(RuntimeError::Kind {
                found: "wearing a head that continues text",
                remedy: "only classifiers say what a text is",
            });
        };
        let mut branch = self.clone();
        branch.set_head(Some(head.clone()));
        let scores = branch.feed(tokens)?;
        let highest = scores.iter().copied().fold(f32::MIN, f32::max);
        let total: f32 = scores.iter().map(|score| (score - highest).exp()).sum();
        let mut likelihoods: Vec<_> = labels
            .iter()
            .zip(scores)
            .map(|(label, score)| Likelihood {
                label: label.clone(),
                probability: (score - highest).exp() / total,
            })
            .collect();
        likelihoods.sort_by(|one, other| other.probability.total_cmp(&one.probability));
        Ok(likelihoods)
    }
}
