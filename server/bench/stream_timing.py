"""Computes the tokens of an answer and their times, by vLLM's definitions."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import msgspec

from trencadis.core.json_types import JsonObject
from trencadis.server.bench.http_client import Exchange

Json = JsonObject


@dataclass(slots=True)
class BenchTiming:
    """Timing of one request, in seconds.

    Args:
        queued: wait in this client because of ``--max-concurrency``.
        ttft: from sending to the first piece with a token.
        itl: times between pieces with tokens.
        latency: from sending to the last piece with a token.
    """

    sent: float = 0.0
    queued: float = 0.0
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    latency: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def tpot(self) -> float:
        """Mean seconds per token after the first; 0 for a single token."""
        return (self.latency - self.ttft) / (self.tokens - 1) if self.tokens > 1 else 0.0


def compute_request_timing(exchange: Exchange, prompt_tokens: int) -> BenchTiming:
    """Computes the timing of an exchange; ``prompt_tokens`` is used if the server does not report usage."""
    found = BenchTiming(exchange.sent, exchange.sent - exchange.started, prompt_tokens=prompt_tokens)
    found.error = exchange.error
    if exchange.status and exchange.status != 200:
        found.error = _describe_refusal(exchange)
    elif not found.error:
        try:
            _read(found, exchange)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            found.error = "an event of the stream is no JSON"
    return found


def _describe_refusal(exchange: Exchange) -> str:
    try:
        error = msgspec.json.decode(exchange.body)["error"]
        said = error["message"] if isinstance(error, dict) else error
    except (msgspec.MsgspecError, KeyError, TypeError, UnicodeDecodeError):
        said = exchange.body[:200].decode("utf-8", "replace")
    return f"{exchange.status}: {' '.join(str(said).split())[:200]}"


def _read(found: BenchTiming, exchange: Exchange) -> None:
    times: list[float] = []
    texts: list[str] = []
    for at, data in split_events(exchange.pieces):
        event = msgspec.json.decode(data)
        if not isinstance(event, dict):
            continue
        if event.get("error"):
            error = event["error"]
            found.error = str(error.get("message", error) if isinstance(error, dict) else error)[:200]
            return
        usage = event.get("usage")
        if usage:
            found.prompt_tokens = usage.get("prompt_tokens") or found.prompt_tokens
            found.tokens = usage.get("completion_tokens") or found.tokens
        piece = get_token_text(event)
        if piece is not None:
            times.append(at)
            texts.append(piece)
    if not times:
        found.error = "the answer has no token"
        return
    found.ttft, found.latency = times[0] - exchange.sent, times[-1] - exchange.sent
    found.itl = [b - a for a, b in itertools.pairwise(times)]
    found.tokens = found.tokens or len(times)
    found.text = "".join(texts)


def split_events(pieces: list[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """Returns (time, data) of server-sent events; an event's time is that of its last byte."""
    found, torn = [], b""
    for at, piece in pieces:
        *whole, torn = (torn + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for one in whole:
            data = one.strip().removeprefix(b"data:").strip()
            if one.strip().startswith(b"data:") and data != b"[DONE]":
                found.append((at, data))
    return found


def get_token_text(event: Json) -> str | None:
    """Returns the text of an event with a token; it may be empty, if a token is not a whole character.

    None for events without a token: only the role, only the end, or the usage.
    """
    choices = event.get("choices")
    if not choices:
        return None
    choice = choices[0]
    if "text" in choice:
        text = choice["text"] or ""
        return None if not text and choice.get("finish_reason") else text
    delta = choice.get("delta") or {}
    text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
    if text or delta.get("tool_calls"):
        return str(text)
    return None if delta.get("role") or choice.get("finish_reason") else ""
