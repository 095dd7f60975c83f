"""The field ``prediction`` of a chat request: a text that the answer may repeat."""

from __future__ import annotations

from trencadis.core.errors import BadRequest
from trencadis.core.json_types import Json, JsonObject

FIELD = "prediction"


def read_prediction(value: JsonObject) -> str:
    """Returns the predicted text.

    Raises:
        BadRequest: the value has another type than content, or content that is neither a text nor a list of texts.
    """
    kind, content = value.get("type"), value.get("content")
    if kind != "content":
        raise BadRequest(f"prediction.type must be 'content', got {kind!r}.", param=f"{FIELD}.type")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest("prediction.content must be a text or a list of text parts.", param=f"{FIELD}.content")
    return "".join(_read_part(part, at) for at, part in enumerate(content))


def _read_part(part: Json, at: int) -> str:
    """Returns the text of part number ``at``."""
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise BadRequest(
            f"prediction.content[{at}] must be a text part: {{'type': 'text', 'text': ...}}.",
            param=f"{FIELD}.content[{at}]",
        )
    return text


def check_prediction(value: JsonObject, choices: int, calls: bool) -> None:
    """Checks a prediction against the rest of its request.

    Args:
        choices: number of requested answers; ``calls``: True if the answer may call tools.

    Raises:
        BadRequest: the prediction is malformed, or is sent with several answers or with tools.
    """
    read_prediction(value)
    if choices > 1:
        raise BadRequest(f"prediction is about one answer, but n is {choices}.", param=FIELD)
    if calls:
        raise BadRequest("prediction cannot be used with tools; leave it out, or send tool_choice 'none'.", param=FIELD)
