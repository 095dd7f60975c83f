"""Synthetic sessions for a fleet: turns that extend their past, shared system prompts, shared images, a hot one.

Turns come in the order of their arrival, as many as asked for. Memory depends on the sessions that are open alone.
"""

from __future__ import annotations

import heapq
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

TURNS = (1, 1, 2, 3, 5, 8)
SYSTEMS, SHARED = 24, 400
HOT = 0.04
"""Share of the sessions that are about one and the same image."""
LONGEST = 24_000
IMAGE_TOKENS = (64, 144, 256, 324, 391, 616, 999, 1196)
"""Placeholder tokens of images of 224x224 to 1280x720 pixels."""


class Shown(NamedTuple):
    """An image at its place in a prompt; equal ids are equal images. A token stands for four patches."""

    id: int
    offset: int
    tokens: int

    @property
    def slots(self) -> int:
        """VISION slots: patches, in windows of 64."""
        return -(-4 * self.tokens // 64) * 64


@dataclass(slots=True)
class Session:
    """One conversation: what its turns say, one after the other.

    ``texts`` are the lengths of messages and answers in turn; what precedes them are a system prompt and images.
    """

    number: int
    system: int
    system_tokens: int
    images: list[Shown]
    texts: array[int] = field(default_factory=lambda: array("i"))
    turns: int = 1
    length: int = 0


class Turn(NamedTuple):
    """One request: ``prompt`` tokens, of which the first ``past`` were the last turn's prompt and answer."""

    arrival: float
    session: Session
    texts: int
    """How many of the session's texts the prompt holds."""
    past: int
    prompt: int
    output: int


def _lognormal(rng: random.Random, median: float, sigma: float, least: int, most: int) -> int:
    return min(max(round(median * 2.718281828 ** rng.gauss(0, sigma)), least), most)


def zipf(count: int, power: float = 1.0) -> Sequence[float]:
    """Cumulated weights of ``count`` things, the i-th as popular as 1 / i ** power."""
    return list(accumulate(1 / (i + 1) ** power for i in range(count)))


def sessions(seed: int, requests: int, rate: float) -> Iterator[Turn]:
    """``requests`` turns, of which ``rate`` arrive a second on average once all sessions are under way."""
    rng = random.Random(f"sessions {seed}")
    weights, shared = zipf(SYSTEMS), zipf(SHARED, 0.8)
    lengths = [_lognormal(rng, 500, 0.8, 60, 3000) for _ in range(SYSTEMS)]
    mean = sum(TURNS) / len(TURNS)
    heap: list[tuple[float, int, Session]] = []
    now, opened, made = 0.0, 0, 0
    while made < requests:
        while not heap or now <= heap[0][0]:
            session = _session(rng, opened, weights, shared, lengths)
            heapq.heappush(heap, (now, opened, session))
            opened += 1
            now += rng.expovariate(rate / mean)
        at, number, session = heapq.heappop(heap)
        past = session.length
        message, answer = _lognormal(rng, 70, 1.1, 4, 6000), _lognormal(rng, 160, 0.8, 4, 1200)
        session.texts.extend((message, answer))
        yield Turn(at, session, len(session.texts) - 1, past, past + message, answer)
        made += 1
        session.length += message + answer
        session.turns -= 1
        if session.turns and session.length < LONGEST:
            heapq.heappush(heap, (at + 5 + answer * 0.02 + rng.expovariate(0.1), number, session))


def _session(
    rng: random.Random, number: int, weights: Sequence[float], shared: Sequence[float], lengths: Sequence[int]
) -> Session:
    system = rng.choices(range(SYSTEMS), cum_weights=weights)[0]
    made = Session(number, system, lengths[system], [], turns=rng.choice(TURNS), length=lengths[system])
    if rng.random() < HOT:
        ids = [0]
    else:
        count = rng.choice((0, 0, 0, 1, 1, 2))
        ids = [
            1 + rng.choices(range(SHARED), cum_weights=shared)[0] if rng.random() < 0.4 else 1_000_000 + 2 * number + i
            for i in range(count)
        ]
    for id in ids:
        tokens = IMAGE_TOKENS[id * 2_654_435_761 % 1009 % len(IMAGE_TOKENS)]
        made.images.append(Shown(id, made.length, tokens))
        made.length += tokens
    return made
