"""Random requests for an engine in this process: text, images, aborts, shared prefixes, choices."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field, replace

import numpy as np

from trencadis.core.engine.engine import Engine
from trencadis.core.media_spans import MediaSpan
from trencadis.core.request import BeamRule, Delta, Request, SamplingParams
from trencadis.multimodal.qwen2_vl.qwen2_and_qwen2_5_vision_config import PATCH_VALUES

Pixels = np.ndarray[tuple[int, int], np.dtype[np.uint8]]


def image_span(offset: int, rng: random.Random, most: int) -> MediaSpan:
    """One of thirty images with sides of 4 to ``most`` patches."""
    image = random.Random(rng.randrange(30))
    h, w = (2 * image.randint(2, most // 2) for _ in range(2))
    slots = 64 * -(-h // 8) * -(-w // 8)
    return MediaSpan(offset, h * w // 4, f"{h:04x}{w:04x}{image.randrange(1 << 16):04x}", (1, h, w), slots)


def random_request(rng: random.Random, number: int, length: int, vocab: int, most: int) -> Request:
    """A prompt of up to 3/4 of ``length`` tokens, half of them with images."""
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


def constrained(params: SamplingParams, rng: random.Random, vocab: int) -> SamplingParams:
    """Also with stop ids, a minimum during which they are masked, and a bias that leaves a grammar's few ids."""
    stops = [rng.randrange(vocab) for _ in range(rng.choice([0, 1, vocab // 8]))]
    allowed = rng.sample(range(vocab), rng.choice([0, 0, 3, 40]))
    return replace(
        params,
        max_tokens=rng.choice([5, 8, 20]),
        min_tokens=rng.choice([0, 0, 2, 5]),
        stop_token_ids=stops,
        logit_bias={id: 100.0 for id in allowed},
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
    )


def searched(request: Request, rng: random.Random) -> Request:
    """The same prompt, answered by beams."""
    params = SamplingParams(
        n=rng.choice([1, 2, 3, 6, 10]),
        temperature=0.0,
        max_tokens=rng.choice([1, 4, 12, None]),
        min_tokens=0 if rng.random() < 0.8 else 1,
        ignore_eos=rng.random() < 0.2,
        stop_token_ids=request.params.stop_token_ids,
    )
    return replace(
        request, params=params, beams=BeamRule(rng.choice([-0.5, 0.0, 1.0, 2.0]), rng.choice([True, False, None]))
    )


@dataclass
class Traffic:
    """Sends ``count`` requests, at most ``together`` at a time; in a turn of ``aborts``, one is aborted.

    What is asked depends on the seed alone, not on how many steps the answers take.

    Args:
        wild: requests are also ``constrained``, and some choices are ended by what they say, as a stop string ends
            them: where an id of theirs comes, its choice is aborted, and what it says after it does not count.
        extras: share of the requests that are answered by beams, or ask for log-probabilities of chosen ids.
    """

    engine: Engine
    seed: int
    count: int
    length: int
    vocab: int
    most: int = 16
    together: int = 12
    aborts: float = 0.02
    wild: bool = False
    extras: float = 0.0
    sent: int = 0
    gone: set[str] = field(default_factory=set)
    stopped: dict[tuple[str, int], int] = field(default_factory=dict)
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
                request = self.request(own)
                if self.extras and own.random() < self.extras:
                    request = self.extra(request, own)
                spans[request.id] = request.spans
                live.add(request.id)
                self.engine.add(request)
                self.sent += 1
            if live and rng.random() < self.aborts:
                name = rng.choice(sorted(live))
                self.engine.abort(name)
                live.discard(name)
                self.gone.add(name)
            for delta in self.engine.step():
                assert delta.finish != "error", delta.message
                self.take(delta)
                if delta.finish:
                    self.ended[delta.id] = delta.finish
                    live.discard(delta.id)
            for request_id, index in self.engine.needs():
                self.engine.add_media(request_id, index, self.draw(spans[request_id][index]))

    def request(self, rng: random.Random) -> Request:
        """Request number ``sent``."""
        made = random_request(rng, self.sent, self.length, self.vocab, self.most)
        return replace(made, params=constrained(made.params, rng, self.vocab)) if self.wild else made

    def draw(self, span: MediaSpan) -> Pixels:
        """The patches of an image."""
        return pixels(span)

    def extra(self, request: Request, rng: random.Random) -> Request:
        """The request with beams, or with chosen ids."""
        if rng.random() < 0.7:
            return searched(request, rng)
        ids = rng.sample(range(self.vocab), rng.choice([1, 3, 40]))
        return replace(request, params=replace(request.params, prompt_logprobs=None, logprob_token_ids=ids))

    def take(self, delta: Delta) -> None:
        """A delta's tokens, up to the one that the client stops at."""
        key = (delta.id, delta.choice)
        said = self.tokens.setdefault(key, [])
        for token in delta.tokens:
            if key in self.stopped:
                return
            said.append(token)
            # In a third of the requests, a third of the ids ends a choice.
            if self.wild and zlib.crc32(f"{self.seed} {delta.id} {token % 3}".encode()) % 9 == 0:
                self.stopped[key] = len(said)
                self.engine.abort(*key)


def pixels(span: MediaSpan, values: int = PATCH_VALUES) -> Pixels:
    """An image's patches of so many values, made from its digest."""
    _, h, w = span.grid
    made = np.random.default_rng(int(span.digest, 16)).integers(0, 256, (h * w, values), np.uint8)
    return made
