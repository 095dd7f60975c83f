"""Messages of a chat request to what a template takes, and the images in them, each with its place in the request."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trencadis.core.errors import BadRequest, TrencadisError
from trencadis.multimodal.options import MediaPart, part_options, part_uuid

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")
IMAGE_PARTS = ("image_url", "input_image", "image", "image_pil")
LATER_PARTS = {
    "video_url": "video is not supported yet",
    "video": "video is not supported yet",
    "audio_url": "At most 0 audio(s) may be provided in one prompt",
    "input_audio": "At most 0 audio(s) may be provided in one prompt",
    "image_embeds": "image_embeds are not supported",
    "file": "files are not supported",
}


class NotImplementedYet(TrencadisError):
    """501: a form of a value that this server does not read."""

    status = 501
    type = "NotImplementedError"


@dataclass(slots=True)
class Conversation:
    """What a template renders.

    Args:
        messages: with scrubbed texts; images are ``{"type": "image"}`` parts or placeholders in the text.
        images: in prompt order.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    images: list[MediaPart] = field(default_factory=list)


def parse(
    messages: Sequence[Any],
    *,
    scrub: Callable[[Any], Any],
    placeholder: str = "",
    as_string: bool = False,
    max_images: int = 0,
    developer: bool = False,
) -> Conversation:
    """Checks messages and takes their images out.

    Args:
        scrub: removes the process's nonce from a user's value.
        placeholder: marked text of an image, for templates that take content as a string.
        as_string: whether the template does.
        max_images: of one prompt.
        developer: whether the template knows that role; else it reads as ``system``.

    Raises:
        BadRequest: ``param`` is the JSON path of the fault.
    """
    out = Conversation()
    for i, message in enumerate(messages):
        path = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise BadRequest(f"{path} must be an object with role and content.", param=path)
        role = message.get("role")
        if role not in ROLES:
            raise BadRequest(
                f"{path}.role is {str(role)[:40]!r}; one of {', '.join(ROLES)} is needed.", param=f"{path}.role"
            )
        made = {k: scrub(v) for k, v in message.items() if k not in ("content", "role") and v is not None}
        made["role"] = "system" if role == "developer" and not developer else role
        made["content"] = _content(message.get("content"), path, out.images, scrub, placeholder if as_string else None)
        if made.get("tool_calls"):
            made["tool_calls"] = _tool_calls(made["tool_calls"], path)
        out.messages.append(made)
    if len(out.images) > max_images:
        raise BadRequest(f"At most {max_images} image(s) may be provided in one prompt.", param="image")
    return out


def _content(
    content: Any, path: str, images: list[MediaPart], scrub: Callable[[Any], Any], placeholder: str | None
) -> str | list[dict[str, Any]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return str(scrub(content))
    if not isinstance(content, list | tuple):
        raise BadRequest(f"{path}.content must be a string or a list of parts.", param=f"{path}.content")
    parts = []
    for j, part in enumerate(content):
        where = f"{path}.content[{j}]"
        found = _part(part, where)
        if isinstance(found, str):
            parts.append({"type": "text", "text": scrub(found)})
        else:
            images.append(found)
            parts.append({"type": "image"})
    if placeholder is None:
        return parts
    pictures = [placeholder] * sum(p["type"] == "image" for p in parts)
    return "\n".join(pictures + [p["text"] for p in parts if p["type"] == "text"])


def _part(part: Any, where: str) -> str | MediaPart:
    """A part's text, or its image."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise BadRequest(f"{where} must be an object with a type.", param=where)
    kind = part.get("type") or next((k for k in ("text", "image_url", "image") if k in part), None)
    if kind in TEXT_PARTS:
        text = part.get("text", part.get(str(kind)))
        if not isinstance(text, str):
            raise BadRequest(f"{where}.text must be a string.", param=f"{where}.text")
        return text
    if kind in IMAGE_PARTS:
        uuid = part_uuid(part, where)
        return MediaPart(_source(part, where, uuid is not None), where, part_options(part, where), uuid=uuid)
    if kind in LATER_PARTS:
        audio = str(kind).endswith(("audio", "audio_url"))
        raise BadRequest(f"{LATER_PARTS[str(kind)]}.", param="audio" if audio else where)
    raise BadRequest(f"{where} has the unknown type {str(kind)[:40]!r}; text or image_url is needed.", param=where)


def _source(part: Mapping[str, Any], where: str, named: bool) -> Any:
    """A URL, bytes or a PIL image; None only where a uuid names the picture and no data come with it."""
    given = False
    for key in ("image_url", "image", "image_pil"):
        value = part.get(key)
        if isinstance(value, Mapping):
            value = value.get("url")
        if value is None:
            continue
        given = True
        if isinstance(value, str):
            return _address(value.strip(), where)
        if isinstance(value, bytes) or hasattr(value, "resize"):
            return value
        break
    if named and not given:
        return None
    raise BadRequest(f"{where} needs an image_url with a url.", param=where)


def _address(url: str, where: str) -> str:
    scheme = url.partition(":")[0].lower()
    if scheme not in ("http", "https", "data", "file"):
        raise BadRequest("The URL must be either a HTTP, data or file URL.", param=where)
    if scheme == "data" and ";base64" not in url[:200].partition(",")[0].lower():
        raise NotImplementedYet("Only base64 data URLs are supported for now.", param=where)
    return url


def _tool_calls(calls: Any, path: str) -> list[Any]:
    """Templates walk through arguments as an object; clients send them as JSON text."""
    where = f"{path}.tool_calls"
    if not isinstance(calls, list) or not all(isinstance(c, dict) for c in calls):
        raise BadRequest(f"{where} must be a list of objects.", param=where)
    for i, call in enumerate(calls):
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"] or "{}")
            except ValueError:
                raise BadRequest(f"{where}[{i}].function.arguments is not valid JSON.", param=where) from None
    return calls
