//! SentencePiece BPE: the pair that makes the token with the best score merges first.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};
use std::path::{Path, PathBuf};
use tokenizers::models::bpe::BpeTrainer;
use tokenizers::{Model, Result, Token};

/// The model of `tokenizer.ggml.model = "llama"`.
///
/// `tokenizers` has BPE over a ranked list of merges. A vocabulary with scores has no such list: any two neighbours
/// whose concatenation is a token may merge, and equal scores go left to right. Rebuilding a list orders ties
/// otherwise, and takes several times the memory of the vocabulary; doing as SentencePiece does is exact and small.
#[derive(Debug, Clone)]
pub(crate) struct ScoredBpe {
    tokens: Vec<String>,
    scores: Vec<f32>,
    ids: HashMap<String, u32>,
    /// Whether a token may come out of merging, by id. Control, unknown and byte tokens may not.
    mergeable: Vec<bool>,
    bytes: [Option<u32>; 256],
    unk: Option<u32>,
}

/// A run of text that is one token so far; `len` is 0 once it was merged into its left neighbour.
struct Symbol {
    start: usize,
    len: usize,
    previous: Option<usize>,
    next: Option<usize>,
}

struct Merge {
    score: f32,
    left: usize,
    right: usize,
    len: usize,
}

impl Ord for Merge {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Merge {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Merge {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Merge {}

impl ScoredBpe {
    /// `scores` and `mergeable` have one entry for each token, and no two tokens are equal.
    pub fn new(
        tokens: Vec<String>,
        scores: Vec<f32>,
        mergeable: Vec<bool>,
        bytes: [Option<u32>; 256],
        unk: Option<u32>,
    ) -> Self {
        let ids = (0..).zip(&tokens).map(|(id, token)| (token.clone(), id)).collect();
        Self { tokens, scores, ids, mergeable, bytes, unk }
    }

    fn mergeable_id(&self, text: &str) -> Option<u32> {
        self.ids.get(text).copied().filter(|&id| self.mergeable.get(id as usize) == Some(&true))
    }

    fn offer(
        &self,
        text: &str,
        symbols: &[Symbol],
        left: usize,
        right: usize,
        queue: &mut BinaryHeap<Merge>,
    ) {
        let (a, b) = (&symbols[left], &symbols[right]);
        let len = a.len + b.len;
        if let Some(id) = self.mergeable_id(&text[a.start..a.start + len]) {
            queue.push(Merge { score: self.scores[id as usize], left, right, len });
        }
    }

    fn merged(&self, text: &str) -> Vec<Symbol> {
        let mut symbols: Vec<Symbol> = Vec::new();
        for (start, character) in text.char_indices() {
            let index = symbols.len();
            if let Some(last) = symbols.last_mut() {
                last.next = Some(index);
            }
            let previous = index.checked_sub(1);
            symbols.push(Symbol { start, len: character.len_utf8(), previous, next: None });
        }
        let mut queue = BinaryHeap::new();
        for right in 1..symbols.len() {
            self.offer(text, &symbols, right - 1, right, &mut queue);
        }
        while let Some(Merge { left, right, len, .. }) = queue.pop() {
            let outdated = symbols[left].len == 0 || symbols[right].len == 0;
            if outdated || symbols[left].len + symbols[right].len != len {
                continue;
            }
            let after = symbols[right].next;
            symbols[right].len = 0;
            symbols[left].len = len;
            symbols[left].next = after;
            if let Some(after) = after {
                symbols[after].previous = Some(left);
                self.offer(text, &symbols, left, after, &mut queue);
            }
            if let Some(before) = symbols[left].previous {
                self.offer(text, &symbols, before, left, &mut queue);
            }
        }
        symbols
    }

    fn token(&self, id: u32, range: (usize, usize)) -> Token {
        Token::new(id, self.tokens[id as usize].clone(), range)
    }
}

impl Model for ScoredBpe {
    type Trainer = BpeTrainer;

    fn tokenize(&self, sequence: &str) -> Result<Vec<Token>> {
        let mut tokens: Vec<Token> = Vec::new();
        let mut after_unknown = false;
        for symbol in self.merged(sequence).iter().filter(|symbol| symbol.len > 0) {
            let range = (symbol.start, symbol.start + symbol.len);
            let text = &sequence[range.0..range.1];
            let was_unknown = std::mem::take(&mut after_unknown);
            if let Some(id) = self.mergeable_id(text) {
                tokens.push(self.token(id, range));
            } else if text.bytes().all(|byte| self.bytes[usize::from(byte)].is_some()) {
                let ids = text.bytes().filter_map(|byte| self.bytes[usize::from(byte)]);
                tokens.extend(ids.map(|id| self.token(id, range)));
            } else if let Some(unk) = self.unk {
                // A run of unknown characters is one unknown token.
                after_unknown = true;
                if !was_unknown {
                    tokens.push(self.token(unk, range));
                }
            } else {
                return Err(format!("the vocabulary cannot spell {text:?} and has no unknown token").into());
            }
        }
        Ok(tokens)
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.ids.get(token).copied()
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.tokens.get(id as usize).cloned()
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        self.ids.clone()
    }

    fn get_vocab_size(&self) -> usize {
        self.tokens.len()
    }

    fn save(&self, _folder: &Path, _prefix: Option<&str>) -> Result<Vec<PathBuf>> {
        Err("vocabularies read from GGUF files are not written back".into())
    }

    fn get_trainer(&self) -> BpeTrainer {
        BpeTrainer::default()
    }
}

#[cfg(test)]
mod tests {
    use super::ScoredBpe;
    use tokenizers::Model;

    fn model(vocabulary: &[(&str, f32)]) -> ScoredBpe {
        let tokens = vocabulary.iter().map(|(token, _)| (*token).to_owned()).collect();
        let scores = vocabulary.iter().map(|(_, score)| *score).collect();
        ScoredBpe::new(tokens, scores, vec![true; vocabulary.len()], [None; 256], Some(0))
    }

    fn pieces(model: &ScoredBpe, text: &str) -> Vec<String> {
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
