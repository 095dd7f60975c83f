"""What grammars cost over HTTP: first tokens under a new and a known schema, and others' tokens while bad ones arrive.

python -m benchmarks.grammars.served [--model half] [--rounds 30] [--seconds 40] [--threads 1] [--smoke]

TTFT: a plain request, one with a schema that the server knows, and one with a new schema of 5 KB take
turns; medians of the differences of each round. ITL: one client streams without a rule, in alternating spans beside a
sender of plain requests of one word and beside one whose equal requests have schemas, patterns and grammars that are
meant to cost much.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx

from benchmarks.harness.checkpoints import SHAPES, checkpoint
from benchmarks.harness.reporting import Others, machine, median, quantile, report, table
from benchmarks.harness.server import serving

BARS = {"known_ms": 2.0, "new_ms": 20.0, "itl_p99": 1.10}
"""Most milliseconds that a schema adds to TTFT, and the most that attacks raise the p99 of others' ITL by."""


def schema(seed: int, size: int = 5 * 1024) -> dict[str, Any]:
    """An object of about ``size`` bytes of JSON; no two seeds give the same."""
    rng, made = random.Random(seed), {}
    while len(json.dumps(made)) < size - 200:
        name = f"field_{rng.randrange(16**8):08x}"
        made[name] = rng.choice((
            {"type": "string", "maxLength": rng.randrange(10, 60)},
            {"type": "integer", "minimum": 0, "maximum": rng.randrange(10, 10**6)},
            {"enum": [f"{name}_{i}" for i in range(6)]},
            {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,9}$"}, "maxItems": 5},
            {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "boolean"}}, "required": ["x"]},
        ))  # fmt: skip
    return {"type": "object", "properties": made, "required": list(made)[:3], "additionalProperties": False}


def form(made: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request that ask for a schema."""
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": made}}}


def attacks() -> Iterator[dict[str, Any]]:
    """Fields that are meant to cost much, over and over, each time a little different."""
    number = 0
    while True:
        number += 1
        deep: dict[str, Any] = {"const": number}
        for _ in range(14):
            deep = {"oneOf": [{"type": "object", "properties": {"a": deep}}, {"type": "array", "items": deep}]}
        yield form(deep)
        yield form({"enum": [f"{number}-{i}" for i in range(12000)]})
        yield form({"type": "string", "pattern": f"((a{{1,{900 + number}}}){{1,1000}}){{1,1000}}"})
        yield form({"type": "array", "items": {"type": "array", "maxItems": 10**6 + number}, "minItems": 10**6})
        yield form({"$ref": f"https://example.com/{number}.json"})
        yield {"structured_outputs": {"grammar": f'start: start start | "{number}"'}}
        yield {"structured_outputs": {"grammar": "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(2000))}}
        yield {"structured_outputs": {"regex": f"(.*a){{{20 + number % 9}}}"}}
        yield {"structured_outputs": {"choice": [f"{number}-{'x' * 40}-{i}" for i in range(4000)]}}


class Asker:
    """A client of one server."""

    def __init__(self, url: str, model: str) -> None:
        self.http = httpx.Client(base_url=url, trust_env=False, timeout=120)
        self.model, self.count = model, 0

    def stamps(self, tokens: int, **fields: Any) -> tuple[int, list[float]]:
        """The status of one request, and the seconds from its start to each token."""
        self.count += 1
        text = " ".join(f"{self.count}-{i}" for i in range(8))
        return self.sent("chat/completions", '"content":"', messages=[{"role": "user", "content": text}],
                         max_tokens=tokens, **fields)  # fmt: skip

    def sent(self, route: str, mark: str, **fields: Any) -> tuple[int, list[float]]:
        """The status of a streamed request, and the seconds to each event in which ``mark`` begins a text."""
        body = {"model": self.model, "temperature": 0, "stream": True, **fields}
        begun, found = time.perf_counter(), []
        with self.http.stream("POST", f"/v1/{route}", json=body) as answer:
            for line in answer.iter_lines():
                if mark in line and mark + '"' not in line:
                    found.append(time.perf_counter() - begun)
        return answer.status_code, found

    def first(self, **fields: Any) -> float:
        """Seconds to the first token.

        Raises:
            RuntimeError: the request was refused.
        """
        status, found = self.stamps(4, **fields)
        if status != 200 or not found:
            raise RuntimeError(f"a request with {str(fields)[:80]} was answered {status}")
        return found[0]


def first_tokens(asker: Asker, rounds: int) -> dict[str, float]:
    """Milliseconds: the median of plain requests, and medians of what a known and a new schema add."""
    known = form(schema(0))
    asker.first(**known)
    plain, more = [], {"known_ms": [], "new_ms": []}  # type: tuple[list[float], dict[str, list[float]]]
    for round in range(rounds):
        cases = [("plain", {}), ("known_ms", known), ("new_ms", form(schema(round + 1)))]
        random.Random(round).shuffle(cases)
        found = {name: 1000 * asker.first(**fields) for name, fields in cases}
        plain.append(found["plain"])
        for name, values in more.items():
            values.append(found[name] - found["plain"])
    return {"plain_ms": median(plain)} | {name: median(values) for name, values in more.items()}


class Attacker(threading.Thread):
    """Sends one request of a word after the other, with the fields of an attack while it is ``on``."""

    def __init__(self, asker: Asker) -> None:
        super().__init__(daemon=True)
        self.asker, self.on, self.over = asker, threading.Event(), False
        self.sent: list[tuple[int, float]] = []

    def run(self) -> None:
        """Runs until it is over."""
        source = attacks()
        while not self.over:
            attack = next(source) if self.on.is_set() else {}
            begun = time.perf_counter()
            status, _ = self.asker.sent("completions", '"text":"', prompt="a", max_tokens=2, **attack)
            if attack:
                self.sent.append((status, time.perf_counter() - begun))


def under_attack(asker: Asker, attacker: Attacker, seconds: float) -> dict[str, float]:
    """ITL beside plain requests and beside attacks: medians and p99 in milliseconds, and what was sent."""
    attacker.start()
    gaps: dict[bool, list[float]] = {False: [], True: []}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for on in (False, True):
            (attacker.on.set if on else attacker.on.clear)()
            _, found = asker.stamps(64, ignore_eos=True)
            gaps[on] += [1000 * (b - a) for a, b in itertools.pairwise(found)]
    attacker.on.clear()
    attacker.over = True
    attacker.join(60)
    plain, beside = (quantile(gaps[on], 0.99) for on in (False, True))
    return {
        "itl_ms": median(gaps[False]), "itl_beside_ms": median(gaps[True]), "itl_p99_ms": plain,
        "itl_p99_beside_ms": beside, "itl_p99": beside / plain, "attacks": float(len(attacker.sent)),
        "longest_attack_s": max(s for _, s in attacker.sent),
        "refused": float(sum(status != 200 for status, _ in attacker.sent)),
    }  # fmt: skip


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="half", choices=sorted(SHAPES))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    if args.smoke:
        args.model, args.rounds, args.seconds = "tiny", 2, 2.0
    flags = ["--device", "cpu", "--threads", str(args.threads), "--max-num-seqs", "4", "--max-model-len", "1024"]
    others = Others()
    with serving(str(checkpoint(args.model)), *flags) as server:
        asker = Asker(server.url, server.model())
        found = first_tokens(asker, args.rounds)
        found |= under_attack(asker, Attacker(Asker(server.url, asker.model)), args.seconds)
    rows = [(name, f"{value:.2f}", f"{BARS[name]:g}" if name in BARS else "") for name, value in found.items()]
    settings = {name: getattr(args, name) for name in ("model", "rounds", "seconds", "threads")}
    result = {"settings": settings, "machine": machine(), "others": others.cores(), "found": found}
    report("grammars-served", result, table(("figure", "value", "bar"), rows))


if __name__ == "__main__":
    main()
