//! The table of tokens by id, for lookups without allocation.

use crate::decoding::Decoding;
use crate::error::TextError;
use crate::string_column::StringColumn;
use crate::vocabulary::Vocabulary;
use std::borrow::Cow;
use std::sync::Arc;

/// The most unused ids. Gaps between ids exist (reserved slots), but an id far beyond the number of tokens indicates a damaged
/// file and would determine the size of the table.
const MAX_UNUSED_IDS: usize = 1 << 16;

/// One entry of a vocabulary.
pub(crate) struct TokenEntry<'a> {
    pub id: u32,
    pub text: Cow<'a, str>,
    /// Matched in text as a whole, before the model sees it.
    pub added: bool,
    /// A control token, omitted from text shown to users.
    pub special: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Absent,
    Model,
    Added,
    Special,
}

/// Texts of tokens and the bytes that they decode to, by id.
pub(crate) struct TokenTable {
    /// The model's vocabulary, which holds the first texts, if there is one.
    vocabulary: Option<Arc<Vocabulary>>,
    /// The number of texts that it holds.
    spelled: usize,
    /// The remaining texts.
    texts: StringColumn,
    decoded: StringColumn,
    kinds: Vec<Kind>,
    decoding: Decoding,
}

impl TokenTable {
    /// `vocabulary` is that of the model, if it is one of ours; its texts are not stored twice.
    pub fn new(
        mut entries: Vec<TokenEntry<'_>>,
        vocabulary: Option<Arc<Vocabulary>>,
        decoding: Decoding,
    ) -> Result<Self, TextError> {
        // Added tokens sort behind model tokens of the same id and replace them, because their text is matched in prompts.
        entries.sort_by_key(|entry| (entry.id, entry.added));
        let limit = entries.len().saturating_mul(4).saturating_add(MAX_UNUSED_IDS);
        let mut pieces = Self {
            vocabulary,
            spelled: 0,
            texts: StringColumn::default(),
            decoded: StringColumn::default(),
            kinds: Vec::with_capacity(entries.len()),
            decoding,
        };
        let mut entries = entries.into_iter().peekable();
        while let Some(entry) = entries.next() {
            if entries.peek().is_some_and(|next| next.id == entry.id) {
                continue;
            }
            let id = entry.id as usize;
            if id >= limit {
                return Err(TextError::InvalidVocabulary {
                    field: "tokens",
                    reason: format!(
                        "token `{}` has the id {id}, far beyond the number of tokens",
                        entry.text
                    ),
                });
            }
            while pieces.kinds.len() < id {
                pieces.push(Kind::Absent, "", &[])?;
            }
            let kind = match (entry.special, entry.added) {
                (true, _) => Kind::Special,
                (false, true) => Kind::Added,
                (false, false) => Kind::Model,
            };
            let bytes = pieces.decoding.piece(&entry.text, kind != Kind::Model, false);
            pieces.push(kind, &entry.text, &bytes)?;
        }
        pieces.texts.shrink();
        pieces.decoded.shrink();
        Ok(pieces)
    }

    fn push(&mut self, kind: Kind, text: &str, decoded: &[u8]) -> Result<(), TextError> {
        let id = self.kinds.len();
        if self.spelled == id && kind != Kind::Absent && self.spelled_text(id) == Some(text) {
            self.spelled += 1;
        } else {
            self.texts.push(text.as_bytes())?;
        }
        self.decoded.push(decoded)?;
        self.kinds.push(kind);
        Ok(())
    }

    fn spelled_text(&self, id: usize) -> Option<&str> {
        self.vocabulary.as_ref()?.token(id as u32)
    }

    fn kind(&self, id: u32) -> Kind {
        self.kinds.get(id as usize).copied().unwrap_or(Kind::Absent)
    }

    /// One past the highest id.
    pub fn len(&self) -> usize {
        self.kinds.len()
    }

    pub fn contains(&self, id: u32) -> bool {
        self.kind(id) != Kind::Absent
    }

    pub fn is_special(&self, id: u32) -> bool {
        self.kind(id) == Kind::Special
    }

    /// Returns whether a token is matched in text as a whole, without being special.
    pub fn is_added(&self, id: u32) -> bool {
        self.kind(id) == Kind::Added
    }

    /// Returns whether a token means more than its text. That holds for control tokens, and for added tokens such as `<tool_call>`
    /// that are not runs of white space.
    pub fn is_control(&self, id: u32) -> bool {
        match self.kind(id) {
            Kind::Special => true,
            Kind::Added => self.text(id).is_some_and(|text| text.contains(char::is_alphabetic)),
            Kind::Model | Kind::Absent => false,
        }
    }

    pub fn control_spellings(&self) -> impl Iterator<Item = &str> {
        let ids = (0..).take(self.len()).filter(|&id| self.is_control(id));
        ids.filter_map(|id| self.text(id))
    }

    /// The token's spelling in the vocabulary.
    pub fn text(&self, id: u32) -> Option<&str> {
        if !self.contains(id) {
            return None;
        }
        match (id as usize).checked_sub(self.spelled) {
            None => self.spelled_text(id as usize),
            Some(further) => std::str::from_utf8(self.texts.get(further)?).ok(),
        }
    }

    /// The bytes that the token adds in the middle of a text.
    pub fn bytes(&self, id: u32) -> Option<&[u8]> {
        if !self.contains(id) {
            return None;
        }
        self.decoded.get(id as usize)
    }

    /// The bytes that the token adds at the start of a text, where some decoders strip a leading space.
    pub fn first_bytes(&self, id: u32) -> Option<Vec<u8>> {
        self.text(id).map(|text| self.decoding.piece(text, self.kind(id) != Kind::Model, true))
    }

    pub fn decoding(&self) -> &Decoding {
        &self.decoding
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(id: u32, text: &str, added: bool) -> TokenEntry<'_> {
        TokenEntry { id, text: text.into(), added, special: false }
    }

    #[test]
    fn texts_do_not_depend_on_the_vocabulary_that_holds_them() {
        let vocabulary = || {
            let tokens = [("a", 0), ("b", 1), ("c", 2), ("d", 3), ("f", 6)];
            Arc::new(Vocabulary::new(tokens.map(|(text, id)| (text.into(), id)).to_vec()).unwrap())
        };
        let texts = |entries: Vec<TokenEntry<'_>>, vocabulary| {
            let pieces = TokenTable::new(entries, vocabulary, Decoding::word_piece()).unwrap();
            let texts = (0..8).map(|id| pieces.text(id).map(str::to_owned)).collect::<Vec<_>>();
            (pieces.spelled, texts)
        };
        let all =
            || vec![entry(0, "a", false), entry(1, "b", false), entry(2, "c", false), entry(3, "d", false)];
        let with = |more: Vec<TokenEntry<'static>>| all().into_iter().chain(more).collect::<Vec<_>>();
        for (spelled, more) in [
            (4, vec![]),
            (4, vec![entry(6, "f", false), entry(7, "<g>", true)]),
            (1, vec![entry(1, "<b>", true)]),
            (4, vec![entry(2, "c", true), entry(4, "e", true)]),
            (0, vec![entry(0, "<a>", true), entry(6, "f", false)]),
        ] {
            let by_vocabulary = texts(with(more.iter().map(again).collect()), Some(vocabulary()));
            assert_eq!(by_vocabulary, (spelled, texts(with(more), None).1));
        }
    }

    fn again<'a>(of: &TokenEntry<'a>) -> TokenEntry<'a> {
        TokenEntry { text: of.text.clone(), ..*of }
    }
}
