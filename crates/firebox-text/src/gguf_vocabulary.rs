//! Vocabularies from the `tokenizer.ggml.*` keys of GGUF files.

use crate::backend::{Backend, Pipeline, catch_panics};
use crate::charsmap;
use crate::decoding::{Decoding, SPACE_MARK, byte_token};
use crate::error::TextError;
use crate::parsed_vocabulary::{Frame, Parsed};
use crate::pretokenizer::PreTokenizer;
use crate::ranked_bpe::{Options, RankedBpe};
use crate::scored_bpe::ScoredBpe;
use crate::special_tokens::SpecialTokens;
use crate::token_table::{TokenEntry, TokenTable};
use crate::tokenizer_json;
use crate::tokenizers_adapter::CustomModel;
use crate::vocabulary::Vocabulary;
use firebox_store::GgufVocabulary;
use std::collections::HashMap;
use tokenizers::models::bpe::Vocab;
use tokenizers::models::unigram::Unigram;
use tokenizers::models::wordpiece::WordPiece;
use tokenizers::normalizers::replace::ReplacePattern;
use tokenizers::normalizers::{BertNormalizer, NormalizerWrapper, Prepend, Replace, Sequence};
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};
use tokenizers::{AddedToken, ModelWrapper};

/// The values of `tokenizer.ggml.token_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TokenType {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl TokenType {
    fn from_number(number: i32) -> Self {
        match number {
            2 => TokenType::Unknown,
            3 => TokenType::Control,
            4 => TokenType::UserDefined,
            5 => TokenType::Unused,
            6 => TokenType::Byte,
            // 0 is 'undefined', which converters write for plain tokens.
            _ => TokenType::Normal,
        }
    }

    pub fn is_special(self) -> bool {
        matches!(self, TokenType::Unknown | TokenType::Control)
    }
}

/// A vocabulary with consistent arrays and existing special ids.
pub(crate) struct Checked<'a> {
    pub source: &'a GgufVocabulary,
    pub tokens: Vec<String>,
    pub types: Vec<TokenType>,
    pub scores: Vec<f32>,
    pub named: SpecialTokens,
}

pub(crate) fn parse(source: &GgufVocabulary) -> Result<Parsed, TextError> {
    let checked = Checked::new(source)?;
    if let Some(json) = &source.huggingface_json {
        return checked.embedded(json);
    }
    catch_panics(|| match source.model.as_str() {
        "gpt2" if source.pre.as_deref() == Some("gemma4") => checked.raw_bpe(),
        "gpt2" => checked.byte_level_bpe(),
        "gemma4" => checked.raw_bpe(),
        "llama" => checked.sentencepiece_bpe(),
        "t5" => checked.unigram(),
        "bert" => checked.word_piece(),
        model => Err(TextError::UnknownModel { model: model.to_owned() }),
    })
}

impl<'a> Checked<'a> {
    pub fn new(source: &'a GgufVocabulary) -> Result<Self, TextError> {
        let count = source.tokens.len();
        if count == 0 || u32::try_from(count).is_err() {
            return Err(TextError::InvalidVocabulary {
                field: "tokenizer.ggml.tokens",
                reason: format!("it has {count} entries"),
            });
        }
        let length = |field, found| match found {
            0 => Ok(false),
            found if found == count => Ok(true),
            found => Err(TextError::VocabularyLength { field, found, expected: count }),
        };
        let types = match length("tokenizer.ggml.token_type", source.token_types.len())? {
            true => source.token_types.iter().map(|&number| TokenType::from_number(number)).collect(),
            false => vec![TokenType::Normal; count],
        };
        let scores = match length("tokenizer.ggml.scores", source.scores.len())? {
            // Adding zero turns negative zero into positive zero, so that the two compare equal.
            true => source.scores.iter().map(|score| score + 0.0).collect(),
            false => vec![0.0; count],
        };
        if let Some(score) = scores.iter().find(|score: &&f32| !score.is_finite()) {
            return Err(TextError::InvalidVocabulary {
                field: "tokenizer.ggml.scores",
                reason: format!("it holds {score}, which orders nothing"),
            });
        }
        let tokens = (0..count).map(|id| match source.tokens[id].as_str() {
            // An empty token cannot be matched; it only reserves its id.
            "" => format!("[EMPTY_{id}]"),
            token => token.to_owned(),
        });
        let mut checked =
            Self { source, tokens: tokens.collect(), types, scores, named: SpecialTokens::default() };
        checked.named = checked.named_tokens()?;
        Ok(checked)
    }

    /// Refuses duplicate tokens, for models that do not detect them on their own.
    pub fn require_distinct(&self) -> Result<(), TextError> {
        let mut seen: HashMap<&str, u32> = HashMap::with_capacity(self.tokens.len());
        for (id, token) in (0..).zip(&self.tokens) {
            if let Some(first) = seen.insert(token, id) {
                return Err(TextError::DuplicateToken { token: token.clone(), first, second: id });
            }
        }
        Ok(())
    }

    fn named_tokens(&self) -> Result<SpecialTokens, TextError> {
        let source = self.source;
        let count = self.tokens.len();
        let given = [
            ("tokenizer.ggml.bos_token_id", source.bos),
            ("tokenizer.ggml.eos_token_id", source.eos),
            ("tokenizer.ggml.eot_token_id", source.eot),
            ("tokenizer.ggml.eom_token_id", source.eom),
            ("tokenizer.ggml.unknown_token_id", source.unk),
            ("tokenizer.ggml.padding_token_id", source.pad),
            ("tokenizer.ggml.seperator_token_id", source.sep),
            ("tokenizer.ggml.cls_token_id", source.cls),
            ("tokenizer.ggml.mask_token_id", source.mask),
        ];
        for (field, id) in given {
            if let Some(id) = id.filter(|&id| id as usize >= count) {
                return Err(TextError::TokenOutOfRange { field, id, vocab_size: count });
            }
        }
        // Defaults for absent keys: the ids of the first models of each kind.
        let usual = |id: u32, kinds: &[TokenType]| {
            self.types.get(id as usize).filter(|kind| kinds.contains(kind)).map(|_| id)
        };
        let control = [TokenType::Control];
        let unknown = [TokenType::Unknown, TokenType::Control];
        let (bos, eos, unk) = match source.model.as_str() {
            "llama" => (usual(1, &control), usual(2, &control), usual(0, &unknown)),
            "t5" => (None, usual(1, &control), usual(2, &unknown)),
            "bert" => (usual(101, &control), None, usual(100, &unknown)),
            _ => (None, None, None),
        };
        Ok(SpecialTokens {
            bos: source.bos.or(source.cls).or(bos),
            eos: source.eos.or(eos),
            unk: source.unk.or(unk),
            pad: source.pad,
        })
    }

    /// The `tokenizer.json` that a converter embedded in the file: exact, where the other keys only approximate.
    fn embedded(self, json: &str) -> Result<Parsed, TextError> {
        self.require_distinct()?;
        let mut parsed = tokenizer_json::parse(json.as_bytes())?;
        parsed.named = SpecialTokens { unk: parsed.named.unk.or(self.named.unk), ..self.named };
        parsed.ends = self.ends();
        if self.source.add_bos.is_some() || self.source.add_eos.is_some() {
            parsed.frame = Some(self.frame(false, false));
        }
        Ok(parsed)
    }

    fn table(&self) -> Vocab {
        self.tokens.iter().cloned().zip(0..).collect()
    }

    fn ranked(&self, options: Options) -> Result<Pipeline<CustomModel<RankedBpe>>, TextError> {
        let vocabulary = Vocabulary::new(self.tokens.iter().map(|token| token.into()).zip(0..).collect())?;
        let merges = self.source.merges.iter().enumerate().map(|(index, merge)| {
            // A token may begin with a space of its own.
            let first = merge.chars().next().map_or(0, char::len_utf8);
            let space = merge[first..].find(' ').ok_or_else(|| {
                let reason = "it is not two tokens with a space between";
                TextError::InvalidMerge { index, merge: merge.clone(), reason }
            })?;
            Ok((&merge[..first + space], &merge[first + space + 1..]))
        });
        Ok(Pipeline::new(CustomModel(RankedBpe::new(vocabulary, merges, options)?)))
    }

    pub fn text_of(&self, id: Option<u32>) -> Option<String> {
        self.tokens.get(id? as usize).cloned()
    }

    fn byte_level_bpe(self) -> Result<Parsed, TextError> {
        let splitting = PreTokenizer::named(self.source.pre.as_deref().unwrap_or("default"))?;
        let mut pipeline = self.ranked(Options {
            unk_token: self.text_of(self.named.unk),
            ignore_merges: splitting.ignore_merges,
            ..Options::default()
        })?;
        pipeline.with_normalizer(splitting.normalizer()).map_err(invalid)?;
        pipeline.with_pre_tokenizer(Some(splitting.splitter()?));
        let frame = self.frame(splitting.add_bos, false);
        self.finish(Backend::Ranked(Box::new(pipeline)), Decoding::byte_level(), frame)
    }

    /// Gemma 4: merges over plain UTF-8 with marked spaces, and byte tokens for other characters.
    fn raw_bpe(self) -> Result<Parsed, TextError> {
        let mut pipeline = self.ranked(Options {
            unk_token: self.text_of(self.named.unk),
            byte_fallback: true,
            fuse_unk: true,
            ignore_merges: false,
        })?;
        pipeline.with_normalizer(Some(mark_spaces()?)).map_err(invalid)?;
        let frame = self.frame(true, false);
        self.finish(Backend::Ranked(Box::new(pipeline)), Decoding::sentencepiece(false), frame)
    }

    fn sentencepiece_bpe(mut self) -> Result<Parsed, TextError> {
        let prefixed = self.source.add_space_prefix.unwrap_or(true);
        let mut bytes = [None; 256];
        for (id, token) in (0..).zip(&self.tokens) {
            if let Some(byte) = byte_token(token).filter(|_| self.types[id as usize] == TokenType::Byte) {
                bytes[usize::from(byte)] = Some(id);
            }
        }
        let apart = [TokenType::Unknown, TokenType::Control, TokenType::Byte];
        let mergeable = self.types.iter().map(|kind| !apart.contains(kind)).collect();
        let scores = std::mem::take(&mut self.scores);
        let model = ScoredBpe::new(&self.tokens, scores, mergeable, bytes, self.named.unk)?;
        let mut pipeline = Pipeline::new(CustomModel(model));
        let mut steps = self.cleaning(false)?;
        if prefixed {
            steps.push(Prepend::new(SPACE_MARK.to_string()).into());
        }
        steps.push(mark_spaces()?);
        pipeline.with_normalizer(Some(Sequence::new(steps))).map_err(invalid)?;
        let frame = self.frame(true, false);
        self.finish(Backend::Scored(Box::new(pipeline)), Decoding::sentencepiece(prefixed), frame)
    }

    fn unigram(self) -> Result<Parsed, TextError> {
        self.require_distinct()?;
        let prefixed = self.source.add_space_prefix.unwrap_or(true);
        let byte_fallback = self.types.contains(&TokenType::Byte);
        let pieces = (0..self.tokens.len()).map(|id| match self.types[id] {
            // As in SentencePiece: preferred over anything that the model could compose.
            TokenType::UserDefined => (self.tokens[id].clone(), 0.0),
            _ => (self.tokens[id].clone(), f64::from(self.scores[id])),
        });
        let unk = self.named.unk.map(|id| id as usize);
        let model = Unigram::from(pieces.collect(), unk, byte_fallback).map_err(invalid)?;
        let mut pipeline = Pipeline::new(ModelWrapper::Unigram(model));
        let steps = self.cleaning(true)?;
        if steps.is_empty() {
            pipeline.with_normalizer(None::<NormalizerWrapper>).map_err(invalid)?;
        } else {
            pipeline.with_normalizer(Some(Sequence::new(steps))).map_err(invalid)?;
        }
        let scheme = if prefixed { PrependScheme::Always } else { PrependScheme::Never };
        pipeline.with_pre_tokenizer(Some(Metaspace::new(SPACE_MARK, scheme, true)));
        let frame = self.frame(false, true);
        self.finish(Backend::Hub(Box::new(pipeline.into())), Decoding::sentencepiece(prefixed), frame)
    }

    fn word_piece(mut self) -> Result<Parsed, TextError> {
        self.require_distinct()?;
        self.spell_continuations()?;
        let unk = self.text_of(self.named.unk).ok_or(TextError::InvalidVocabulary {
            field: "tokenizer.ggml.unknown_token_id",
            reason: "a WordPiece vocabulary needs a token for unknown words".to_owned(),
        })?;
        let model = WordPiece::builder().vocab(self.table()).unk_token(unk).build().map_err(invalid)?;
        // Most files do not tell whether text is lower-cased. A vocabulary with upper case must be cased.
        let cased = (self.tokens.iter().zip(&self.types))
            .any(|(token, kind)| *kind == TokenType::Normal && token.bytes().all(|b| b.is_ascii_uppercase()));
        let mut pipeline = Pipeline::new(ModelWrapper::WordPiece(model));
        pipeline.with_normalizer(Some(BertNormalizer::new(true, true, None, !cased))).map_err(invalid)?;
        pipeline.with_pre_tokenizer(Some(BertPreTokenizer));
        let sep = self.source.sep.or(self.source.eos).or_else(|| {
            let position = self.tokens.iter().position(|token| token == "[SEP]")?;
            u32::try_from(position).ok()
        });
        let frame = Frame {
            before: self.named.bos.filter(|_| self.source.add_bos != Some(false)).into_iter().collect(),
            after: sep.filter(|_| self.source.add_sep != Some(false)).into_iter().collect(),
        };
        self.finish(Backend::Hub(Box::new(pipeline.into())), Decoding::word_piece(), frame)
    }

    /// GGUF marks the beginnings of words, and WordPiece marks continuations.
    fn spell_continuations(&mut self) -> Result<(), TextError> {
        for (token, kind) in self.tokens.iter_mut().zip(&self.types) {
            let bracketed = token.starts_with('[') && token.ends_with(']');
            if kind.is_special() || bracketed {
                continue;
            }
            *token = match token.strip_prefix(SPACE_MARK) {
                Some(beginning) => beginning.to_owned(),
                None => format!("##{token}"),
            };
        }
        self.require_distinct()
    }

    /// Normalization requested by the metadata, applied before spaces are marked.
    fn cleaning(&self, by_default: bool) -> Result<Vec<NormalizerWrapper>, TextError> {
        let mut steps: Vec<NormalizerWrapper> = Vec::new();
        if let Some(charsmap) =
            self.source.precompiled_charsmap.as_ref().filter(|charsmap| !charsmap.is_empty())
        {
            steps.push(charsmap::read(charsmap)?.into());
        }
        if self.source.remove_extra_whitespaces.unwrap_or(by_default) {
            // Spaces only: other white space is treated like any character.
            for (spaces, instead) in [("^ +| +$", ""), (" {2,}", " ")] {
                let spaces = ReplacePattern::Regex(spaces.to_owned());
                steps.push(Replace::new(spaces, instead).map_err(invalid)?.into());
            }
        }
        Ok(steps)
    }

    pub fn frame(&self, bos_by_default: bool, eos_by_default: bool) -> Frame {
        let bos = self.source.add_bos.unwrap_or(bos_by_default);
        let eos = self.source.add_eos.unwrap_or(eos_by_default);
        Frame {
            before: self.named.bos.filter(|_| bos).into_iter().collect(),
            after: self.named.eos.filter(|_| eos).into_iter().collect(),
        }
    }

    /// Ids that end a generation: those named by the metadata, and control tokens that end a turn in well-known chat formats,
    /// which converters often omit.
    fn ends(&self) -> Vec<u32> {
        let named = [self.source.eos, self.source.eot, self.source.eom, self.named.eos];
        let mut ends: Vec<u32> = named.into_iter().flatten().collect();
        // In this format `<|end|>` closes a part of a turn, not the turn.
        let harmony = self.tokens.iter().any(|token| token == "<|return|>");
        for ((id, token), kind) in (0..).zip(&self.tokens).zip(&self.types) {
            let ends_turn = match token.as_str() {
                "<|eot_id|>"
                | "<|eom_id|>"
                | "<|im_end|>"
                | "<end_of_turn>"
                | "<turn|>"
                | "<|endoftext|>"
                | "<|end_of_text|>"
                | "<|return|>"
                | "<|call|>"
                | "<EOT>"
                | "[EOT]"
                | "<end_of_utterance>"
                | "<｜end▁of▁sentence｜>" => true,
                "<|end|>" => !harmony,
                _ => false,
            };
            if ends_turn && *kind == TokenType::Control {
                ends.push(id);
            }
        }
        ends
    }

    fn finish(self, mut backend: Backend, decoding: Decoding, frame: Frame) -> Result<Parsed, TextError> {
        let ends = self.ends();
        let listed = [self.named.bos, self.named.eos, self.named.pad, self.source.eot, self.source.eom];
        let mut added = Vec::new();
        let mut entries = Vec::with_capacity(self.tokens.len());
        for ((id, token), kind) in (0..).zip(self.tokens).zip(self.types) {
            // A token in a special role is special, whatever its type.
            let special = kind.is_special() || listed.contains(&Some(id));
            let matched = special || kind == TokenType::UserDefined;
            if matched {
                added.push(AddedToken::from(token.clone(), special).normalized(false));
            }
            entries.push(TokenEntry { id, text: token.into(), added: matched, special });
        }
        backend.add_tokens(added)?;
        let pieces = TokenTable::new(entries, backend.vocabulary().cloned(), decoding)?;
        Ok(Parsed { backend, pieces, frame: Some(frame), named: self.named, ends })
    }
}

fn mark_spaces() -> Result<NormalizerWrapper, TextError> {
    let space = ReplacePattern::String(" ".to_owned());
    Replace::new(space, SPACE_MARK.to_string()).map(Into::into).map_err(invalid)
}

fn invalid(error: tokenizers::Error) -> TextError {
    TextError::InvalidVocabulary { field: "tokenizer.ggml", reason: error.to_string() }
}
