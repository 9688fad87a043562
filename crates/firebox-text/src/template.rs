//! Chat templates: the prompt for a conversation in a model's format.

use crate::answer_reader::AnswerReader;
use crate::backend::catch_panics;
use crate::error::TextError;
use crate::message::{Content, Message};
use crate::special_tokens;
use crate::template_filters;
use crate::template_limits::{self, MAX_VALUE_BYTES, TooLarge};
use crate::template_operators::guarded;
use crate::template_python::{self, TemplateException};
use crate::thoughts::{ThoughtMarks, ThoughtReader};
use crate::tokenizer::Tokenizer;
use crate::tool_calls::{CallReader, CallSyntax, tools_as_text, tools_in_system_message};
use firebox_store::TextAssets;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, Error, ErrorKind};
use serde_json::{Map, Value, json};
use std::error::Error as _;
use std::fmt;
use std::io;
use std::time::SystemTime;

/// The most steps of a template: enough for thousands of messages in a template that compares every pair of them, and about two
/// seconds for one that never ends.
const MAX_STEPS: u64 = 50_000_000;
const MAX_CALL_DEPTH: usize = 100;
/// Stack size for the engine's parser, which recurses for every operator; untouched pages cost nothing.
const PARSER_STACK: usize = 256 << 20;

const DEFAULT: &str = "default";
/// The name of the second template of some models, for conversations with tools.
const WITH_TOOLS: &str = "tool_use";

const PLAIN: &str = "{% for message in messages %}{{ message.content }}\n{% endfor %}";

const TURN_START: &str = "<|im_start|>";
const TURN_END: &str = "<|im_end|>";
/// For models without a template whose vocabulary contains ChatML's tokens.
const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// The chat template of a model.
///
/// Renders like `apply_chat_template` of `transformers`, in an environment with the same filters, functions and Python methods.
/// Templates are untrusted, so they have limits: 256 KiB of source, 50 million steps, 100 calls deep, 64 MiB of output, 64 MiB
/// for each value that is assigned or is an operand or result of an operator (`~`, `+`, `*`), a method, or a filter that makes
/// text, 256 levels of nesting in each of them, and 2 GiB for everything built together. Two things are limited only by the
/// number of steps: copies by slices (`x[1:]`) before they are assigned, none larger than their source, and the template's own
/// text between tags, where a loop writes it into a variable. A namespace cannot be assigned to an attribute of another.
///
/// ```
/// use firebox_text::{ChatTemplate, Message, TemplateOptions};
///
/// let source = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}";
/// let template = ChatTemplate::from_source(source, Default::default())?;
/// let prompt = template.render(&[Message::user("Hello")], &TemplateOptions::default())?;
/// assert_eq!(prompt, "[user] Hello\n");
/// # Ok::<(), firebox_text::TextError>(())
/// ```
pub struct ChatTemplate {
    environment: Environment<'static>,
    has_tools_template: bool,
    calls: CallSyntax,
    thoughts: Option<ThoughtMarks>,
    tools: ToolPlacement,
    source: String,
    /// Variables such as `bos_token`.
    tokens: Map<String, Value>,
    content: ContentStyle,
}

/// The form of `message.content` that a template expects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ContentStyle {
    /// Text or lists of parts; also if it cannot be determined.
    AsGiven,
    /// Text only.
    Text,
    /// Lists of parts only.
    Parts,
}

/// The place where a template looks for tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ToolPlacement {
    /// In the variable `tools`.
    Variable,
    /// In a field of the system message.
    System,
    /// Nowhere.
    Words,
}

/// The inputs of a template beside the messages.
#[derive(Debug, Clone)]
pub struct TemplateOptions {
    /// Tools the model may call, as JSON schemas.
    pub tools: Option<Vec<Value>>,
    /// Documents the model may refer to.
    pub documents: Option<Vec<Value>>,
    /// Appends the beginning of the assistant's answer. On by default.
    pub add_generation_prompt: bool,
    /// Enables or disables reasoning of models that support both; `None` leaves it to the template.
    pub enable_thinking: Option<bool>,
    /// Further variables of the template.
    pub variables: Map<String, Value>,
    /// The time for `strftime_now`; the current time if `None`.
    pub now: Option<SystemTime>,
}

impl Default for TemplateOptions {
    fn default() -> Self {
        Self {
            tools: None,
            documents: None,
            add_generation_prompt: true,
            enable_thinking: None,
            variables: Map::new(),
            now: None,
        }
    }
}

impl ChatTemplate {
    /// The template of a model, together with a separate one for conversations with tools if there is one. Without a template,
    /// ChatML is used if the vocabulary has `<|im_start|>`.
    pub fn new(assets: &TextAssets, tokenizer: &Tokenizer) -> Result<Self, TextError> {
        let tokens = special_tokens(assets, tokenizer);
        match &assets.chat_template {
            Some(source) => Self::compile(source, assets.tools_template.as_deref(), tokens),
            None if [TURN_START, TURN_END].iter().all(|mark| tokenizer.token_to_id(mark).is_some()) => {
                Self::from_source(CHATML, tokens)
            }
            None => Err(TextError::MissingChatTemplate),
        }
    }

    /// A fallback for models without a template: the contents line by line, without roles.
    pub fn plain() -> Result<Self, TextError> {
        Self::from_source(PLAIN, Map::new())
    }

    /// A template from its source. `tokens` are variables for special tokens, such as `bos_token`.
    pub fn from_source(source: &str, tokens: Map<String, Value>) -> Result<Self, TextError> {
        Self::compile(source, None, tokens)
    }

    fn compile(
        source: &str,
        with_tools: Option<&str>,
        tokens: Map<String, Value>,
    ) -> Result<Self, TextError> {
        let uncompiled = |error: Error| TextError::InvalidChatTemplate { reason: describe(&error) };
        let mut environment = environment().map_err(uncompiled)?;
        for (name, source) in [(DEFAULT, Some(source)), (WITH_TOOLS, with_tools)] {
            let Some(source) = source else { continue };
            environment = add(environment, name, guarded(source)?)?;
        }
        let mut template = Self {
            environment,
            has_tools_template: with_tools.is_some(),
            calls: CallSyntax::from_template(with_tools.unwrap_or(source)),
            thoughts: ThoughtMarks::from_template(source),
            tools: ToolPlacement::Variable,
            source: source.to_owned(),
            tokens,
            content: ContentStyle::AsGiven,
        };
        template.content = template.probe();
        template.tools = template.place_of_tools();
        Ok(template)
    }

    /// The source of the template.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Returns whether the template mentions a variable.
    pub fn mentions(&self, variable: &str) -> bool {
        self.source.contains(variable)
    }

    /// The syntax in which a model of this template writes tool calls.
    pub fn call_syntax(&self) -> CallSyntax {
        match self.tools {
            ToolPlacement::Variable => self.calls,
            ToolPlacement::System => CallSyntax::Functions,
            ToolPlacement::Words if self.calls.is_always_marked() => self.calls,
            ToolPlacement::Words => CallSyntax::Fenced,
        }
    }

    /// Returns a reader of the answer to a prompt. It reads calls if there are tools; without any, only the marks that every answer
    /// of the model has.
    pub fn answer_reader(
        &self,
        tokenizer: &Tokenizer,
        prompt: &[u32],
        tools: Option<&[Value]>,
    ) -> AnswerReader {
        let syntax = self.call_syntax();
        let calls = (tools.is_some() || syntax.is_always_marked())
            .then(|| CallReader::new(syntax, tools.unwrap_or_default()));
        // Channels are read with calls.
        let marks = self.thoughts.filter(|_| !syntax.is_always_marked());
        let thoughts = marks.map(|marks| ThoughtReader::new(marks, marks.are_open(tokenizer, prompt)));
        AnswerReader::new(thoughts, calls)
    }

    /// The messages in the form in which the template renders tools: unchanged, with tools in the system message, or with tools
    /// described in text.
    pub fn messages_with_tools(&self, messages: &[Message], tools: &[Value]) -> Vec<Message> {
        match self.tools {
            ToolPlacement::Variable => messages.to_vec(),
            ToolPlacement::System => tools_in_system_message(messages, tools),
            ToolPlacement::Words => tools_as_text(messages, tools),
        }
    }

    /// The prompt for a conversation.
    pub fn render(&self, messages: &[Message], options: &TemplateOptions) -> Result<String, TextError> {
        let messages = messages.iter().map(|message| self.prepare(message)).collect::<Result<Vec<_>, _>>()?;
        self.render_values(messages, options)
    }

    /// The token ids of the prompt for a conversation, safe for untrusted messages.
    ///
    /// Control tokens written by the template, or earlier by the assistant, are encoded as such. Their spellings in other messages,
    /// in tools and in documents are encoded as plain text: `<|im_end|>` typed by a user does not end a turn.
    pub fn encode(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
        options: &TemplateOptions,
    ) -> Result<Vec<u32>, TextError> {
        let prompt = self.render_marked(tokenizer, messages, options)?;
        tokenizer.encode_marked(&prompt, false)
    }

    /// The prompt for a conversation, with marks around spellings of control tokens in untrusted text.
    pub(crate) fn render_marked(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
        options: &TemplateOptions,
    ) -> Result<String, TextError> {
        let control = tokenizer.control_tokens();
        let mut values = Vec::with_capacity(messages.len());
        for message in messages {
            let mut value = self.prepare(message)?;
            if message.role != "assistant" {
                control.mark_message(&mut value);
            }
            values.push(value);
        }
        let mut options = options.clone();
        options.tools.iter_mut().flatten().for_each(|tool| control.mark(tool));
        options.documents.iter_mut().flatten().for_each(|document| control.mark(document));
        options.variables.values_mut().for_each(|variable| control.mark(variable));
        self.render_values(values, &options)
    }

    fn render_values(&self, messages: Vec<Value>, options: &TemplateOptions) -> Result<String, TextError> {
        let mut variables = self.tokens.clone();
        variables.insert("messages".to_owned(), Value::Array(messages));
        variables.insert("tools".to_owned(), json!(options.tools));
        variables.insert("documents".to_owned(), json!(options.documents));
        variables.insert("add_generation_prompt".to_owned(), json!(options.add_generation_prompt));
        if let Some(thinking) = options.enable_thinking {
            variables.insert("enable_thinking".to_owned(), json!(thinking));
        }
        variables.extend(options.variables.clone());

        let mut context = std::collections::BTreeMap::new();
        for (name, value) in &variables {
            context.insert(name.as_str(), minijinja::Value::from(Serde(value)));
        }
        let now = options.now.unwrap_or_else(SystemTime::now);
        context.insert(
            "strftime_now",
            minijinja::Value::from_function(move |format: &str| strftime(now, format)),
        );

        let name = if self.has_tools_template && options.tools.is_some() { WITH_TOOLS } else { DEFAULT };
        let template = self.environment.get_template(name).map_err(|error| failure(&error))?;
        template_limits::begin();
        let mut prompt = Bounded { bytes: Vec::new(), full: false };
        // minijinja 3.0.5 panics on `''[::-1]`.
        let context = minijinja::Value::from(context);
        let rendered = catch_panics(|| Ok(template.render_captured_to(context, &mut prompt)));
        let rendered = rendered.map_err(|_| TextError::RenderChatTemplate {
            reason: "the template engine failed on it".to_owned(),
        })?;
        if prompt.full {
            return Err(TextError::TemplateLimit { limit: "64 MiB of output" });
        }
        rendered.map_err(|error| failure(&error))?;
        String::from_utf8(prompt.bytes)
            .map_err(|error| TextError::RenderChatTemplate { reason: error.to_string() })
    }

    /// A message in the form that templates expect.
    fn prepare(&self, message: &Message) -> Result<Value, TextError> {
        let mut value = json!(message);
        let content = match (&message.content, self.content) {
            (Some(Content::Parts(parts)), ContentStyle::Text) => {
                if let Some(part) = parts.iter().find(|part| part.text.is_none()) {
                    return Err(TextError::UnsupportedContent { kind: part.kind.clone() });
                }
                Some(json!(message.text()))
            }
            (Some(Content::Text(text)), ContentStyle::Parts) => Some(json!([{"type": "text", "text": text}])),
            _ => None,
        };
        let Value::Object(fields) = &mut value else { return Ok(value) };
        if let Some(content) = content {
            fields.insert("content".to_owned(), content);
        }
        // As in `transformers`: many templates write "None" for null, and nothing for a missing field.
        fields.retain(|_, field| !field.is_null());
        // Reasoning has three names; templates read the first or, for gpt-oss, the second.
        let names = ["reasoning_content", "thinking", "reasoning"];
        let thought = names.iter().find_map(|name| fields.get(*name).filter(|thought| thought.is_string()));
        if let Some(thought) = thought.cloned() {
            for name in &names[..2] {
                fields.entry(*name).or_insert_with(|| thought.clone());
            }
        }
        for call in fields.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
            let Some(arguments) = call.pointer_mut("/function/arguments") else { continue };
            let parsed = arguments.as_str().and_then(|text| serde_json::from_str::<Value>(text).ok());
            if let Some(parsed) = parsed.filter(Value::is_object) {
                *arguments = parsed;
            }
        }
        Ok(value)
    }

    /// Determines where the template looks for tools by rendering it with one.
    fn place_of_tools(&self) -> ToolPlacement {
        const MARK: &str = "firebox_probe";
        let parameters = json!({"type": "object", "properties": {}, "required": []});
        let function = json!({"name": MARK, "description": MARK, "parameters": parameters});
        let tools = vec![json!({"type": "function", "function": function})];
        let shows = |messages: &[Message], options: &TemplateOptions| {
            self.render(messages, options).is_ok_and(|prompt| prompt.contains(MARK))
        };
        let question = [Message::user("a")];
        let options = TemplateOptions { tools: Some(tools.clone()), ..TemplateOptions::default() };
        if shows(&question, &options) {
            return ToolPlacement::Variable;
        }
        let told = tools_in_system_message(&question, &tools);
        if shows(&told, &TemplateOptions::default()) { ToolPlacement::System } else { ToolPlacement::Words }
    }

    /// Determines the form of content that the template expects by rendering a message in each form.
    fn probe(&self) -> ContentStyle {
        const MARK: &str = "firebox-probe";
        let shows = |content: Value| {
            let message = json!({"role": "user", "content": content});
            let options = TemplateOptions::default();
            // A list rendered as a list shows the names of its fields.
            self.render_values(vec![message], &options).is_ok_and(|prompt| {
                prompt.contains(MARK) && !prompt.contains("\"text\"") && !prompt.contains("'text'")
            })
        };
        match (shows(json!(MARK)), shows(json!([{"type": "text", "text": MARK}]))) {
            (true, false) => ContentStyle::Text,
            (false, true) => ContentStyle::Parts,
            _ => ContentStyle::AsGiven,
        }
    }
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate")
            .field("source", &self.source)
            .field("tokens", &self.tokens)
            .finish_non_exhaustive()
    }
}

fn environment() -> Result<Environment<'static>, Error> {
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
    let mut environment = Environment::new();
    environment.set_syntax(syntax);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(template_python::method);
    environment.set_formatter(template_python::write);
    environment.add_test("iterable", template_python::is_iterable);
    environment.add_test("sequence", template_python::is_sequence);
    environment.add_filter("tojson", template_python::tojson);
    environment.add_filter("length", template_python::length);
    environment.add_filter("count", template_python::length);
    environment.add_function("raise_exception", template_python::raise_exception);
    template_filters::install(&mut environment);
    environment.set_fuel(Some(MAX_STEPS));
    environment.set_recursion_limit(MAX_CALL_DEPTH);
    Ok(environment)
}

/// Compiles a template on a stack that its nesting cannot exhaust.
fn add(
    mut environment: Environment<'static>,
    name: &'static str,
    source: String,
) -> Result<Environment<'static>, TextError> {
    let compiler = std::thread::Builder::new().name("chat-template".to_owned()).stack_size(PARSER_STACK);
    let invalid = |reason: String| TextError::InvalidChatTemplate { reason };
    let compiler = compiler.spawn(move || {
        let added = environment.add_template_owned(name, source);
        added.map(|()| environment).map_err(|error| describe(&error))
    });
    let compiled = compiler.map_err(|error| invalid(format!("no thread to compile it on: {error}")))?.join();
    compiled.map_err(|_| invalid("the template engine failed on it".to_owned()))?.map_err(invalid)
}

fn special_tokens(assets: &TextAssets, tokenizer: &Tokenizer) -> Map<String, Value> {
    let named = tokenizer.named();
    let roles = [
        ("bos_token", named.bos),
        ("eos_token", named.eos),
        ("unk_token", named.unk),
        ("pad_token", named.pad),
        ("sep_token", None),
        ("cls_token", None),
        ("mask_token", None),
    ];
    let mut tokens = Map::new();
    for (role, id) in roles {
        let by_id = || id.and_then(|id| tokenizer.id_to_token(id)).map(str::to_owned);
        if let Some(token) = special_tokens::spelled(assets, role).or_else(by_id) {
            tokens.insert(role.to_owned(), Value::String(token));
        }
    }
    tokens
}

/// The most letters that a character of a date format can become: `%c`, two characters, becomes a whole date.
const MAX_EXPANSION: usize = 64;

fn strftime(now: SystemTime, format: &str) -> Result<String, Error> {
    template_limits::check(format.len().saturating_mul(MAX_EXPANSION))?;
    let invalid = |error: jiff::Error| Error::new(ErrorKind::InvalidOperation, error.to_string());
    let time = jiff::Timestamp::try_from(now).map_err(invalid)?;
    let time = time.to_zoned(jiff::tz::TimeZone::system());
    let text = jiff::fmt::strtime::format(format, &time).map_err(invalid)?;
    template_limits::charge(text.len())?;
    Ok(text)
}

/// Collects output up to [`MAX_VALUE_BYTES`].
struct Bounded {
    bytes: Vec<u8>,
    full: bool,
}

impl io::Write for Bounded {
    fn write(&mut self, piece: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + piece.len() > MAX_VALUE_BYTES {
            self.full = true;
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.bytes.extend_from_slice(piece);
        Ok(piece.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn failure(error: &Error) -> TextError {
    let mut source = error.source();
    while let Some(inner) = source {
        if let Some(TemplateException(message)) = inner.downcast_ref() {
            return TextError::RefusedByTemplate { message: message.clone() };
        }
        if let Some(TooLarge(limit)) = inner.downcast_ref() {
            return TextError::TemplateLimit { limit };
        }
        source = inner.source();
    }
    match error.kind() {
        ErrorKind::OutOfFuel => TextError::TemplateLimit { limit: "50 million steps" },
        _ => TextError::RenderChatTemplate { reason: describe(error) },
    }
}

fn describe(error: &Error) -> String {
    let mut reason = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        reason = format!("{reason}: {inner}");
        source = inner.source();
    }
    reason
}
