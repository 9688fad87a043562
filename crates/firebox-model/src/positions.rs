//! Learned positions: a table whose rows are added to the embeddings.

use burn::module::{Module, Param};
use burn::tensor::Tensor;

use crate::ModelError;
use crate::config::DecoderConfig;
use crate::rows::{Span, indices};
use crate::weights::{Learned, Weights};

/// A table with a row for every position.
#[derive(Module, Debug)]
pub(crate) struct LearnedPositions {
    table: Param<Tensor<2>>,
    rows: usize,
}

impl LearnedPositions {
    /// Builds the table, if the model has one. `weights` are those within the model's prefix.
    pub fn load(config: &DecoderConfig, weights: &Weights<'_>) -> Result<Option<Self>, ModelError> {
        let Some(name) = &config.learned_positions else { return Ok(None) };
        let rows = config.max_positions;
        let name = format!("{name}.weight");
        let table = weights.learned(&name, [rows, config.hidden_size], Learned::All)?;
        Ok(Some(Self { table, rows }))
    }

    /// Adds the rows of the positions to the embeddings of these sequences' tokens.
    pub fn add(
        &self,
        embedded: Tensor<2>,
        spans: impl Iterator<Item = Span>,
    ) -> Result<Tensor<2>, ModelError> {
        let mut positions = Vec::with_capacity(embedded.dims()[0]);
        for Span { rows, position, .. } in spans {
            let tokens = position + rows;
            if tokens > self.rows {
                return Err(ModelError::TooLong { tokens, longest: self.rows });
            }
            positions.extend(position as u32..tokens as u32);
        }
        let table = self.table.val();
        let rows = table.clone().select(0, indices(&positions, &table.device()));
        Ok(embedded.add(rows))
    }
}
