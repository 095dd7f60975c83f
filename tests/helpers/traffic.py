"""Random requests for an engine in this process: text, images, aborts, shared prefixes, choices."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from trencadis.core.engine import Engine
from trencadis.core.request import MediaSpan, Request, SamplingParams

PATCH_VALUES = 1176


def image_span(offset: int, rng: random.Random, most: int) -> MediaSpan:
    """One of thirty pictures with sides of 4 to ``most`` patches."""
    picture = random.Random(rng.randrange(30))
    h, w = (2 * picture.randint(2, most // 2) for _ in range(2))
    slots = 64 * -(-h // 8) * -(-w // 8)
    return MediaSpan(offset, h * w // 4, f"{h:04x}{w:04x}{picture.randrange(1 << 16):04x}", (1, h, w), slots)


def random_request(rng: random.Random, number: int, length: int, vocab: int, most: int) -> Request:
    """A prompt of up to 3/4 of ``length`` tokens, half of them with pictures."""
    shared = random.Random(rng.randrange(5))
    tokens = [shared.randrange(vocab) for _ in range(rng.randrange(length // 3))]
    spans: list[MediaSpan] = []
    for _ in range(rng.choice([0, 0, 1, 2])):
        span = image_span(len(tokens), rng, most)
        if span.offset + span.length < length * 3 // 4:
            spans.append(span)
            tokens += [0] * span.length
    tokens += [rng.randrange(vocab) for _ in range(rng.randint(1, max(length * 3 // 4 - len(tokens), 1)))]
    params = SamplingParams(
        n=rng.choice([1, 1, 1, 2]),
        temperature=rng.choice([0.0, 0.0, 1.0]),
        presence_penalty=rng.choice([0.0, 0.0, 0.5]),
        max_tokens=rng.choice([1, 2, 5, 12]),
        seed=rng.randrange(1000),
        ignore_eos=True,
        prompt_logprobs=1 if rng.random() < 0.05 else None,
    )
    return Request(f"r{number}", tokens, params, spans)


@dataclass
class Traffic:
    """Sends ``count`` requests, at most ``together`` at a time; in a turn of ``aborts``, one is aborted.

    What is asked depends on the seed alone, not on how many steps the answers take.
    """

    engine: Engine
    seed: int
    count: int
    length: int
    vocab: int
    most: int = 16
    together: int = 12
    aborts: float = 0.02
    sent: int = 0
    ended: dict[str, str] = field(default_factory=dict)
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)

    def run(self) -> None:
        """Until all have ended."""
        rng = random.Random(self.seed)
        spans: dict[str, list[MediaSpan]] = {}
        live: set[str] = set()
        while self.sent < self.count or not self.engine.idle():
            while self.sent < self.count and len(live) < self.together and rng.random() < 0.7:
                own = random.Random(self.seed * 1_000_003 + self.sent)
                request = random_request(own, self.sent, self.length, self.vocab, self.most)
                spans[request.id] = request.spans
                live.add(request.id)
                self.engine.add(request)
                self.sent += 1
            if live and rng.random() < self.aborts:
                gone = rng.choice(sorted(live))
                self.engine.abort(gone)
                live.discard(gone)
            for delta in self.engine.step():
                assert delta.finish != "error", delta.message
                self.tokens.setdefault((delta.id, delta.choice), []).extend(delta.tokens)
                if delta.finish:
                    self.ended[delta.id] = delta.finish
                    live.discard(delta.id)
            for request_id, index in self.engine.needs():
                self.engine.media(request_id, index, pixels(spans[request_id][index]))


def pixels(span: MediaSpan) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """A picture's patches, made from its digest."""
    _, h, w = span.grid
    made = np.random.default_rng(int(span.digest, 16)).integers(0, 256, (h * w, PATCH_VALUES), np.uint8)
    return made
