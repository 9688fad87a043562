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
use firebox_text::{ChatTemplate, Message, TemplateOptions};
use serde::Deserialize;
use serde_json::{Map, Value};

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

#[test]
#[ignore = "tool: chat templates of llama.cpp, and transformers"]
fn published_templates_render_as_in_transformers() {
    let files = std::fs::read_dir(tool("FIREBOX_TEMPLATES")).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> =
        files.filter(|path| path.extension().is_some_and(|kind| kind == "json")).collect();
    files.sort();
    let (mut equal, mut all, mut whole) = (0, 0, 0);
    let mut wrong = Vec::new();
    for file in &files {
        let name = file.file_stem().unwrap().to_string_lossy();
        let published: Published = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
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
    println!("{equal} of {all} renderings are equal, {whole} of {} templates in all of theirs", files.len());
    assert!(!files.is_empty() && wrong.is_empty(), "{}", wrong.join("\n"));
}
