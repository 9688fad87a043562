//! Tokenizers, chat templates and tool calls: text in and out of language models.
//!
//! - [`Tokenizer`]: a vocabulary, from `tokenizer.json` or from the metadata of a GGUF file;
//! - [`Detokenizer`]: text from a stream of tokens;
//! - [`StopStrings`]: ends a generation at given strings;
//! - [`ChatTemplate`]: the prompt for a conversation of [`Message`]s;
//! - [`AnswerReader`]: thoughts, text and tool calls in a model's answer.
//!
//! Nothing here computes with tensors. Files are not trusted: malformed metadata is a [`TextError`].

mod answer_reader;
mod backend;
mod charsmap;
mod chat_encoder;
mod control_tokens;
mod conversion;
mod decoding;
mod detokenizer;
mod error;
mod gguf_vocabulary;
mod merging;
mod message;
mod parsed_vocabulary;
mod pretokenizer;
mod ranked_bpe;
mod scored_bpe;
mod special_tokens;
mod stop;
mod string_column;
mod template;
mod template_filters;
mod template_generation_tag;
mod template_limits;
mod template_operators;
mod template_python;
mod thoughts;
mod token_table;
mod tokenizer;
mod tokenizer_json;
mod tokenizer_json_files;
mod tokenizer_json_steps;
mod tokenizers_adapter;
mod tool_calls;
mod verbatim;
mod vocabulary;

pub use answer_reader::AnswerReader;
pub use backend::panic_message;
pub use chat_encoder::ChatEncoder;
pub use conversion::{gguf_vocabulary, tokenizer_files};
pub use detokenizer::{Detokenizer, DetokenizerState};
pub use error::TextError;
pub use firebox_store::{GgufVocabulary, TextAssets, TokenizerSource};
pub use message::{Content, ContentPart, FunctionCall, Message, ToolCall};
pub use stop::StopStrings;
pub use template::{ChatTemplate, TemplateOptions};
pub use thoughts::{ThoughtMarks, ThoughtReader};
pub use tokenizer::Tokenizer;
pub use tool_calls::{AnswerPart, CallReader, CallSyntax, CallableTool, is_valid_tool_name};
