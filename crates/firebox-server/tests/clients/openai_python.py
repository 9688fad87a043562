"""Drives a server by the official `openai` package. Usage: openai_python.py http://HOST:PORT/v1"""

import json
import sys
import typing

import openai
import pydantic

client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
said = [{"role": "user", "content": "Hello"}]

assert [model.id for model in client.models.list()] == ["llama", "pocket"]
assert client.models.retrieve("pocket").id == "pocket"

whole = client.chat.completions.create(model="llama", messages=said, max_tokens=12, temperature=0)
assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
assert whole.usage.prompt_tokens_details.cached_tokens == 0

stream = client.chat.completions.create(
    model="llama",
    messages=said,
    max_tokens=12,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
parts = list(stream)
text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
assert text == whole.choices[0].message.content
assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens

schema = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}},
    "required": ["sure"],
    "additionalProperties": False,
}
form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
formed = client.chat.completions.create(model="llama", messages=said, response_format=form, temperature=0)
assert isinstance(json.loads(formed.choices[0].message.content)["sure"], bool)

likely = client.chat.completions.create(
    model="llama", messages=said, max_tokens=3, logprobs=True, top_logprobs=2
)
assert all(len(token.top_logprobs) == 2 for token in likely.choices[0].logprobs.content)

several = client.completions.create(model="llama", prompt="Once", max_tokens=5, n=3, seed=1, logprobs=1)
assert len(several.choices) == 3

# The package asks for base64 by itself, and unpacks it.
vectors = client.embeddings.create(model="llama", input=["Hello", "there"])
assert [len(entry.embedding) for entry in vectors.data] == [32, 32]

# Leaving in the middle.
with client.completions.create(model="llama", prompt="Once", max_tokens=200, stream=True, n=8) as stream:
    next(iter(stream))

for wrong, error in [
    ({"model": "none"}, openai.NotFoundError),
    ({"temperature": -1}, openai.BadRequestError),
    ({"n": 1000}, openai.BadRequestError),
]:
    try:
        client.chat.completions.create(**{"model": "llama", "messages": said, **wrong})
    except error as found:
        assert found.body["param"] == next(iter(wrong)), found.body
    else:
        raise AssertionError(wrong)

# Tools.
lamp = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "room": {"enum": ["hall", "attic"]}},
    "required": ["on", "room"],
    "additionalProperties": False,
}
tool = {"type": "function", "function": {"name": "lamp", "description": "A lamp", "parameters": lamp}}
wish = {"model": "pocket", "messages": said, "tools": [tool], "tool_choice": "required", "temperature": 0}
called = client.chat.completions.create(**wish).choices[0]
assert called.finish_reason == "tool_calls" and called.message.content is None, called
call = called.message.tool_calls[0]
assert call.function.name == "lamp" and isinstance(json.loads(call.function.arguments)["on"], bool)

with client.chat.completions.stream(**wish) as stream:
    final = stream.get_final_completion().choices[0]
assert final.finish_reason == "tool_calls"
assert final.message.tool_calls[0].function.arguments == call.function.arguments

answered = client.chat.completions.create(
    model="pocket",
    messages=[*said, called.message, {"role": "tool", "tool_call_id": call.id, "content": "It is on."}],
    tools=[tool],
    max_tokens=8,
)
assert answered.usage.prompt_tokens > 0

# A type of the caller's as the form of an answer.
class Sure(pydantic.BaseModel):
    sure: bool
    place: typing.Literal["hall", "attic"]


parsed = client.chat.completions.parse(model="pocket", messages=said, response_format=Sure)
assert isinstance(parsed.choices[0].message.parsed, Sure), parsed

# Responses.
response = client.responses.create(model="pocket", input="Hello", max_output_tokens=12, temperature=0)
assert response.output_text and response.usage.output_tokens <= 12, response
with client.responses.stream(model="pocket", input="Hello", max_output_tokens=12, temperature=0) as stream:
    deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert deltas == response.output_text
    assert stream.get_final_response().output_text == response.output_text
flat = {"type": "function", "name": "lamp", "parameters": lamp, "strict": True}
response = client.responses.create(
    model="pocket", input="Light!", tools=[flat], tool_choice={"type": "function", "name": "lamp"}
)
item = response.output[0]
assert item.type == "function_call" and json.loads(item.arguments)["room"] in ("hall", "attic")
kinds = [
    event.type
    for event in client.responses.create(
        model="pocket", input="Light!", tools=[flat], tool_choice="required", stream=True
    )
]
assert kinds[0] == "response.created" and kinds[-1] == "response.completed", kinds
next_input = [
    {"role": "user", "content": "Light!"},
    item.to_dict(),
    {"type": "function_call_output", "call_id": item.call_id, "output": "It is on."},
]
assert client.responses.create(model="pocket", input=next_input, max_output_tokens=4).output[0].type == "message"
formed = client.responses.parse(model="pocket", input="Hello", text_format=Sure)
assert isinstance(formed.output_parsed, Sure), formed
print("done")
