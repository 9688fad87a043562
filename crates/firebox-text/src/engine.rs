//! The `tokenizers` crate behind one small surface.

use crate::error::TextError;
use crate::own_model::{Cut as _, OwnModel};
use crate::ranked::RankedBpe;
use crate::scored::ScoredBpe;
use crate::vocabulary::Vocabulary;
use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::{Arc, Once};
use tokenizers::{
    AddedToken, DecoderWrapper, Encoding, Model, NormalizedString, Normalizer, NormalizerWrapper,
    OffsetReferential, OffsetType, PostProcessor, PostProcessorWrapper, PreTokenizedString, PreTokenizer,
    PreTokenizerWrapper, TokenizerImpl,
};

/// A tokenizer of the `tokenizers` crate with some model.
pub(crate) type Pipeline<M> =
    TokenizerImpl<M, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// Every kind of tokenizer this crate drives.
pub(crate) enum Engine {
    /// A model of `tokenizers`' own.
    Hub(Box<tokenizers::Tokenizer>),
    /// BPE over a list of merges.
    Ranked(Box<Pipeline<OwnModel<RankedBpe>>>),
    /// SentencePiece BPE, whose order of merging `tokenizers` cannot express.
    Scored(Box<Pipeline<OwnModel<ScoredBpe>>>),
}

/// The same of every kind of tokenizer.
macro_rules! with_pipeline {
    ($engine:expr, $pipeline:ident => $same:expr) => {
        match $engine {
            Engine::Hub($pipeline) => $same,
            Engine::Ranked($pipeline) => $same,
            Engine::Scored($pipeline) => $same,
        }
    };
}

impl Engine {
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError> {
        shielded(|| with_pipeline!(self, pipeline => ids(pipeline.encode_fast(text, add_special))))
    }

    /// Whether the steps around the model come through a text at all; that the model cannot spell it is no fault.
    pub fn survives(&self, text: &str) -> Result<(), TextError> {
        shielded(|| {
            let _ = with_pipeline!(self, pipeline => pipeline.encode_fast(text, true).is_ok());
            Ok(())
        })
    }

    /// Encodes without looking for added tokens. Where the model itself spells a token for which `is_control` holds,
    /// that token is taken apart.
    pub fn encode_literal(
        &self,
        text: &str,
        is_control: impl Fn(u32) -> bool,
    ) -> Result<Vec<u32>, TextError> {
        shielded(|| with_pipeline!(self, pipeline => literal(pipeline, text, is_control)))
    }

    /// Puts the tokens around `ids` that the post-processor adds to every text.
    pub fn surround(&self, ids: Vec<u32>) -> Result<Vec<u32>, TextError> {
        shielded(|| with_pipeline!(self, pipeline => surround(pipeline, ids)))
    }

    /// The tokens of a model of ours.
    pub fn vocabulary(&self) -> Option<&Arc<Vocabulary>> {
        match self {
            Self::Hub(_) => None,
            Self::Ranked(pipeline) => Some(pipeline.get_model().0.vocabulary()),
            Self::Scored(pipeline) => Some(pipeline.get_model().0.vocabulary()),
        }
    }

    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        with_pipeline!(self, pipeline => pipeline.token_to_id(token))
    }

    /// Adds tokens that are matched in plain text. Their ids are those of the model's tokens of the same spelling.
    pub fn add_tokens(&mut self, tokens: Vec<AddedToken>) -> Result<(), TextError> {
        shielded(|| {
            let added = with_pipeline!(self, pipeline => pipeline.add_tokens(tokens));
            added.map(|_| ()).map_err(encode_error)
        })
    }
}

thread_local! {
    /// Whether a panic of this thread becomes an error, so that there is nothing to print about it.
    static SHIELDED: Cell<bool> = const { Cell::new(false) };
}

/// Runs `tokenizers` code that is fed from files. What is known to panic there is checked beforehand; this keeps what
/// is not known from taking the process down.
pub(crate) fn shielded<T>(work: impl FnOnce() -> Result<T, TextError>) -> Result<T, TextError> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = take_hook();
        set_hook(Box::new(move |panic| {
            if !SHIELDED.get() {
                before(panic);
            }
        }));
    });
    let was = SHIELDED.replace(true);
    let caught = catch_unwind(AssertUnwindSafe(work));
    SHIELDED.set(was);
    caught.unwrap_or_else(|panic| {
        let said = panic_message(&*panic);
        Err(TextError::Encode { reason: format!("the tokenizer's data made it fail ({said})") })
    })
}

/// What a panic that was caught has said.
pub fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let said = panic.downcast_ref::<String>().map(String::as_str);
    said.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it does not say why")
}

fn encode_error(error: tokenizers::Error) -> TextError {
    TextError::Encode { reason: error.to_string() }
}

fn ids(encoding: tokenizers::Result<Encoding>) -> Result<Vec<u32>, TextError> {
    encoding.map(|encoding| encoding.get_ids().to_vec()).map_err(encode_error)
}

fn literal<M: Model>(
    pipeline: &Pipeline<M>,
    text: &str,
    is_control: impl Fn(u32) -> bool,
) -> Result<Vec<u32>, TextError> {
    let mut normalized = NormalizedString::from(text);
    if let Some(normalizer) = pipeline.get_normalizer() {
        normalizer.normalize(&mut normalized).map_err(encode_error)?;
    }
    let mut words = PreTokenizedString::from(normalized);
    if let Some(splitter) = pipeline.get_pre_tokenizer() {
        splitter.pre_tokenize(&mut words).map_err(encode_error)?;
    }
    let model = pipeline.get_model();
    let mut ids = Vec::new();
    for (word, _, _) in words.get_splits(OffsetReferential::Normalized, OffsetType::None) {
        for token in model.tokenize(word).map_err(encode_error)? {
            if !is_control(token.id) {
                ids.push(token.id);
                continue;
            }
            let mut buffer = [0; 4];
            for character in token.value.chars() {
                let parts = model.tokenize(character.encode_utf8(&mut buffer)).map_err(encode_error)?;
                ids.extend(parts.into_iter().map(|part| part.id).filter(|&id| !is_control(id)));
            }
        }
    }
    Ok(ids)
}

fn surround<M: Model>(pipeline: &Pipeline<M>, ids: Vec<u32>) -> Result<Vec<u32>, TextError> {
    let Some(post_processor) = pipeline.get_post_processor() else { return Ok(ids) };
    let count = ids.len();
    let encoding = Encoding::new(
        ids,
        vec![0; count],
        vec![String::new(); count],
        vec![None; count],
        vec![(0, 0); count],
        vec![0; count],
        vec![1; count],
        Vec::new(),
        Default::default(),
    );
    let processed = post_processor.process(encoding, None, true);
    processed.map(|encoding| encoding.get_ids().to_vec()).map_err(encode_error)
}
