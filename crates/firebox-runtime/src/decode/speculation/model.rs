//! Drafts by a smaller model.

use crate::decode::speculation::{Draft, Drafter};
use crate::session::Snapshot;
use crate::{Model, RuntimeError, Sampler, Session};

/// Drafts by a smaller model with the same vocabulary.
///
/// It samples with the settings and the random numbers that the large model will use. Where the two have equal probabilities
/// they choose the same token, and where these nearly agree they mostly do; at temperature 0 both choose the likeliest. The
/// second choice for the first token is a branch of its own.
#[derive(Debug, Clone)]
pub struct ModelDrafter {
    session: Session,
    /// The session before the last draft, of which some tokens may have been refused.
    mark: Option<Snapshot>,
}

impl ModelDrafter {
    /// Drafts by `draft` for `model`. Both must have equal vocabularies.
    pub fn new(draft: &Model, model: &Model) -> Result<Self, RuntimeError> {
        model.check_draft(draft)?;
        Ok(Self { session: draft.session()?, mark: None })
    }

    /// Changes the draft model's session, for example its type of keys and values.
    pub fn with_session(self, change: impl FnOnce(Session) -> Session) -> Self {
        Self { session: change(self.session), mark: None }
    }

    fn continued(&mut self, tokens: &[u32], most: usize, sampler: &Sampler) -> Result<Draft, RuntimeError> {
        let known = self.session.tokens().iter().zip(tokens).take_while(|(known, now)| known == now).count();
        // At least one token goes through the layers, as logits come only of that.
        let kept = known.min(tokens.len().saturating_sub(1));
        match self.mark.take() {
            Some(mark) => self.session.rewind_to(&mark, kept),
            None => self.session.rewind(kept),
        }
        let mut logits = self.session.feed(&tokens[kept..])?;
        self.mark = Some(self.session.snapshot());
        let (mut second, mut sampler) = (sampler.clone(), sampler.clone());
        let mut branch = vec![sampler.sample(&logits, tokens)];
        // Continuing from it as well would take the draft model as long again.
        logits[branch[0] as usize] = f32::NEG_INFINITY;
        let other = vec![second.sample(&logits, tokens)];
        while branch.len() < most {
            let next = self.session.feed(&branch[branch.len() - 1..])?;
            branch.push(sampler.sample(&next, self.session.tokens()));
        }
        Ok(vec![branch, other].into())
    }
}

impl Drafter for ModelDrafter {
    fn propose(&mut self, tokens: &[u32], most: usize, sampler: &Sampler) -> Result<Draft, RuntimeError> {
        if tokens.is_empty() || most == 0 {
            return Ok(Draft::default());
        }
        match self.continued(tokens, most, sampler) {
            // The generation itself is cancelled elsewhere.
            Err(RuntimeError::Cancelled) => Ok(Draft::default()),
            drafted => drafted,
        }
    }
}
