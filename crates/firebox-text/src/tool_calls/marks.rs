//! The marks that families of models write around calls, and around messages in channels.

pub(super) const TAG: &str = "<tool_call>";
pub(super) const TAG_END: &str = "</tool_call>";
pub(super) const PYTHON: &str = "<|python_tag|>";
pub(super) const LISTED: &str = "[TOOL_CALLS]";
pub(super) const ARGUMENTS: &str = "[ARGS]";
pub(super) const CALL_ID: &str = "[CALL_ID]";
pub(super) const FENCE: &str = "```";
pub(super) const FUNCTIONS: &str = "<|tool_call|>";
pub(super) const FUNCTIONS_END: &str = "<|/tool_call|>";
pub(super) const FUNCTOOLS: &str = "functools";
/// Follows the tools in Phi-4-mini's prompt.
pub(super) const TOOL_FIELD_END: &str = "<|/tool|>";
pub(super) const CALLS_BEGIN: &str = "<｜tool▁calls▁begin｜>";
pub(super) const CALLS_END: &str = "<｜tool▁calls▁end｜>";
pub(super) const CALL_BEGIN: &str = "<｜tool▁call▁begin｜>";
pub(super) const CALL_END: &str = "<｜tool▁call▁end｜>";
pub(super) const SEPARATOR: &str = "<｜tool▁sep｜>";
pub(super) const START: &str = "<|start|>";
pub(super) const CHANNEL: &str = "<|channel|>";
pub(super) const CONSTRAIN: &str = "<|constrain|>";
pub(super) const MESSAGE: &str = "<|message|>";
pub(super) const END: &str = "<|end|>";
pub(super) const CALL: &str = "<|call|>";
pub(super) const RETURN: &str = "<|return|>";
/// The recipient of messages that call tools, before the name of a tool.
pub(super) const RECIPIENT: &str = "functions";
