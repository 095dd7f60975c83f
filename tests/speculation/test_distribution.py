"""Tokens that are sampled beside drafts follow the model's distribution, whatever the drafts are."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.oracles.chi_square import chi_square_limit
from tests.speculation.scripted_proposer import ScriptedProposer
from tests.speculation.test_cpu_answers import engine_of
from trencadis.core.engine.engine import Engine
from trencadis.core.request import Request, SamplingParams
from trencadis.core.scheduling.draft_scheduler import DraftScheduler
from trencadis.core.scheduling.sequence import Sequence
from trencadis.core.spec.draft_proposer_interface import DraftProposer
from trencadis.core.spec.spec_config import SpeculationConfig

PROMPT = [5, 6, 7]
KEPT = 3
"""Ids that the filter leaves at each place."""

FLAGS: dict[str, Any] = {"max_num_seqs": 32, "num_gpu_blocks_override": 400, "max_num_batched_tokens": 512}
Triple = tuple[int, ...]


def finish(engine: Engine) -> list[Any]:
    """All deltas until no request is left."""
    found: list[Any] = []
    while not engine.idle():
        found += engine.step()
    return found


def shares(engine: Engine, begun: Triple) -> dict[int, float]:
    """The distribution of the token after ``begun``: the best ``KEPT`` ids, by the model's own log-probabilities."""
    engine.add(Request("asked", [*PROMPT, *begun], SamplingParams(temperature=0, max_tokens=1, logprobs=KEPT)))
    (told,) = [one for delta in finish(engine) for one in delta.logprobs or []]
    weights = {token: math.exp(value) for token, value in zip(told.top_ids, told.top_logprobs, strict=True)}
    whole = sum(weights.values())
    return {token: weight / whole for token, weight in weights.items()}


def exact(engine: Engine) -> dict[Triple, float]:
    """The probability of each three tokens after the prompt."""
    found: dict[Triple, float] = {(): 1.0}
    for _ in range(3):
        found = {
            (*begun, token): chance * share
            for begun, chance in found.items()
            for token, share in shares(engine, begun).items()
        }
    return found


def drawn(path: Path, count: int, ids: list[int], seed: int) -> tuple[Counter[Triple], Engine]:
    """Triples of ``count`` choices; each is drafted by ids that chance takes from ``ids``, most often the first."""
    engine = engine_of(path, **FLAGS)
    rng = random.Random(seed)

    def make(seq: Sequence) -> DraftProposer:
        return ScriptedProposer(lambda tokens, known: ids[0] if rng.random() < 0.5 else rng.choice(ids))

    scheduler = engine.scheduler
    config = SpeculationConfig("ngram", 2, always=True)
    scheduler.drafting = DraftScheduler(config, scheduler.limits, scheduler.totals, make)
    for number in range(count // 25):
        params = SamplingParams(n=25, temperature=1.0, top_k=KEPT, max_tokens=3, seed=seed + number, ignore_eos=True)
        engine.add(Request(f"r{number}", PROMPT, params))
    tokens: dict[tuple[str, int], list[int]] = {}
    for delta in finish(engine):
        tokens.setdefault((delta.id, delta.choice), []).extend(delta.tokens)
    engine.close()
    return Counter(tuple(one) for one in tokens.values()), engine


def check(path: Path, count: int) -> None:
    engine = engine_of(path, speculation=False, **FLAGS)
    expected = exact(engine)
    engine.close()
    ids = sorted(set(itertools.chain(*expected)), key=lambda one: -sum(p for t, p in expected.items() if one in t[1:]))
    seen, drafted = drawn(path, count, ids, 1)
    totals = drafted.scheduler.totals
    assert totals.spec_draft_tokens > count / 2 and 0.02 < totals.spec_accepted / totals.spec_draft_tokens < 0.6
    assert set(seen) <= set(expected) and sum(seen.values()) == count
    common = {triple: share * count for triple, share in expected.items() if share * count >= 5}
    rest = count - sum(common.values())
    found = sum((seen[triple] - want) ** 2 / want for triple, want in common.items())
    if rest > 5:
        found += (count - sum(seen[triple] for triple in common) - rest) ** 2 / rest
    print(f"{count} choices: chi-square {found:.1f} over {len(common)} triples, {totals.spec_accepted} accepted")
    assert found < chi_square_limit(len(common))


def test_triples_follow_the_distribution(vl_checkpoint: Path) -> None:
    """Above the 99.9 % point one time in a thousand; the seed is fixed."""
    check(vl_checkpoint, 600)


@pytest.mark.long
def test_fifty_thousand_triples_follow_the_distribution(vl_checkpoint: Path) -> None:
    check(vl_checkpoint, 50_000)
