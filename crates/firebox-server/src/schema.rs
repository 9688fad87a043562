//! Schemas of requests and responses for the OpenAPI document. Handlers read requests field by field, so that
//! errors name the field.

#![expect(dead_code, reason = "nothing but descriptions is made of these")]

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

/// An error.
#[derive(Serialize, ToSchema)]
pub(crate) struct ErrorBody {
    error: ErrorInside,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct ErrorInside {
    /// What is wrong and what to do.
    message: String,
    /// Its type, such as `invalid_request_error`.
    r#type: String,
    /// The invalid field.
    #[schema(required)]
    param: Option<String>,
    #[schema(required)]
    code: Option<String>,
}

/// An event of a stream.
#[derive(Serialize, ToSchema)]
pub(crate) struct StreamEvent {
    /// JSON, or `[DONE]` at the end.
    data: String,
    /// Type of the event, if there are several.
    event: Option<String>,
}

/// State of the server.
#[derive(Serialize, ToSchema)]
pub(crate) struct Health {
    status: String,
}

/// Models.
#[derive(Serialize, ToSchema)]
pub(crate) struct ModelList {
    object: String,
    data: Vec<ModelEntry>,
}

/// A model, or one of its heads.
#[derive(Serialize, ToSchema)]
pub(crate) struct ModelEntry {
    /// The name for requests.
    id: String,
    object: String,
    created: u64,
    owned_by: String,
    /// The base model.
    root: String,
    /// The model that a head belongs to.
    #[schema(required)]
    parent: Option<String>,
    /// The longest sequence; null for encoders and for models that are not open yet.
    #[schema(required)]
    max_model_len: Option<u64>,
}

/// One or several texts.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum Texts {
    One(String),
    Several(Vec<String>),
}

/// One or several prompts, as texts or tokens.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum Prompts {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<u64>),
    TokenLists(Vec<Vec<u64>>),
}

/// Sampling parameters and stop conditions.
#[derive(Serialize, ToSchema)]
pub(crate) struct Sampling {
    #[schema(minimum = 0, maximum = 100)]
    temperature: Option<f32>,
    /// The number of likeliest tokens to sample from; 0 or -1 for all.
    #[schema(minimum = -1, maximum = 4294967295i64)]
    top_k: Option<i64>,
    #[schema(minimum = 0, maximum = 1)]
    top_p: Option<f32>,
    #[schema(minimum = 0, maximum = 1)]
    min_p: Option<f32>,
    #[schema(minimum = 0, maximum = 1)]
    typical_p: Option<f32>,
    #[schema(minimum = 0.01, maximum = 100)]
    repetition_penalty: Option<f32>,
    #[schema(minimum = -2, maximum = 2)]
    presence_penalty: Option<f32>,
    #[schema(minimum = -2, maximum = 2)]
    frequency_penalty: Option<f32>,
    /// By token id.
    logit_bias: Option<BTreeMap<String, f32>>,
    seed: Option<i64>,
    /// Texts that end the answer.
    stop: Option<Texts>,
    /// Continues after the model's end token.
    ignore_eos: Option<bool>,
    /// Ends an answer that only repeats itself. In sessions the default is true, unless `ignore_eos` is.
    loop_guard: Option<bool>,
    speculation: Option<SpeculationOptions>,
}

/// The output format, and the number of answers.
#[derive(Serialize, ToSchema)]
pub(crate) struct OutputOptions {
    response_format: Option<ResponseFormat>,
    /// A JSON schema, as in llama.cpp.
    #[schema(value_type = Option<Object>)]
    json_schema: Option<Value>,
    /// A grammar in llama.cpp's GBNF notation.
    grammar: Option<String>,
    /// Answers for every prompt.
    #[schema(minimum = 1, maximum = 64)]
    n: Option<u64>,
    /// Streams the answer as events.
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct SpeculationOptions {
    /// Drafts tokens by looking up how the text continued before. The tokens are the same, and come faster where the text
    /// repeats itself. The default is that of the server.
    lookup: Option<bool>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct StreamOptions {
    /// Ends the stream with the token counts.
    include_usage: Option<bool>,
}

/// The output format.
#[derive(Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum ResponseFormat {
    Text,
    JsonObject,
    JsonSchema { json_schema: NamedSchema },
}

#[derive(Serialize, ToSchema)]
pub(crate) struct NamedSchema {
    name: Option<String>,
    strict: Option<bool>,
    /// A JSON schema.
    #[schema(value_type = Object)]
    schema: Value,
}

/// A conversation to continue.
#[derive(Serialize, ToSchema)]
pub(crate) struct ChatRequest {
    /// A model, or `model:head`; optional if there is one model.
    model: Option<String>,
    #[schema(min_items = 1)]
    messages: Vec<ChatMessage>,
    /// -1 for as many as fit.
    #[schema(minimum = -1, maximum = 4294967295i64)]
    max_completion_tokens: Option<i64>,
    /// Older name of `max_completion_tokens`.
    #[schema(minimum = -1, maximum = 4294967295i64)]
    max_tokens: Option<i64>,
    logprobs: Option<bool>,
    #[schema(minimum = 0, maximum = 20)]
    top_logprobs: Option<u64>,
    tools: Option<Vec<Tool>>,
    tool_choice: Option<ToolChoice>,
    /// One answer may call several tools.
    parallel_tool_calls: Option<bool>,
    /// Additional variables of the chat template.
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Option<Value>,
    add_generation_prompt: Option<bool>,
    /// How much to reason, as the chat template has it; refused if it has no place for that.
    reasoning_effort: Option<String>,
    #[serde(flatten)]
    sampling: Sampling,
    #[serde(flatten)]
    output: OutputOptions,
}

/// A message of a conversation.
#[derive(Serialize, ToSchema)]
pub(crate) struct ChatMessage {
    /// `system`, `developer`, `user`, `assistant`, `tool`, or another role that the template supports.
    role: String,
    content: Option<MessageContent>,
    name: Option<String>,
    reasoning_content: Option<String>,
    tool_calls: Option<Vec<CalledTool>>,
    /// The call that a `tool` message answers.
    tool_call_id: Option<String>,
}

#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum MessageContent {
    Text(String),
    Parts(Vec<TextPart>),
}

#[derive(Serialize, ToSchema)]
pub(crate) struct TextPart {
    /// `text`, or another type that the template supports.
    r#type: String,
    text: Option<String>,
}

/// A function the model may call.
#[derive(Serialize, ToSchema)]
pub(crate) struct Tool {
    /// `function`
    r#type: String,
    function: ToolFunction,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct ToolFunction {
    #[schema(min_length = 1)]
    name: String,
    description: Option<String>,
    /// A JSON schema.
    #[schema(value_type = Option<Object>)]
    parameters: Option<Value>,
    /// The arguments of every call fit the parameters.
    strict: Option<bool>,
}

/// `auto`, `none`, `required`, or the function to call.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum ToolChoice {
    Mode(ToolMode),
    Function(NamedTool),
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ToolMode {
    Auto,
    None,
    Required,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct NamedTool {
    r#type: String,
    function: NamedFunction,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct NamedFunction {
    name: String,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct CalledTool {
    id: Option<String>,
    #[schema(nullable = false)]
    r#type: Option<String>,
    function: CalledFunction,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct CalledFunction {
    name: String,
    /// JSON.
    arguments: String,
}

/// One or several answers.
#[derive(Serialize, ToSchema)]
pub(crate) struct ChatCompletion {
    id: String,
    object: String,
    created: u64,
    model: String,
    choices: Vec<ChatChoice>,
    usage: UsageBody,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct ChatChoice {
    index: u64,
    message: AssistantMessage,
    #[schema(required)]
    logprobs: Option<ChatLogprobs>,
    finish_reason: FinishReason,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct AssistantMessage {
    role: String,
    #[schema(required)]
    content: Option<String>,
    #[schema(required)]
    refusal: Option<String>,
    /// The thoughts before the answer.
    #[schema(nullable = false)]
    reasoning_content: Option<String>,
    tool_calls: Option<Vec<CalledTool>>,
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FinishReason {
    Stop,
    Length,
    ToolCalls,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct ChatLogprobs {
    content: Vec<TokenLogprob>,
    #[schema(required)]
    refusal: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct TokenLogprob {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
    top_logprobs: Vec<LikelyToken>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct LikelyToken {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

/// Token counts of a request.
#[derive(Serialize, ToSchema)]
pub(crate) struct UsageBody {
    prompt_tokens: u64,
    completion_tokens: u64,
    total_tokens: u64,
    prompt_tokens_details: CachedTokens,
    completion_tokens_details: ReasoningTokens,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct ReasoningTokens {
    pub reasoning_tokens: u64,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct CachedTokens {
    /// Prompt tokens taken from the prefix cache.
    cached_tokens: u64,
}

/// Texts to continue.
#[derive(Serialize, ToSchema)]
pub(crate) struct CompletionRequest {
    model: Option<String>,
    prompt: Prompts,
    /// -1 for as many as fit.
    #[schema(minimum = -1, maximum = 4294967295i64)]
    max_tokens: Option<i64>,
    #[schema(minimum = 0, maximum = 20)]
    logprobs: Option<u64>,
    /// Another name of `max_tokens`.
    #[schema(minimum = -1, maximum = 4294967295i64)]
    max_completion_tokens: Option<i64>,
    #[serde(flatten)]
    sampling: Sampling,
    #[serde(flatten)]
    output: OutputOptions,
}

/// Continuations of texts.
#[derive(Serialize, ToSchema)]
pub(crate) struct Completion {
    id: String,
    object: String,
    created: u64,
    model: String,
    choices: Vec<CompletionChoice>,
    usage: UsageBody,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct CompletionChoice {
    index: u64,
    text: String,
    #[schema(required)]
    logprobs: Option<CompletionLogprobs>,
    finish_reason: FinishReason,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct CompletionLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<f32>,
    top_logprobs: Vec<BTreeMap<String, f32>>,
    text_offset: Vec<u64>,
}

/// Texts to embed.
#[derive(Serialize, ToSchema)]
pub(crate) struct EmbeddingRequest {
    model: Option<String>,
    input: Prompts,
    encoding_format: Option<EncodingFormat>,
    /// As many of the first numbers of every vector, scaled to length one.
    #[schema(minimum = 1, maximum = 4294967295i64)]
    dimensions: Option<u64>,
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum EncodingFormat {
    Float,
    Base64,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct EmbeddingList {
    object: String,
    data: Vec<Embedding>,
    model: String,
    usage: ReadTokens,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct Embedding {
    object: String,
    index: u64,
    embedding: Vector,
}

/// An embedding as numbers, or as base64 of little-endian floats.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum Vector {
    Float(Vec<f32>),
    Base64(String),
}

#[derive(Serialize, ToSchema)]
pub(crate) struct ReadTokens {
    prompt_tokens: u64,
    total_tokens: u64,
}

/// Documents to rank.
#[derive(Serialize, ToSchema)]
pub(crate) struct RerankRequest {
    model: Option<String>,
    #[schema(min_length = 1)]
    query: String,
    #[schema(min_items = 1, max_items = 2048)]
    documents: Vec<Document>,
    #[schema(minimum = 1, maximum = 4294967295i64)]
    top_n: Option<u64>,
    return_documents: Option<bool>,
}

#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum Document {
    Text(String),
    Object(DocumentText),
}

#[derive(Serialize, ToSchema)]
pub(crate) struct DocumentText {
    text: String,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct Ranking {
    id: String,
    model: String,
    results: Vec<Ranked>,
    usage: ReadTokens,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct Ranked {
    index: u64,
    relevance_score: f32,
    document: Option<DocumentText>,
}

/// A text or a conversation.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum TokenizeRequest {
    Text(TokenizeText),
    Chat(TokenizeChat),
}

#[derive(Serialize, ToSchema)]
pub(crate) struct TokenizeText {
    model: Option<String>,
    prompt: String,
    add_special_tokens: Option<bool>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct TokenizeChat {
    model: Option<String>,
    #[schema(min_items = 1)]
    messages: Vec<ChatMessage>,
    tools: Option<Vec<Tool>>,
    add_generation_prompt: Option<bool>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct Tokens {
    count: u64,
    #[schema(required)]
    max_model_len: Option<u64>,
    tokens: Vec<u64>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct DetokenizeRequest {
    model: Option<String>,
    tokens: Vec<u64>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct Detokenized {
    prompt: String,
    content: String,
}
