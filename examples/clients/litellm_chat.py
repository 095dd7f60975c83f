"""LiteLLM: text, a stream, an image, and a tool that is called."""

import os

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else its import asks a server for prices

import litellm
from connect import image_url, options

o = options()
where = {"model": f"openai/{o.model}", "api_base": o.base_url, "api_key": o.key, "max_tokens": 100, "temperature": 0}
talk = [{"role": "user", "content": "Who are you?"}]
print("answer:", litellm.completion(messages=talk, **where).choices[0].message.content)
stream = litellm.completion(messages=talk, stream=True, **where)
print("stream:", "".join(chunk.choices[0].delta.content or "" for chunk in stream))

image = [
    {"type": "image_url", "image_url": {"url": image_url()}},
    {"type": "text", "text": "What shape is the red one?"},
]
answer = litellm.completion(messages=[{"role": "user", "content": image}], **where)
print("picture:", answer.choices[0].message.content)

parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
weather = [{"role": "user", "content": "How is the weather in Paris?"}]
for call in litellm.completion(messages=weather, tools=tools, **where).choices[0].message.tool_calls or []:
    print("call:", call.function.name, call.function.arguments)
