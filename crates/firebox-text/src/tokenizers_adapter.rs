//! An adapter of Firebox's word tokenizers to the pipeline of the `tokenizers` crate.

use crate::vocabulary::Vocabulary;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokenizers::models::bpe::BpeTrainer;
use tokenizers::{Model, Result, Token};

/// Splits words into tokens.
pub(crate) trait WordTokenizer {
    fn vocabulary(&self) -> &Arc<Vocabulary>;

    /// Returns ids, each with the byte range of the word that it covers.
    fn tokenize_word(&self, word: &str) -> Result<Vec<(u32, (usize, usize))>>;
}

#[derive(Debug, Clone)]
pub(crate) struct CustomModel<C>(pub C);

impl<C: WordTokenizer> Model for CustomModel<C> {
    type Trainer = BpeTrainer;

    fn tokenize(&self, word: &str) -> Result<Vec<Token>> {
        let token = |(id, range)| Token::new(id, self.id_to_token(id).unwrap_or_default(), range);
        Ok(self.0.tokenize_word(word)?.into_iter().map(token).collect())
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.0.vocabulary().id(token)
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.0.vocabulary().token(id).map(str::to_owned)
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        self.0.vocabulary().iter().map(|(token, id)| (token.to_owned(), id)).collect()
    }

    fn get_vocab_size(&self) -> usize {
        self.0.vocabulary().len()
    }

    fn save(&self, _folder: &Path, _prefix: Option<&str>) -> Result<Vec<PathBuf>> {
        Err("a vocabulary that was read is not written back".into())
    }

    fn get_trainer(&self) -> BpeTrainer {
        BpeTrainer::default()
    }
}
