//! Errors of the conversion between text and token ids.

/// Every failure of this crate.
///
/// Messages are written for users who run a model: they name the field that is wrong and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// The model has no vocabulary.
    #[error(
        "the model has no tokenizer: put `tokenizer.json` beside its weights, or use a GGUF file with a vocabulary"
    )]
    MissingTokenizer,

    /// A tokenizer has a part that another format has no form for.
    #[error(
        "the tokenizer cannot be written as {form}: {reason}; use the model in its own format, or the published file of that format"
    )]
    NotWritten {
        /// The other format.
        form: &'static str,
        /// The part.
        reason: String,
    },

    /// `tokenizer.json` is invalid.
    #[error("`tokenizer.json` is not usable: {reason}; download it again from where the model came from")]
    InvalidTokenizerJson {
        /// The objection of the parser or of a consistency check.
        reason: String,
    },

    /// `tokenizer.json` uses a decoder that cannot run one token at a time.
    #[error("`tokenizer.json` uses the decoder `{decoder}`, which cannot be run token by token: {reason}")]
    UnsupportedDecoder {
        /// Type name of the decoder.
        decoder: String,
        /// The unsupported part.
        reason: &'static str,
    },

    /// `tokenizer.ggml.model` is none of the known kinds.
    #[error(
        "`tokenizer.ggml.model` is `{model}`; known are gpt2, gemma4, llama, t5 and bert: convert the model with its `tokenizer.json` instead"
    )]
    UnknownModel {
        /// The value found.
        model: String,
    },

    /// `tokenizer.ggml.pre` is none of the known kinds.
    #[error(
        "`tokenizer.ggml.pre` is `{pre}`, a pre-tokenizer this version does not know: load the model from its Hugging Face directory, which says how to split text"
    )]
    UnknownPreTokenizer {
        /// The value found.
        pre: String,
    },

    /// Two arrays of the vocabulary disagree about its size.
    #[error(
        "`{field}` has {found} entries for {expected} tokens: the GGUF file is damaged or was written by a faulty converter"
    )]
    VocabularyLength {
        /// The metadata key with the wrong length.
        field: &'static str,
        /// Entries found.
        found: usize,
        /// Number of tokens.
        expected: usize,
    },

    /// A vocabulary that cannot be used for another reason.
    #[error("`{field}` is not usable: {reason}")]
    InvalidVocabulary {
        /// The metadata key at fault.
        field: &'static str,
        /// The defect.
        reason: String,
    },

    /// Two ids have the same token text.
    #[error("the vocabulary holds `{token}` twice, as {first} and as {second}: the file is damaged")]
    DuplicateToken {
        /// The text.
        token: String,
        /// Lower id.
        first: u32,
        /// Higher id.
        second: u32,
    },

    /// A special token id lies outside the vocabulary.
    #[error("`{field}` is {id}, but the vocabulary has {vocab_size} tokens: correct the model's metadata")]
    TokenOutOfRange {
        /// The metadata key at fault.
        field: &'static str,
        /// The value found.
        id: u32,
        /// Number of tokens.
        vocab_size: usize,
    },

    /// A merge rule that does not fit the vocabulary.
    #[error(
        "merge rule {index} (`{merge}`) is not usable: {reason}; the tokenizer's vocabulary and merges do not belong together"
    )]
    InvalidMerge {
        /// Position in the list of merges.
        index: usize,
        /// The rule as written.
        merge: String,
        /// The defect.
        reason: &'static str,
    },

    /// The normalization table of a SentencePiece model is malformed.
    #[error("the normalization table `precompiled_charsmap` is malformed: {reason}")]
    InvalidCharsmap {
        /// The defect.
        reason: &'static str,
    },

    /// The tokenizer refused a text.
    #[error("the text could not be tokenized: {reason}")]
    Encode {
        /// The tokenizer's message.
        reason: String,
    },

    /// The model has no chat template, and none can be assumed.
    #[error(
        "the model has no chat template: pass a prompt as it stands with `--raw`, or name a template file with `--chat-template`"
    )]
    MissingChatTemplate,

    /// The chat template does not compile.
    #[error("the chat template does not compile: {reason}; name another one with `--chat-template`")]
    InvalidChatTemplate {
        /// The template engine's message, with its line.
        reason: String,
    },

    /// The template itself refused the conversation.
    #[error("the model's chat template refused this conversation: {message}")]
    RefusedByTemplate {
        /// The argument of the template's `raise_exception`.
        message: String,
    },

    /// The template failed while rendering.
    #[error("the chat template failed: {reason}")]
    RenderChatTemplate {
        /// The template engine's message, with its line.
        reason: String,
    },

    /// The template ran too long or produced too much.
    #[error(
        "the chat template exceeded its {limit}: it does not end, or the conversation is far larger than any context"
    )]
    TemplateLimit {
        /// The limit that was crossed.
        limit: &'static str,
    },

    /// A message has content that the template cannot render.
    #[error(
        "the model's chat template takes text only, but a message has a part of type `{kind}`: leave it out"
    )]
    UnsupportedContent {
        /// `type` of the part.
        kind: String,
    },
}
