"""openai: an answer that fits a type, and one that is any JSON object."""

import json
from typing import Literal

from connect import image_url, options
from openai import OpenAI
from pydantic import BaseModel


class Finding(BaseModel):
    """What the answer holds."""

    shape: Literal["circle", "square", "triangle", "star", "heart"]
    colour: Literal["red", "green", "blue"]


o = options()
client = OpenAI(base_url=o.base_url, api_key=o.key)
content = [
    {"type": "image_url", "image_url": {"url": image_url()}},
    {"type": "text", "text": "What shape is the red one?"},
]
answer = client.chat.completions.parse(
    model=o.model, messages=[{"role": "user", "content": content}], response_format=Finding, max_completion_tokens=200,
    temperature=0,
)  # fmt: skip
print("parsed:", answer.choices[0].message.parsed, answer.choices[0].finish_reason)

answer = client.chat.completions.create(
    model=o.model, messages=[{"role": "user", "content": "Who are you?"}], max_completion_tokens=2000, temperature=0,
    response_format={"type": "json_object"},
)  # fmt: skip
if answer.choices[0].finish_reason == "stop":
    print("an object:", type(json.loads(answer.choices[0].message.content)).__name__)
else:
    print("an object: cut off")
