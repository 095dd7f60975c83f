"""The output of one choice: detokenized text, stop strings, and its finish reason.

Text is emitted as soon as it is certain; the pieces join to the full decode. Stop strings are found in a text that
arrives in pieces.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

from trencadis.core.errors import TrencadisError, Unavailable, from_status
from trencadis.core.request import Delta, RequestStats, SamplingParams, TokenLogprob
from trencadis.server.prompts.answer_reader import AnswerPart, AnswerReader
from trencadis.server.text.checkpoint_tokenizer import TokenBytes, Tokenizer

REPLACEMENT = "�"


class Detokenizer(Protocol):
    """Turns the tokens of one choice into text."""

    def feed(self, tokens: Sequence[int]) -> str:
        """Returns the text that ``tokens`` made certain."""
        ...

    def finish(self) -> str:
        """Returns the text still held back when the choice ends."""
        ...


class DetokenizerMaker(Protocol):
    """Makes the detokenizer of one choice.

    Args:
        prompt: ids of the prompt; they matter only if texts depend on the tokens before them.
        shown: special tokens that are not skipped, because a parser reads them.
    """

    def __call__(
        self, prompt: Sequence[int] = (), skip_special_tokens: bool = True, shown: frozenset[int] = frozenset()
    ) -> Detokenizer:
        """Makes the detokenizer."""
        ...


def make_detokenizers(tokenizer: Tokenizer) -> DetokenizerMaker:
    """Returns the maker of detokenizers for a vocabulary."""
    if tokenizer.pieces.byte_level:
        return partial(ByteDetokenizer, tokenizer.pieces)
    return partial(WindowDetokenizer, tokenizer)


class ByteDetokenizer:
    """Detokenizer for byte-level vocabularies; holds back the bytes of an unfinished character."""

    def __init__(
        self,
        pieces: TokenBytes,
        prompt: Sequence[int] = (),
        skip_special_tokens: bool = True,
        shown: Set[int] = frozenset(),
    ) -> None:
        self._pieces = pieces
        self._skip = skip_special_tokens
        self._shown = shown
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, tokens: Sequence[int]) -> str:
        """Returns the text that ``tokens`` made certain."""
        pieces = self._pieces
        if len(tokens) == 1 and not self._utf8.buffer:
            text = pieces.text_of(tokens[0])
            if text is not None:
                return text
        kept = (t for t in tokens if not (self._skip and pieces.is_special(t)) or t in self._shown)
        return self._utf8.decode(b"".join(pieces.bytes_of(t) for t in kept))

    def finish(self) -> str:
        """Returns the rest; bytes of an unfinished character become U+FFFD."""
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """Detokenizer for vocabularies whose decoder looks at neighbours: decodes a short window twice and emits the
    difference.

    The window starts a few tokens before the first token without emitted text, so the cost per token is constant.
    """

    CONTEXT = 6

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        # The library skips all special tokens or none, so those that are not shown are dropped before.
        self._skip = skip_special_tokens and not shown
        self._dropped = tokenizer.special_ids - shown if skip_special_tokens and shown else frozenset()
        self._tokens = list(prompt[-self.CONTEXT :])
        self._start = 0
        self._read = len(self._tokens)

    def feed(self, tokens: Sequence[int]) -> str:
        """Returns the text that ``tokens`` made certain."""
        return "".join(self._one(t) for t in tokens if t not in self._dropped)

    def finish(self) -> str:
        """Returns the rest of the window."""
        return self._advance(self._window(self._start, len(self._tokens)))

    def _one(self, token: int) -> str:
        self._tokens.append(token)
        text = self._window(self._start, len(self._tokens))
        return "" if text.endswith(REPLACEMENT) else self._advance(text)

    def _advance(self, text: str) -> str:
        out = text[len(self._window(self._start, self._read)) :]
        self._start, self._read = self._read, len(self._tokens)
        return out

    def _window(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._tokens[start:end], self._skip)


class StopMatcher:
    """Cuts a text at the first complete stop string; of several that end at the same position the longest counts.

    The result depends on the text alone, not on its division into pieces. Only an end that may still become a stop
    string is held back: at most the length of the longest one, less one.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = [s for s in stops if s]
        self._longest = max((len(s) for s in self._stops), default=0)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, armed: bool = True) -> str:
        """Returns the text that may be sent. If not ``armed`` (before min_tokens), no match may use this text."""
        if not self._stops or self.matched is not None:
            return text if self.matched is None else ""
        if not armed:
            out, self._held = self._held + text, ""
            return out
        self._held += text
        found = self._first()
        if found is not None:
            start, stop = found
            self.matched = stop
            out, self._held = self._held[: start + len(stop) if self._include else start], ""
            return out
        keep = self._count_undecided()
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def finish(self) -> str:
        """Returns the text held back, once the text has ended without a stop string."""
        out, self._held = self._held, ""
        return out

    def _first(self) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = self._held.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _count_undecided(self) -> int:
        """Returns the length of the longest end of the text that begins some stop string."""
        for size in range(min(self._longest - 1, len(self._held)), 0, -1):
            tail = self._held[-size:]
            if any(len(s) > size and s.startswith(tail) for s in self._stops):
                return size
        return 0


RESTART_SECONDS = 5
"""Retry-After of a request that failed because its engine ended; a restart takes about as long."""


class PieceStep(NamedTuple):
    """The segments that some tokens of a piece add to an answer, and the log-probabilities of these tokens."""

    answer: AnswerPart
    logprobs: list[TokenLogprob]


@dataclass(slots=True)
class TextPiece:
    """The text, tokens and finish reason that one delta adds to a choice.

    ``steps``: where a piece of several tokens has log-probabilities and a divided answer, what each token adds, so that
    a log-probability can be given to the segment of its token; empty: all tokens belong to ``answer`` as a whole.
    """

    text: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    answer: AnswerPart | None = None
    steps: Sequence[PieceStep] = ()

    def divide(self) -> Sequence[PieceStep]:
        """Returns ``steps``, or the whole piece as one; its answer is a copy."""
        if self.steps:
            return self.steps
        whole = AnswerPart()
        if self.answer is not None:
            whole.extend(self.answer)
        return (PieceStep(whole, self.logprobs),)

    def extend(self, later: TextPiece) -> None:
        """Adds the next piece of the same choice."""
        if self.answer is not None and (self.logprobs or later.logprobs):
            self.steps = (*self.divide(), *later.divide())
        self.text += later.text
        self.tokens = [*self.tokens, *later.tokens]
        self.logprobs = [*self.logprobs, *later.logprobs]
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason
        if self.answer is None:
            self.answer = later.answer
        elif later.answer is not None:
            self.answer.extend(later.answer)


JOINED = 64
"""Pieces that are joined into one."""


class PieceCollector:
    """The pieces of a choice that is answered whole, joined: a token takes few bytes then.

    Args:
        keeps_tokens: the answer has the ids of its tokens.
    """

    __slots__ = ("_keeps_tokens", "_waiting", "pieces")

    def __init__(self, keeps_tokens: bool) -> None:
        self.pieces: list[TextPiece] = []
        self._keeps_tokens, self._waiting = keeps_tokens, list[TextPiece]()

    def add(self, piece: TextPiece) -> None:
        """Adds the next piece."""
        self._waiting.append(piece)
        if len(self._waiting) >= JOINED or piece.finish_reason is not None:
            self._join()

    def _join(self) -> None:
        some, self._waiting = self._waiting, []
        last, answers = some[-1], [one.answer for one in some if one.answer is not None]
        for one in answers[1:]:
            answers[0].extend(one)
        self.pieces.append(
            TextPiece(
                "".join(one.text for one in some),
                [token for one in some for token in one.tokens] if self._keeps_tokens else [],
                [item for one in some for item in one.logprobs],
                last.finish_reason,
                last.stop_reason,
                answers[0] if answers else None,
            )
        )


class ChoiceStream:
    """Turns the deltas of one choice into pieces of text.

    Args:
        eos: ids that end a text, in addition to ``params.stop_token_ids``.
        reader: divides the text into reasoning, content and calls; None if all of it is content.
    """

    count: int = 0
    """Number of tokens so far."""
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    finish_reason: str | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    stats: RequestStats | None = None
    pooled: bytes = b""

    def __init__(
        self, detokenizer: Detokenizer, params: SamplingParams, eos: Collection[int], reader: AnswerReader | None = None
    ) -> None:
        self._detokenizer = detokenizer
        self._reader = reader
        watched = bool(params.stop) or reader is not None
        self._stop = StopMatcher(params.stop, params.include_stop_str_in_output) if watched else None
        """None if text is passed on unchanged: no reader parses it, and no stop string can end the choice."""
        self._params = params
        self._ends = frozenset(eos) | frozenset(params.stop_token_ids)
        self._begun = False
        self._surplus = 0
        """Tokens of the delta that is being fed which follow the end of a stop string."""
        self._parts: list[AnswerPart] = []
        """What each token of the delta that is being fed adds to the answer, if the delta has log-probabilities."""
        self.reasoning_tokens: int | None = 0 if reader is not None and reader.reasons else None

    @property
    def stopped_early(self) -> bool:
        """True if a stop string, or the completion of the one requested call, ended the choice; the engine does not
        know.
        """
        return self._stop is not None and (self._stop.matched is not None or self._complete)

    @property
    def calls(self) -> int:
        """Number of calls so far."""
        return 0 if self._reader is None else self._reader.calls

    @property
    def _complete(self) -> bool:
        return self._reader is not None and self._reader.complete

    def feed(self, delta: Delta) -> TextPiece:
        """Returns the piece of a delta. Feed nothing after a piece with a ``finish_reason``.

        Raises:
            TrencadisError: the delta reports an error.
        """
        tokens = delta.tokens
        self.count += len(tokens)
        if delta.finish is not None or not self._begun or not self._params.detokenize:
            return self._feed_any(delta)
        if self._stop is None:
            return TextPiece(self._detokenizer.feed(tokens), tokens, delta.logprobs or [])
        piece = self._make_piece(self._decode_until_stop(tokens, delta, self._stop), delta)
        self._end(piece, self._stop)
        self.finish_reason = piece.finish_reason
        return piece

    def _feed_any(self, delta: Delta) -> TextPiece:
        """Handles every kind of delta; ``feed`` handles those between the first and the last, which hold only tokens
        and log-probabilities.
        """
        if delta.finish == "error":
            raise _make_error(delta)
        self._begun = True
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        self.stats = delta.stats or self.stats
        self.pooled = delta.pooled or self.pooled
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        text = self._decode(delta) if self._params.detokenize else ""
        reason = "repetition_detected" if delta.finish == "repetition" else delta.stop_token
        piece = self._make_piece(text, delta, delta.finish, reason)
        if self._stop is not None:
            self._end(piece, self._stop)
        self.finish_reason = piece.finish_reason
        return piece

    def _end(self, piece: TextPiece, stop: StopMatcher) -> None:
        """Sets the finish reason if the text has ended the choice, and adds the segments that the reader has made."""
        if self.stopped_early:
            piece.finish_reason, piece.stop_reason = "stop", stop.matched
        elif piece.finish_reason is not None:
            piece.text += self._read_answer(stop.finish())
        if self._reader is not None:
            if piece.finish_reason is not None:
                self._reader.finish()
            piece.answer = self._reader.take_part()
            if self._parts:
                self._divide(piece)

    def _divide(self, piece: TextPiece) -> None:
        """Sets the ``steps`` of a piece; what its tokens' texts have not added comes with the last token."""
        parts, self._parts = self._parts, []
        parts += [AnswerPart() for _ in range(len(piece.logprobs) - len(parts))]  # a token that ends the text
        assert piece.answer is not None
        parts[-1].extend(piece.answer)
        whole = AnswerPart()
        for part in parts:
            whole.extend(part)
        piece.answer, piece.steps = whole, [PieceStep(p, [one]) for p, one in zip(parts, piece.logprobs, strict=True)]

    def _decode(self, delta: Delta) -> str:
        """Returns the text of a delta that may be sent."""
        tokens = delta.tokens
        ended = delta.finish == "stop" and tokens and tokens[-1] in self._ends
        if ended and not self._params.include_stop_str_in_output:
            # The token that ends an answer is not part of its text, even with skip_special_tokens=False.
            tokens = tokens[:-1]
        if self._stop is not None:
            return self._decode_until_stop(tokens, delta, self._stop)
        out = self._detokenizer.feed(tokens)
        return out if delta.finish is None else out + self._detokenizer.finish()

    def _decode_until_stop(self, tokens: Sequence[int], delta: Delta, stop: StopMatcher) -> str:
        """Decodes token by token, because a stop string must end at the right token; else like ``_decode``."""
        start = self.count - len(delta.tokens)
        out, divides = "", len(tokens) > 1 and bool(delta.logprobs)
        for i, token in enumerate(tokens):
            # min_tokens applies to stop strings too: text of the first tokens cannot match.
            armed = start + i + 1 > self._params.min_tokens
            out += self._read_answer(stop.feed(self._detokenizer.feed((token,)), armed))
            if self._reader is not None:
                if divides:
                    self._parts.append(self._reader.take_part())
                if self._reader.thinks:
                    self.reasoning_tokens = (self.reasoning_tokens or 0) + 1
            if self.stopped_early:
                self._surplus = len(delta.tokens) - i - 1
                self.count -= self._surplus
                return out
        if delta.finish is not None:
            out += self._read_answer(stop.feed(self._detokenizer.finish()))
        return out

    def _make_piece(
        self, text: str, delta: Delta, finish: str | None = None, reason: int | str | None = None
    ) -> TextPiece:
        """Returns the piece of a delta without the tokens after a stop string: a step may give several tokens."""
        tokens, logprobs = delta.tokens, delta.logprobs or []
        if self._surplus:
            count = len(tokens) - self._surplus
            tokens, logprobs, self._surplus = tokens[:count], logprobs[:count], 0
        return TextPiece(text, tokens, logprobs, finish, reason)

    def _read_answer(self, text: str) -> str:
        if self._reader is not None and text:
            self._reader.feed(text)
        return text


def _make_error(delta: Delta) -> TrencadisError:
    """Returns the exception for a delta that reports an error."""
    error = from_status(delta.status or 500, delta.message or "The engine failed on this request.")
    if error.status == Unavailable.status:
        error.retry_after = RESTART_SECONDS
    return error
