"""Drives a server by LangChain's chat model. Usage: langchain_model.py http://HOST:PORT/v1"""

import sys

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

common = {"base_url": sys.argv[1], "api_key": "none", "max_retries": 0}
model = ChatOpenAI(model="pocket", temperature=0, max_tokens=100, **common)
said = [SystemMessage("Be brief."), HumanMessage("Hello")]

whole = model.invoke(said)
assert whole.content and whole.usage_metadata["output_tokens"] > 0, whole
assert "".join(part.content for part in model.stream(said)) == whole.content
assert [answer.content for answer in model.batch([said, said])] == [whole.content] * 2


@tool
def lamp(on: bool) -> str:
    """Turns the lamp on or off."""
    return "It is on." if on else "It is off."


with_tools = model.bind_tools([lamp], tool_choice="lamp")
called = with_tools.invoke(said)
call = called.tool_calls[0]
assert call["name"] == "lamp" and isinstance(call["args"]["on"], bool), called
streamed = None
for part in with_tools.stream(said):
    streamed = part if streamed is None else streamed + part
assert streamed.tool_calls[0]["args"] == call["args"], streamed
result: ToolMessage = lamp.invoke(call)
assert model.bind_tools([lamp]).invoke([*said, called, result]).response_metadata["finish_reason"]


class Sure(BaseModel):
    """Whether it is sure."""

    sure: bool


for method in ("json_schema", "function_calling"):
    found = model.with_structured_output(Sure, method=method).invoke("Sure?")
    assert isinstance(found, Sure), (method, found)

newer = ChatOpenAI(model="pocket", temperature=0, max_tokens=12, use_responses_api=True, **common)
assert newer.invoke("Hello").text

vectors = OpenAIEmbeddings(model="llama", check_embedding_ctx_length=False, **common)
assert len(vectors.embed_query("Hello")) == 32
print("done")
