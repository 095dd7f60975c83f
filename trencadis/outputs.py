"""Outputs of offline calls, and the builder that accumulates them while tokens arrive.

Log-probabilities, single or many as flat lists (``SamplingParams.flat_logprobs``), which need few objects for
any number of tokens.

Outputs of offline pooling calls, named as in vLLM.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Self, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from trencadis.core.request import Request, RequestOutputKind, RequestStats, TokenLogprob
from trencadis.server.prompts.output_processor import ChoiceStream, TextPiece
from trencadis.server.prompts.prompt_and_chat_messages import ImageSize, Prompt
from trencadis.server.text.checkpoint_tokenizer import Tokenizer


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token; ``rank`` 1 is the most likely."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class FlatLogprobs(Sequence[Any]):
    """A sequence of ``{token id: log-probability}``, one per position; a position without any is empty.

    The ids of position ``i``, the token itself first, are ``token_ids[start_indices[i]:end_indices[i]]``; ``logprobs``,
    ``ranks`` and ``decoded_tokens`` have the same indices. Positions are only appended.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    def append(self, position: Mapping[int, Logprob] | None) -> None:
        """Adds a position; None adds an empty one."""
        self.start_indices.append(len(self.token_ids))
        for token, one in (position or {}).items():
            self.token_ids.append(token)
            self.logprobs.append(one.logprob)
            self.ranks.append(one.rank)
            self.decoded_tokens.append(one.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def extend(self, positions: Iterable[Mapping[int, Logprob] | None]) -> None:
        """Adds positions in order."""
        for place in positions:
            self.append(place)

    def copy(self) -> FlatLogprobs:
        """Returns the same positions in new lists."""
        return self[:]

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            made = FlatLogprobs()
            made.extend(self[i] for i in range(*index.indices(len(self))))
            return made
        at = range(self.start_indices[index], self.end_indices[index])
        return {self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i]) for i in at}

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))


class PositionLogprobs(dict[int, Logprob]):
    """Token id -> Logprob at one position of the text: first the token at that position, then the most likely.

    The attributes ``token``, ``logprob``, ``rank``, ``top_ids`` and ``top_logprobs`` have the engine's own form.
    """

    __slots__ = ("logprob", "rank", "token", "top_ids", "top_logprobs")

    def __init__(self, tokenizer: Tokenizer, item: TokenLogprob) -> None:
        self.token, self.logprob, self.rank = item.token, item.logprob, item.rank
        self.top_ids, self.top_logprobs = item.top_ids, item.top_logprobs
        super().__init__({item.token: Logprob(item.logprob, item.rank, _token_text(tokenizer, item.token))})
        ranks = item.top_ranks or range(1, len(item.top_ids) + 1)
        for token, value, rank in zip(item.top_ids, item.top_logprobs, ranks, strict=True):
            if token != item.token:
                self[token] = Logprob(value, rank, _token_text(tokenizer, token))


def _token_text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.get_token_bytes(token).decode("utf-8", "replace")


SampleLogprobs = list[PositionLogprobs] | FlatLogprobs
PromptLogprobs = list[PositionLogprobs | None] | FlatLogprobs


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request in seconds (``time.time``); what has not happened yet is None."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    time_in_queue: float | None = None
    num_generation_tokens: int = 0

    @property
    def first_token_latency(self) -> float:
        """Seconds from arrival to the first token; 0 before that."""
        return 0.0 if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def queued_ts(self) -> float:
        """``arrival_time``, under the name of vLLM's V1."""
        return self.arrival_time

    @property
    def scheduled_ts(self) -> float:
        """``first_scheduled_time``; 0 before that."""
        return self.first_scheduled_time or 0.0

    @property
    def first_token_ts(self) -> float:
        """``first_token_time``; 0 before that."""
        return self.first_token_time or 0.0

    @property
    def last_token_ts(self) -> float:
        """``last_token_time``; 0 before the first token."""
        return self.last_token_time or 0.0


@dataclass(slots=True)
class CompletionOutput:
    """One choice. ``cumulative_logprob`` and ``logprobs`` are None unless the parameters request ``logprobs``."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: None = None

    def finished(self) -> bool:
        """Returns True if the choice has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """Answer to one prompt; ``outputs`` holds its ``n`` choices, ``images`` the original and resized sizes of its
    images.

    ``pooled``: packed values that a pooling engine returns instead of an answer.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    lora_request: None = None
    num_cached_tokens: int = 0
    num_image_tokens: int = 0
    images: list[ImageSize] = field(default_factory=list)
    stats: RequestStats | None = None
    pooled: bytes = field(default=b"", repr=False)


class OutputBuilder:
    """Accumulates the text pieces of one request and builds outputs according to ``output_kind``.

    Args:
        streams: one per choice; they hold data besides the pieces, such as the prompt's log-probabilities.
    """

    def __init__(self, request: Request, prompt: Prompt, streams: Sequence[ChoiceStream], tokenizer: Tokenizer) -> None:
        self._streams = streams
        self._tokenizer = tokenizer
        self._kind = request.params.output_kind
        scored = request.params.reports
        self._flat = bool(request.params.flat_logprobs)
        self._choices = [
            CompletionOutput(
                i, cumulative_logprob=0.0 if scored else None, logprobs=self._empty_logprobs() if scored else None
            )
            for i in range(request.params.n)
        ]
        self._output = RequestOutput(
            request.id, prompt.text, prompt.tokens, None, [], False, RequestMetrics(request.arrival or time.time()),
            num_image_tokens=prompt.count_media_tokens(videos=False), images=prompt.image_sizes,
        )  # fmt: skip
        self._changed: set[int] = set()

    def _empty_logprobs(self) -> SampleLogprobs:
        return FlatLogprobs() if self._flat else []

    @property
    def finished(self) -> bool:
        """True if every choice has ended."""
        return all(c.finished() for c in self._choices)

    def add_piece(self, choice: int, piece: TextPiece) -> None:
        """Appends one piece to one choice."""
        made, metrics, now = self._choices[choice], self._output.metrics, time.time()
        assert metrics is not None
        made.text += piece.text
        made.token_ids += piece.tokens
        if made.logprobs is not None and made.cumulative_logprob is not None:
            made.logprobs.extend(PositionLogprobs(self._tokenizer, item) for item in piece.logprobs)
            made.cumulative_logprob += sum(item.logprob for item in piece.logprobs)
        made.finish_reason, made.stop_reason = piece.finish_reason, piece.stop_reason
        if piece.tokens:
            metrics.first_token_time = metrics.first_token_time or now
            metrics.last_token_time = now
            metrics.num_generation_tokens += len(piece.tokens)
        self._changed.add(choice)
        self._update_stats(choice, now)

    def take_output(self) -> RequestOutput | None:
        """Returns the output that is due.

        None if nothing is new, or if only the final output is requested and the request has not ended.
        """
        ended = self.finished
        if not self._changed or (self._kind is RequestOutputKind.FINAL_ONLY and not ended):
            return None
        chosen: Sequence[CompletionOutput] = self._choices
        if self._kind is RequestOutputKind.DELTA:
            chosen = [self._choices[i] for i in sorted(self._changed)]
        self._changed.clear()
        if ended and self._kind is not RequestOutputKind.DELTA:
            outputs = list(chosen)
        else:
            outputs = [self._copy(c) for c in chosen]
        metrics = self._output.metrics
        return replace(
            self._output, outputs=outputs, finished=ended, metrics=None if metrics is None else replace(metrics)
        )

    def _copy(self, choice: CompletionOutput) -> CompletionOutput:
        """Returns a copy to hand out while more pieces may follow.

        In delta mode it then empties the choice except for its cumulative log-probability.
        """
        scores = choice.logprobs
        out = replace(choice, token_ids=[*choice.token_ids], logprobs=None if scores is None else scores.copy())
        if self._kind is RequestOutputKind.DELTA:
            choice.text, choice.token_ids, choice.logprobs = "", [], None if scores is None else self._empty_logprobs()
        return out

    def _update_stats(self, choice: int, now: float) -> None:
        """Copies statistics of the prompt and, once the choice has ended, of the whole request from the choice's
        stream.
        """
        stream, whole, metrics = self._streams[choice], self._output, self._output.metrics
        assert metrics is not None
        whole.num_cached_tokens = max(whole.num_cached_tokens, stream.cached_tokens)
        if whole.prompt_logprobs is None and stream.prompt_logprobs is not None:
            logprobs: PromptLogprobs = FlatLogprobs() if self._flat else []
            for item in stream.prompt_logprobs:
                logprobs.append(None if item is None else PositionLogprobs(self._tokenizer, item))
            whole.prompt_logprobs = logprobs
        if self._choices[choice].finished():
            whole.stats, whole.pooled = stream.stats or whole.stats, stream.pooled
            if stream.stats is not None:
                metrics.time_in_queue = stream.stats.queue
                metrics.first_scheduled_time = metrics.arrival_time + stream.stats.queue
            if self.finished:
                metrics.finished_time = now


T = TypeVar("T")


@dataclass(slots=True)
class PoolingOutput:
    """``data``: float32 [width], an embedding or probabilities (a numpy array); [tokens, width] for a token task."""

    data: NDArray[np.float32]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PoolingOutput) and np.array_equal(self.data, other.data)


@dataclass(slots=True)
class EmbeddingOutput:
    """An embedding."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Length of the embedding."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """Probability of each class, in the order of the checkpoint's labels."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """Relevance score of a pair."""

    score: float


@dataclass(slots=True)
class PoolingRequestOutput(Generic[T]):
    """Output for one prompt; ``outputs`` is one of the classes above."""

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True

    @classmethod
    def like(cls, other: PoolingRequestOutput[Any], outputs: T) -> Self:
        """Returns ``outputs`` as the output for the prompt of ``other``."""
        return cls(other.request_id, outputs, other.prompt_token_ids, other.num_cached_tokens, other.finished)


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """Output of ``embed`` for one prompt."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """Output of ``classify`` for one prompt."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """Output of ``score`` for one pair."""
