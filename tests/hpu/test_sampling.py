"""SAMPLE without sorting the vocabulary: the CPU's thresholds and draws, and variants that compute what is asked."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trencadis.backends.cpu import sampler
from trencadis.backends.hpu.sampling_thresholds import find_thresholds, largest_float
from trencadis.backends.hpu.shape_policy import SERVING
from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.launches.launch_splitter import head_bucket

pytestmark = pytest.mark.part("gaudi")

Find = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def random_rows(seed: int, rows: int, vocab: int) -> tuple[Tensor, Any]:
    """Logits of any temperature, a third of them with many equal values, and every mixture of filters."""
    g = torch.Generator().manual_seed(seed)

    def some(share: float, value: Tensor, off: float) -> Tensor:
        return torch.where(torch.rand(rows, generator=g) < share, value, torch.full((), off))

    logits = torch.randn(rows, vocab, generator=g) * torch.rand(rows, 1, generator=g) * 8
    logits = logits.round() if seed % 3 == 0 else logits
    head = SimpleNamespace(
        top_k=some(0.6, torch.randint(1, vocab + 9, (rows,), generator=g).float(), 0).int(),
        top_p=some(0.7, torch.rand(rows, generator=g), 1), min_p=some(0.4, torch.rand(rows, generator=g) * 0.3, 0),
        temperature=some(0.9, torch.rand(rows, generator=g) + 0.1, 0), uniform=torch.rand(rows, generator=g),
    )  # fmt: skip
    return logits, head


def drawn(find: Find, logits: Tensor, allowed: Tensor, head: Any) -> Tensor:
    return sampler.draw(logits, allowed, head, lambda p, h: find(p, h.top_k, h.top_p, h.min_p))


@pytest.mark.parametrize("vocab", [300])
def test_50000_rows_draw_the_cpus_ids(vocab: int) -> None:
    differ = rows = 0
    for seed in range(25):
        logits, head = random_rows(seed, 2000, vocab)
        allowed = torch.ones_like(logits, dtype=torch.bool)
        allowed[:, seed % vocab] = False
        ids = [drawn(find, logits, allowed, head) for find in (sampler.thresholds, find_thresholds)]
        differ, rows = differ + int((ids[0] != ids[1]).sum()), rows + len(logits)
    assert rows == 50_000 and differ == 0


def sort_values(values: Tensor, dim: int, descending: bool) -> SimpleNamespace:
    """``Tensor.sort`` by numpy, several times as fast: sorted values do not depend on who sorts them."""
    assert descending and dim == -1
    return SimpleNamespace(values=torch.from_numpy(-np.sort(-values.numpy(), axis=-1)))


def count_other_draws(logits: Tensor, allowed: Tensor, head: Any, ours: Callable[..., Tensor] = find_thresholds) -> int:
    """Returns how many rows draw other ids than the CPU's.

    A draw follows from its probabilities and its threshold, so it is made twice only where the thresholds differ.
    """
    found: list[Tensor] = []

    def limit(probs: Tensor, head: Any) -> Tensor:
        args = probs, head.top_k, head.top_p, head.min_p
        found.extend(find(*args) for find in (sampler.thresholds, ours))
        return found[0]

    ids = sampler.draw(logits, allowed, head, limit)
    if torch.equal(*found):
        return 0
    return int((ids != sampler.draw(logits, allowed, head, lambda *args: found[1])).sum())


ROWS = 4
"""Rows at a time: their probabilities stay in the processor's cache."""


def pick_rows(logits: Tensor, head: Any, some: slice) -> tuple[Tensor, Any]:
    return logits[some], SimpleNamespace(**{name: values[some] for name, values in vars(head).items()})


@pytest.mark.parametrize(("seed", "start"), [(761, 20)])
def test_no_order_of_additions_changes_a_draw(seed: int, start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where float32 sums of 151,936 probabilities rounded to other thresholds than the CPU's, and among four rows to
    others than alone.
    """
    monkeypatch.setattr(Tensor, "sort", sort_values)
    logits, head = random_rows(seed, 32, 151_936)
    allowed = torch.ones(ROWS, logits.shape[1], dtype=torch.bool)
    allowed[:, seed] = False
    few = pick_rows(logits, head, slice(start, start + ROWS))
    assert count_other_draws(few[0], allowed, few[1]) == 0
    together = drawn(find_thresholds, few[0], allowed, few[1])
    alone = [pick_rows(*few, slice(i, i + 1)) for i in range(ROWS)]
    assert together.tolist() == [int(drawn(find_thresholds, x, allowed[:1], one)) for x, one in alone]


@pytest.mark.long
@pytest.mark.parametrize("part", range(20))
def test_50000_rows_of_a_real_vocabulary_draw_the_cpus_ids(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,500 of them: each part has rows, seeds and a forbidden id of its own, so that a run may be cut in pieces.

    The bisection is compiled for the CPU, nine times as fast: its sums are exact, so that it finds the same floats.
    """
    monkeypatch.setattr(Tensor, "sort", sort_values)
    fast = torch.compile(find_thresholds, fullgraph=True, dynamic=False)
    differ = rows = 0
    for seed in range(part * 79, (part + 1) * 79):
        logits, head = random_rows(seed, min(32, 2500 - rows), 151_936)
        allowed = torch.ones(ROWS, logits.shape[1], dtype=torch.bool)
        allowed[:, seed] = False
        if seed == part * 79:  # as it is run on a card
            few = pick_rows(logits, head, slice(ROWS))
            assert count_other_draws(few[0], allowed, few[1]) == 0
        for start in range(0, len(logits), ROWS):
            few = pick_rows(logits, head, slice(start, start + ROWS))
            differ += count_other_draws(few[0], allowed, few[1], fast)
        rows += len(logits)
    print(f"part {part}: {rows} rows, {differ} differ")
    assert rows == 2500 and differ == 0


def test_a_threshold_that_is_off_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the way of comparing that the long run has."""
    monkeypatch.setattr(Tensor, "sort", sort_values)
    logits, head = random_rows(1, 200, 300)
    allowed = torch.ones_like(logits, dtype=torch.bool)
    assert count_other_draws(logits, allowed, head) == 0
    assert count_other_draws(logits, allowed, head, lambda *args: find_thresholds(*args) * 1.02) > 0


def test_the_largest_float_is_found_to_its_last_bit() -> None:
    """Normal and subnormal floats, 0, 1 and the float below 1."""
    rng = np.random.default_rng(1)
    bits = rng.integers(0, np.float32(1).view(np.int32) + 1, 3000).astype(np.int32)
    one = int(np.float32(1).view(np.int32))
    bits[:6] = [0, 1, 2, one, one - 1, 1 << 23]
    wanted = torch.from_numpy(bits.view(np.float32)[:, None].copy())
    assert torch.equal(largest_float(lambda t: t <= wanted, wanted), wanted)


@pytest.mark.parametrize("name", ["full", "draw", "penalised", "ahead"])
def test_no_launch_sorts_the_vocabulary(name: str) -> None:
    """In compile mode a sort is a topk of everything; topk of the reported log-probabilities alone is allowed."""
    from tests.hpu.compiled.test_compiled_bodies import traced
    from trencadis.backends.hpu.emulator.emulated_graph_lowering import calls

    made, lowered = traced(name)
    vocab = made.model.config.text.vocab
    sorts = [n for n in calls(lowered.graph) if "sort" in str(n.target)]
    most = [n.args[1] for n in calls(lowered.graph) if "topk" in str(n.target)]
    assert not sorts and all(k < vocab for k in most) and len(most) == (name in ("full", "ahead"))
    softmaxes = [n for n in calls(lowered.graph) if "softmax" in str(n.target)]
    assert bool(softmaxes) is (name != "penalised"), "a penalised argmax needs no probabilities"


def test_each_step_takes_the_cheapest_variant() -> None:
    buckets = [Bucket(Stage.SAMPLE, (4,), v) for v in ("greedy", "full", "draw", "penalised")]
    plan = Plan(SERVING, buckets=tuple(buckets))
    cases = {
        "greedy": {"full": False, "best": True},
        "full": {"full": True, "best": False, "logprobs": True},
        "draw": {"full": True, "best": False, "logprobs": False},
        "penalised": {"full": True, "best": False, "logprobs": False, "cold": True},
    }  # fmt: skip
    for variant, needs in cases.items():
        assert head_bucket(3, plan=plan, **needs).variant == variant
    assert SERVING.split_head
