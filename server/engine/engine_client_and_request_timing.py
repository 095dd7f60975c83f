"""The engine's interface for the routes, and the timing of a request that runs on it.

``engine.supervisor`` implements the interface over the engine's process.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from trencadis.core.engine_stats import EngineInfo, EngineStats
from trencadis.core.errors import Unavailable
from trencadis.core.graph_and_bucket_learning_report import GraphPlan
from trencadis.core.host_memory import gib
from trencadis.core.request import Delta, Request, RequestStats

if TYPE_CHECKING:  # offline use works without msgspec
    from trencadis.core.process.engine_messages import Phase

Pixels = npt.NDArray[np.uint8]
"""uint8 [patches, PATCH_VALUES] of one image."""

DeltaCallback = Callable[[Delta], bool]
"""Handles a delta and returns True, or returns False without handling it; see ``EngineClient.set_delta_callback``."""


SMALL_BACKLOG = 32 << 10
"""Bytes of deltas of a choice that may wait for the reader without being counted: a hundred tokens, or ten with
log-probabilities."""
DELTA_BYTES = 300
"""Bytes of a delta with one token."""
LOGPROB_BYTES = 400
"""Bytes of the log-probability of one token."""
CANDIDATE_BYTES = 72
"""Bytes of each other token in it."""


def estimate_size(delta: Delta) -> int:
    """Returns the bytes of memory that a delta takes, without what it tells of the prompt, which the budget of answers
    counts.
    """
    size = DELTA_BYTES + 40 * len(delta.tokens)
    if delta.logprobs is not None:
        size += len(delta.logprobs) * LOGPROB_BYTES
        size += CANDIDATE_BYTES * sum([len(one.top_ids) for one in delta.logprobs])
    return size


class Backlog:
    """Bytes of deltas that wait for their readers, which are clients that read slower than the engine writes.

    Args:
        most: bytes of one request.
        total: bytes of all requests, without the first ``SMALL_BACKLOG`` of each choice.
        reserved: returns the bytes of ``total`` that other answers of this process may take.
    """

    def __init__(self, most: int = 64 << 20, total: int = 256 << 20, reserved: Callable[[], int] = lambda: 0) -> None:
        self.most, self.total, self.reserved = most, total, reserved
        self.held = 0

    def count_held(self) -> int:
        """Returns the bytes that are held of all requests."""
        return self.held

    def fits(self, size: int) -> bool:
        """Returns True if ``size`` bytes of one request are allowed, and the bytes that are held of all requests."""
        return size <= self.most and self.held + self.reserved() <= self.total


BACKLOG = Backlog()
"""The backlog of all requests of this process. ``routes.state_builder.make_state`` sets its bounds."""


MakeVocabulary = Callable[[], Awaitable[bytes] | bytes]
"""Returns a packed ``grammar_tokenizer_and_vocabulary.Vocabulary``, or an awaitable of it."""


async def pack_vocabulary(make: MakeVocabulary | None) -> bytes:
    """Returns what ``make`` returns.

    Raises:
        Unavailable: there is none.
    """
    if make is None:
        raise Unavailable("This server has no vocabulary for grammars.")
    made = make()
    return made if isinstance(made, bytes) else await made


class EngineClient(Protocol):
    """Protocol of an engine: takes requests and returns deltas."""

    observers: list[Callable[[EngineStats], None]]
    """Called with every statistics message, whose lists contain only new entries."""

    on_operation: list[Callable[[str, float], None]]
    """Called after falling asleep or waking, with ``sleep`` or ``wake`` and the seconds that it took."""

    @property
    def restarts(self) -> int:
        """Number of engines that failed and were replaced."""
        ...

    @property
    def sleep_level(self) -> int:
        """0: awake; else the level at which the engine sleeps, until it has woken up."""
        ...

    @property
    def sleep_operation(self) -> str:
        """``sleep`` or ``wake`` while the operation runs, else empty."""
        ...

    @property
    def failing(self) -> bool:
        """True if engines fail repeatedly, so that this process should be replaced too."""
        ...

    @property
    def info(self) -> EngineInfo | None:
        """The engine's report when it became ready; None while it loads."""
        ...

    @property
    def phase(self) -> str:
        """The engine's current activity in a word or two (``loading``, ``running``, ``draining``, ``stalled``)."""
        ...

    @property
    def accepting(self) -> bool:
        """True if the engine accepts requests, also while it sleeps."""
        ...

    @property
    def healthy(self) -> bool:
        """True if the engine is neither dead nor stalled."""
        ...

    @property
    def ready(self) -> bool:
        """True if the engine accepts requests and is as warm as ``--warmup`` requires."""
        ...

    @property
    def stats(self) -> EngineStats:
        """The latest counters."""
        ...

    @property
    def plan(self) -> GraphPlan | None:
        """Planned shapes and their states; None if there is no plan, or not yet."""
        ...

    @property
    def progress(self) -> Phase | None:
        """The last phase of loading that the engine reported."""
        ...

    def submit(self, request: Request, pixels: Sequence[Pixels]) -> AsyncIterator[Delta]:
        """Submits a request; yields deltas of all choices until each has finished. Raises TrencadisError, here or from
        the iterator.
        """
        ...

    def abort(self, id: str, choice: int = -1) -> None:
        """Ends a request, or one choice of it; unknown ids are ignored."""
        ...

    def set_delta_callback(self, id: str, callback: DeltaCallback) -> None:
        """Sets a callback that gets a request's deltas at once while its reader is idle.

        The iterator still yields each choice's last delta and the deltas for which the callback returns False, in
        order.
        Unknown ids are ignored. Call it after the first delta: until then the request may change its engine.
        """
        ...

    def reset_prefix_cache(self) -> None:
        """Makes all cached blocks unavailable to later requests."""
        ...

    def reset_encoder_cache(self) -> None:
        """Drops embeddings of images that no running request waits for."""
        ...

    async def learn_buckets(self, force: bool = False) -> None:
        """Starts a search for shapes that suit the traffic; ``force``: changes to them, whatever they gain.

        Raises:
            Conflict: a search or a change runs.
            NotFound: the engine records no needs.
        """
        ...

    async def sleep(self, level: int = 1, abort: bool = False) -> None:
        """Ends the engine's process once its requests have ended (``abort``: now); the next request starts another."""
        ...

    async def wake(self) -> None:
        """Starts the engine if it sleeps, and waits until it accepts requests."""
        ...


def get_replicas(engine: EngineClient) -> Sequence[EngineClient]:
    """Returns the engines of a client: those of a fleet, else the client itself."""
    found: Sequence[EngineClient] = getattr(engine, "engines", ())
    return found or [engine]


class ChoiceStats(Protocol):
    """Protocol of a choice's stream: what it knows of the engine's work."""

    stats: RequestStats | None
    """The engine's statistics; None before the choice has ended."""

    cached_tokens: int
    """Prompt tokens that came from the prefix cache."""

    count: int
    """Number of tokens so far."""


@dataclass(slots=True)
class TokenTimes:
    """Arrival times of the first and the last token of a choice, and the number of its tokens."""

    first: float
    last: float
    count: int


@dataclass(slots=True)
class RequestTiming:
    """Times (``time.monotonic``) and counts of one request, for metrics and its closing log line.

    ``engine`` is the index of the engine that it ran on, ``fair_queue_seconds`` how long it waited in the fair queue
    before ``start``.
    """

    id: str
    start: float
    prompt_tokens: int
    image_tokens: int
    max_tokens: int
    n: int
    first: float | None = None
    end: float | None = None
    generated: int = 0
    gaps: list[float] = field(default_factory=list)
    choices: dict[int, TokenTimes] = field(default_factory=dict)
    finish: list[str] = field(default_factory=list)
    streams: Sequence[ChoiceStats] = field(default_factory=list)
    media: int = 0
    prepared: int = 0
    media_seconds: dict[str, float] = field(default_factory=dict)
    media_begun: float = 0.0
    media_ended: float = 0.0
    engine: int = 0
    fair_queue_seconds: float = 0.0

    def add_tokens(self, choice: int, count: int) -> None:
        """Records that ``count`` tokens of ``choice`` have arrived now; gaps are counted within a choice."""
        if not count:
            return
        now = time.monotonic()
        self.generated += count
        arrivals = self.choices.get(choice)
        if arrivals is None:
            self.first = self.first or now
            self.choices[choice] = TokenTimes(now, now, count)
            return
        gap = now - arrivals.last
        arrivals.last = now
        arrivals.count += count
        if count == 1:
            self.gaps.append(gap)
        else:
            self.gaps.extend([gap / count] * count)

    @property
    def stats(self) -> list[RequestStats]:
        """The engine's statistics of each choice that it has ended."""
        return [stream.stats for stream in self.streams if stream.stats is not None]

    @property
    def slowest(self) -> RequestStats | None:
        """The statistics of the choice that took longest; None before any has ended."""
        return max(self.stats, key=lambda s: s.queue + s.prefill + s.decode, default=None)

    @property
    def cached(self) -> int:
        """Prompt tokens that came from the prefix cache."""
        return max((stream.cached_tokens for stream in self.streams), default=0)

    def seconds_per_token(self) -> list[float]:
        """Returns the mean seconds per token after the first, of each choice that has more than one."""
        return [(a.last - a.first) / (a.count - 1) for a in self.choices.values() if a.count > 1]


def format_plan_lines(plan: GraphPlan) -> Iterator[str]:
    """Yields the lines of ledger, pools, buckets by stage and state, and advice."""
    yield f"{'memory':<26} {'':>12} {'':>7}"
    for name, count in plan.ledger:
        yield f"  {name:<26} {gib(count):>12} {100 * count / max(plan.total, 1):6.1f} %"
    yield f"  {'total':<26} {gib(plan.total):>12}  100.0 %"
    yield "graph pools"
    for pool, (budget, spent, lost) in plan.pools.items():
        kept = f", {gib(lost)} not returned" if lost else ""
        yield f"  {pool:<26} {gib(spent):>12} of {gib(budget)}{kept}"
    yield f"planned shapes, warm-up {plan.warmup}"
    counts: Counter[tuple[str, str]] = Counter((b.stage, b.state) for b in plan.buckets)
    for stage in dict.fromkeys(b.stage for b in plan.buckets):
        states = ", ".join(f"{n} {state}" for (s, state), n in sorted(counts.items()) if s == stage)
        yield f"  {stage:<26} {states}"
    for bucket in plan.buckets:
        if bucket.failed:
            yield f"  {bucket.name}: {bucket.failed}"
    yield from plan.advice
