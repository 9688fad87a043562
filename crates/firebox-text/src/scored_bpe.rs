//! SentencePiece BPE: the pair whose token has the best score merges first.

use crate::error::TextError;
use crate::merging::{Merge, Symbol, Symbols};
use crate::tokenizers_adapter::WordTokenizer;
use crate::vocabulary::Vocabulary;
use std::sync::Arc;
use tokenizers::Result;

/// The model of `tokenizer.ggml.model = "llama"`.
///
/// The BPE of `tokenizers` has a ranked list of merges. A vocabulary with scores has none: any two neighbours whose concatenation
/// is a token may merge, and equal scores merge from left to right. A reconstructed list would order ties differently and take
/// several times the memory of the vocabulary.
#[derive(Debug, Clone)]
pub(crate) struct ScoredBpe {
    vocabulary: Arc<Vocabulary>,
    scores: Vec<f32>,
    /// Whether merging may produce a token, by id. Control, unknown and byte tokens may not be produced.
    mergeable: Vec<bool>,
    bytes: [Option<u32>; 256],
    unk: Option<u32>,
}

impl ScoredBpe {
    /// `scores` and `mergeable` have one entry per token, and no two tokens are equal.
    pub fn new(
        tokens: &[String],
        scores: Vec<f32>,
        mergeable: Vec<bool>,
        bytes: [Option<u32>; 256],
        unk: Option<u32>,
    ) -> std::result::Result<Self, TextError> {
        let vocabulary = Vocabulary::new(tokens.iter().map(|token| token.into()).zip(0..).collect())?;
        Ok(Self { vocabulary: Arc::new(vocabulary), scores, mergeable, bytes, unk })
    }

    fn mergeable_id(&self, text: &str) -> Option<u32> {
        self.vocabulary.id(text).filter(|&id| self.mergeable.get(id as usize) == Some(&true))
    }

    fn offer(&self, text: &str, left: &Symbol, right: &Symbol) -> Option<Merge> {
        let id = self.mergeable_id(&text[left.start..right.range().1])?;
        Some(Merge { rank: rank(self.scores[id as usize]), id })
    }

    fn merged(&self, text: &str) -> Symbols {
        let mut symbols = Symbols::with_capacity(text.len());
        // Single characters are looked up after all merges.
        text.chars().for_each(|character| symbols.push(u32::MAX, character.len_utf8()));
        symbols.merge(|left, right| self.offer(text, left, right));
        symbols
    }
}

/// A key that decreases as scores increase.
fn rank(score: f32) -> u32 {
    let bits = score.to_bits();
    if score.is_sign_negative() { bits } else { !bits & (u32::MAX >> 1) }
}

impl WordTokenizer for ScoredBpe {
    fn vocabulary(&self) -> &Arc<Vocabulary> {
        &self.vocabulary
    }

    fn tokenize_word(&self, word: &str) -> Result<Vec<(u32, (usize, usize))>> {
        let mut tokens = Vec::new();
        let mut after_unknown = false;
        for symbol in self.merged(word).iter() {
            let range = symbol.range();
            let text = &word[range.0..range.1];
            let was_unknown = std::mem::take(&mut after_unknown);
            if let Some(id) = self.mergeable_id(text) {
                tokens.push((id, range));
            } else if text.bytes().all(|byte| self.bytes[usize::from(byte)].is_some()) {
                let ids = text.bytes().filter_map(|byte| self.bytes[usize::from(byte)]);
                tokens.extend(ids.map(|id| (id, range)));
            } else if let Some(unk) = self.unk {
                // A run of unknown characters becomes one unknown token.
                after_unknown = true;
                if !was_unknown {
                    tokens.push((unk, range));
                }
            } else {
                return Err(format!("the vocabulary cannot spell {text:?} and has no unknown token").into());
            }
        }
        Ok(tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::ScoredBpe;
    use crate::tokenizers_adapter::CustomModel;
    use tokenizers::Model;

    fn model(vocabulary: &[(&str, f32)]) -> CustomModel<ScoredBpe> {
        let tokens: Vec<String> = vocabulary.iter().map(|(token, _)| (*token).to_owned()).collect();
        let scores = vocabulary.iter().map(|(_, score)| *score).collect();
        CustomModel(
            ScoredBpe::new(&tokens, scores, vec![true; vocabulary.len()], [None; 256], Some(0)).unwrap(),
        )
    }

    fn pieces(model: &CustomModel<ScoredBpe>, text: &str) -> Vec<String> {
        model.tokenize(text).unwrap().into_iter().map(|token| token.value).collect()
    }

    #[test]
    fn best_score_merges_first_and_ties_go_left_to_right() {
        let model =
            model(&[("<unk>", 0.0), ("a", -9.0), ("b", -9.0), ("aa", -1.0), ("ab", -1.0), ("bb", -0.5)]);
        assert_eq!(pieces(&model, "aab"), ["aa", "b"]);
        assert_eq!(pieces(&model, "aaa"), ["aa", "a"]);
        assert_eq!(pieces(&model, "abb"), ["a", "bb"]);
    }

    #[test]
    fn unknown_characters_in_a_row_are_one_token() {
        let model = model(&[("<unk>", 0.0), ("a", -1.0)]);
        assert_eq!(pieces(&model, "xyaz"), ["<unk>", "a", "<unk>"]);
    }
}
