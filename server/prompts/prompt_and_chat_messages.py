"""A prompt in the engine's form, and the messages of a chat request converted for the template.

A prompt has ids, media, and how answers to it are parsed. Media of messages are collected with their JSON paths.
Content parts are texts, images and videos, in OpenAI's form and in qwen-vl-utils'. OpenAI's form names a URL
(``image_url``, ``video_url``). The form of qwen-vl-utils (``image``, ``video``) also takes bare paths, PIL images and,
for a video, a list of frames.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from trencadis.core.errors import BadRequest, TrencadisError, attach_param
from trencadis.core.json_types import Json, JsonMapping, JsonObject
from trencadis.core.output_constraints import Rule
from trencadis.core.request import Request, SamplingParams
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import MediaPart, part_options, part_uuid
from trencadis.multimodal.media_timing_and_concurrency import MediaTimes
from trencadis.server.prompts.answer_reader import AnswerReader
from trencadis.server.prompts.multimodal_inputs import (
    ExpandedPrompt,
    ImageItem,
    MediaItem,
    VideoItem,
    is_video,
    list_encoder_items,
)
from trencadis.server.protocol.json_body_limits import BodyLimits, BodyScan, check_json, scan_text
from trencadis.server.text.chat_template import ROLES
from trencadis.server.text.checkpoint_tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ImageSize:
    """One image of a prompt as the model saw it; boxes in an answer refer to ``width`` x ``height``, in pixels.

    Args:
        grid: patches (t, h, w).
        tokens: placeholder tokens in the prompt.
        original_width: width of the upright image before resizing.
    """

    width: int
    height: int
    grid: tuple[int, int, int]
    tokens: int
    original_width: int
    original_height: int


@dataclass(slots=True)
class Prompt:
    """A prompt as token ids, with its media in prompt order.

    Args:
        reader: makes the parser of each answer; None if answers are content only.
        shown: special tokens that stay in the text for the readers, even if other special tokens are skipped.
        rule: restricts what answers may contain.
        interval: tokens that a streamed piece must collect; the first piece and the last do not wait.
        prediction: ids of a text that the answer may repeat.
    """

    tokens: list[int]
    text: str | None = None
    expanded: ExpandedPrompt | None = None
    media: list[MediaItem] = field(default_factory=list)
    salt: str = ""
    times: MediaTimes = field(default_factory=MediaTimes)
    reader: Callable[[], AnswerReader] | None = None
    shown: frozenset[int] = frozenset()
    rule: Rule | None = None
    interval: int = 1
    prediction: list[int] = field(default_factory=list)

    @property
    def images(self) -> list[ImageItem]:
        """The images among the media."""
        return [cast(ImageItem, m) for m in self.media if not is_video(m)]

    @property
    def clips(self) -> list[VideoItem]:
        """The videos among the media."""
        return [cast(VideoItem, m) for m in self.media if is_video(m)]

    def count_media_tokens(self, videos: bool) -> int:
        """Returns the number of placeholder tokens of all videos, or of all images."""
        return sum(m.tokens for m in self.media if is_video(m) == videos)

    @property
    def image_sizes(self) -> list[ImageSize]:
        """Sizes of the images, in order."""
        return [
            ImageSize(p.resized[1], p.resized[0], p.grid, p.tokens, p.original[1], p.original[0]) for p in self.images
        ]

    @property
    def pixels(self) -> list[Any]:
        """uint8 [patches, values of a patch], one array per span: an image or a temporal patch of a video."""
        return [item.pixels for item in list_encoder_items(self.media)]

    def make_request(
        self, id: str, sampling: SamplingParams, *, arrival: float, salt: str = "", priority: int = 0
    ) -> Request:
        """Makes the request for the engine."""
        e, salt = self.expanded or ExpandedPrompt(self.tokens), salt or self.salt
        made = Request(id, self.tokens, sampling, e.spans, e.positions, e.delta, salt, priority, arrival, self.rule)
        made.prediction = self.prediction
        return made


def render_prompt(prompt: Prompt, tokenizer: Tokenizer, most: int | None) -> str:
    """Returns the text of a prompt, special tokens included, with one placeholder for each image or video.

    Args:
        most: most characters of the result; None: all.
    """
    kept: list[int] = []
    at = 0
    spans = () if prompt.expanded is None else prompt.expanded.spans
    for run in sorted(run for span in spans for run in span.list_runs()):
        # Consecutive runs belong to one image.
        beside = 0 < at == run.offset and prompt.tokens[at] == prompt.tokens[at - 1]
        kept += prompt.tokens[at : run.offset + (not beside)]
        at = run.offset + run.length
    # A token has at least one character, except pieces of a character: these make the text shorter than ``most``.
    kept = (kept + prompt.tokens[at:])[:most]
    return tokenizer.decode(kept, skip_special_tokens=False)[:most]


TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")
IMAGE_KEYS = ("image_url", "image", "image_pil")
IMAGE_PARTS = (*IMAGE_KEYS, "input_image")
VIDEO_KEYS = ("video_url", "video")
VIDEO_PARTS = (*VIDEO_KEYS, "input_video")
PATH_KEYS = ("image", "video")
"""Keys whose values may be bare paths."""
GUESSED = ("text", "image_url", "image", "video_url", "video")
"""Keys that determine the kind of a part without a type, in this order."""
LATER_PARTS = {
    "audio_url": "At most 0 audio(s) may be provided in one prompt",
    "input_audio": "At most 0 audio(s) may be provided in one prompt",
    "image_embeds": "image_embeds are not supported",
    "video_embeds": "video_embeds are not supported",
    "file": "files are not supported",
}
LONGEST_PATH = 4096
"""Most characters of a path, as Linux has it; each part of one is an object."""
_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:")


class NotImplementedYet(TrencadisError):
    """501: this server does not support this form of a value."""

    status = 501
    type = "NotImplementedError"


def read_part(part: Json, where: str) -> str | MediaPart:
    """Returns the text of a part, or its image or video.

    Raises:
        BadRequest: ``param`` is ``where``, the part's JSON path, or a field below it.
        NotImplementedYet: a data URL without base64.
    """
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise BadRequest(f"{where} must be an object with a type.", param=where)
    kind = part.get("type") or next((k for k in GUESSED if k in part), None)
    if kind in TEXT_PARTS:
        text = part.get("text", part.get(str(kind)))
        if not isinstance(text, str):
            raise BadRequest(f"{where}.text must be a string.", param=f"{where}.text")
        return text
    return _read_media(part, kind, where)


def _read_media(part: JsonMapping, kind: Json, where: str) -> MediaPart:
    """Returns the image or video of a part of type ``kind``, which is not text."""
    if kind in IMAGE_PARTS:
        uuid = part_uuid(part, where)
        source = _read_image(part, where, uuid is not None)
        return MediaPart(source, where, part_options(part, where), uuid=uuid)
    return _read_video_part(part, kind, where)


def _read_video_part(part: JsonMapping, kind: Json, where: str) -> MediaPart:
    """Returns the video of a part of type ``kind``, which is neither text nor image."""
    if kind in VIDEO_PARTS:
        uuid = part_uuid(part, where)
        return MediaPart(_read_video(part, where, uuid is not None), where, part_options(part, where), "video", uuid)
    if isinstance(kind, str) and kind in LATER_PARTS:
        audio = kind.endswith(("audio", "audio_url"))
        raise BadRequest(f"{LATER_PARTS[kind]}.", param="audio" if audio else where)
    raise BadRequest(f"{where} has the unknown type {str(kind)[:40]!r}; text or image_url is needed.", param=where)


def _read_image(part: JsonMapping, where: str, named: bool) -> object:
    """Returns a URL, path, bytes or PIL image; None if ``named`` (the part has a uuid) and there is no data."""
    key, value = _find_value(part, IMAGE_KEYS)
    if value is None and named:
        return None
    source = _read_source(value, key, where)
    if source is None:
        raise BadRequest(f"{where} needs an image_url with a url.", param=where)
    return source


def _read_video(part: JsonMapping, where: str, named: bool) -> object:
    """Returns a URL, path, bytes, array of frames, or list of images; None if ``named`` (the part has a uuid) and
    there is no data.
    """
    key, value = _find_value(part, VIDEO_KEYS)
    if value is None and named:
        return None
    if isinstance(value, list | tuple):
        return [_read_frame(frame, f"{where}.{key}[{i}]", where) for i, frame in enumerate(value)]
    # An array of frames has a ``resize`` too, so that ``_read_source`` returns it unchanged.
    source = _read_source(value, key, where)
    if source is None:
        raise BadRequest(f"{where} needs a video_url with a url, or a video with a path or frames.", param=where)
    return source


def _read_frame(value: Json, field: str, where: str) -> Json:
    if isinstance(value, Mapping):
        value = _find_value(value, (*IMAGE_KEYS, "url"))[1]
    source = _read_source(value, "image", where)
    if source is None:
        raise BadRequest(f"{field} must be a URL, a path or an image.", param=where)
    return source


def _find_value(part: JsonMapping, keys: tuple[str, ...]) -> tuple[str, Json]:
    """Returns the first key that is present, and its value or the ``url`` inside it."""
    for key in keys:
        value = part.get(key)
        if isinstance(value, Mapping):
            value = value.get("url")
        if value is not None:
            return key, value
    return keys[0], None


def _read_source(value: Json, key: str, where: str) -> object:
    """Returns a source that the media loader takes, or None."""
    if isinstance(value, str):
        return _read_url(value.strip(), key, where)
    return value if isinstance(value, bytes | Path) or hasattr(value, "resize") else None


def _read_url(url: str, key: str, where: str) -> str | Path:
    if url and key in PATH_KEYS and "\0" not in url and not _SCHEME.match(url):
        if len(url) > LONGEST_PATH:
            raise BadRequest(f"A path has at most {LONGEST_PATH} characters.", param=where)
        return Path(url)
    scheme = url.partition(":")[0].lower()
    if scheme not in ("http", "https", "data", "file"):
        raise BadRequest("The URL must be either a HTTP, data or file URL.", param=where)
    if scheme == "data" and ";base64" not in url[:200].partition(",")[0].lower():
        raise NotImplementedYet("Only base64 data URLs are supported for now.", param=where)
    return url


ARGUMENTS = BodyLimits(values=1 << 16, containers=1 << 14, outline=4 << 20, text=4 << 20)
"""Limits of the arguments of all tool calls of a conversation, which are JSON inside JSON."""


LONGEST_ROLE = 64
"""Most characters of a role."""

PAIR_ROLES = ("query", "document")
"""Roles of the two sides of a pair, on a pooling server."""


@dataclass(frozen=True, slots=True)
class MessageRules:
    """The limits of messages and the template's expectations.

    Args:
        scrub: removes this process's nonce from a value of the user.
        roles: what the template calls each role that is known here; a user's own stays as it is.
        placeholders: marked text of each kind (``image``, ``video``), for templates that take content as a string.
        as_string: known roles whose content the template takes as a string; a user's own is taken as ``user`` is.
        as_parts: known roles whose content the template takes as a list of parts alone, as above.
        most: most media of each kind in one prompt.
        text_arguments: the template takes arguments of calls as JSON text, not as objects.
    """

    scrub: Callable[[Json], Json]
    roles: Mapping[str, str]
    placeholders: Mapping[str, str] = field(default_factory=dict)
    as_string: Collection[str] = ()
    as_parts: Collection[str] = ()
    most: Mapping[str, int] = field(default_factory=dict)
    text_arguments: bool = False


@dataclass(slots=True)
class Conversation:
    """The messages that a template renders, with their media.

    Args:
        messages: texts are scrubbed; media are ``{"type": "image"}`` or ``video`` parts, or placeholders in the text.
        media: in prompt order.
        arguments: counts the values and characters in the arguments of all calls.
    """

    messages: list[JsonObject] = field(default_factory=list)
    media: list[MediaPart] = field(default_factory=list)
    arguments: BodyScan = field(default_factory=lambda: BodyScan(ARGUMENTS))


def parse_messages(messages: Sequence[Json], rules: MessageRules) -> Conversation:
    """Checks messages and collects their media.

    Raises:
        BadRequest: ``param`` is the JSON path of the fault.
    """
    out = Conversation()
    for i, message in enumerate(messages):
        out.messages.append(_convert_message(message, f"messages[{i}]", rules, out))
    if out.media:
        _check_media_counts(out.media, rules.most)
    return out


def _convert_message(message: Json, path: str, rules: MessageRules, conversation: Conversation) -> JsonObject:
    """Converts a message for the template; its media and arguments are counted in ``conversation``."""
    if not isinstance(message, Mapping):
        raise BadRequest(f"{path} must be an object with role and content.", param=path)
    check_json(message, path)
    role = _read_role(message.get("role"), f"{path}.role")
    made = {k: rules.scrub(v) for k, v in message.items() if k not in ("content", "role") and v is not None}
    made["role"] = rules.roles[role] if role in rules.roles else rules.scrub(role)
    known = role if role in rules.roles else "user"
    made["content"] = _convert_content(message.get("content"), path, conversation.media, rules, known)
    if len(made) > 2:
        _add_calls(made, path, rules, conversation)
    return made


def _read_role(role: Json, where: str) -> str:
    """The role of a message, also one of the user's own: the template decides what it makes of it.

    Raises:
        BadRequest: it is no short text, or not of one line: templates end what they say of a message with one.
    """
    if not isinstance(role, str) or not 0 < len(role) <= LONGEST_ROLE or not role.isprintable():
        shown = role[:40] if isinstance(role, str) else role if role is None else type(role).__name__
        raise BadRequest(
            f"{where} is {shown!r}; give a line of at most {LONGEST_ROLE} characters, such as {', '.join(ROLES)}.",
            param=where,
        )
    return role


def _add_calls(made: JsonObject, path: str, rules: MessageRules, conversation: Conversation) -> None:
    """Adds a message's calls and reasoning in the form that templates read."""
    calls = made.pop("tool_calls", None)
    if calls:
        made["tool_calls"] = rules.scrub(_convert_tool_calls(calls, path, conversation.arguments, rules.text_arguments))
    thoughts = made.get("reasoning_content", made.get("reasoning"))
    if isinstance(thoughts, str):
        # Answers of this server have both names, and templates read either.
        made["reasoning_content"] = made["reasoning"] = thoughts
        if not (calls and made["content"]):  # gpt-oss' template reads this name, and refuses it beside both
            made.setdefault("thinking", thoughts)


def _check_media_counts(media: Sequence[MediaPart], most: Mapping[str, int]) -> None:
    for kind in ("image", "video"):
        allowed = most.get(kind, 0)
        if sum(part.kind == kind for part in media) > allowed:
            raise BadRequest(f"At most {allowed} {kind}(s) may be provided in one prompt.", param=kind)


def _convert_content(
    content: Json, path: str, media: list[MediaPart], rules: MessageRules, role: str
) -> str | list[JsonObject]:
    if content is None:
        return ""
    if isinstance(content, str):
        text = str(rules.scrub(content))
        return [{"type": "text", "text": text}] if role in rules.as_parts else text
    if not isinstance(content, list | tuple):
        raise BadRequest(f"{path}.content must be a string or a list of parts.", param=f"{path}.content")
    parts = [_convert_part(part, f"{path}.content[{j}]", media, rules) for j, part in enumerate(content)]
    return _join_as_text(parts, rules) if role in rules.as_string else parts


def _join_as_text(parts: Sequence[JsonMapping], rules: MessageRules) -> str:
    """Joins content for a template that takes it as a string: placeholders, then texts."""
    shown = [rules.placeholders.get(p["type"], "") for p in parts if p["type"] != "text"]
    return "\n".join(shown + [p["text"] for p in parts if p["type"] == "text"])


def _convert_part(part: Json, where: str, media: list[MediaPart], rules: MessageRules) -> JsonObject:
    found = read_part(part, where)
    if isinstance(found, str):
        return {"type": "text", "text": rules.scrub(found)}
    return _convert_media_part(found, media, rules)


def _convert_media_part(part: MediaPart, media: list[MediaPart], rules: MessageRules) -> JsonObject:
    """Adds an image or a video to ``media`` and returns its part for the template."""
    media.append(part)
    if len(media) > sum(rules.most.values()):
        # Raises now: reading tens of thousands more would only cost time.
        _check_media_counts(media, rules.most)
    return {"type": part.kind}


def _convert_tool_calls(calls: Json, path: str, scan: BodyScan, as_text: bool) -> list[Json]:
    """Converts calls to transformers' form: clients send arguments as JSON text, templates expect an object.

    A call without arguments has an empty object, which templates can print.
    """
    where = f"{path}.tool_calls"
    if not isinstance(calls, list) or not all(isinstance(c, dict) for c in calls):
        raise BadRequest(f"{where} must be a list of objects.", param=where)
    for i, call in enumerate(calls):
        function = call.get("function")
        if isinstance(function, dict) and function.get("arguments") is None:
            function["arguments"] = {}
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            name = f"{where}[{i}].function.arguments"
            with attach_param(name):
                scan_text(scan, function["arguments"])
            try:
                function["arguments"] = json.loads(function["arguments"] or "{}")
            except (ValueError, RecursionError):
                raise BadRequest(f"{name} is not valid JSON.", param=where) from None
            check_json(function["arguments"], name)
        if as_text and isinstance(function, dict):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return calls
