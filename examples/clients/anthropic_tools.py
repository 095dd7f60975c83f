"""anthropic: the model calls a function, gets its result, and answers; the second time as a stream."""

from anthropic import Anthropic
from connect import get_weather, options

o = options()
client = Anthropic(base_url=o.server, api_key=o.key)
tools = [
    {
        "name": "get_weather",
        "description": "The weather in a city.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
]
messages = [{"role": "user", "content": "How is the weather in Paris?"}]

first = client.messages.create(model=o.model, max_tokens=200, messages=messages, tools=tools)
print("stop_reason:", first.stop_reason)
results = []
for block in first.content:
    if block.type == "tool_use":
        print("call:", block.name, block.input)
        results.append({"type": "tool_result", "tool_use_id": block.id, "content": get_weather(**block.input)})
talk = [*messages, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
last = client.messages.create(model=o.model, max_tokens=200, messages=talk, tools=tools)
print("answer:", last.content[0].text)

with client.messages.stream(model=o.model, max_tokens=200, messages=messages, tools=tools) as stream:
    final = stream.get_final_message()
print("streamed call:", *(f"{b.name} {b.input}" for b in final.content if b.type == "tool_use"))
