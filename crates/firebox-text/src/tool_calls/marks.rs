//! The marks that families of models write around calls, and around messages in channels.

pub(super) const TAG: &str = "<tool_call>";
pub(super) const TAG_END: &str = "</tool_call>";
/// Around Seed-OSS's calls, which are marked up as those of Qwen3-Coder.
pub(super) const SEED_TAG: &str = "<seed:tool_call>";
pub(super) const SEED_TAG_END: &str = "</seed:tool_call>";
/// Around the calls of MiniMax-M1 and Apriel.
pub(super) const TAGS: &str = "<tool_calls>";
pub(super) const TAGS_END: &str = "</tool_calls>";
/// Around the calls of Nemotron Nano 2.
pub(super) const TOOLCALL: &str = "<TOOLCALL>";
pub(super) const TOOLCALL_END: &str = "</TOOLCALL>";
/// Around the calls of MiniMax-M2.
pub(super) const MINIMAX: &str = "<minimax:tool_call>";
pub(super) const MINIMAX_END: &str = "</minimax:tool_call>";
/// Around the calls of DeepSeek-V3.2.
pub(super) const DSML: &str = "<｜DSML｜function_calls>";
pub(super) const DSML_END: &str = "</｜DSML｜function_calls>";
/// Around the calls of DeepSeek-V4.
pub(super) const DSML_TOOLS: &str = "<｜DSML｜tool_calls>";
pub(super) const DSML_TOOLS_END: &str = "</｜DSML｜tool_calls>";
/// Around the calls of LFM2.
pub(super) const PYTHONIC: &str = "<|tool_call_start|>";
pub(super) const PYTHONIC_END: &str = "<|tool_call_end|>";
/// Around a call of Gemma 4.
pub(super) const BRACED: &str = "<|tool_call>";
pub(super) const BRACED_END: &str = "<tool_call|>";
/// The marks of Kimi K2.
pub(super) const SECTION: &str = "<|tool_calls_section_begin|>";
pub(super) const SECTION_CALL: &str = "<|tool_call_begin|>";
pub(super) const SECTION_ARGUMENTS: &str = "<|tool_call_argument_begin|>";
pub(super) const SECTION_CALL_END: &str = "<|tool_call_end|>";
pub(super) const SECTION_END: &str = "<|tool_calls_section_end|>";
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
