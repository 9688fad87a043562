//! Chat templates compared with `transformers`. `make_templates.py` makes the fixtures.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use firebox_text::{
    AnswerPart, CallSyntax, ChatTemplate, ContentPart, Detokenizer, GgufVocabulary, Message, TemplateOptions,
    TextAssets, TextError, Tokenizer, TokenizerSource,
};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::path::Path;
use std::time::{Duration, SystemTime};

#[derive(Deserialize)]
struct Case {
    messages: Vec<Message>,
    options: Map<String, Value>,
    rendered: Option<String>,
    refused: Option<String>,
}

fn tokens_of(bos: &str, eos: &str) -> Map<String, Value> {
    Map::from_iter([("bos_token".to_owned(), json!(bos)), ("eos_token".to_owned(), json!(eos))])
}

fn options(mut given: Map<String, Value>) -> TemplateOptions {
    let list = |value: Option<Value>| value.and_then(|value| value.as_array().cloned());
    TemplateOptions {
        tools: list(given.remove("tools")),
        documents: list(given.remove("documents")),
        add_generation_prompt: given
            .remove("add_generation_prompt")
            .is_some_and(|value| value == json!(true)),
        enable_thinking: given.remove("enable_thinking").and_then(|value| value.as_bool()),
        now: Some(SystemTime::UNIX_EPOCH + Duration::from_secs(1_709_208_000)),
        variables: given,
    }
}

fn check(name: &str) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/templates");
    let source = std::fs::read_to_string(folder.join(name).with_extension("jinja")).unwrap();
    let cases = std::fs::read(folder.join(name).with_extension("json")).unwrap();
    let cases: Vec<Case> = serde_json::from_slice(&cases).unwrap();
    let template = ChatTemplate::from_source(&source, tokens_of("<s>", "</s>")).unwrap();
    for (index, case) in cases.into_iter().enumerate() {
        let rendered = template.render(&case.messages, &options(case.options));
        match (rendered, case.rendered, case.refused) {
            (Ok(rendered), Some(expected), None) => {
                for (line, expected) in rendered.lines().zip(expected.lines()) {
                    assert_eq!(line, expected, "{name}, case {index}");
                }
                assert_eq!(rendered, expected, "{name}, case {index}");
            }
            (Err(TextError::RefusedByTemplate { message }), None, Some(expected)) => {
                assert_eq!(message, expected, "{name}, case {index}");
            }
            (rendered, ..) => panic!("{name}, case {index}: {rendered:?}"),
        }
    }
}

#[test]
fn alternating_turns() {
    check("turns");
}

#[test]
fn tools_and_results() {
    check("tools");
}

#[test]
fn reasoning() {
    check("thinking");
}

#[test]
fn content_in_parts() {
    check("parts");
}

#[test]
fn dates_and_documents() {
    check("dates");
}

#[test]
fn python_in_templates() {
    check("python");
}

#[test]
fn arguments_of_tool_calls_may_be_json_in_a_string() {
    let source = "{{ messages[0].tool_calls[0].function.arguments.x + 1 }}";
    let template = ChatTemplate::from_source(source, Map::new()).unwrap();
    let message: Message = serde_json::from_value(json!({
        "role": "assistant",
        "tool_calls": [{"function": {"name": "f", "arguments": "{\"x\": 41}"}}],
    }))
    .unwrap();
    assert_eq!(template.render(&[message], &TemplateOptions::default()).unwrap(), "42");
}

#[test]
fn content_takes_the_form_that_the_template_expects() {
    let parts =
        json!({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]});
    let parts: Message = serde_json::from_value(parts).unwrap();
    let image = json!({"role": "user", "content": [{"type": "image_url", "image_url": {}}]});
    let image: Message = serde_json::from_value(image).unwrap();

    let text_only = "{% for m in messages %}{{ m.content + '.' }}{% endfor %}";
    let text_only = ChatTemplate::from_source(text_only, Map::new()).unwrap();
    assert_eq!(text_only.render(&[parts], &TemplateOptions::default()).unwrap(), "a\nb.");
    let refused = text_only.render(&[image], &TemplateOptions::default()).unwrap_err();
    assert_eq!(refused, TextError::UnsupportedContent { kind: "image_url".to_owned() });

    let parts_only = "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}";
    let parts_only = ChatTemplate::from_source(parts_only, Map::new()).unwrap();
    assert_eq!(parts_only.render(&[Message::user("plain")], &TemplateOptions::default()).unwrap(), "plain");
}

#[test]
fn tools_go_where_the_template_expects_them() {
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {}}});
    let messages: Vec<Message> = serde_json::from_value(json!([
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": [{"function": {"name": "f", "arguments": "{\"x\": 1}"}}]},
        {"role": "tool", "content": "c"},
    ]))
    .unwrap();
    let told = |source: &str| {
        let template = ChatTemplate::from_source(source, Map::new()).unwrap();
        let told = template.messages_with_tools(&messages, std::slice::from_ref(&tool));
        let options = TemplateOptions { tools: Some(vec![tool.clone()]), ..TemplateOptions::default() };
        (template.call_syntax(), template.render(&told, &options).unwrap())
    };
    let in_system = "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% if 'tools' in m and m['tools'] is not none %}{{ '<|tool|>' + m['tools'] + '<|/tool|>' }}{% endif %}{% endfor %}";
    let expected = "<|system|><|tool|>[{\"name\":\"f\",\"parameters\":{}}]<|/tool|><|user|>a<|assistant|>b\
        <|tool_call|>[{\"name\": \"f\", \"arguments\": {\"x\": 1}}]<|/tool_call|><|tool_response|>c";
    assert_eq!(told(in_system), (CallSyntax::Functions, expected.to_owned()));
    let (syntax, text) = told("{% for m in messages %}{{ m.content }}{% endfor %}");
    assert!(syntax == CallSyntax::Fenced && text.contains("```json") && text.contains("\"f\""), "{text}");
    let known = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}[TOOL_CALLS]{% for m in messages %}{{ m.content }}{% endfor %}";
    assert_eq!(told(known), (CallSyntax::Listed, "f[TOOL_CALLS]abc".to_owned()));
}

#[test]
fn answers_are_read_as_the_template_says() {
    let vocabulary = GgufVocabulary {
        model: "gpt2".into(),
        tokens: [
            "<think>",
            "</think>",
            "a",
            "Ċ",
            "<|channel|>",
            "analysis",
            "<|message|>",
            "<|end|>",
            "<|call|>",
        ]
        .map(String::from)
        .to_vec(),
        token_types: vec![4, 4, 1, 1, 3, 1, 3, 3, 3],
        ..GgufVocabulary::default()
    };
    let source = Some(TokenizerSource::Gguf(vocabulary));
    let assets = TextAssets { tokenizer: source, ..TextAssets::default() };
    let tokenizer = Tokenizer::new(&assets, &Value::Null).unwrap();
    let read = |template: &str, prompt: &[u32], answer: &[u32]| {
        let template = ChatTemplate::from_source(template, Map::new()).unwrap();
        let mut reader = template.answer_reader(&tokenizer, prompt, None);
        let mut detokenizer = Detokenizer::continuing(&tokenizer, true);
        let mut all = [String::new(), String::new()];
        let mut add = |parts: Vec<AnswerPart>| {
            for part in parts {
                match part {
                    AnswerPart::Thought(thought) => all[0] += &thought,
                    AnswerPart::Text(text) => all[1] += &text,
                    _ => panic!("a call"),
                }
            }
        };
        for token in answer {
            let text = detokenizer.push(*token);
            add(reader.push_token(&text, Some(*token), &tokenizer));
        }
        add(reader.finish());
        all
    };
    let thinks = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}";
    assert_eq!(read(thinks, &[2], &[0, 3, 2, 3, 1, 3, 2]), ["a", "a"]);
    // The template has written the first mark, with or without a line break, or both.
    assert_eq!(read(thinks, &[2, 0, 3], &[2, 1, 2]), ["a", "a"]);
    assert_eq!(read(thinks, &[2, 0], &[2]), ["a", ""]);
    assert_eq!(read(thinks, &[2, 0, 3, 1, 3], &[2]), ["", "a"]);
    assert_eq!(read("{{ messages[0].content }}", &[2], &[0, 2, 1]), ["", "<think>a</think>"]);
    // Marks that are control tokens are absent from the text.
    let channels = "<|channel|>{{ messages[0].content }}<|call|>";
    assert_eq!(read(channels, &[2], &[4, 5, 6, 2, 7]), ["a", ""]);
    assert_eq!(read(channels, &[2], &[2, 2]), ["", "aa"]);
}

#[test]
fn reasoning_has_several_names() {
    let source = "{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}";
    let template = ChatTemplate::from_source(source, Map::new()).unwrap();
    let cases = [
        (json!({"reasoning": "a"}), "a|a"),
        (json!({"reasoning": "a", "reasoning_content": "b"}), "b|b"),
        (json!({"reasoning": null, "thinking": "c"}), "c|c"),
        (json!({"reasoning": {"effort": "low"}}), "|"),
    ];
    for (mut message, expected) in cases {
        message["role"] = json!("assistant");
        let message: Message = serde_json::from_value(message).unwrap();
        assert_eq!(template.render(&[message], &TemplateOptions::default()).unwrap(), expected);
    }
}

#[test]
fn unsupported_features_are_errors() {
    let template = ChatTemplate::from_source("{{ messages[0].content[::-1] }}", Map::new()).unwrap();
    let said = |text: &str| template.render(&[Message::user(text)], &TemplateOptions::default());
    assert_eq!(said("ab").unwrap(), "ba");
    assert!(!matches!(said(""), Ok(text) if !text.is_empty()));
}

#[test]
fn endless_templates_are_stopped() {
    let loops =
        "{% for a in range(9999) %}{% for b in range(9999) %}{% set c = a * b %}{% endfor %}{% endfor %}";
    let floods =
        "{% for a in range(9999) %}{% for b in range(9999) %}{{ 'x' * 9999 }}{% endfor %}{% endfor %}";
    let recurses = "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}";
    for source in [loops, floods] {
        let source = format!("{{% if messages[0].role == 'go' %}}{source}{{% endif %}}");
        let template = ChatTemplate::from_source(&source, Map::new()).unwrap();
        let error = template.render(&[Message::new("go", "")], &TemplateOptions::default()).unwrap_err();
        assert!(matches!(error, TextError::TemplateLimit { .. }), "{error}");
    }
    let template = ChatTemplate::from_source(recurses, Map::new()).unwrap();
    let error = template.render(&[], &TemplateOptions::default()).unwrap_err();
    assert!(matches!(error, TextError::RenderChatTemplate { .. }), "{error}");
}

#[test]
fn a_syntax_error_names_its_line() {
    let error = ChatTemplate::from_source("a\n{% if %}", Map::new()).unwrap_err();
    assert!(error.to_string().contains("line 2") || error.to_string().contains(":2"), "{error}");
}

#[test]
fn users_cannot_write_control_tokens() {
    let tokens = [
        "<unk>", "<s>", "</s>", "<tool>", "▁", "h", "i", "▁hi", "<", "/", "s", ">", "t", "o", "l", "\n", "I",
    ];
    let vocabulary = GgufVocabulary {
        model: "llama".to_owned(),
        tokens: tokens.map(str::to_owned).to_vec(),
        scores: (0_u8..17).map(|rank| -f32::from(rank)).collect(),
        token_types: vec![2, 3, 3, 4, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
        ..GgufVocabulary::default()
    };
    let assets = TextAssets { tokenizer: Some(TokenizerSource::Gguf(vocabulary)), ..TextAssets::default() };
    let tokenizer = Tokenizer::new(&assets, &Value::Null).unwrap();
    let source = "{{ bos_token }}{% for m in messages %}I{{ m.content }}{{ eos_token }}{% endfor %}";
    let template = ChatTemplate::from_source(source, tokens_of("<s>", "</s>")).unwrap();
    let options = TemplateOptions::default();
    let spelled = |messages: &[Message]| -> String {
        let ids = template.encode(&tokenizer, messages, &options).unwrap();
        ids.into_iter().map(|id| format!("{}|", tokenizer.id_to_token(id).unwrap())).collect()
    };
    // SentencePiece adds a space after a token, but none between pieces of one text.
    assert_eq!(spelled(&[Message::user("hi")]), "<s>|▁|I|h|i|</s>|");
    assert_eq!(spelled(&[Message::user("i</s>h")]), "<s>|▁|I|i|<|/|s|>|h|</s>|");
    assert_eq!(spelled(&[Message::user("<tool>")]), "<s>|▁|I|<|t|o|o|l|>|</s>|");
    assert_eq!(spelled(&[Message::assistant("<tool>")]), "<s>|▁|I|<tool>|</s>|");

    let joined = "{% for m in messages %}{% for p in m.content %}{{ p.text|trim }}{% endfor %}{% endfor %}";
    let either = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}\
        {{ p.text }}{% endfor %}{% endif %}{% endfor %}";
    let parts =
        |texts: &[&str]| Message::user(texts.iter().copied().map(ContentPart::text).collect::<Vec<_>>());
    for (source, texts) in [(joined, ["hi</ ", "s", " >hi"]), (either, ["hi<", "/", "s>hi"])] {
        let template = ChatTemplate::from_source(source, Map::new()).unwrap();
        let ids = template.encode(&tokenizer, &[parts(&texts)], &options).unwrap();
        let text: Vec<&str> = ids.iter().filter_map(|id| tokenizer.id_to_token(*id)).collect();
        assert!(text.concat().ends_with("hi</s>hi") && !ids.contains(&2), "{source}: {text:?}");
    }
    let property = json!({"properties": {"i</s>": {"description": "i</s>"}}, "required": ["i</s>"]});
    let tools = TemplateOptions { tools: Some(vec![property]), ..TemplateOptions::default() };
    for filter in ["tojson", "tojson(ensure_ascii=true)", "string", "pprint", "list", "items|list"] {
        let source = format!(
            "{{{{ tools[0].properties|{filter} }}}}{{{{ tools|{} }}}}",
            filter.replace("items", "list")
        );
        let template = ChatTemplate::from_source(&source, Map::new()).unwrap();
        let ids = template.encode(&tokenizer, &[], &tools).unwrap();
        assert!(!ids.contains(&2) && ids.windows(4).any(|four| four == [8, 9, 10, 11]), "{source}: {ids:?}");
    }
    let names = "{% for n, p in tools[0].properties.items() %}{{ n in tools[0].required }}{% endfor %}";
    let names = ChatTemplate::from_source(names, Map::new()).unwrap();
    assert_eq!(names.render(&[], &tools).unwrap(), "True");

    for plain in ["hi", "so\nso", ""] {
        let messages = [Message::user(plain), Message::assistant("lol")];
        let rendered = template.render(&messages, &options).unwrap();
        let ids = template.encode(&tokenizer, &messages, &options).unwrap();
        assert_eq!(ids, tokenizer.encode(&rendered, false).unwrap());
    }
}

#[test]
fn one_model_serves_many_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Tokenizer>();
    shared::<ChatTemplate>();
    shared::<Detokenizer>();
}

#[test]
fn templates_of_unbounded_nesting_do_not_compile() {
    let nots = format!("{{% if {} x %}}a{{% endif %}}", "not ".repeat(50_000));
    let signs = format!("{{{{ {}1 }}}}", "-".repeat(200_000));
    let attributes = format!("{{{{ x{} }}}}", ".a".repeat(100_000));
    let sums = format!("{{{{ x{} }}}}", "~x".repeat(100_000));
    let elifs = format!("{{% if x %}}{}{{% endif %}}", "{% elif x %}".repeat(20_000));
    let long = "x".repeat(300 << 10);
    for source in [nots, signs, attributes, sums, elifs, long] {
        let error = ChatTemplate::from_source(&source, Map::new()).unwrap_err();
        assert!(matches!(error, TextError::InvalidChatTemplate { .. }), "{error}");
    }
    let deep = format!("{{{{ {}1 }}}}", "not ".repeat(7_000));
    assert!(ChatTemplate::from_source(&deep, Map::new()).is_ok());
}

#[test]
fn templates_that_build_unbounded_values_are_stopped() {
    let doubling =
        "{% set ns = namespace(x='aaaaaaaaaaaaaaaa', l=[]) %}{% for i in range(60) %}BODY{% endfor %}";
    let double = doubling.replace("BODY", "{% set ns.x = ns.x ~ ns.x %}");
    let bombs = [
        "{{ 'a\\n'|indent(10000000000) }}".to_owned(),
        "{{ 'a\\n'|indent(width=10000000000) }}".to_owned(),
        "{{ ('a' * 50000000)|replace('a', 'b' * 1000000) }}".to_owned(),
        "{{ ('a' * 50000000).replace('a', 'b' * 1000000) }}".to_owned(),
        "{{ range(10000)|join('a' * 1000000) }}".to_owned(),
        "{{ ('a' * 1000000).join(range(10000)) }}".to_owned(),
        "{% set x = 'a' * 10 ** 10 %}".to_owned(),
        "{{ '%10000000000d'|format(1) }}".to_owned(),
        "{{ strftime_now('%255Y' * 1000000) }}".to_owned(),
        "{{ [1]|batch(10000000000, 'x') }}".to_owned(),
        doubling.replace("BODY", "{% set ns.x = ns.x ~ ns.x %}"),
        doubling.replace("BODY", "{% set ns.x = ns.x + ns.x %}"),
        doubling.replace("BODY", "{% set y = ns.x %}{% set ns.x = [(y ~ ns.x)][0] %}"),
        doubling.replace("BODY", "{% set ns.x = ns.x * 2 %}"),
        doubling.replace("BODY", "{% set ns.l = ns.l + ['a' * 60000000] %}"),
        doubling.replace("BODY", "{% set ns.x = [ns.x, ns.x]|join %}"),
        doubling.replace("BODY", "{% set c %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = c %}"),
        doubling.replace("BODY", "{% set ns.l = [ns.l, ns.l] %}") + "{% set x = ns.l|tojson %}",
        doubling.replace("BODY", "{% set ns.l = [ns.l, ns.l] %}") + "{% set x = ns.l ~ '' %}",
        // Code for the engine that the limits could mistake for text.
        format!("{{#}}{{{{ \" #}}{double}{{#\"}}}}#}}"),
        format!("{{% raw %}}{{%--endraw%}}{{{{ \"{{% endraw %}}{double}{{#\" }}}}#}}"),
    ];
    for source in bombs {
        let guarded = format!("{{% if messages[0].role == 'go' %}}{source}{{% endif %}}");
        let template = ChatTemplate::from_source(&guarded, Map::new()).unwrap();
        let result = template.render(&[Message::new("go", "")], &TemplateOptions::default());
        let kinds =
            matches!(result, Err(TextError::TemplateLimit { .. } | TextError::RenderChatTemplate { .. }));
        assert!(kinds, "{source}: {:?}", result.map(|prompt| prompt.len()));
    }
}

#[test]
fn values_of_unbounded_nesting_are_stopped() {
    let start = "{% set ns = namespace(x=[], m={}, head=namespace()) %}{% set ns.tail = 1 %}";
    let steps = [
        "{% set ns.x = [ns.x] %}",
        "{% set ns.x, ns.y = [ns.x], 1 %}",
        "{% set ns.m = {'a': ns.m} %}",
        "{% set ns.x = namespace(x=ns.x) %}",
        "{% set ns.x|zip([ns.x]) %}a{% endset %}",
        "{% set n = namespace() %}{% set ns.head.next = n %}",
        "{% for x in [ns.x] %}{% set ns.x = loop %}{% endfor %}",
    ];
    // These hide their contents, so they may succeed.
    let unseen = [
        "{% set ns.x = [ns.x][1:] %}",
        "{% set ns.x = {'a': [ns.x][1:]} %}",
        "{% set ns.x = []|zip(ns.x) %}",
        "{% set ns.x = [ns.x] * 0 %}",
        "{% set ns.m = ns.m|chain({}) %}",
        "{% set ns.x = ns.x|reverse %}",
        "{% set ns.x = range(0)|chain(ns.x) %}",
    ];
    let loops = |body: &str| format!("{start}{{% for i in range(100000) %}}{body}{{% endfor %}}");
    let stopped = steps.map(|step| (true, loops(step)));
    let ended = unseen.map(|step| (false, loops(step)));
    let flat = "{% set x = [[x]] %}".repeat(10_000);
    let scopes = format!("{}{}", "{% with x = [[[[[[[[x]]]]]]]] %}".repeat(100), "{% endwith %}".repeat(100));
    for (stops, source) in stopped.into_iter().chain(ended).chain([(true, flat), (true, scopes)]) {
        let source = format!("{{% if messages[0].role == 'go' %}}{source}{{% endif %}}");
        let template = ChatTemplate::from_source(&source, Map::new()).unwrap();
        let result = template.render(&[Message::new("go", "")], &TemplateOptions::default());
        assert!(result.is_err() || !stops, "{}: {result:?}", &source[..200.min(source.len())]);
    }
}

#[test]
fn assignment_does_not_change_values() {
    let source = "{% set a, b = 1, [2] %}{% set ns = namespace(x=[], n=0) %}{% for m in messages[1:] %}\
        {% set outer = loop %}{% set ns.x = ns.x + [m.content] %}{% set ns.n = ns.n + 1 %}\
        {{ outer.index }}{{ outer.cycle('p', 'q') }}{{ (loop.previtem or {}).content }}{% endfor %}\
        {% macro f(x) %}<{{ x }}>{% endmacro %}{% set g = f %}{% set rest = messages[1:] %}\
        {% set c|upper %}c{% endset %}{% set d = none if a == 1 else 2 %}{% set e = nothing %}\
        {{ g(b) }}{{ ns.x }}{{ ns.n }}{{ rest[0].content }}{{ rest|length }}{{ c }}{{ d }}{{ e is defined }}";
    let template = ChatTemplate::from_source(source, Map::new()).unwrap();
    let said = ["a", "b", "c"].map(Message::user);
    let prompt = template.render(&said, &TemplateOptions::default()).unwrap();
    assert_eq!(prompt, "1p2qb<[2]>['b', 'c']2b2CNoneFalse");
}
