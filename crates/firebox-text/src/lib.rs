//! Text in and out of language models.
//!
//! - [`Tokenizer`]: a vocabulary, from `tokenizer.json` or from the metadata of a GGUF file;
//! - [`Detokenizer`]: text from tokens that come one by one;
//! - [`StopStrings`]: ends a generation at strings the caller named;
//! - [`ChatTemplate`]: the prompt for a conversation of [`Message`]s;
//! - [`CallReader`]: calls of tools in what a model says.
//!
//! Nothing here computes with tensors, and nothing trusts the files: malformed metadata is a [`TextError`].

mod budget;
mod calls;
mod charsmap;
mod column;
mod continued;
mod control;
mod decoding;
mod detokenizer;
mod engine;
mod error;
mod generation_tag;
mod gguf;
mod hub;
mod hub_parts;
mod merging;
mod message;
mod operators;
mod own_model;
mod pieces;
mod pretokenizer;
mod python;
mod ranked;
mod scored;
mod special;
mod stop;
mod template;
mod tokenizer;
mod unread;
mod vocabulary;

pub use calls::{AnswerPart, CallReader, CallSyntax, can_be_called};
pub use continued::Continued;
pub use detokenizer::{Detokenizer, HeldBack};
pub use engine::panic_message;
pub use error::TextError;
pub use firebox_store::{GgufVocabulary, TextAssets, TokenizerSource};
pub use message::{Content, ContentPart, FunctionCall, Message, ToolCall};
pub use stop::StopStrings;
pub use template::{ChatTemplate, TemplateOptions};
pub use tokenizer::Tokenizer;
