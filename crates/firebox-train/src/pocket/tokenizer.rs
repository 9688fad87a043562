//! The pocket model's own vocabulary.

use super::{Generator, Shape, Split, Task};
use serde_json::json;
use thiserror::Error;
use tokenizers::decoders::DecoderWrapper;
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence as Decoders;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
use tokenizers::normalizers::replace::Replace;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};
use tokenizers::pre_tokenizers::sequence::Sequence as PreTokenizers;
use tokenizers::pre_tokenizers::split::{Split as Splitter, SplitPattern};
use tokenizers::tokenizer::Trainer as _;
use tokenizers::{
    AddedToken, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _, SplitDelimiterBehavior,
    Tokenizer,
};

/// Why a tokenizer could not be made.
#[derive(Debug, Error)]
pub enum TokenizerError {
    /// The `tokenizers` crate refused.
    #[error("the tokenizer of the pocket model could not be made: {reason}")]
    Refused {
        /// The error message.
        reason: String,
    },
}

/// The files of a tokenizer made for generated conversations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PocketTokenizer {
    /// The content of `tokenizer.json`.
    pub tokenizer: String,
    /// The content of `tokenizer_config.json`, chat template included.
    pub config: String,
}

const PAD: &str = "<|pad|>";
const END: &str = "<|end|>";
const ROLES: [&str; 3] = ["<|system|>", "<|user|>", "<|assistant|>"];

/// Every word begins with its space, whether it opens a message or not, so that a name is spelt in the same pieces wherever
/// it stands; one space at the very start of a text is lost to that. Digits and signs are pieces of their own.
const WORDS: &str = r"'s|▁?[0-9]|▁?[^\w▁]";

/// One piece before each message and one behind.
const TEMPLATE: &str = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}";

impl PocketTokenizer {
    /// Learns `size` pieces from `conversations` conversations of every task, drawn with `seed`.
    pub fn learn(seed: u64, size: usize, conversations: usize) -> Result<Self, TokenizerError> {
        let mut generator = Generator::new(seed, Split::Train, Shape::full());
        let mut texts = Vec::new();
        for _ in 0..conversations {
            for task in Task::ALL {
                texts.extend(generator.conversation(task).messages.into_iter().map(|line| line.content));
            }
        }
        Self::from_texts(&texts, size).map_err(|error| TokenizerError::Refused { reason: error.to_string() })
    }

    fn from_texts(texts: &[String], size: usize) -> Result<Self, tokenizers::Error> {
        let words = PreTokenizerWrapper::Sequence(PreTokenizers::new(vec![
            Metaspace::new('▁', PrependScheme::Always, true).into(),
            Splitter::new(SplitPattern::Regex(WORDS.into()), SplitDelimiterBehavior::Isolated, false)?.into(),
        ]));
        let special: Vec<_> =
            [PAD, END].into_iter().chain(ROLES).map(|t| AddedToken::from(t, true)).collect();
        // Bytes come before everything learnt: whatever cannot be spelt otherwise is spelt in them.
        let bytes = (0..=255).map(|byte| AddedToken::from(format!("<0x{byte:02X}>"), false));
        let mut trainer = BpeTrainerBuilder::new()
            .vocab_size(size)
            .min_frequency(2)
            .show_progress(false)
            .initial_alphabet((' '..='~').skip(1).chain(['▁']).collect())
            .special_tokens(special.iter().cloned().chain(bytes).collect())
            .build();
        trainer.feed(texts.iter(), |text| {
            let mut split = PreTokenizedString::from(text);
            words.pre_tokenize(&mut split)?;
            let parts = split.get_splits(OffsetReferential::Original, OffsetType::Byte);
            Ok(parts.into_iter().map(|(part, ..)| part.to_owned()).collect())
        })?;
        let mut model = BPE::builder().byte_fallback(true).build()?;
        trainer.train(&mut model)?;

        let mut tokenizer = Tokenizer::new(model);
        let decoders: Vec<DecoderWrapper> = vec![
            Replace::new("▁", " ")?.into(),
            ByteFallback::new().into(),
            Fuse::new().into(),
            Strip::new(' ', 1, 0).into(),
        ];
        tokenizer
            .with_pre_tokenizer(Some(words))
            .with_decoder(Some(Decoders::new(decoders)))
            .add_special_tokens(special)?;
        let config = json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": PAD,
            "model_max_length": 1024,
            "clean_up_tokenization_spaces": false,
            "chat_template": TEMPLATE,
        });
        Ok(Self { tokenizer: tokenizer.to_string(true)?, config: serde_json::to_string_pretty(&config)? })
    }
}
