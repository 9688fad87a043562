"""Renders the templates of tests/fixtures/templates with transformers and records what comes out.

    pip install transformers==5.23.0 jinja2==3.1.6
    TZ=UTC python tests/make_templates.py
"""

import datetime
import json
import pathlib

from transformers.utils import chat_template_utils

HERE = pathlib.Path(__file__).parent / "fixtures" / "templates"
NOW = 1_709_208_000  # 2024-02-29 12:00:00 UTC

SYSTEM = {"role": "system", "content": "  You are terse.\n"}
ASK = {"role": "user", "content": "What is 2 + 2? "}
ANSWER = {"role": "assistant", "content": " 4\n"}
AGAIN = {"role": "user", "content": "And <b>\"3\" & 'é'</b>\t日本 😀?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a place, e.g. \"Zürich\" <now>",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string"},
                "days": {"type": "integer", "default": 3, "minimum": 0.5, "maximum": 1e20},
                "unit": {"type": "string", "enum": ["°C", "°F"], "nullable": True},
            },
            "required": ["place"],
        },
    },
}
NOOP = {"type": "function", "function": {"name": "noop", "parameters": {"type": "object", "properties": {}}}}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "c1",
            "type": "function",
            "function": {"name": "weather", "arguments": {"place": "Zürich", "days": 2, "opts": {"x": [1, None]}}},
        },
        {"id": "c2", "type": "function", "function": {"name": "noop", "arguments": {}}},
    ],
}
RESULTS = [
    {"role": "tool", "tool_call_id": "c1", "content": "{\"sun\": true}"},
    {"role": "tool", "tool_call_id": "c2", "content": "done"},
]
THOUGHT = {"role": "assistant", "content": "<think>\nsum it\n</think>\n\nFour."}
REASONED = {"role": "assistant", "content": "Seven.", "reasoning_content": "\nthree more\n"}
PARTS = {
    "role": "user",
    "content": [
        {"type": "text", "text": "Look:"},
        {"type": "image_url", "image_url": {"url": "data:,"}},
        {"type": "image"},
        {"type": "text", "text": "What is it?"},
    ],
}
AUDIO = {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": ""}}]}

CASES = {
    "turns": [
        ([ASK], {}),
        ([SYSTEM, ASK, ANSWER, AGAIN], {"add_generation_prompt": True}),
        ([SYSTEM, ASK, ANSWER, AGAIN], {"add_generation_prompt": False}),
        ([ASK, ASK], {}),
        ([ANSWER], {}),
    ],
    "tools": [
        ([ASK], {}),
        ([ASK], {"tools": [WEATHER, NOOP]}),
        ([ASK, CALL, *RESULTS, ANSWER], {"tools": [WEATHER], "add_generation_prompt": True}),
    ],
    "thinking": [
        ([SYSTEM, ASK, THOUGHT], {}),
        ([ASK, THOUGHT, AGAIN, REASONED], {}),
        ([ASK, THOUGHT, AGAIN, REASONED, {"role": "user", "content": "<result>7</result>"}, REASONED], {}),
        ([ASK], {"add_generation_prompt": True}),
        ([ASK], {"add_generation_prompt": True, "enable_thinking": True}),
        ([ASK], {"add_generation_prompt": True, "enable_thinking": False}),
    ],
    "parts": [
        ([ASK, ANSWER], {}),
        ([PARTS, ANSWER, PARTS], {"add_vision_id": True}),
        ([AUDIO], {}),
    ],
    "dates": [
        ([SYSTEM, ASK, ANSWER, AGAIN], {}),
        (
            [ASK, {"role": "user", "content": "x" * 41}, {"role": "user", "content": "stop"}, AGAIN],
            {
                "date_string": "1 Jan",
                "documents": [
                    {"title": "the big book", "text": "It was a dark and stormy night"},
                    {"title": "two", "text": "Schluß é日本"},
                ],
            },
        ),
    ],
    "python": [
        ([{"role": "user", "content": "ab,cab,z"}], {}),
        ([{"role": "user", "content": "ÄöÜ, banana"}, SYSTEM, ASK], {}),
    ],
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


class FrozenNow(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(NOW, tz)


chat_template_utils.datetime = FrozenNow

for name, cases in CASES.items():
    source = (HERE / f"{name}.jinja").read_text()
    fixture = []
    for messages, options in cases:
        case = {"messages": messages, "options": options}
        try:
            rendered, _ = chat_template_utils.render_jinja_template([messages], chat_template=source, **options, **TOKENS)
            case["rendered"] = rendered[0]
        except Exception as error:
            assert type(error).__name__ == "TemplateError", (name, error)
            case["refused"] = str(error)
        fixture.append(case)
    (HERE / f"{name}.json").write_text(json.dumps(fixture, ensure_ascii=False, indent=1) + "\n")
    print(name, [case.get("refused", "ok") for case in fixture])
