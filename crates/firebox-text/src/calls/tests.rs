use proptest::prelude::*;
use serde_json::{Value, json};

use super::{AnswerPart, CallReader, CallSyntax};

const ALL: [CallSyntax; 4] = [CallSyntax::Tagged, CallSyntax::Bare, CallSyntax::Listed, CallSyntax::Fenced];

fn tools() -> Vec<Value> {
    let properties = json!({"place": {"type": "string"}, "days": {"type": "integer"}, "deep": {}});
    vec![
        json!({"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": properties}}}),
        json!({"type": "function", "function": {"name": "noop"}}),
    ]
}

fn read<'a>(syntax: CallSyntax, pieces: impl IntoIterator<Item = &'a str>) -> Vec<AnswerPart> {
    let mut reader = CallReader::new(syntax, &tools());
    let mut all: Vec<AnswerPart> = Vec::new();
    let mut take = |said: Vec<AnswerPart>| {
        for one in said {
            match (all.last_mut(), one) {
                (Some(AnswerPart::Text(before)), AnswerPart::Text(text)) => before.push_str(&text),
                (_, one) => all.push(one),
            }
        }
    };
    for piece in pieces {
        take(reader.push(piece));
    }
    take(reader.finish());
    all
}

/// Text as a string, and a call as its name and arguments.
#[track_caller]
fn says(syntax: CallSyntax, text: &str, expected: Value) {
    let said = read(syntax, [text]).into_iter().map(|said| match said {
        AnswerPart::Text(text) => json!(text),
        AnswerPart::Call(call) => {
            let arguments: Value = serde_json::from_str(call.arguments.as_str().unwrap()).unwrap();
            json!([call.name, arguments])
        }
    });
    assert_eq!(Value::from_iter(said), expected, "{syntax:?}: {text}");
}

#[test]
fn tags_are_around_objects_and_markup() {
    let says = |text: &str, expected| says(CallSyntax::Tagged, text, expected);
    let call = r#"{"name": "weather", "arguments": {"place": "Zürich </tool_call> \"}"}}"#;
    let place = json!(["weather", {"place": "Zürich </tool_call> \"}"}]);
    says(&format!("<tool_call>\n{call}\n</tool_call>"), json!([place]));
    says(&format!("I look.\n\n<tool_call>{call}</tool_call>\n "), json!(["I look.", place]));
    says(&format!("<tool_call>{call}</tool_call>\n<tool_call>{call}</tool_call>"), json!([place, place]));
    // Some end where the object ends, and some go on.
    says(&format!("<tool_call>{call}\n"), json!([place]));
    says(&format!("<tool_call>{call}\n</tool_call>\nThere."), json!([place, "\nThere."]));
    // Tools nobody spoke of are called all the same; the caller knows what to say.
    says(r#"<tool_call>{"name": "other"}</tool_call>"#, json!([["other", {}]]));
    let markup = "<tool_call>\n<function=weather>\n<parameter=place>\n12\n</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=deep>\n{\"a\": [1]}\n</parameter>\n</function>\n";
    let found = json!(["weather", {"place": "12", "days": 3, "deep": {"a": [1]}}]);
    says(&format!("{markup}</tool_call>"), json!([found]));
    says(markup, json!([found]));
    let glm = "<tool_call>weather\n<arg_key>place</arg_key>\n<arg_value>12</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>";
    says(glm, json!([["weather", {"place": "12", "days": 3}]]));
}

#[test]
fn what_only_looks_like_a_call_is_text() {
    for text in [
        "<tool_call>",
        "<tool_call>\n{\"name\": \"weather\", \"arguments\": {",
        "<tool_call>{'name': 'weather'}</tool_call> and more",
        "<tool_call>{\"name\": 3}</tool_call>",
        "<tool_call>{\"name\": \"weather\", \"arguments\": [1]}</tool_call>",
        "<tool_call>two words</tool_call>",
        "a <tool b </tool_call> ",
        "   ",
        "",
    ] {
        says(CallSyntax::Tagged, text, if text.is_empty() { json!([]) } else { json!([text]) });
    }
    says(
        CallSyntax::Bare,
        "{\"name\": \"other\", \"parameters\": {}}",
        json!(["{\"name\": \"other\", \"parameters\": {}}"]),
    );
    for text in ["[TOOL_CALLS] no idea\n{}", "[TOOL_CALLS]", "[TOOL_CALLS]weather[ARGS]{\"place\": "] {
        says(CallSyntax::Listed, text, json!([text]));
    }
    for text in [
        "```json\n{\"name\": \"other\"}\n```\nis no call",
        "```rust\nfn main() {}\n``` and ```\nplain\n```",
        "In {\"name\": \"weather\"} nothing is called.",
        "{\"weather\": 1}",
        "```json",
    ] {
        says(CallSyntax::Fenced, text, json!([text]));
    }
}

#[test]
fn an_answer_may_be_the_call() {
    let call = r#"{"name": "weather", "parameters": {"place": "a"}}"#;
    let found = json!(["weather", {"place": "a"}]);
    for text in [call.to_owned(), format!("<|python_tag|>{call}"), format!("\n{call}\n")] {
        says(CallSyntax::Bare, &text, json!([found]));
    }
    says(CallSyntax::Bare, &format!("{call}; {call}"), json!([found, found]));
    says(CallSyntax::Bare, r#"{"type": "function", "function": {"name": "noop"}}"#, json!([["noop", {}]]));
    says(
        CallSyntax::Bare,
        r#"{"type": "function", "name": "noop", "parameters": "{\"a\": 1}"}"#,
        json!([["noop", {"a": 1}]]),
    );
    says(CallSyntax::Fenced, &format!("[{call}, {call}]"), json!([found, found]));
    says(CallSyntax::Fenced, &format!("So:\n```json\n{call}\n```\n"), json!(["So:", found]));
    says(CallSyntax::Fenced, &format!("```tool_code\n{call}```\nb"), json!([found, "\nb"]));
}

#[test]
fn lists_follow_their_mark() {
    let says = |text: &str, expected| says(CallSyntax::Listed, text, expected);
    let found = json!(["weather", {"place": "a"}]);
    let call = r#"{"name": "weather", "arguments": {"place": "a"}}"#;
    says(&format!("[TOOL_CALLS] [{call}, {call}]"), json!([found, found]));
    says(&format!("[TOOL_CALLS]{call}"), json!([found]));
    let named = r#"[TOOL_CALLS]weather[ARGS]{"place": "a"}"#;
    says(&format!("I look. {named}{named}"), json!(["I look.", found, found]));
    says(r#"[TOOL_CALLS]weather[CALL_ID]abc[ARGS]{"place": "a"}"#, json!([found]));
    says(r#"[TOOL_CALLS]weather{"place": "a"}"#, json!([found]));
}

#[test]
fn families_are_told_apart_by_their_templates() {
    let of = |text: &str| CallSyntax::of(text);
    assert_eq!(of("within <tool_call></tool_call> XML tags"), CallSyntax::Tagged);
    assert_eq!(of("{{ '[TOOL_CALLS] [' }}"), CallSyntax::Listed);
    assert_eq!(of("{{- \"<|python_tag|>\" + name }}"), CallSyntax::Bare);
    assert_eq!(of("{\"name\": function name, \"parameters\": dictionary of argument name"), CallSyntax::Bare);
    assert_eq!(of("{{ '<start_of_turn>' + role }}"), CallSyntax::Fenced);
}

/// Texts that have the makings of calls.
fn text() -> impl Strategy<Value = String> {
    let parts = [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<|python_tag|>",
        "```",
        "json\n",
        "{",
        "}",
        "[",
        "]",
        "\"",
        "\\",
        ",",
        ":",
        ";",
        "\n",
        " ",
        "é",
        "a",
        "<",
        "`",
        "weather",
        "{\"name\": \"weather\", \"arguments\": {\"place\": \"a}\"}}",
        "{\"name\": \"other\"}",
        "<function=weather>",
        "<parameter=days>3</parameter>",
        "</function>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "tool_code",
        "{}",
    ];
    proptest::collection::vec(proptest::sample::select(parts.to_vec()), 0..14)
        .prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn however_it_is_cut_the_same_is_said(text in text(), cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..8)) {
        for syntax in ALL {
            let whole = read(syntax, [text.as_str()]);
            let letters: Vec<&str> = text.split_inclusive(|_| true).collect();
            prop_assert_eq!(&read(syntax, letters), &whole, "{:?}", syntax);
            let mut at: Vec<usize> = cuts.iter().map(|cut| text.floor_char_boundary(cut.index(text.len() + 1))).collect();
            at.extend([0, text.len()]);
            at.sort_unstable();
            let pieces: Vec<&str> = at.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
            prop_assert_eq!(&read(syntax, pieces), &whole, "{:?}", syntax);
            // Without a call nothing is lost.
            if !whole.iter().any(|said| matches!(said, AnswerPart::Call(_))) {
                let said: String = whole.iter().map(|said| match said {
                    AnswerPart::Text(text) => text.as_str(),
                    AnswerPart::Call(_) => "",
                }).collect();
                prop_assert_eq!(&said, &text, "{:?}", syntax);
            }
        }
    }

    #[test]
    fn a_call_is_read_back(place in "\\PC{0,12}", days in any::<i64>(), before in "[a-z \n]{0,6}") {
        let arguments = json!({"place": place, "days": days});
        for syntax in ALL {
            let call = json!({"name": "weather", syntax.arguments(): arguments});
            let call = if syntax.lists() { json!([call]) } else { call };
            let before = if syntax.opening().is_empty() { "" } else { before.as_str() };
            let said = read(syntax, [before, syntax.opening(), &call.to_string()]);
            let Some(AnswerPart::Call(found)) = said.last() else { panic!("{said:?}") };
            let found: Value = serde_json::from_str(found.arguments.as_str().unwrap()).unwrap();
            prop_assert_eq!(&found, &arguments);
            prop_assert_eq!(said.len(), 1 + usize::from(!before.trim().is_empty()));
        }
    }
}
