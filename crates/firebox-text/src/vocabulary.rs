//! A model's tokens by spelling and by id.

use crate::error::TextError;
use crate::string_column::StringColumn;
use hashbrown::{DefaultHashBuilder, HashTable};
use std::borrow::Cow;
use std::hash::BuildHasher as _;

/// Spellings in one allocation and ids, in place of the two string maps of `tokenizers`.
#[derive(Debug, Clone)]
pub(crate) struct Vocabulary {
    spellings: StringColumn,
    /// The id of each spelling in increasing order; empty if ids are consecutive, as in most vocabularies.
    ids: Vec<u32>,
    /// A hash table of indices of spellings.
    places: HashTable<u32>,
    hasher: DefaultHashBuilder,
}

impl Vocabulary {
    pub fn new(mut tokens: Vec<(Cow<'_, str>, u32)>) -> Result<Self, TextError> {
        tokens.sort_by_key(|&(_, id)| id);
        let mut vocabulary = Self {
            spellings: StringColumn::default(),
            ids: Vec::with_capacity(tokens.len()),
            places: HashTable::with_capacity(tokens.len()),
            hasher: DefaultHashBuilder::default(),
        };
        for (token, id) in tokens {
            vocabulary.push(&token, id)?;
        }
        vocabulary.spellings.shrink();
        if (0..).zip(&vocabulary.ids).all(|(place, &id)| id == place) {
            vocabulary.ids = Vec::new();
        }
        Ok(vocabulary)
    }

    fn push(&mut self, token: &str, id: u32) -> Result<(), TextError> {
        let hash = self.hasher.hash_one(token.as_bytes());
        if let Some(first) = self.found(hash, token) {
            return Err(TextError::DuplicateToken { token: token.to_owned(), first, second: id });
        }
        // Every spelling has a 32-bit end offset, so their number fits in 32 bits.
        let place = self.len() as u32;
        self.spellings.push(token.as_bytes())?;
        self.ids.push(id);
        let (spellings, hasher) = (&self.spellings, &self.hasher);
        self.places.insert_unique(hash, place, |&place| hasher.hash_one(spelling(spellings, place as usize)));
        Ok(())
    }

    pub fn id(&self, token: &str) -> Option<u32> {
        self.found(self.hasher.hash_one(token.as_bytes()), token)
    }

    fn found(&self, hash: u64, token: &str) -> Option<u32> {
        let is_same = |&place: &u32| spelling(&self.spellings, place as usize) == token.as_bytes();
        self.places.find(hash, is_same).map(|&place| self.id_at(place))
    }

    fn id_at(&self, place: u32) -> u32 {
        self.ids.get(place as usize).copied().unwrap_or(place)
    }

    pub fn token(&self, id: u32) -> Option<&str> {
        let place = match self.ids.get(id as usize) {
            _ if self.ids.is_empty() => id as usize,
            // Most gaps are at the end.
            Some(&found) if found == id => id as usize,
            _ => self.ids.binary_search(&id).ok()?,
        };
        std::str::from_utf8(self.spellings.get(place)?).ok()
    }

    pub fn len(&self) -> usize {
        self.spellings.len()
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, u32)> {
        let spelled =
            |place| std::str::from_utf8(spelling(&self.spellings, place as usize)).unwrap_or_default();
        (0..self.len() as u32).map(move |place| (spelled(place), self.id_at(place)))
    }
}

/// The entry at an index that was handed out, so it is within bounds.
fn spelling(spellings: &StringColumn, place: usize) -> &[u8] {
    spellings.get(place).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(tokens: &[(&'static str, u32)]) -> Result<Vocabulary, TextError> {
        Vocabulary::new(tokens.iter().map(|&(token, id)| (token.into(), id)).collect())
    }

    #[test]
    fn ids_may_have_gaps_and_come_in_any_order() {
        let vocabulary = of(&[("c", 9), ("", 2), ("a", 0), ("ab", 4)]).unwrap();
        assert_eq!(
            ["a", "", "ab", "c", "b"].map(|token| vocabulary.id(token)),
            [Some(0), Some(2), Some(4), Some(9), None]
        );
        assert_eq!(
            [0, 1, 2, 4, 9, 10].map(|id| vocabulary.token(id)),
            [Some("a"), None, Some(""), Some("ab"), Some("c"), None]
        );
        assert_eq!(vocabulary.iter().collect::<Vec<_>>(), [("a", 0), ("", 2), ("ab", 4), ("c", 9)]);
    }

    #[test]
    fn a_spelling_has_one_id() {
        let error = of(&[("a", 0), ("b", 1), ("a", 2)]).unwrap_err();
        assert!(matches!(error, TextError::DuplicateToken { token, first: 0, second: 2 } if token == "a"));
    }
}
