//! What a pass tells about the token that follows.

use firebox_kernels::likeliest::Scored;

/// The scores of the tokens that may follow a sequence, after one or more of its tokens.
#[derive(Debug, Clone, PartialEq)]
pub enum Scores {
    /// All logits, row after row.
    Logits(Vec<f32>),
    /// The tokens with the highest logits after the last token, likeliest first: all that a
    /// [sampler](crate::Sampler) chooses from.
    Likeliest(Vec<Scored>),
}

/// The scores after one token.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ScoreRow<'a> {
    Logits(&'a [f32]),
    Likeliest(&'a [Scored]),
}

impl Default for Scores {
    fn default() -> Self {
        Self::Logits(Vec::new())
    }
}

impl Scores {
    /// Returns row `index` of `rows`. The likeliest tokens are those of every row.
    pub(crate) fn row(&self, index: usize, rows: usize) -> ScoreRow<'_> {
        match self {
            Self::Logits(logits) => {
                let width = logits.len() / rows;
                ScoreRow::Logits(&logits[index * width..][..width])
            }
            Self::Likeliest(likeliest) => ScoreRow::Likeliest(likeliest),
        }
    }
}
