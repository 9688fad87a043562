//! Tests of the tool call reader.
#![allow(clippy::unwrap_used, reason = "a test that fails here should say so")]

use firebox_testing::checks::tool_calls::{read, tools};
use firebox_text::{AnswerPart, CallReader, CallSyntax};
use proptest::prelude::*;
use serde_json::{Value, json};

/// Text as a string, thoughts as an object, and a call as its name and arguments, which are a text if they are invalid JSON.
#[track_caller]
fn says(syntax: CallSyntax, text: &str, expected: Value) {
    let parts = read(syntax, [text]).into_iter().filter_map(|parts| match parts {
        AnswerPart::Text(text) => Some(json!(text)),
        AnswerPart::Thought(thought) => Some(json!({"thought": thought})),
        AnswerPart::Call(call) => {
            let arguments = call.arguments.as_str().unwrap();
            let value: Value = serde_json::from_str(arguments).unwrap_or_else(|_| json!(arguments));
            Some(json!([call.name, value]))
        }
        AnswerPart::CallStart(_) | AnswerPart::Arguments(_) => None,
    });
    assert_eq!(Value::from_iter(parts), expected, "{syntax:?}: {text}");
}

#[test]
fn tags_enclose_objects_and_markup() {
    let says = |text: &str, expected| says(CallSyntax::Tagged, text, expected);
    let call = r#"{"name": "weather", "arguments": {"place": "Zürich </tool_call> \"}"}}"#;
    let place = json!(["weather", {"place": "Zürich </tool_call> \"}"}]);
    says(&format!("<tool_call>\n{call}\n</tool_call>"), json!([place]));
    says(&format!("I look.\n\n<tool_call>{call}</tool_call>\n "), json!(["I look.", place]));
    says(&format!("<tool_call>{call}</tool_call>\n<tool_call>{call}</tool_call>"), json!([place, place]));
    // Some answers end with the object, and some continue.
    says(&format!("<tool_call>{call}\n"), json!([place]));
    says(&format!("<tool_call>{call}\n</tool_call>\nThere."), json!([place, "\nThere."]));
    // Undeclared tools are called too; the caller handles them.
    says(r#"<tool_call>{"name": "other"}</tool_call>"#, json!([["other", {}]]));
    let markup = "<tool_call>\n<function=weather>\n<parameter=place>\n12\n</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=deep>\n{\"a\": [1]}\n</parameter>\n</function>\n";
    let found = json!(["weather", {"place": "12", "days": 3, "deep": {"a": [1]}}]);
    says(&format!("{markup}</tool_call>"), json!([found]));
    says(markup, json!([found]));
    let glm = "<tool_call>weather\n<arg_key>place</arg_key>\n<arg_value>12</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>";
    says(glm, json!([["weather", {"place": "12", "days": 3}]]));
}

#[test]
fn text_that_resembles_a_call_stays_text() {
    for text in [
        "<tool_call>",
        "<tool_call>\n{\"name\": \"weather\", \"arguments\": {",
        "<tool_call>\n{\"name\": \"weather\", \"arguments\": {'place': 'a'}}",
        "<tool_call>\n[{\"name\": \"weather\", \"arguments\": 1}, 2]",
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
    for text in ["[TOOL_CALLS] no idea\n{}", "[TOOL_CALLS]", "[TOOL_CALLS]weather[ARGS]{"] {
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
fn a_call_that_began_stays_a_call() {
    let says = |text: &str, expected| says(CallSyntax::Tagged, text, expected);
    let begun = "<tool_call>{\"name\": \"weather\", \"arguments\": {\"place\": \"Zü";
    says(begun, json!([["weather", "{\"place\": \"Zü"]]));
    // A missing bracket is tolerated.
    says(
        "<tool_call>{\"name\": \"noop\", \"arguments\": {\"a\": 1}</tool_call> b",
        json!([["noop", {"a": 1}], " b"]),
    );
    let found = json!(["noop", {}]);
    says("<tool_call>[{\"name\": \"noop\", \"arguments\": {}}", json!([found]));
    says("<tool_call>[{\"name\": \"noop\", \"arguments\": {}}, ", json!([found]));
    says(
        "<tool_call>[{\"name\": \"noop\", \"arguments\": {}}, {\"x\": 1}] b",
        json!([found, ", {\"x\": 1}] b"]),
    );
    let later = "<tool_call>[{\"name\": \"noop\", \"arguments\": {}}, {\"arguments\": {}, \"name\": \"a\"}]</tool_call>b";
    says(later, json!([found, ["a", {}], "b"]));
}

#[test]
fn arguments_are_returned_as_they_arrive() {
    let mut reader = CallReader::new(CallSyntax::Listed, &tools());
    let mut pieces = Vec::new();
    for piece in [
        "[TOOL_CALLS][",
        "{\"name\": \"weather\", \"argu",
        "ments\": {",
        "\"pla",
        "ce\": \"Zürich\"",
        "}",
        "}]",
    ] {
        let parts = reader.push(piece);
        pieces.push(parts.iter().filter(|part| matches!(part, AnswerPart::Arguments(_))).count());
    }
    assert_eq!(pieces, [0, 0, 0, 1, 1, 1, 0]);
}

/// Texts in markup are no exception; other values are known once they are whole.
#[test]
fn arguments_in_markup_are_returned_as_they_arrive() {
    let cases = [
        (
            CallSyntax::Tagged,
            "<tool_call>\n<function=weather>\n",
            "<parameter=place>\n",
            "\n</parameter>\n",
            "</function>\n</tool_call>",
        ),
        (
            CallSyntax::Tagged,
            "<tool_call>weather\n",
            "<arg_key>place</arg_key>\n<arg_value>",
            "</arg_value>\n",
            "</tool_call>",
        ),
        (
            CallSyntax::Invoked,
            "<minimax:tool_call>\n<invoke name=\"weather\">\n",
            "<parameter name=\"place\">",
            "</parameter>\n",
            "</invoke>\n</minimax:tool_call>",
        ),
        (
            CallSyntax::Dsml,
            "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"other\">\n",
            "<｜DSML｜parameter name=\"place\" string=\"true\">",
            "</｜DSML｜parameter>\n",
            "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        ),
    ];
    for (syntax, begins, key, after, ends) in cases {
        let mut reader = CallReader::new(syntax, &tools());
        let mut arguments = |piece: &str| -> String {
            let parts = reader.push(piece).into_iter().filter_map(|part| match part {
                AnswerPart::Arguments(text) => Some(text),
                _ => None,
            });
            parts.collect()
        };
        let pieces = [begins, key, "Zü", "rich \"1\"\n<", "/p", after, ends].map(&mut arguments);
        assert_eq!(pieces.concat(), "{\"place\": \"Zürich \\\"1\\\"\\n</p\"}", "{syntax:?}: {pieces:?}");
        assert_eq!(pieces[..3].concat(), "{\"place\": \"Zü", "{syntax:?}: {pieces:?}");
    }
}

#[test]
fn several_calls_share_their_marks() {
    let found = json!(["weather", {"place": "a", "days": 3}]);
    let invoke = |prefix: &str, text: &str, number: &str| {
        format!(
            "<{prefix}invoke name=\"weather\">\n<{prefix}parameter name=\"place\"{text}>a</{prefix}parameter>\n\
             <{prefix}parameter name=\"days\"{number}>3</{prefix}parameter>\n</{prefix}invoke>\n"
        )
    };
    let (plain, dsml) = (invoke("", "", ""), invoke("｜DSML｜", " string=\"true\"", " string=\"false\""));
    let python = "weather(place='a', days=3)";
    let braced = "<|tool_call>call:weather{place:<|\"|>a<|\"|>,days:3}<tool_call|>";
    let section = "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{\"place\": \"a\", \"days\": 3}<|tool_call_end|>";
    let object = "{\"name\": \"weather\", \"arguments\": {\"place\": \"a\", \"days\": 3}}";
    for (syntax, text) in [
        (CallSyntax::Invoked, format!("<minimax:tool_call>\n{plain}{plain}</minimax:tool_call>")),
        (CallSyntax::Dsml, format!("<｜DSML｜function_calls>\n{dsml}{dsml}</｜DSML｜function_calls>")),
        (CallSyntax::Dsml, format!("<｜DSML｜tool_calls>\n{dsml}\n{dsml}</｜DSML｜tool_calls>")),
        (CallSyntax::Pythonic, format!("<|tool_call_start|>[{python}, {python}]<|tool_call_end|>")),
        (CallSyntax::Braced, format!("{braced}{braced}")),
        (
            CallSyntax::Sections,
            format!("<|tool_calls_section_begin|>{section}{section}<|tool_calls_section_end|>"),
        ),
        (
            CallSyntax::Enclosed,
            format!("<tool_calls>\n{object}\n</tool_calls><TOOLCALL>[{object}]</TOOLCALL>"),
        ),
    ] {
        says(syntax, &format!("I look.\n{text}"), json!(["I look.", found, found]));
        says(syntax, &format!("{text}\nSo"), json!([found, found, "\nSo"]));
    }
    for (syntax, text) in [
        (CallSyntax::Invoked, "<minimax:tool_call>\n<invoke name=\"two words\">"),
        (CallSyntax::Pythonic, "<|tool_call_start|>[weather(]<|tool_call_end|>"),
        (CallSyntax::Braced, "<|tool_call>weather{}<tool_call|> b"),
        (CallSyntax::Sections, "<|tool_call_begin|>two words<|tool_call_argument_begin|>{}"),
    ] {
        says(syntax, text, json!([text]));
    }
}

#[test]
fn functions_are_in_a_list() {
    let says = |text: &str, expected| says(CallSyntax::Functions, text, expected);
    let call = r#"{"name": "weather", "arguments": {"place": "a"}}"#;
    let found = json!(["weather", {"place": "a"}]);
    says(&format!("<|tool_call|>[{call}, {call}]<|/tool_call|>"), json!([found, found]));
    says(&format!("I look.\n<|tool_call|>{call}<|/tool_call|>\n"), json!(["I look.", found]));
    says(&format!("functools[{call}]"), json!([found]));
    for text in ["import functools\n", "functools[1]", "<|tool_call|> and more"] {
        says(text, json!([text]));
    }
}

#[test]
fn names_are_separated_from_arguments() {
    let (begin, end) = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>");
    let found = json!(["weather", {"place": "a"}]);
    let plain = "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"place\": \"a\"}<｜tool▁call▁end｜>";
    let fence = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{\"place\": \"a\"}\n```<｜tool▁call▁end｜>";
    let object =
        "<｜tool▁call▁begin｜>{\"name\": \"weather\", \"arguments\": {\"place\": \"a\"}}<｜tool▁call▁end｜>";
    for syntax in [CallSyntax::Separated, CallSyntax::SeparatedFence, CallSyntax::Fenced] {
        for call in [plain, fence, object] {
            says(syntax, &format!("{begin}{call}{end}"), json!([found]));
            says(
                syntax,
                &format!("I look.\n\n{begin}{call}\n{call}{end}\nb"),
                json!(["I look.", found, found, "\nb"]),
            );
            // Some answers omit the marks around all calls.
            says(syntax, call, json!([found]));
        }
        for text in [
            begin,
            "<｜tool▁calls▁begin｜>no<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>two words<｜tool▁sep｜>{}",
            "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>none<｜tool▁call▁end｜> {}",
            "<｜tool▁call▁begin｜>weather {\"place\": \"a\"}",
        ] {
            says(syntax, text, json!([text]));
        }
    }
}

#[test]
fn channels_are_separated() {
    let says = |text: &str, expected| says(CallSyntax::Channels, text, expected);
    let thought = "<|channel|>analysis<|message|>I had better look.<|end|><|start|>assistant";
    let call = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{\"place\": \"a\"}";
    let found = json!(["weather", {"place": "a"}]);
    let thinks = json!({"thought": "I had better look."});
    says(&format!("{thought}{call}<|call|>"), json!([thinks, found]));
    says(&format!("{thought}{call}"), json!([thinks, found]));
    // The recipient may precede the channel.
    says(
        " to=functions.weather<|channel|>commentary json<|message|>\n{\"place\": \"a\"} <|call|>",
        json!([found]),
    );
    says(&format!("{call}<|call|><|start|>assistant{call}<|call|>"), json!([found, found]));
    says(
        &format!("{thought}<|channel|>final<|message|>It < rains.\n<|return|>"),
        json!([thinks, "It < rains.\n"]),
    );
    says(
        &format!("{thought}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{call}<|call|>"),
        json!([thinks, "I look.", found]),
    );
    // Messages without a proper end.
    says("<|channel|>analysis<|message|>Hm<|channel|>final<|message|>So", json!([{"thought": "Hm"}, "So"]));
    says("<|channel|>analysis<|message|>Hm", json!([{"thought": "Hm"}]));
    says("<|channel|>analysis<|mess", json!([]));
    says("<|channel|>commentary to=functions.noop<|message|><|call|>", json!([["noop", {}]]));
    let any = "<|channel|>commentary to=functions <|constrain|>json<|message|>";
    says(&format!("{any}{{\"name\": \"noop\", \"arguments\": {{}}}}"), json!([["noop", {}]]));
    // A constrained model writes nothing else.
    for text in ["{\"a\": 1}", "to be", " <|", "Plain."] {
        says(text, json!([text]));
    }
    let mut silent = CallReader::new(CallSyntax::Channels, &[]);
    silent.push(call);
    assert_eq!(silent.finish(), []);
    let mut silent = CallReader::new(CallSyntax::Channels, &[]);
    assert_eq!(silent.push(call), [AnswerPart::Text("{\"place\": \"a\"}".into())]);
}

#[test]
fn a_header_without_an_end_is_text() {
    for mark in ["<|channel|>", "<|start|>", " \n<|channel|>"] {
        let text = format!("{mark}{}", "and so on, ".repeat(100));
        says(CallSyntax::Channels, &text, json!([text]));
        let ended = format!("{text}<|end|><|channel|>final<|message|>Yes.");
        says(CallSyntax::Channels, &ended, json!([format!("{text}\n\nYes.")]));
    }
}

#[test]
fn a_whole_answer_can_be_a_call() {
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
fn syntaxes_are_recognized_by_their_templates() {
    let of = |text: &str| CallSyntax::from_template(text);
    assert_eq!(of("within <tool_call></tool_call> XML tags"), CallSyntax::Tagged);
    assert_eq!(of("{{ '[TOOL_CALLS] [' }}"), CallSyntax::Listed);
    assert_eq!(of("{{- \"<|python_tag|>\" + name }}"), CallSyntax::Bare);
    assert_eq!(of("{\"name\": function name, \"parameters\": dictionary of argument name"), CallSyntax::Bare);
    assert_eq!(of("{{ '<start_of_turn>' + role }}"), CallSyntax::Fenced);
    assert_eq!(of("'<|tool|>' + message['tools'] + '<|/tool|>'"), CallSyntax::Functions);
    assert_eq!(of("name + '<｜tool▁sep｜>' + arguments"), CallSyntax::Separated);
    assert_eq!(of("'<｜tool▁sep｜>' + name + '\\n```json\\n'"), CallSyntax::SeparatedFence);
    assert_eq!(of("'<tool_calls>' + calls"), CallSyntax::Enclosed);
    assert_eq!(of("{{- '<minimax:tool_call>' }}"), CallSyntax::Invoked);
    assert_eq!(of("{% set dsml = '｜DSML｜' %}"), CallSyntax::Dsml);
    assert_eq!(of("'<|tool_call_start|>[' + name"), CallSyntax::Pythonic);
    assert_eq!(of("'<|tool_call>call:' + name"), CallSyntax::Braced);
    assert_eq!(of("'<|tool_call_begin|>' + id"), CallSyntax::Sections);
    assert_eq!(of("'<|channel|>commentary json<|message|>' + arguments + '<|call|>'"), CallSyntax::Channels);
}

/// Texts made of fragments of calls.
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
        "<|tool_call|>",
        "<|/tool_call|>",
        "functools",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "<|start|>assistant",
        "<|channel|>",
        "analysis",
        "commentary",
        " to=functions.weather",
        "<|message|>",
        "<|end|>",
        "<|call|>",
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        "<invoke name=\"weather\">",
        "<parameter name=\"place\">",
        "</invoke>",
        "</parameter>",
        "<｜DSML｜function_calls>",
        "<｜DSML｜invoke name=\"weather\">",
        "<｜DSML｜parameter name=\"days\" string=\"false\">",
        "</｜DSML｜invoke>",
        "</｜DSML｜parameter>",
        "</｜DSML｜function_calls>",
        "<|tool_call_start|>",
        "[weather(place=",
        "<|tool_call_end|>",
        "'",
        "(",
        ")",
        "=",
        "<|tool_call>",
        "call:weather{",
        "<|\"|>",
        "<tool_call|>",
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "functions.weather:0",
        "<|tool_call_argument_begin|>",
        "<tool_calls>",
        "</tool_calls>",
        "\"name\": \"noop\", ",
        "\"arguments\": ",
        "{\"function\": {\"name\": \"weather\", \"arguments\": {\"place\": \"",
    ];
    proptest::collection::vec(proptest::sample::select(parts.to_vec()), 0..14)
        .prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn however_it_is_cut_the_same_is_said(text in text(), cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..8)) {
        for syntax in CallSyntax::ALL {
            let whole = read(syntax, [text.as_str()]);
            let letters: Vec<&str> = text.split_inclusive(|_| true).collect();
            prop_assert_eq!(&read(syntax, letters), &whole, "{:?}", syntax);
            let mut at: Vec<usize> = cuts.iter().map(|cut| text.floor_char_boundary(cut.index(text.len() + 1))).collect();
            at.extend([0, text.len()]);
            at.sort_unstable();
            let pieces: Vec<&str> = at.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
            prop_assert_eq!(&read(syntax, pieces), &whole, "{:?}", syntax);
            // Without a call, nothing but the marks of channels is lost.
            if syntax != CallSyntax::Channels && !whole.iter().any(|part| matches!(part, AnswerPart::Call(_))) {
                let text_parts: String = whole.iter().map(|part| match part {
                    AnswerPart::Text(text) => text.as_str(),
                    _ => "",
                }).collect();
                prop_assert_eq!(&text_parts, &text, "{:?}", syntax);
            }
        }
    }

    #[test]
    fn a_call_is_read_back(place in "\\PC{0,12}", days in any::<i64>(), before in "[a-z \n]{0,6}") {
        let arguments = json!({"place": place, "days": days});
        for syntax in CallSyntax::ALL {
            let call = json!({"name": "weather", syntax.arguments_key(): arguments});
            let call = if syntax.always_lists() { json!([call]) } else { call };
            let before = match syntax {
                CallSyntax::Bare | CallSyntax::Fenced | CallSyntax::Channels => "",
                _ => before.as_str(),
            };
            let named = syntax.names_tool_first().then(|| (Some("weather"), arguments.to_string()));
            for (tool, call) in [(None, call.to_string())].into_iter().chain(named) {
                let parts = read(syntax, [before, &syntax.opening(tool), &call]);
                let Some(AnswerPart::Call(found)) = parts.last() else { panic!("{parts:?}") };
                prop_assert_eq!(&found.name, "weather");
                let found: Value = serde_json::from_str(found.arguments.as_str().unwrap()).unwrap();
                prop_assert_eq!(&found, &arguments);
                prop_assert_eq!(parts.len(), 3 + usize::from(!before.trim().is_empty()));
            }
        }
    }
}
