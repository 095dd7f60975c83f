"""openai: a call that the model must make, of any function and of one by name; its arguments fit the schema."""

import json

from connect import image_url, options
from openai import OpenAI

o = options()
client = OpenAI(base_url=o.base_url, api_key=o.key)
shape = {"type": "string", "enum": ["circle", "square", "triangle"]}
tools = [
    {
        "type": "function",
        "function": {
            "name": "report",
            "description": "Reports a shape.",
            "parameters": {
                "type": "object", "properties": {"shape": shape}, "required": ["shape"], "additionalProperties": False,
            },
        },
    }
]  # fmt: skip
content = [
    {"type": "image_url", "image_url": {"url": image_url()}},
    {"type": "text", "text": "What shape is the red one?"},
]
for choice in ("required", {"type": "function", "function": {"name": "report"}}):
    answer = client.chat.completions.create(
        model=o.model, messages=[{"role": "user", "content": content}], tools=tools, tool_choice=choice,
        max_completion_tokens=200, temperature=0,
    )  # fmt: skip
    call = answer.choices[0].message.tool_calls[0].function
    print("call:", call.name, json.loads(call.arguments)["shape"], answer.choices[0].finish_reason)
