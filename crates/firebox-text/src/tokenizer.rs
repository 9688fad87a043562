//! Text to token ids and back.

use crate::control::{self, ControlTokens};
use crate::detokenizer::Detokenizer;
use crate::engine::Engine;
use crate::error::TextError;
use crate::pieces::Pieces;
use crate::special::{self, NamedTokens};
use crate::{gguf, hub};
use firebox_store::{TextAssets, TokenizerSource};
use serde_json::Value;
use std::fmt;
use std::sync::{Arc, OnceLock};

/// A model's vocabulary and the rules for using it. Cloning is cheap; clones share the vocabulary.
///
/// ```
/// use firebox_text::{GgufVocabulary, TextAssets, Tokenizer, TokenizerSource};
///
/// let tokens = ["<unk>", "<s>", "</s>", "▁", "h", "i", "▁h", "▁hi"];
/// let vocabulary = GgufVocabulary {
///     model: "llama".into(),
///     tokens: tokens.map(String::from).to_vec(),
///     scores: vec![0.0, 0.0, 0.0, -5.0, -4.0, -3.0, -2.0, -1.0],
///     token_types: vec![2, 3, 3, 1, 1, 1, 1, 1],
///     ..GgufVocabulary::default()
/// };
/// let assets = TextAssets { tokenizer: Some(TokenizerSource::Gguf(vocabulary)), ..TextAssets::default() };
/// let tokenizer = Tokenizer::new(&assets, &serde_json::Value::Null)?;
/// assert_eq!(tokenizer.encode("hi", true)?, [1, 7]);
/// assert_eq!(tokenizer.decode(&[1, 7], true), "hi");
/// # Ok::<(), firebox_text::TextError>(())
/// ```
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<Inner>,
}

struct Inner {
    engine: Engine,
    pieces: Pieces,
    /// Ids put around a text, where that is not left to the post-processor of `tokenizer.json`.
    frame: Option<Frame>,
    named: NamedTokens,
    eos: Vec<u32>,
    adds_bos: bool,
    control: OnceLock<ControlTokens>,
}

/// Special tokens put around a text.
#[derive(Debug, Clone, Default)]
pub(crate) struct Frame {
    pub before: Vec<u32>,
    pub after: Vec<u32>,
}

/// A vocabulary as its source describes it, before the other files of the model had their say.
pub(crate) struct Parsed {
    pub engine: Engine,
    pub pieces: Pieces,
    pub frame: Option<Frame>,
    pub named: NamedTokens,
    /// Ids at which the vocabulary itself says a generation ends.
    pub ends: Vec<u32>,
}

impl Tokenizer {
    /// Builds the tokenizer of a model from its text files and its `config.json`.
    pub fn new(assets: &TextAssets, config: &Value) -> Result<Self, TextError> {
        let mut parsed = match &assets.tokenizer {
            None => return Err(TextError::MissingTokenizer),
            Some(TokenizerSource::Json(bytes)) => hub::parse(bytes)?,
            Some(TokenizerSource::Gguf(vocabulary)) => gguf::parse(vocabulary)?,
        };
        special::complete(&mut parsed, assets, config);
        let eos = special::ends(&parsed, assets, config);
        let Parsed { engine, pieces, frame, named, .. } = parsed;
        let mut tokenizer =
            Inner { engine, pieces, frame, named, eos, adds_bos: false, control: OnceLock::new() };
        let around_nothing = tokenizer.encode("", true, Injection::Parsed)?;
        tokenizer.adds_bos = named.bos.is_some() && around_nothing.first() == named.bos.as_ref();
        Ok(Self { inner: Arc::new(tokenizer) })
    }

    /// Token ids of a text in which the spellings of special tokens *are* those tokens, as in a rendered chat template.
    ///
    /// With `add_special`, the tokens the model wants around every text are added; leave them out for a rendered chat
    /// template, which writes them itself.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError> {
        self.inner.encode(text, add_special, Injection::Parsed)
    }

    /// Token ids of a text that is nothing but text: `<|im_end|>` typed by a user becomes the ordinary tokens of those
    /// ten characters, so no text can pose as a control token. Nor can it pose as an added token that is a word of a
    /// kind, such as `<tool_call>`.
    pub fn encode_literal(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError> {
        self.inner.encode(text, add_special, Injection::Literal)
    }

    /// Token ids of a text that goes on from another one. As [`encode`](Self::encode) has them, with nothing added: no
    /// special tokens, and no space where the vocabulary puts one before every text.
    pub fn encode_continuation(&self, text: &str) -> Result<Vec<u32>, TextError> {
        control::piece(self, text, true, false)
    }

    /// The text of some ids, special tokens left out if `skip_special`. Ids outside the vocabulary leave no trace;
    /// bytes that are no UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut stream = self.detokenizer(skip_special);
        let mut text = String::new();
        for &id in ids {
            text += &stream.push(id);
        }
        text + &stream.finish()
    }

    /// A decoder for ids that come one by one.
    pub fn detokenizer(&self, skip_special: bool) -> Detokenizer {
        Detokenizer::new(self, skip_special)
    }

    /// The bytes a token adds in the middle of a text: possibly no whole character, possibly none at all.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.inner.pieces.bytes(id)
    }

    /// A token as the vocabulary spells it (`Ġhello`, `▁hello`, `<0x0A>`).
    pub fn id_to_token(&self, id: u32) -> Option<&str> {
        self.inner.pieces.text(id)
    }

    /// The id of a token as the vocabulary spells it.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.engine.token_to_id(token)
    }

    /// One past the highest id. A model may have more rows than that.
    pub fn vocab_size(&self) -> usize {
        self.inner.pieces.len()
    }

    /// Whether a token is a control token rather than text.
    pub fn is_special(&self, id: u32) -> bool {
        self.inner.pieces.is_special(id)
    }

    /// Whether a token means more than its text: control tokens do, and added tokens that are words of a kind
    /// (`<tool_call>`) rather than runs of spaces.
    pub fn is_control(&self, id: u32) -> bool {
        self.inner.pieces.is_control(id)
    }

    /// Ids at which a generation ends, in ascending order.
    pub fn eos_ids(&self) -> &[u32] {
        &self.inner.eos
    }

    /// Whether a generation ends at this id.
    pub fn is_eos(&self, id: u32) -> bool {
        self.inner.eos.binary_search(&id).is_ok()
    }

    /// The token that begins a text, if the model has one.
    pub fn bos_id(&self) -> Option<u32> {
        self.inner.named.bos
    }

    /// The token that pads batches, if the model has one.
    pub fn pad_id(&self) -> Option<u32> {
        self.inner.named.pad
    }

    /// The token that stands for anything the vocabulary cannot spell, if there is one.
    pub fn unk_id(&self) -> Option<u32> {
        self.inner.named.unk
    }

    /// Whether [`encode`](Self::encode) with `add_special` begins with [`bos_id`](Self::bos_id).
    pub fn adds_bos(&self) -> bool {
        self.inner.adds_bos
    }

    pub(crate) fn pieces(&self) -> &Pieces {
        &self.inner.pieces
    }

    pub(crate) fn control_tokens(&self) -> &ControlTokens {
        self.inner.control.get_or_init(|| ControlTokens::new(self.inner.pieces.control_spellings()))
    }

    pub(crate) fn named(&self) -> &NamedTokens {
        &self.inner.named
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("bos", &self.bos_id())
            .field("eos", &self.eos_ids())
            .finish_non_exhaustive()
    }
}

#[derive(Clone, Copy)]
enum Injection {
    Parsed,
    Literal,
}

impl Inner {
    fn encode(&self, text: &str, add_special: bool, injection: Injection) -> Result<Vec<u32>, TextError> {
        let by_engine = add_special && self.frame.is_none();
        let ids = match injection {
            Injection::Parsed => self.engine.encode(text, by_engine)?,
            Injection::Literal => {
                let mut ids = self.engine.encode(text, false)?;
                if ids.iter().any(|&id| self.is_control(id)) {
                    ids = self.engine.encode_literal(text, |id| self.is_control(id))?;
                }
                if by_engine { self.engine.surround(ids)? } else { ids }
            }
        };
        match &self.frame {
            Some(frame) if add_special => Ok([&frame.before[..], &ids, &frame.after].concat()),
            _ => Ok(ids),
        }
    }

    /// The unknown token is special, yet stands for plain text the vocabulary cannot spell.
    fn is_control(&self, id: u32) -> bool {
        self.pieces.is_control(id) && Some(id) != self.named.unk
    }
}
