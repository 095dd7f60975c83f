"""The engine's log-probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypedDict, cast

from trencadis.core.json_types import JsonObject
from trencadis.core.request import TokenLogprob
from trencadis.server.protocol.chat_completions import ChoiceLogprobs, TokenLogprobs
from trencadis.server.protocol.completions import CompletionLogprobs
from trencadis.server.text.checkpoint_tokenizer import Tokenizer

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
        top: number of candidates; the token itself is always listed too.
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
        best = {self._format_token(t): make_finite(p) for t, p in select_top_logprobs(item, self._top)}
        return best | {self._format_token(item.token): make_finite(item.logprob)}

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
