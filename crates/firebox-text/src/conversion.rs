//! Tokenizers in another format than that of their source: `tokenizer.json` as GGUF metadata, and back.
//!
//! What is written is read again and compared with its source on a few texts of every kind.

use crate::decoding::{SPACE_MARK, byte_token};
use crate::error::TextError;
use crate::pretokenizer::PreTokenizer;
use crate::tokenizer::Tokenizer;
use crate::tokenizer_json::{self, RankedOutline};
use crate::tokenizer_json_files::files;
use firebox_store::{GgufVocabulary, TextAssets, TokenizerFiles, TokenizerSource};
use serde_json::Value;
use std::collections::HashSet;

/// Texts on which both forms have to agree.
const SAMPLES: [&str; 6] = [
    "",
    "Hello world, it's 12345 o'clock; we'll SEE!",
    "  two  spaces,\ttabs\n\n and\r\nbreaks   \n",
    "naïve café e\u{301} Ünïcödé Привет 你好世界 日本語 مرحبا 🙂👍🏽",
    "fn main() { let x = a[0] + 1e-5; } // <tag attr=\"1\"> http://a.b/c?d=e",
    "▁marked and \u{a0}odd\u{200b} 0x1F 3.14 1,000,000",
];

/// Values of `tokenizer.ggml.token_type`.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// Returns a model's tokenizer as GGUF metadata, or refuses it by name.
pub fn gguf_vocabulary(assets: &TextAssets, config: &Value) -> Result<GgufVocabulary, TextError> {
    let bytes = match &assets.tokenizer {
        None => return Err(TextError::MissingTokenizer),
        Some(TokenizerSource::Gguf(vocabulary)) => return Ok(vocabulary.clone()),
        Some(TokenizerSource::Json(bytes)) => bytes,
    };
    let source = Tokenizer::new(assets, config)?;
    let outline = tokenizer_json::outline(bytes)?;
    let vocabulary = match outline.byte_fallback {
        true => sentencepiece(&source, &outline)?,
        false => byte_level(&source, &outline)?,
    };
    let written = TokenizerSource::Gguf(vocabulary.clone());
    let written = TextAssets { tokenizer: Some(written), ..TextAssets::default() };
    compare(&source, &Tokenizer::new(&written, &Value::Null)?, "GGUF metadata")?;
    Ok(vocabulary)
}

/// Returns a GGUF vocabulary as the files of a Hugging Face directory, or refuses it by name.
pub fn tokenizer_files(vocabulary: &GgufVocabulary) -> Result<TokenizerFiles, TextError> {
    let made = files(vocabulary)?;
    let of = |tokenizer| TextAssets { tokenizer: Some(tokenizer), ..TextAssets::default() };
    let source = Tokenizer::new(&of(TokenizerSource::Gguf(vocabulary.clone())), &Value::Null)?;
    let written = of(TokenizerSource::Json(made.tokenizer.to_string().into_bytes()));
    let written = TextAssets { tokenizer_config: Some(made.config.clone()), ..written };
    compare(&source, &Tokenizer::new(&written, &Value::Null)?, "tokenizer.json")?;
    Ok(TokenizerFiles { ends: source.eos_ids().to_vec(), ..made })
}

/// Checks that two tokenizers make the same of the samples, and of a text with special tokens in it.
fn compare(source: &Tokenizer, written: &Tokenizer, form: &'static str) -> Result<(), TextError> {
    let special = (0..source.vocab_size() as u32).find(|&id| source.is_special(id));
    let marked =
        special.and_then(|id| source.id_to_token(id)).map(|token| format!("one{token} two{token}\n"));
    for text in SAMPLES.into_iter().chain(marked.as_deref()) {
        // A text that neither vocabulary can spell is no difference.
        if source.encode(text, true).ok() != written.encode(text, true).ok() {
            let reason = format!("the text {text:?} would become other tokens");
            return Err(TextError::NotWritten { form, reason });
        }
    }
    Ok(())
}

fn refused(reason: impl Into<String>) -> TextError {
    TextError::NotWritten { form: "GGUF metadata", reason: reason.into() }
}

fn byte_level(source: &Tokenizer, outline: &RankedOutline) -> Result<GgufVocabulary, TextError> {
    let RankedOutline { normalizer, pre_tokenizer, ignore_merges, .. } = outline;
    let pre = PreTokenizer::name_of(normalizer, pre_tokenizer, *ignore_merges)
        .ok_or_else(|| refused("its pre-tokenizer is none that GGUF has a name for"))?;
    let merges = outline.merges.iter().map(|(left, right)| match left.contains(' ') || right.contains(' ') {
        true => Err(refused(format!("the merge of {left:?} and {right:?} has a space in it"))),
        false => Ok(format!("{left} {right}")),
    });
    Ok(GgufVocabulary {
        model: "gpt2".to_owned(),
        pre: Some(pre.to_owned()),
        merges: merges.collect::<Result<_, _>>()?,
        ..common(source)?
    })
}

fn sentencepiece(source: &Tokenizer, outline: &RankedOutline) -> Result<GgufVocabulary, TextError> {
    for (part, list, known) in [
        (&outline.normalizer, "normalizers", ["Prepend", "Replace"]),
        (&outline.pre_tokenizer, "pretokenizers", ["Metaspace", ""]),
    ] {
        let kind = |step: &Value| step.get("type").and_then(Value::as_str).map(str::to_owned);
        let mut kinds = steps(part, list).iter().filter_map(kind);
        if let Some(kind) = kinds.find(|kind| !known.contains(&kind.as_str())) {
            return Err(refused(format!(
                "its step `{kind}` before SentencePiece's BPE is none that GGUF can say"
            )));
        }
    }
    let mut vocabulary = GgufVocabulary {
        model: "llama".to_owned(),
        pre: Some("default".to_owned()),
        add_space_prefix: Some(outline.adds_space_prefix()),
        ..common(source)?
    };
    for (token, kind) in vocabulary.tokens.iter().zip(&mut vocabulary.token_types) {
        if *kind == NORMAL && byte_token(token).is_some() {
            *kind = BYTE;
        }
    }
    if let Some(kind) = source.unk_id().and_then(|id| vocabulary.token_types.get_mut(id as usize)) {
        *kind = UNKNOWN;
    }
    // The order of merges, as scores of what they make: that is where the list came from.
    vocabulary.scores = vec![0.0; vocabulary.tokens.len()];
    let (mut seen, mut last) = (HashSet::new(), None);
    for (rank, (left, right)) in outline.merges.iter().enumerate() {
        let id = source.token_to_id(&format!("{left}{right}"));
        if last == id {
            continue;
        }
        let scores = id.and_then(|id| vocabulary.scores.get_mut(id as usize));
        let Some(score) = scores.filter(|_| seen.insert(id)) else {
            return Err(refused("its merges are in an order that scores of tokens do not have"));
        };
        *score = -1.0 - rank as f32;
        last = id;
    }
    let is_made = |id: usize| vocabulary.scores[id] < 0.0;
    let unmade = (0..vocabulary.tokens.len()).find(|&id| {
        vocabulary.token_types[id] == NORMAL && vocabulary.tokens[id].chars().count() > 1 && !is_made(id)
    });
    match unmade {
        Some(id) => Err(refused(format!("no merge makes its token {:?}", vocabulary.tokens[id]))),
        None => Ok(vocabulary),
    }
}

/// The tokens, their types, and the special ones.
fn common(source: &Tokenizer) -> Result<GgufVocabulary, TextError> {
    let ids = 0..source.vocab_size() as u32;
    let named = source.named();
    let mut others = source.eos_ids().iter().copied().filter(|id| Some(*id) != named.eos);
    let around_nothing = source.encode("", true)?;
    let ends = around_nothing.len() > usize::from(source.adds_bos())
        && named.eos.is_some()
        && around_nothing.last() == named.eos.as_ref();
    Ok(GgufVocabulary {
        tokens: ids
            .clone()
            .map(|id| source.id_to_token(id).map_or_else(|| format!("[PAD{id}]"), str::to_owned))
            .collect(),
        token_types: ids
            .map(|id| match source.id_to_token(id) {
                None => UNUSED,
                Some(_) if source.is_special(id) => CONTROL,
                Some(_) if source.pieces().is_added(id) => USER_DEFINED,
                Some(_) => NORMAL,
            })
            .collect(),
        bos: named.bos,
        eos: named.eos,
        eot: others.next(),
        eom: others.next(),
        unk: named.unk,
        pad: named.pad,
        add_bos: Some(source.adds_bos()),
        add_eos: Some(ends),
        ..GgufVocabulary::default()
    })
}

/// The steps of a sequence, or the only one.
fn steps<'s>(part: &'s Value, list: &str) -> &'s [Value] {
    let steps = part.get(list).and_then(Value::as_array);
    steps.map_or(std::slice::from_ref(part), Vec::as_slice)
}

impl RankedOutline {
    /// Returns whether a space is added before a text.
    fn adds_space_prefix(&self) -> bool {
        let is = |step: &Value, kind: &str| step.get("type").is_some_and(|found| found == kind);
        let mark = SPACE_MARK.to_string();
        let prepended = steps(&self.normalizer, "normalizers")
            .iter()
            .any(|step| is(step, "Prepend") && step.get("prepend").is_some_and(|text| *text == mark));
        let metaspace = steps(&self.pre_tokenizer, "pretokenizers").iter().any(|step| {
            is(step, "Metaspace") && step.get("prepend_scheme").is_none_or(|scheme| scheme != "never")
        });
        prepended || metaspace
    }
}
