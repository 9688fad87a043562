//! Tool calls in a model's answer. Every family of models has a syntax of its own.

mod answer_part;
mod call_grammar;
mod channel_reader;
mod declared_tools;
mod json_scanner;
mod literals;
mod marker_reader;
mod marks;
mod markup;
mod object_head;
mod part_queue;
mod reader;
mod region;
mod syntax;
mod text_tools;
mod tool_name;

pub use answer_part::AnswerPart;
pub use call_grammar::CallableTool;
pub use reader::CallReader;
pub use syntax::CallSyntax;
pub(crate) use text_tools::{tools_as_text, tools_in_system_message};
pub use tool_name::is_valid_tool_name;
