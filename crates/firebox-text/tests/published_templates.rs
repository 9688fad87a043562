//! Published chat templates compared with `transformers`. `render_published.py` fetches them and records the expected output in the
//! folder that `FIREBOX_TEMPLATES` names.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking, and says what it found"
)]

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use firebox_testing::tool::tool;
use firebox_text::{AnswerPart, CallReader, CallSyntax, ChatTemplate, Message, TemplateOptions};
use serde::Deserialize;
use serde_json::{Map, Value, json};

#[derive(Deserialize)]
struct Published {
    template: String,
    tokens: Map<String, Value>,
    now: u64,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    title: String,
    messages: Vec<Message>,
    options: Map<String, Value>,
    rendered: Option<String>,
    refused: Option<String>,
}

/// Known differences by the prefix of a template's name; they concern only cases with tools.
const DIFFERENT: [(&str, &str); 3] = [
    ("llama-cpp-deepseek-r1", "Jinja does not write what `map` makes as JSON; minijinja does"),
    (
        "meetkai-functionary-medium-v3.1",
        "Jinja escapes what is added to text that is `safe`; minijinja does not",
    ),
    (
        "CohereForAI-c4ai-command-r-plus",
        "Jinja takes `schema.items` for a method; minijinja takes it for the entry",
    ),
];

fn options(mut given: Map<String, Value>, now: u64) -> TemplateOptions {
    let list = |value: Option<Value>| value.and_then(|value| value.as_array().cloned());
    TemplateOptions {
        tools: list(given.remove("tools")),
        documents: list(given.remove("documents")),
        add_generation_prompt: given.remove("add_generation_prompt") == Some(Value::Bool(true)),
        enable_thinking: given.remove("enable_thinking").and_then(|value| value.as_bool()),
        now: Some(SystemTime::UNIX_EPOCH + Duration::from_secs(now)),
        variables: given,
    }
}

/// The first difference of two texts, with its surroundings.
fn parting(found: &str, expected: &str) -> String {
    let same = found.bytes().zip(expected.bytes()).take_while(|(one, other)| one == other).count();
    let around = |text: &str| {
        let (from, to) = (text.floor_char_boundary(same.saturating_sub(40)), (same + 40).min(text.len()));
        text[from..text.ceil_char_boundary(to)].to_owned()
    };
    format!("found {:?}, expected {:?}", around(found), around(expected))
}

/// The published templates with their names.
fn published() -> Vec<(String, Published)> {
    let files = std::fs::read_dir(tool("FIREBOX_TEMPLATES")).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> =
        files.filter(|path| path.extension().is_some_and(|kind| kind == "json")).collect();
    files.sort();
    let read = |file: PathBuf| {
        let published = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        (file.file_stem().unwrap().to_string_lossy().into_owned(), published)
    };
    files.into_iter().map(read).collect()
}

#[test]
#[ignore = "tool: chat templates of llama.cpp, and transformers"]
fn published_templates_render_as_in_transformers() {
    let all_published = published();
    let (templates, mut equal, mut all, mut whole) = (all_published.len(), 0, 0, 0);
    let mut wrong = Vec::new();
    for (name, published) in all_published {
        let template = match ChatTemplate::from_source(&published.template, published.tokens) {
            Ok(template) => template,
            Err(error) => {
                wrong.push(format!("{name}: {error}"));
                continue;
            }
        };
        let cases = published.cases.len();
        let mut same = 0;
        let known = DIFFERENT.iter().find(|(begins, _)| name.starts_with(begins)).map(|(_, why)| why);
        for case in published.cases {
            let has_tools = case.options.get("tools").is_some_and(|tools| *tools != Value::Array(Vec::new()));
            let rendered = template.render(&case.messages, &options(case.options, published.now));
            let fault = match (rendered, case.rendered, case.refused) {
                (Ok(found), Some(expected), _) if found == expected => None,
                (Ok(found), Some(expected), _) => Some(parting(&found, &expected)),
                (Ok(_), None, reason) => Some(format!("is refused elsewhere: {}", reason.unwrap())),
                (Err(error), Some(_), _) => Some(error.to_string()),
                (Err(_), None, _) => None,
            };
            match fault {
                None => same += 1,
                Some(_) if has_tools && known.is_some() => {}
                Some(fault) => wrong.push(format!("{name}, {}: {fault}", case.title)),
            }
        }
        (equal, all, whole) = (equal + same, all + cases, whole + usize::from(same == cases));
        let known = known.filter(|_| same < cases).map(|why| format!(": {why}")).unwrap_or_default();
        println!("{same:3} of {cases} {name}{known}");
    }
    println!("{equal} of {all} renderings are equal, {whole} of {} templates in all of theirs", templates);
    assert!(templates > 0 && wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Templates, by the prefix of their name, whose calls are not read.
const NOT_READ: [&str; 11] = [
    "Apertus",
    "Cohere",
    "GigaChat",
    "Kimi-K3",
    "MiniMax-M3",
    "meetkai-functionary-medium-v3.1",
    "muse-glimmer",
    "openbmb-MiniCPM5",
    "tencent-Hy3",
    "upstage-Solar",
    "CohereForAI-c4ai-command-r7b",
];

/// What a template writes for a call is read as that call, however the answer is cut.
#[test]
#[ignore = "tool: chat templates of llama.cpp, and transformers"]
fn calls_of_published_templates_are_read_back() {
    let published = published();
    let (mut read_back, mut unread) = (Vec::new(), Vec::new());
    for (name, Published { template: source, tokens, now, .. }) in published {
        let Ok(template) = ChatTemplate::from_source(&source, tokens) else { continue };
        for (nth, arguments) in calls().into_iter().enumerate() {
            let Some((answer, tools)) = called(&source, &template, &arguments, now) else { continue };
            let syntax = CallSyntax::from_template(&source);
            let whole = read(syntax, &tools, [answer.as_str()]);
            let letters = read(syntax, &tools, answer.split_inclusive(|_| true));
            assert_eq!(letters, whole, "{name}: {answer}");
            let found: Vec<_> = whole.iter().filter_map(call).collect();
            if found == [("weather".to_owned(), arguments)] {
                read_back.push(format!("{name} {nth} ({syntax:?})"));
            } else if !NOT_READ.iter().any(|begins| name.starts_with(begins)) {
                unread.push(format!("{name} {nth} ({syntax:?}): {answer:?} is read as {whole:?}"));
            }
        }
    }
    println!("{} read back: {}", read_back.len(), read_back.join(", "));
    assert!(!read_back.is_empty() && unread.is_empty(), "{}", unread.join("\n"));
}

/// Arguments of a call.
fn calls() -> [Value; 3] {
    [
        json!({"place": "Zürich", "days": 2, "hours": [1.5, 20]}),
        json!({"place": "a \"b\"\n{<c>} </d>, e=f", "days": -1, "exact": true, "route": {"from": "x", "via": []}}),
        json!({}),
    ]
}

/// Returns what a template writes for an answer that is a call, and the declared tools; nothing if it writes none, or other
/// arguments.
fn called(
    source: &str,
    template: &ChatTemplate,
    arguments: &Value,
    now: u64,
) -> Option<(String, Vec<Value>)> {
    let properties = json!({
        "place": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"},
        "hours": {"type": "array", "items": {"type": "number"}}, "route": {"type": "object"},
    });
    let parameters = json!({"type": "object", "properties": properties});
    let tool = json!({"type": "function", "function": {"name": "weather", "description": "It.", "parameters": parameters}});
    let message = |message: Value| serde_json::from_value::<Message>(message).unwrap();
    let ask = message(json!({"role": "user", "content": "How is it?"}));
    let function = json!({"name": "weather", "arguments": arguments});
    // Mistral's templates take ids of nine letters; Kimi's have the name of the function in them.
    let id = if source.contains("tool_call_argument_begin") { "functions.weather:0" } else { "abcdefgh1" };
    let call = json!({"id": id, "type": "function", "function": function});
    let answer = message(json!({"role": "assistant", "content": "", "tool_calls": [call]}));
    let render = |messages: &[Message], prompts: bool| {
        let given = json!({"tools": [tool], "add_generation_prompt": prompts, "enable_thinking": false});
        template.render(messages, &options(given.as_object().unwrap().clone(), now)).ok()
    };
    let (prompt, whole) = (render(std::slice::from_ref(&ask), true)?, render(&[ask.clone(), answer], false)?);
    // Some prompts open or close a thought that is not kept.
    let unprompted = render(std::slice::from_ref(&ask), false)?;
    let written = whole.strip_prefix(&prompt).or_else(|| whole.strip_prefix(&unprompted))?;
    written.contains("weather").then(|| (written.to_owned(), vec![tool.clone()]))
}

fn call(part: &AnswerPart) -> Option<(String, Value)> {
    let AnswerPart::Call(call) = part else { return None };
    let arguments = call.arguments.as_str().unwrap();
    Some((call.name.clone(), serde_json::from_str(arguments).unwrap_or_else(|_| arguments.into())))
}

fn read<'t>(
    syntax: CallSyntax,
    tools: &[Value],
    pieces: impl IntoIterator<Item = &'t str>,
) -> Vec<AnswerPart> {
    let mut reader = CallReader::new(syntax, tools);
    let mut parts: Vec<AnswerPart> = pieces.into_iter().flat_map(|piece| reader.push(piece)).collect();
    parts.extend(reader.finish());
    let mut joined: Vec<AnswerPart> = Vec::new();
    for part in parts {
        match (joined.last_mut(), part) {
            (Some(AnswerPart::Text(before)), AnswerPart::Text(text)) => before.push_str(&text),
            (Some(AnswerPart::Thought(before)), AnswerPart::Thought(thought)) => before.push_str(&thought),
            (Some(AnswerPart::Arguments(before)), AnswerPart::Arguments(text)) => before.push_str(&text),
            (_, part) => joined.push(part),
        }
    }
    joined
}
