//! A small interface to the `tokenizers` crate.

use crate::error::TextError;
use crate::ranked_bpe::RankedBpe;
use crate::scored_bpe::ScoredBpe;
use crate::tokenizers_adapter::{CustomModel, WordTokenizer as _};
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

/// A tokenizer of the `tokenizers` crate with a model of type `M`.
pub(crate) type Pipeline<M> =
    TokenizerImpl<M, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// The kinds of tokenizers that this crate uses.
pub(crate) enum Backend {
    /// A model of the `tokenizers` crate.
    Hub(Box<tokenizers::Tokenizer>),
    /// BPE with a list of merges.
    Ranked(Box<Pipeline<CustomModel<RankedBpe>>>),
    /// SentencePiece BPE, whose merge order `tokenizers` cannot express.
    Scored(Box<Pipeline<CustomModel<ScoredBpe>>>),
}

/// Evaluates an expression for every kind of tokenizer.
macro_rules! with_pipeline {
    ($backend:expr, $pipeline:ident => $same:expr) => {
        match $backend {
            Backend::Hub($pipeline) => $same,
            Backend::Ranked($pipeline) => $same,
            Backend::Scored($pipeline) => $same,
        }
    };
}

impl Backend {
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError> {
        catch_panics(|| with_pipeline!(self, pipeline => ids(pipeline.encode_fast(text, add_special))))
    }

    /// Checks that the steps around the model can process a text; a text that the model cannot spell is no fault.
    pub fn check_text(&self, text: &str) -> Result<(), TextError> {
        catch_panics(|| {
            let _ = with_pipeline!(self, pipeline => pipeline.encode_fast(text, true).is_ok());
            Ok(())
        })
    }

    /// Encodes without matching added tokens. Tokens of the model for which `is_control` holds are split.
    pub fn encode_literal(
        &self,
        text: &str,
        is_control: impl Fn(u32) -> bool,
    ) -> Result<Vec<u32>, TextError> {
        catch_panics(|| with_pipeline!(self, pipeline => literal(pipeline, text, is_control)))
    }

    /// Adds the tokens that the post-processor puts around every text.
    pub fn surround(&self, ids: Vec<u32>) -> Result<Vec<u32>, TextError> {
        catch_panics(|| with_pipeline!(self, pipeline => surround(pipeline, ids)))
    }

    /// The vocabulary of our own models.
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
        catch_panics(|| {
            let added = with_pipeline!(self, pipeline => pipeline.add_tokens(tokens));
            added.map(|_| ()).map_err(encode_error)
        })
    }
}

thread_local! {
    /// Set while a panic of this thread is converted to an error, so that the hook prints nothing.
    static CATCHING_PANIC: Cell<bool> = const { Cell::new(false) };
}

/// Runs `tokenizers` code on data from files. Known causes of panics are checked beforehand; this converts unknown ones to errors.
pub(crate) fn catch_panics<T>(work: impl FnOnce() -> Result<T, TextError>) -> Result<T, TextError> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = take_hook();
        set_hook(Box::new(move |panic| {
            if !CATCHING_PANIC.get() {
                before(panic);
            }
        }));
    });
    let was = CATCHING_PANIC.replace(true);
    let caught = catch_unwind(AssertUnwindSafe(work));
    CATCHING_PANIC.set(was);
    caught.unwrap_or_else(|panic| {
        let said = panic_message(&*panic);
        Err(TextError::Encode { reason: format!("the tokenizer's data made it fail ({said})") })
    })
}

/// The message of a caught panic.
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
