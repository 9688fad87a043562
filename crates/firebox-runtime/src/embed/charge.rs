//! Limits the memory of embedding passes.

use std::iter;

use firebox_cache::allocated_positions;
use firebox_model::Network;

use super::ROWS;
use crate::planner::encoder_activation_bytes;
use crate::{Account, Charge};
use crate::{Model, RuntimeError};

impl Model {
    /// Returns how many rows short texts fill at a time.
    pub(super) fn rows_at_once(&self) -> usize {
        let rows = match (self.network(), self.residency(), &self.paid) {
            (_, Some(residency), _) => residency.rows_at_once(),
            (Network::Encoder(encoder), _, Some(paid)) => {
                let row = encoder_activation_bytes(encoder.config(), iter::once(1));
                usize::try_from(paid.left() / row.max(1)).unwrap_or(ROWS)
            }
            _ => ROWS,
        };
        rows.clamp(1, ROWS)
    }

    /// Returns how many of those rows a text of `tokens` takes.
    pub(super) fn rows_of(&self, tokens: usize) -> usize {
        self.residency().map_or(tokens, |_| allocated_positions(tokens))
    }

    /// Charges bytes that a request holds beside its pages, for a model with a memory budget, until the result is dropped.
    /// Other accounts make room; if that is too little, the request is refused.
    pub fn pay_for(&self, bytes: u64) -> Result<Option<Charge>, RuntimeError> {
        Ok(match (self.residency(), &self.paid) {
            (Some(residency), _) => Some(residency.pay_for(bytes)?),
            (None, Some(paid)) => Some(paid.beside(Account::Activations, bytes)?),
            // The model has no budget.
            (None, None) => None,
        })
    }

    /// Charges for a pass over texts of these lengths, for a model with a memory budget, until the result is dropped.
    /// Other accounts make room; if that is too little, the pass is refused.
    pub(super) fn pay_for_pass(
        &self,
        lengths: impl Iterator<Item = usize> + Clone,
    ) -> Result<Option<Charge>, RuntimeError> {
        match (self.network(), self.residency(), &self.paid) {
            (Network::Decoder(_), Some(residency), _) => residency.pay_for_pass(lengths).map(Some),
            (Network::Encoder(encoder), _, Some(paid)) => {
                let bytes = encoder_activation_bytes(encoder.config(), lengths);
                Ok(Some(paid.beside(Account::Activations, bytes)?))
            }
            // The model has no budget.
            _ => Ok(None),
        }
    }
}
