//! Schemas of `/v1/responses` for the OpenAPI document.

#![expect(dead_code, reason = "nothing but descriptions is made of these")]

use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::schema::{ReasoningTokens, Sampling};

/// A conversation to continue.
#[derive(Serialize, ToSchema)]
pub(super) struct ResponseRequest {
    /// A model, or `model:head`; optional if there is one model.
    model: Option<String>,
    input: ResponseInput,
    /// The system prompt.
    instructions: Option<String>,
    /// -1 for as many as fit.
    #[schema(minimum = -1, maximum = 4294967295i64)]
    max_output_tokens: Option<i64>,
    tools: Option<Vec<ResponseTool>>,
    /// `auto`, `none`, `required`, or an object with the `name` of a function.
    #[schema(value_type = Option<Object>)]
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    text: Option<ResponseText>,
    /// Returned unchanged.
    #[schema(value_type = Option<Object>)]
    metadata: Option<Value>,
    /// Streams the answer as events.
    stream: Option<bool>,
    /// `message.output_text.logprobs` adds log-probabilities.
    include: Option<Vec<String>>,
    #[schema(minimum = 0, maximum = 20)]
    top_logprobs: Option<u64>,
    reasoning: Option<ResponseReasoning>,
    /// Additional variables of the chat template.
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Option<Value>,
    add_generation_prompt: Option<bool>,
    #[serde(flatten)]
    sampling: Sampling,
}

/// How the model reasons.
#[derive(Serialize, ToSchema)]
pub(super) struct ResponseReasoning {
    /// How much to reason, as the chat template has it; refused if it has no place for that.
    effort: Option<String>,
}

/// A user message, or the items of a conversation.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(super) enum ResponseInput {
    Text(String),
    Items(Vec<ResponseItem>),
}

#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(super) enum ResponseItem {
    Message(ResponseMessage),
    Call(FunctionCallItem),
    Output(FunctionCallOutput),
}

#[derive(Serialize, ToSchema)]
pub(super) struct ResponseMessage {
    role: String,
    content: ResponseContent,
}

#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(super) enum ResponseContent {
    Text(String),
    Parts(Vec<ResponsePart>),
}

#[derive(Serialize, ToSchema)]
pub(super) struct ResponsePart {
    /// `input_text` or `output_text`
    r#type: String,
    text: String,
}

#[derive(Serialize, ToSchema)]
pub(super) struct FunctionCallItem {
    /// `function_call`
    r#type: String,
    call_id: String,
    name: String,
    /// JSON.
    arguments: String,
}

#[derive(Serialize, ToSchema)]
pub(super) struct FunctionCallOutput {
    /// `function_call_output`
    r#type: String,
    call_id: String,
    output: String,
}

/// A function the model may call.
#[derive(Serialize, ToSchema)]
pub(super) struct ResponseTool {
    /// `function`
    r#type: String,
    #[schema(min_length = 1)]
    name: String,
    description: Option<String>,
    /// A JSON schema.
    #[schema(value_type = Option<Object>)]
    parameters: Option<Value>,
    /// The arguments of every call fit the parameters.
    strict: Option<bool>,
}

#[derive(Serialize, ToSchema)]
pub(super) struct ResponseText {
    format: Option<ResponseTextFormat>,
}

/// The output format.
#[derive(Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum ResponseTextFormat {
    Text,
    JsonObject,
    JsonSchema {
        name: Option<String>,
        strict: Option<bool>,
        /// A JSON schema.
        #[schema(value_type = Object)]
        schema: Value,
    },
}

/// An answer.
#[derive(Serialize, ToSchema)]
pub(super) struct ResponseBody {
    id: String,
    object: String,
    created_at: u64,
    /// `completed`, or `incomplete` if it reached the maximum length.
    status: String,
    #[schema(value_type = Option<Object>, required)]
    error: Option<Value>,
    #[schema(value_type = Option<Object>, required)]
    incomplete_details: Option<Value>,
    model: String,
    /// Reasoning, messages and function calls.
    #[schema(value_type = Vec<Object>)]
    output: Vec<Value>,
    parallel_tool_calls: bool,
    temperature: f32,
    top_p: f32,
    usage: ResponseUsage,
}

#[derive(Serialize, ToSchema)]
pub(super) struct ResponseUsage {
    input_tokens: u64,
    input_tokens_details: CachedInput,
    output_tokens: u64,
    output_tokens_details: ReasoningTokens,
    total_tokens: u64,
}

#[derive(Serialize, ToSchema)]
pub(super) struct CachedInput {
    cached_tokens: u64,
}
