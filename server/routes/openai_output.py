"""Parts of an answer in OpenAI's form: a message, the delta of a chunk, log-probabilities in two forms, and usage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TypedDict, cast

from trencadis.core.json_types import JsonObject
from trencadis.core.request import TokenLogprob
from trencadis.server.prompts.answer_reader import AnswerPart, CallPart
from trencadis.server.prompts.generation_stream import Generation
from trencadis.server.prompts.prompt_and_chat_messages import Prompt
from trencadis.server.protocol.base_request import (
    CompletionTokensDetails,
    ImageDetails,
    PromptTokensDetails,
    Usage,
    VideoDetails,
)
from trencadis.server.protocol.chat_completions import (
    CalledFunction,
    ChoiceLogprobs,
    DeltaFunction,
    DeltaMessage,
    DeltaToolCall,
    Message,
    MessageToolCall,
    TokenLogprobs,
)
from trencadis.server.protocol.completions import CompletionLogprobs
from trencadis.server.text.checkpoint_tokenizer import Tokenizer


def make_message(role: str, text: str, parts: Sequence[AnswerPart]) -> Message:
    """Makes the message of a whole answer; ``text`` is its content if no parser has read it into ``parts``."""
    return _read_message(role, parts) if parts else Message(role=role, content=text)


def _read_message(role: str, parts: Sequence[AnswerPart]) -> Message:
    thoughts = "".join(part.reasoning for part in parts) or None
    calls = _make_calls(parts)
    content = "".join(part.content for part in parts) or (None if calls or thoughts else "")
    return Message(role=role, content=content, tool_calls=calls, reasoning=thoughts, reasoning_content=thoughts)


def _make_calls(parts: Sequence[AnswerPart]) -> list[MessageToolCall]:
    found: dict[int, tuple[CallPart, list[str]]] = {}
    for part in parts:
        for call in part.calls:
            found.setdefault(call.index, (call, []))[1].append(call.arguments)
    return [
        MessageToolCall(id=first.id, function=CalledFunction(name=first.name, arguments="".join(arguments)))
        for first, arguments in found.values()
    ]


def make_delta(part: AnswerPart) -> DeltaMessage:
    """Makes the delta that a chunk adds; only fields with a value are set."""
    delta = DeltaMessage()
    if thoughts := part.reasoning:
        delta.reasoning = delta.reasoning_content = thoughts
    if content := part.content:
        delta.content = content
    if calls := part.calls:
        delta.tool_calls = [_make_call_delta(call) for call in calls]
    return delta


def _make_call_delta(call: CallPart) -> DeltaToolCall:
    if not call.id:
        return DeltaToolCall(index=call.index, function=DeltaFunction(arguments=call.arguments))
    function = DeltaFunction(name=call.name, arguments=call.arguments)
    return DeltaToolCall(index=call.index, id=call.id, type="function", function=function)


FLOOR = -9999.0
"""Replaces minus infinity, which JSON does not have."""


def make_finite(value: float) -> float:
    """Returns ``value``; minus infinity and NaN become ``FLOOR``."""
    return max(value, FLOOR) if math.isfinite(value) else FLOOR


def select_top_logprobs(item: TokenLogprob, top: int) -> list[tuple[int, float]]:
    """Returns the ``top`` best ids (-1: all) and their log-probabilities, or all ids of ``logprob_token_ids`` if those
    were requested.
    """
    pairs = list(zip(item.top_ids, item.top_logprobs, strict=True))
    return pairs if item.top_ranks or top < 0 else pairs[:top]


def get_token_text(tokenizer: Tokenizer, token: int) -> str:
    """Returns the text of a single token."""
    return tokenizer.get_token_bytes(token).decode("utf-8", "replace")


class TokenFields(TypedDict):
    """A token of the chat form: ``bytes`` are those of its text."""

    token: str
    logprob: float
    bytes: list[int]


class TokenEntry(TokenFields):
    """A token of the chat form with its candidates."""

    top_logprobs: list[TokenFields]


class CompletionLists(TypedDict):
    """The completions form: a value for each token; None for the first token of an echoed prompt."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptToken(TypedDict):
    """A token at a position of a prompt: ``rank`` counts from 1."""

    logprob: float
    rank: int
    decoded_token: str


PromptEntry = dict[str, PromptToken]
"""Tokens at one position of a prompt, by id."""


def make_chat_logprobs(
    tokenizer: Tokenizer, items: Sequence[TokenLogprob], top: int, as_ids: bool = False
) -> ChoiceLogprobs:
    """Makes the chat form: one entry per token with ``top`` candidates; ``as_ids`` shows tokens as ``token_id:ID``."""
    entries = cast(list[JsonObject], make_chat_entries(tokenizer, items, top, as_ids))
    return ChoiceLogprobs(content=[TokenLogprobs(**entry) for entry in entries])


def make_chat_entries(
    tokenizer: Tokenizer, items: Sequence[TokenLogprob], top: int, as_ids: bool = False
) -> list[TokenEntry]:
    """Makes the fields of ``TokenLogprobs`` for each token; arguments: see ``make_chat_logprobs``."""
    made = []
    for item in items:
        best = select_top_logprobs(item, top) if item.top_ids else []
        entry: TokenEntry = {
            **_make_fields(tokenizer, item.token, item.logprob, as_ids),
            "top_logprobs": [_make_fields(tokenizer, t, p, as_ids) for t, p in best],
        }
        made.append(entry)
    return made


def _make_fields(tokenizer: Tokenizer, token: int, logprob: float, as_ids: bool) -> TokenFields:
    raw = tokenizer.get_token_bytes(token)
    shown = format_token_id(token) if as_ids else raw.decode("utf-8", "replace")
    return {"token": shown, "logprob": make_finite(logprob), "bytes": list(raw)}


def format_token_id(token: int) -> str:
    """Returns a token as its id (``return_tokens_as_token_ids``), because different tokens may have equal texts."""
    return f"token_id:{token}"


class CompletionLogprobsBuilder:
    """Builds the completions form; keeps the text offset between the events of a stream.

    Args:
        top: number of candidates, which are listed after the token itself.
    """

    def __init__(self, tokenizer: Tokenizer, top: int, as_ids: bool = False) -> None:
        self._as_ids = as_ids
        self._tokenizer = tokenizer
        self._top = top
        self._offset = 0

    def build(self, items: Sequence[TokenLogprob | None], first: int | None = None) -> CompletionLogprobs:
        """Makes the lists over ``items``; None stands for ``first``, the first token of an echoed prompt."""
        return CompletionLogprobs(**self.build_lists(items, first))

    def build_lists(self, items: Sequence[TokenLogprob | None], first: int | None = None) -> CompletionLists:
        """Returns the fields of ``build`` as a dict."""
        offsets, tokens = list[int](), list[str]()
        scores, best = list[float | None](), list[dict[str, float] | None]()
        for item in items:
            token = (first or 0) if item is None else item.token
            text = get_token_text(self._tokenizer, token)
            offsets.append(self._offset)
            self._offset += len(text)
            tokens.append(format_token_id(token) if self._as_ids else text)
            scores.append(None if item is None else make_finite(item.logprob))
            best.append(None if item is None else self._make_top(item))
        return {"text_offset": offsets, "token_logprobs": scores, "tokens": tokens, "top_logprobs": best}

    def _make_top(self, item: TokenLogprob) -> dict[str, float]:
        own = {self._format_token(item.token): make_finite(item.logprob)}
        best = {self._format_token(t): make_finite(p) for t, p in select_top_logprobs(item, self._top)}
        return own | best | own  # the token comes first, as vLLM's clients expect; others may have the same text

    def _format_token(self, token: int) -> str:
        return format_token_id(token) if self._as_ids else get_token_text(self._tokenizer, token)


def make_prompt_table(tokenizer: Tokenizer, items: Sequence[TokenLogprob | None], top: int) -> list[PromptEntry | None]:
    """Makes ``prompt_logprobs``: per prompt token an object from id to logprob, rank and text; null for the first.

    The token itself is always listed, in addition to the ``top`` best (-1: all).
    """
    last = None if top < 0 else top
    out: list[PromptEntry | None] = []
    for item in items:
        if item is None:
            out.append(None)
            continue
        entry: PromptEntry = {
            str(token): {"logprob": make_finite(p), "rank": rank, "decoded_token": get_token_text(tokenizer, token)}
            for rank, (token, p) in enumerate(zip(item.top_ids[:last], item.top_logprobs[:last], strict=True), 1)
        }
        chosen: PromptToken = {
            "logprob": make_finite(item.logprob),
            "rank": item.rank,
            "decoded_token": get_token_text(tokenizer, item.token),
        }
        out.append({str(item.token): chosen} | entry)
    return out


def make_usage(generations: Sequence[Generation], sizes: bool = False, shown: bool = True) -> Usage:
    """Counts the tokens of a request; ``sizes`` adds the size of each image and video after resizing.

    Args:
        shown: list the kinds of prompt tokens even without ``sizes``.
    """
    prompt = sum(len(g.prompt.tokens) for g in generations)
    completion = sum(g.timing.generated for g in generations)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=make_prompt_details(generations, sizes) if shown or sizes else None,
        completion_tokens_details=make_completion_details(generations),
    )


def make_completion_details(generations: Sequence[Generation]) -> CompletionTokensDetails | None:
    """Counts the kinds of tokens of all answers; None if no kind is counted."""
    thoughts = [g.reasoning_tokens for g in generations if g.reasoning_tokens is not None]
    predicted = [g.predicted for g in generations if g.predicted is not None]
    if not thoughts and not predicted:
        return None
    made = CompletionTokensDetails(reasoning_tokens=sum(thoughts))
    if predicted:
        made.accepted_prediction_tokens = sum(one.count_accepted() for one in predicted)
        made.rejected_prediction_tokens = sum(one.count_rejected() for one in predicted)
    return made


def make_prompt_details(generations: Sequence[Generation], sizes: bool) -> PromptTokensDetails:
    """Counts the kinds of tokens of all prompts; ``sizes``: see ``make_usage``."""
    details = PromptTokensDetails(cached_tokens=sum(g.timing.cached for g in generations), image_tokens=0)
    if any(g.prompt.media for g in generations):
        _count_media(details, generations)
    if sizes:
        _add_sizes(details, generations)
    return details


def _add_sizes(details: PromptTokensDetails, generations: Sequence[Generation]) -> None:
    """Adds the sizes of each image and video as the model sees it."""
    details.images = [one for g in generations for one in list_image_details(g.prompt)]
    details.videos = [one for g in generations for one in list_video_details(g.prompt)] or None


def _count_media(details: PromptTokensDetails, generations: Sequence[Generation]) -> None:
    """Adds the placeholder tokens of images and videos."""
    kinds = {"image": False, "video": True}
    counts = {kind: sum(g.prompt.count_media_tokens(videos) for g in generations) for kind, videos in kinds.items()}
    details.image_tokens, details.video_tokens = counts.values()
    details.multimodal_tokens = {kind: count for kind, count in counts.items() if count}


def list_image_details(prompt: Prompt) -> list[ImageDetails]:
    """Lists the images of a prompt as the model sees them."""
    return [ImageDetails(**asdict(size)) for size in prompt.image_sizes]


def list_video_details(prompt: Prompt) -> list[VideoDetails]:
    """Lists the videos of a prompt as the model sees them."""
    return [
        VideoDetails(
            width=c.resized[1],
            height=c.resized[0],
            grid=list(c.grid),
            tokens=c.tokens,
            fps=c.fps,
            frames=list(c.indices),
            total_frames=c.frames,
        )
        for c in prompt.clips
    ]
