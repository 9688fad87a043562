"""Renders published chat templates with transformers, for `cargo test --test published_templates`.

The templates belong to those who published them, and stay out of this repository. They come with llama.cpp, in the
source package of llama-cpp-python, which pip downloads (75 MB, nothing of it is installed or kept):

    pip install transformers==5.23.0 jinja2==3.1.6
    TZ=UTC python tests/render_published.py DIR             # downloads, renders, writes DIR/NAME.json
    TZ=UTC python tests/render_published.py DIR TEMPLATES   # renders the *.jinja of a folder instead
"""

import datetime
import json
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile

import tokenizers
import transformers
from transformers.utils import chat_template_utils

PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"
NOW = 1_709_208_000  # 2024-02-29 12:00:00 UTC

SYSTEM = {"role": "system", "content": "  You are terse.\n"}
DEVELOPER = {"role": "developer", "content": "Answer in <one> word."}
ASK = {"role": "user", "content": "What is 2 + 2? "}
ANSWER = {"role": "assistant", "content": " 4\n"}
AGAIN = {"role": "user", "content": "And <b>\"3\" & 'é'</b>\t日本 😀?"}
PLACE = {"type": "string", "description": "Where, as \"town\" or 'town, country'"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a place, e.g. \"Zürich\" <now>",
        "parameters": {
            "type": "object",
            "properties": {
                "place": PLACE,
                "days": {"type": "integer", "description": "How many", "default": 3, "minimum": 0.5, "maximum": 1e20},
                "unit": {"type": "string", "enum": ["°C", "°F"], "description": "Of degrees"},
                "hours": {"type": "array", "items": {"type": "number"}, "description": "Which"},
            },
            "required": ["place", "days"],
        },
    },
}
# Some templates write signatures in Python or TypeScript, and cannot write all of these.
INTRICATE = {
    "type": "function",
    "function": {
        "name": "travel",
        "description": "A way.\nOr none.",
        "parameters": {
            "type": "object",
            "properties": {
                "unit": {"type": "string", "enum": ["km", "mi"], "nullable": True, "default": "km"},
                "exact": {"type": ["boolean", "null"], "default": False},
                "route": {
                    "type": "object",
                    "properties": {"from": PLACE, "via": {"type": "array", "items": {"type": "string"}}},
                    "required": ["from"],
                },
                "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            },
            "required": ["route"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
NOOP = {
    "type": "function",
    "function": {"name": "noop", "description": "Nothing.", "parameters": {"type": "object", "properties": {}}},
}
BARE_TOOL = {"type": "function", "function": {"name": "bare"}}
TOOLS = [WEATHER, NOOP]


def called(identity, name, arguments):
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def answered(identity, name, content):
    return {"role": "tool", "tool_call_id": identity, "name": name, "content": content}


# Mistral's templates take ids of nine letters only.
HERE = called("abcdefgh1", "weather", {"place": "Zürich", "days": 2, "exact": True, "hours": [1.5, 20], "unit": None})
ROUTE = called("abcdefgh2", "weather", {"place": "a \"b\"\n", "days": -1, "route": {"from": "x", "via": []}})
NOTHING = called("abcdefgh3", "noop", {})
CALL = {"role": "assistant", "content": "", "tool_calls": [HERE]}
SILENT = {"role": "assistant", "content": None, "tool_calls": [HERE]}
ABSENT = {"role": "assistant", "tool_calls": [ROUTE]}
BOTH = {"role": "assistant", "content": "I look.", "tool_calls": [ROUTE, NOTHING]}
SUN = answered("abcdefgh1", "weather", '{"sun": true, "warm": "é"}')
RAIN = answered("abcdefgh2", "weather", "It rains.\n")
DONE = answered("abcdefgh3", "noop", "done")
THOUGHT = {"role": "assistant", "content": "<think>\nsum it\n</think>\n\nFour."}
REASONED = {"role": "assistant", "content": "Seven.", "reasoning_content": "\nthree more\n"}
REASONED_CALL = {"role": "assistant", "content": "", "reasoning_content": "I had better look.", "tool_calls": [HERE]}
PARTS = {"role": "user", "content": [{"type": "text", "text": "Look: "}, {"type": "text", "text": "what is it?"}]}
DOCUMENTS = [
    {"title": "the big book", "text": "It was a dark and stormy night"},
    {"title": "two", "text": "Schluß é日本"},
]

# What single families want to be told beside that.
NAMED = {"functions": "none", "datetime": "now", "date_string": "1 Jan"}
PROMPT = {"add_generation_prompt": True}
CASES = {
    "one question": ([ASK], PROMPT),
    "one question, not prompted": ([ASK], {}),
    "system": ([SYSTEM, ASK], PROMPT),
    "developer": ([DEVELOPER, AGAIN], PROMPT),
    "several turns": ([SYSTEM, ASK, ANSWER, AGAIN], PROMPT),
    "several turns, closed": ([ASK, ANSWER, AGAIN, ANSWER], {}),
    "two questions": ([ASK, AGAIN], PROMPT),
    "an answer at the end": ([ASK, ANSWER], PROMPT),
    "late system": ([ASK, ANSWER, SYSTEM, AGAIN], PROMPT),
    "tools": ([ASK], {"tools": TOOLS, **PROMPT}),
    "tools and system": ([SYSTEM, ASK, ANSWER, AGAIN], {"tools": TOOLS, **PROMPT}),
    "an intricate tool": ([SYSTEM, ASK], {"tools": [NOOP, INTRICATE], **PROMPT}),
    "a tool of a name alone": ([ASK], {"tools": [BARE_TOOL], **PROMPT}),
    "no tools": ([ASK], {"tools": [], **PROMPT}),
    "a call": ([ASK, CALL, SUN], {"tools": TOOLS, **PROMPT}),
    "a call, silent": ([SYSTEM, ASK, SILENT, SUN], {"tools": TOOLS, **PROMPT}),
    "a call, without content": ([ASK, ABSENT, RAIN], {"tools": TOOLS, **PROMPT}),
    "a call, not answered": ([ASK, CALL], {"tools": TOOLS}),
    "a call, then words": ([SYSTEM, ASK, CALL, SUN, ANSWER, AGAIN], {"tools": TOOLS, **PROMPT}),
    "calls at once": ([ASK, BOTH, RAIN, DONE], {"tools": TOOLS, **PROMPT}),
    "calls one after another": ([ASK, CALL, SUN, BOTH, RAIN, DONE, ANSWER], {"tools": TOOLS}),
    "an answer to no call": ([ASK, SUN], {"tools": TOOLS, **PROMPT}),
    "thinking": ([ASK], {"enable_thinking": True, **PROMPT}),
    "no thinking": ([ASK], {"enable_thinking": False, **PROMPT}),
    "no thinking, system and tools": ([SYSTEM, ASK], {"enable_thinking": False, "tools": TOOLS, **PROMPT}),
    "thought in the text": ([SYSTEM, ASK, THOUGHT, AGAIN], PROMPT),
    "thought at the end": ([ASK, REASONED], {}),
    "thought before": ([ASK, REASONED, AGAIN], {"enable_thinking": True, **PROMPT}),
    "thought, then called": ([ASK, REASONED_CALL, SUN], {"tools": TOOLS, "enable_thinking": True, **PROMPT}),
    "thought, called and answered": ([ASK, REASONED_CALL, SUN, REASONED, AGAIN, REASONED], {"tools": TOOLS}),
    "documents": ([ASK], {"documents": DOCUMENTS, **PROMPT}),
    "effort": ([SYSTEM, ASK], {"reasoning_effort": "high", "thinking": True, **NAMED, **PROMPT}),
    "content in parts": ([PARTS, ANSWER, PARTS], PROMPT),
}
# Where a template takes text alone, parts of text are made one text by Firebox, instead of an error, of nothing, or of
# Python's form of a list. That is on purpose.
LENIENT = "content in parts"
TOKENS = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "unk_token": "<|unk|>", "pad_token": "<|pad|>"}


class FrozenNow(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(NOW, tz)


def published(folder):
    """The templates of the package, by name."""
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", PACKAGE]
    subprocess.run([*download, "--dest", folder, f"{PACKAGE}=={VERSION}"], check=True)
    [package] = pathlib.Path(folder).glob("*.tar.gz")
    with tarfile.open(package) as files:
        for file in files:
            path = pathlib.PurePosixPath(file.name)
            if path.match("llama.cpp/models/templates/*.jinja"):
                yield path.stem, files.extractfile(file).read().decode()


def main(out, templates=None):
    chat_template_utils.datetime = FrozenNow
    vocabulary = tokenizers.models.WordLevel({"<|unk|>": 0}, unk_token="<|unk|>")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(vocabulary), **TOKENS)
    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        if templates is None:
            sources = dict(published(folder))
        else:
            sources = {path.stem: path.read_text() for path in pathlib.Path(templates).glob("*.jinja")}
    for name, source in sorted(sources.items()):
        cases = []
        for title, (messages, options) in CASES.items():
            case = {"title": title, "messages": messages, "options": options}
            try:
                case["rendered"] = tokenizer.apply_chat_template(
                    messages, chat_template=source, tokenize=False, **options
                )
            except Exception as error:
                case["refused"] = f"{type(error).__name__}: {error}"
            rendered = case.get("rendered", "")
            if title == LENIENT and ("what is it?" not in rendered or re.search("[\"']type[\"']", rendered)):
                continue
            cases.append(case)
        fixture = {"template": source, "tokens": TOKENS, "now": NOW, "cases": cases}
        (out / f"{name}.json").write_text(json.dumps(fixture, ensure_ascii=False, indent=1) + "\n")
        refused = sum("refused" in case for case in cases)
        print(f"{name}: {len(cases) - refused} rendered, {refused} refused")


main(*sys.argv[1:])
