//! Answers with text and strict calls, in the syntax of every family of models.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use firebox_grammar::{Constraint, Grammar};
use firebox_text::{CallSyntax, CallableTool, GgufVocabulary, TextAssets, Tokenizer, TokenizerSource};
use serde_json::{Value, json};

const MARKS: [&str; 31] = [
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<|tool_call|>",
    "<|/tool_call|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<think>",
    "<tool_calls>",
    "</tool_calls>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "<｜DSML｜function_calls>",
    "</｜DSML｜function_calls>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
];

/// A tokenizer of bytes, whose marks are control tokens or text.
fn tokenizer(has_marks: bool) -> Arc<Tokenizer> {
    let mut moved = (0x100..).filter_map(char::from_u32);
    let letters = (0..=255u8).map(|byte| match byte {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte).to_string(),
        _ => moved.next().unwrap().to_string(),
    });
    let mut tokens: Vec<String> = letters.collect();
    let mut token_types = vec![1; tokens.len()];
    if has_marks {
        tokens.extend(MARKS.map(String::from));
    }
    tokens.push("<|return|>".into());
    token_types.resize(tokens.len(), 3);
    let eos = Some(tokens.len() as u32 - 1);
    let vocabulary = GgufVocabulary { model: "gpt2".into(), tokens, token_types, eos, ..Default::default() };
    let tokenizer = Some(TokenizerSource::Gguf(vocabulary));
    Arc::new(Tokenizer::new(&TextAssets { tokenizer, ..Default::default() }, &Value::Null).unwrap())
}

/// The grammar of answers with a strict tool, and with one whose arguments are any object.
fn grammar(syntax: CallSyntax, tokenizer: &Tokenizer, text: Option<&Value>) -> Option<Grammar> {
    let parameters = json!({
        "type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"],
        "additionalProperties": false,
    });
    let tool =
        |name: &str, schema| CallableTool { name: name.into(), arguments: Grammar::json_in_lark(&schema) };
    let tools = [tool("lamp", parameters), tool("lamp.dim-1", json!({"type": "object"}))];
    let text = text.map(Grammar::json_in_lark);
    syntax.answer_grammar(tokenizer, &tools, text.as_deref()).map(Grammar::Lark)
}

/// Returns how much of a text the grammar permits, and whether an answer may end there.
fn follow(grammar: &Grammar, tokenizer: &Arc<Tokenizer>, text: &str) -> (String, bool) {
    let mut constraint =
        Constraint::new(grammar, tokenizer, &[]).unwrap_or_else(|error| panic!("{error}: {grammar:?}"));
    let tokens = tokenizer.encode(text, false).unwrap();
    let count = tokens.iter().take_while(|token| constraint.accept(**token).is_ok()).count();
    (tokenizer.decode(&tokens[..count], false), constraint.may_end().unwrap_or(false))
}

#[track_caller]
fn permits(grammar: &Grammar, tokenizer: &Arc<Tokenizer>, text: &str) {
    assert_eq!(follow(grammar, tokenizer, text), (text.to_owned(), true), "{text}");
}

#[track_caller]
fn stops(grammar: &Grammar, tokenizer: &Arc<Tokenizer>, text: &str, behind: &str) {
    let found = follow(grammar, tokenizer, text).0;
    let at = text.find(behind).unwrap() + behind.len();
    assert_eq!(found, text[..at], "{text}");
}

const CALLS: [(CallSyntax, &str); 21] = [
    (CallSyntax::Tagged, "<tool_call>\n{\"name\": \"lamp\", \"arguments\": ARGS}\n</tool_call>"),
    (CallSyntax::Bare, "{\"name\": \"lamp\", \"parameters\": ARGS}"),
    (CallSyntax::Bare, "<|python_tag|>{\"name\": \"lamp\", \"parameters\": ARGS}"),
    (CallSyntax::Bare, "[{\"name\": \"lamp\", \"parameters\": ARGS}]"),
    (CallSyntax::Listed, "[TOOL_CALLS][{\"name\": \"lamp\", \"arguments\": ARGS}]"),
    (CallSyntax::Listed, "[TOOL_CALLS]lamp[ARGS]ARGS"),
    (CallSyntax::Functions, "<|tool_call|>[{\"name\": \"lamp\", \"arguments\": ARGS}]"),
    (CallSyntax::Functions, "functools[{\"name\": \"lamp\", \"arguments\": ARGS}]"),
    (CallSyntax::Separated, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>lamp<｜tool▁sep｜>ARGS"),
    (
        CallSyntax::SeparatedFence,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>lamp\n```json\nARGS",
    ),
    (CallSyntax::Fenced, "{\"name\": \"lamp\", \"arguments\": ARGS}"),
    (CallSyntax::Fenced, "```json\n{\"name\": \"lamp\", \"arguments\": ARGS}"),
    (
        CallSyntax::Channels,
        "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>commentary to=functions.lamp \
         <|constrain|>json<|message|>ARGS",
    ),
    (CallSyntax::Channels, " to=functions.lamp<|channel|>commentary json<|message|>ARGS"),
    (CallSyntax::Enclosed, "<tool_calls>[{\"name\": \"lamp\", \"arguments\": ARGS}]</tool_calls>"),
    (CallSyntax::Enclosed, "<tool_calls>{\"name\": \"lamp\", \"arguments\": ARGS}</tool_calls>"),
    (
        CallSyntax::Invoked,
        "<minimax:tool_call>\n{\"name\": \"lamp\", \"arguments\": ARGS}\n</minimax:tool_call>",
    ),
    (
        CallSyntax::Dsml,
        "<｜DSML｜function_calls>\n{\"name\": \"lamp\", \"arguments\": ARGS}\n</｜DSML｜function_calls>",
    ),
    (CallSyntax::Pythonic, "<|tool_call_start|>{\"name\": \"lamp\", \"arguments\": ARGS}<|tool_call_end|>"),
    (CallSyntax::Braced, "<|tool_call>{\"name\": \"lamp\", \"arguments\": ARGS}<tool_call|>"),
    (
        CallSyntax::Sections,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.lamp:0<|tool_call_argument_begin|>ARGS<|tool_call_end|>",
    ),
];

/// A call with these arguments.
fn with_arguments(call: &str, arguments: &str) -> String {
    let at = call.rfind("ARGS").unwrap();
    format!("{}{arguments}{}", &call[..at], &call[at + 4..])
}

#[test]
fn arguments_of_a_strict_tool_fit_in_every_syntax() {
    for has_marks in [true, false] {
        let tokenizer = tokenizer(has_marks);
        for (syntax, call) in CALLS {
            let Some(grammar) = grammar(syntax, &tokenizer, None) else {
                assert!(!has_marks && syntax == CallSyntax::Channels);
                continue;
            };
            let fits = |arguments: &str| with_arguments(call, arguments);
            permits(&grammar, &tokenizer, &fits("{\"on\": true}"));
            stops(&grammar, &tokenizer, &fits("{\"on\": 1}"), "{\"on\": ");
            stops(&grammar, &tokenizer, &fits("{\"off\": 1}"), "{\"o");
            let other = fits("{\"any\": [1]}").replace("lamp", "lamp.dim-1");
            permits(&grammar, &tokenizer, &other);
            let unknown = fits("{}").replace("lamp", "door");
            assert!(follow(&grammar, &tokenizer, &unknown).0.len() < unknown.len(), "{syntax:?}: {unknown}");
        }
    }
}

#[test]
fn as_many_tools_as_a_request_may_have_are_one_grammar() {
    let tokenizer = tokenizer(true);
    let parameters =
        json!({"type": "object", "properties": {"a": {"type": "string"}, "b": {"enum": [1, 2]}}});
    let of = |at| CallableTool { name: format!("tool-{at}"), arguments: Grammar::json_in_lark(&parameters) };
    let tools: Vec<CallableTool> = (0..128).map(of).collect();
    for (syntax, call) in CALLS {
        let grammar = Grammar::Lark(syntax.answer_grammar(&tokenizer, &tools, None).unwrap());
        let call = with_arguments(call, "{\"a\": \"x\", \"b\": 2}").replace("lamp", "tool-127");
        permits(&grammar, &tokenizer, &call);
        stops(&grammar, &tokenizer, &call.replace(": 2", ": 3"), "\"b\": ");
    }
}

#[test]
fn text_around_calls_is_free() {
    for has_marks in [true, false] {
        let tokenizer = tokenizer(has_marks);
        for syntax in CALLS.map(|(syntax, _)| syntax) {
            let Some(grammar) = grammar(syntax, &tokenizer, None) else { continue };
            for text in ["", "Hello.", "a < b, c[0], 5 > 3", "import functools\n"] {
                permits(&grammar, &tokenizer, text);
            }
            if syntax != CallSyntax::Channels {
                permits(&grammar, &tokenizer, "<think>Well.</think>\n\nNo.");
                permits(&grammar, &tokenizer, "So:\n```python\nprint({1: 2})\n```\nand so on");
                permits(&grammar, &tokenizer, "{\"city\": {\"name\": \"Bern\"}}");
                permits(&grammar, &tokenizer, "[1, 2]");
                permits(&grammar, &tokenizer, "```json\n{\"city\": \"Bern\"}\n```\n");
            }
        }
        let tagged = grammar(CallSyntax::Tagged, &tokenizer, None).unwrap();
        let call = "<tool_call>{\"name\": \"lamp\", \"arguments\": {\"on\": true}}</tool_call>";
        permits(&tagged, &tokenizer, &format!("First.\n{call}\n{call} Then."));
        stops(&tagged, &tokenizer, &format!("{call}<tool_call><function=lamp>"), "</tool_call><tool_call>");
        // Without a mark, an object that begins like a call is one.
        let bare = grammar(CallSyntax::Bare, &tokenizer, None).unwrap();
        let call = "{\"name\": \"lamp\", \"parameters\": {\"on\": true}}";
        permits(&bare, &tokenizer, &format!("{call}; {call}"));
        let turned = follow(&bare, &tokenizer, "{\"arguments\": {}, \"name\": \"lamp\"}");
        assert_eq!(turned, ("{\"arguments".into(), false));
        stops(&bare, &tokenizer, "{\"name\": \"lamp\", \"parameters\": 1", "parameters\": ");
        let second = format!("{call};{{\"name\": \"lamp\", \"parameters\": 1");
        assert_eq!(follow(&bare, &tokenizer, &second).0, second[..second.len() - 1]);
    }
}

#[test]
fn an_output_format_is_that_of_the_text() {
    let tokenizer = tokenizer(true);
    let schema = json!({"const": {"a": 1}});
    for (syntax, call) in CALLS {
        let Some(grammar) = grammar(syntax, &tokenizer, Some(&schema)) else {
            assert!(matches!(syntax, CallSyntax::Bare | CallSyntax::Fenced));
            continue;
        };
        permits(&grammar, &tokenizer, "{\"a\": 1}");
        assert!(follow(&grammar, &tokenizer, "Hello").0.is_empty());
        if !call.contains("analysis") && !call.starts_with("functools") {
            permits(&grammar, &tokenizer, &with_arguments(call, "{\"on\": true}"));
            stops(&grammar, &tokenizer, &with_arguments(call, "{\"on\": 1}"), "{\"on\": ");
        }
    }
}
