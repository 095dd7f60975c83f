"""openai: the model calls a function, gets its result, and answers; the second time as a stream."""

import json

from connect import get_weather, options
from openai import OpenAI

o = options()
client = OpenAI(base_url=o.base_url, api_key=o.key)
tools = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
messages = [{"role": "user", "content": "How is the weather in Paris?"}]

first = client.chat.completions.create(model=o.model, messages=messages, tools=tools, max_completion_tokens=200)
print("finish_reason:", first.choices[0].finish_reason)
messages.append(first.choices[0].message)
for call in first.choices[0].message.tool_calls:
    print("call:", call.function.name, call.function.arguments)
    result = get_weather(**json.loads(call.function.arguments))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
last = client.chat.completions.create(model=o.model, messages=messages, tools=tools, max_completion_tokens=200)
print("answer:", last.choices[0].message.content)

with client.chat.completions.stream(model=o.model, messages=messages[:1], tools=tools) as stream:
    for event in stream:
        if event.type == "tool_calls.function.arguments.done":
            print("streamed call:", event.name, event.arguments)
