//! Text to token ids and back.

use crate::backend::Backend;
use crate::control_tokens::ControlTokens;
use crate::error::TextError;
use crate::parsed_vocabulary::{Frame, Parsed};
use crate::special_tokens::SpecialTokens;
use crate::token_table::TokenTable;
use crate::{gguf_vocabulary, tokenizer_json};
use firebox_store::{TextAssets, TokenizerSource};
use serde_json::Value;
use std::fmt;
use std::sync::{Arc, OnceLock};

/// A model's vocabulary and the rules of its use. Clones share the vocabulary.
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
    backend: Backend,
    pieces: TokenTable,
    /// Ids put around a text, unless the post-processor of `tokenizer.json` does that.
    frame: Option<Frame>,
    named: SpecialTokens,
    eos: Vec<u32>,
    adds_bos: bool,
    control: OnceLock<ControlTokens>,
}

impl Tokenizer {
    /// Builds the tokenizer of a model from its text files and its `config.json`.
    pub fn new(assets: &TextAssets, config: &Value) -> Result<Self, TextError> {
        let mut parsed = match &assets.tokenizer {
            None => return Err(TextError::MissingTokenizer),
            Some(TokenizerSource::Json(bytes)) => tokenizer_json::parse(bytes)?,
            Some(TokenizerSource::Gguf(vocabulary)) => gguf_vocabulary::parse(vocabulary)?,
        };
        parsed.complete(assets, config);
        let eos = parsed.end_ids(assets, config);
        let Parsed { backend, pieces, frame, named, .. } = parsed;
        let mut tokenizer =
            Inner { backend, pieces, frame, named, eos, adds_bos: false, control: OnceLock::new() };
        let around_nothing = tokenizer.encode("", true, Injection::Parsed)?;
        tokenizer.adds_bos = named.bos.is_some() && around_nothing.first() == named.bos.as_ref();
        Ok(Self { inner: Arc::new(tokenizer) })
    }

    /// Encodes a text in which the spellings of special tokens *are* those tokens, such as a rendered chat template.
    ///
    /// `add_special` adds the tokens that the model expects around every text; rendered chat templates contain them already.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError> {
        self.inner.encode(text, add_special, Injection::Parsed)
    }

    /// Encodes untrusted text: `<|im_end|>` typed by a user becomes ordinary tokens of those ten characters. Added tokens such as
    /// `<tool_call>` are spelled out in the same way.
    pub fn encode_literal(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError> {
        self.inner.encode(text, add_special, Injection::Literal)
    }

    /// Encodes a text that continues another one. Like [`encode`](Self::encode) without special tokens, and without the space that
    /// some vocabularies add before every text.
    pub fn encode_continuation(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.encode_piece(text, true, false)
    }

    /// Encodes a prompt rendered from marked messages. `begun` says that it continues an encoded text.
    pub(crate) fn encode_marked(&self, prompt: &str, begun: bool) -> Result<Vec<u32>, TextError> {
        let mut ids = Vec::new();
        let mut begun = begun;
        for (text, literal) in self.control_tokens().pieces(prompt) {
            ids.extend(self.encode_piece(text, begun, literal)?);
            begun = true;
        }
        Ok(ids)
    }

    /// Encodes one piece of a prompt. SentencePiece adds a space before every text, so a later piece is encoded behind a line
    /// break whose ids are removed again.
    fn encode_piece(&self, text: &str, begun: bool, literal: bool) -> Result<Vec<u32>, TextError> {
        let encode = |text: &str| match literal {
            true => self.encode_literal(text, false),
            false => self.encode(text, false),
        };
        if begun {
            let line_break = encode("\n")?;
            let mut ids = encode(&format!("\n{text}"))?;
            if !line_break.is_empty() && ids.starts_with(&line_break) {
                return Ok(ids.split_off(line_break.len()));
            }
        }
        encode(text)
    }

    /// The bytes that a token adds in the middle of a text, which may be an incomplete character, or none at all.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.inner.pieces.bytes(id)
    }

    /// A token's spelling in the vocabulary (`Ġhello`, `▁hello`, `<0x0A>`).
    pub fn id_to_token(&self, id: u32) -> Option<&str> {
        self.inner.pieces.text(id)
    }

    /// The id of a token by its spelling in the vocabulary.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.backend.token_to_id(token)
    }

    /// One past the highest id. A model may have more rows.
    pub fn vocab_size(&self) -> usize {
        self.inner.pieces.len()
    }

    /// Returns whether a token is a control token rather than text.
    pub fn is_special(&self, id: u32) -> bool {
        self.inner.pieces.is_special(id)
    }

    /// Returns whether a token means more than its text. That holds for control tokens, and for added tokens such as `<tool_call>`
    /// that are not runs of white space.
    pub fn is_control(&self, id: u32) -> bool {
        self.inner.pieces.is_control(id)
    }

    /// Ids that end a generation, ascending.
    pub fn eos_ids(&self) -> &[u32] {
        &self.inner.eos
    }

    /// Returns whether an id ends a generation.
    pub fn is_eos(&self, id: u32) -> bool {
        self.inner.eos.binary_search(&id).is_ok()
    }

    /// The token at the beginning of a text, if the model has one.
    pub fn bos_id(&self) -> Option<u32> {
        self.inner.named.bos
    }

    /// The token that pads batches, if the model has one.
    pub fn pad_id(&self) -> Option<u32> {
        self.inner.named.pad
    }

    /// The token for text that the vocabulary cannot spell, if there is one.
    pub fn unk_id(&self) -> Option<u32> {
        self.inner.named.unk
    }

    /// Returns whether [`encode`](Self::encode) with `add_special` begins with [`bos_id`](Self::bos_id).
    pub fn adds_bos(&self) -> bool {
        self.inner.adds_bos
    }

    pub(crate) fn pieces(&self) -> &TokenTable {
        &self.inner.pieces
    }

    pub(crate) fn control_tokens(&self) -> &ControlTokens {
        self.inner.control.get_or_init(|| ControlTokens::new(self.inner.pieces.control_spellings()))
    }

    pub(crate) fn named(&self) -> &SpecialTokens {
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
            Injection::Parsed => self.backend.encode(text, by_engine)?,
            Injection::Literal => {
                let mut ids = self.backend.encode(text, false)?;
                if ids.iter().any(|&id| self.is_control(id)) {
                    ids = self.backend.encode_literal(text, |id| self.is_control(id))?;
                }
                if by_engine { self.backend.surround(ids)? } else { ids }
            }
        };
        match &self.frame {
            Some(frame) if add_special => Ok([&frame.before[..], &ids, &frame.after].concat()),
            _ => Ok(ids),
        }
    }

    /// The unknown token is special, but it stands for plain text that the vocabulary cannot spell.
    fn is_control(&self, id: u32) -> bool {
        self.pieces.is_control(id) && Some(id) != self.named.unk
    }
}
