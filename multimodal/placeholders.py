"""Expands each placeholder token of a prompt to as many tokens as its image or video has.

Expands videos whose temporal patches are each preceded by a timestamp in text. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from trencadis.core.cross_attention_inputs import ENDLESS
from trencadis.core.errors import BadRequest
from trencadis.core.media_spans import MediaSpan, TokenRun
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import MediaPart
from trencadis.multimodal.processor_interface import Layout, Media, PreparedImage, PreparedVideo, encoder_items

Encode = Callable[[str], list[int]]


def expand_placeholders(
    tokens: Sequence[int],
    image_token: int,
    media: Sequence[Media],
    positions: Sequence[int],
    video_token: int = -1,
    encode: Encode | None = None,
    placed: int = -1,
) -> tuple[list[int], list[MediaSpan]]:
    """Repeats the token at each of ``positions`` as often as its image or video has tokens.

    Args:
        tokens: prompt ids in which each image is one image token, each video one video token.
        image_token: id of the image token; ``video_token``: id of the video token.
        media: in the order of ``positions``.
        positions: ascending indices into ``tokens``, from the chat template. They cannot be found by id, since a user's
            text may hold the same id.
        encode: tokenizes a layout's text between placeholder tokens, special tokens included; for families whose images
            have such text.
        placed: id that stands for an image in ``tokens``, if it is not ``image_token``.

    Returns:
        The expanded ids, and one span per item (``encoder_items(media)``), by ascending offset.

    Raises:
        ValueError: media and positions differ in number, or a position holds no media token or is out of order.
    """
    if len(media) != len(positions):
        raise ValueError(f"{len(media)} media for {len(positions)} places")
    out: list[int] = []
    spans: list[MediaSpan] = []
    done = 0
    for one, position in zip(media, positions, strict=True):
        wanted = video_token if isinstance(one, PreparedVideo) else image_token
        expected = placed if placed >= 0 and wanted == image_token else wanted
        if not done <= position < len(tokens) or tokens[position] != expected:
            raise ValueError(f"place {position} holds no media token, or is out of order")
        out += tokens[done:position]
        layout = () if isinstance(one, PreparedVideo) else one.layout
        if layout:
            spans += _expand_layout(layout, encoder_items([one]), out, image_token, encode)
        for item in () if layout else encoder_items([one]):
            spans.append(MediaSpan(len(out), item.tokens, item.digest, item.grid, item.slots))
            out += [wanted] * item.tokens
        done = position + 1
    out += tokens[done:]
    return out, spans


def _expand_layout(
    layout: Layout, items: Sequence[PreparedImage], out: list[int], token: int, encode: Encode | None
) -> list[MediaSpan]:
    """Appends a layout's text and placeholder tokens to ``out``; returns the span of each item."""
    runs: list[list[TokenRun]] = [[] for _ in items]
    visible_rows = [0] * len(items)
    for piece in layout:
        if isinstance(piece, str):
            assert encode is not None, "text beside placeholders needs the tokenizer"
            out += encode(piece)
        else:
            runs[piece.item].append(TokenRun(len(out), piece.tokens, piece.first, piece.constant))
            visible_rows[piece.item] = piece.visible_rows
            out += [token] * piece.tokens
    return [_make_span(item, tuple(some), rows) for item, some, rows in zip(items, runs, visible_rows, strict=True)]


def _make_span(item: PreparedImage, runs: tuple[TokenRun, ...], visible_rows: int = 0) -> MediaSpan:
    if visible_rows:
        return MediaSpan(0, ENDLESS, item.digest, item.grid, item.slots, item.tokens, runs, visible_rows)
    first, last = runs[0], runs[-1]
    length = last.offset + last.length - first.offset
    plain = runs == (TokenRun(first.offset, item.tokens),)
    if plain:
        return MediaSpan(first.offset, length, item.digest, item.grid, item.slots)
    return MediaSpan(first.offset, length, item.digest, item.grid, item.slots, item.tokens, runs)


class NumberedPlaceholders:
    """Image placeholders that are numbered text in a raw prompt, such as ``<|image_1|>``.

    ``before`` and ``behind``: text before and after a number.
    """

    def __init__(self, before: str, behind: str) -> None:
        self._pattern = re.compile(f"{re.escape(before)}([0-9]+){re.escape(behind)}")

    def replace_marks(self, text: str, parts: Sequence[MediaPart], token: str) -> tuple[str, Sequence[MediaPart]]:
        """Replaces each numbered mark of ``text`` by ``token`` and returns ``parts`` in the order of the marks.

        A number may occur more than once; a text without marks is returned unchanged, and the caller counts its tokens.

        Raises:
            BadRequest: the numbers in ``text`` are not exactly 1 to the number of ``parts``.
        """
        numbers = [int(found) if len(found) < 10 else 0 for found in self._pattern.findall(text)]
        if not numbers:
            return text, parts
        if set(numbers) != set(range(1, len(parts) + 1)):
            most = len(parts)
            raise BadRequest(
                f"The prompt names {len(set(numbers))} images and has {most}; it must name each by its number, "
                f"{'1' if most == 1 else f'1 to {most}'}.",
                param="prompt",
            )
        return self._pattern.sub(lambda _: token, text), [parts[number - 1] for number in numbers]


def format_timestamps(video: PreparedVideo) -> list[str]:
    """Returns the timestamp text of each temporal patch, the middle of its two frames."""
    seconds = [index / video.rate for index in video.indices]
    pairs = zip(seconds[::2], seconds[1::2], strict=True)
    return [f"<{(first + second) / 2:.1f} seconds>" for first, second in pairs]


def expand_with_timestamps(
    tokens: Sequence[int],
    image_token: int,
    media: Sequence[Media],
    positions: Sequence[int],
    video_token: int = -1,
    encode: Encode | None = None,
    times: Sequence[Sequence[int]] = (),
    marks: tuple[int, int] = (-1, -1),
    behind: bool = False,
) -> tuple[list[int], list[MediaSpan]]:
    """Expands placeholders as ``placeholders.expand_placeholders``, but each temporal patch of a video separately.

    Args:
        times: ids of the timestamp text before each temporal patch of all videos, in order.
        marks: ids before and after each temporal patch. If they surround a video's placeholder in ``tokens``, those are
            dropped.
        behind: timestamps stand after their patches, which have tokens of images.

    Raises:
        ValueError: as ``expand_placeholders``.
    """
    out: list[int] = []
    spans: list[MediaSpan] = []
    timestamps, done = iter(times), 0

    def put(item: PreparedImage, token: int) -> None:
        spans.append(MediaSpan(len(out), item.tokens, item.digest, item.grid, item.slots))
        out.extend([token] * item.tokens)

    for one, position in zip(media, positions, strict=True):
        video = isinstance(one, PreparedVideo)
        if not done <= position < len(tokens) or tokens[position] != (video_token if video else image_token):
            raise ValueError(f"place {position} holds no media token, or is out of order")
        marked = video and position > done and (tokens[position - 1], *tokens[position + 1 : position + 2]) == marks
        out += tokens[done : position - 1 if marked else position]
        if isinstance(one, PreparedVideo):
            for patch in one.patches:
                words = next(timestamps)
                out += [marks[0]] if behind else [*words, marks[0]]
                put(patch, image_token if behind else video_token)
                out += [marks[1], *words] if behind else [marks[1]]
        else:
            put(one, image_token)
        done = position + (2 if marked else 1)
    out += tokens[done:]
    return out, spans
