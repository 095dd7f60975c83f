"""langchain-openai: an answer of a type, by a JSON schema and by a call that must be made."""

from typing import Literal

from connect import image_url, options
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Finding(BaseModel):
    """A shape in an image."""

    shape: Literal["circle", "square", "triangle", "star", "heart"]
    colour: Literal["red", "green", "blue"]


o = options()
model = ChatOpenAI(base_url=o.base_url, api_key=o.key, model=o.model, max_completion_tokens=400, temperature=0)
image = [
    {"type": "image_url", "image_url": {"url": image_url()}},
    {"type": "text", "text": "What shape is the red one?"},
]
for method in ("json_schema", "function_calling"):
    found = model.with_structured_output(Finding, method=method, strict=True).invoke([HumanMessage(image)])
    print(f"{method}:", type(found).__name__, found)
