"""Drives a server by the official `openai` package. Usage: official_client.py http://HOST:PORT/v1"""

import json
import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
said = [{"role": "user", "content": "Hello"}]

assert [model.id for model in client.models.list()] == ["llama"]

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
print("done")
