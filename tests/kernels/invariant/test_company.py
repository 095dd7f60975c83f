"""``--batch-invariant``: a token has the same bits alone, in company, decoded or in a chunk, its keys cut or not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tests.oracles.attention_cases import Case, Prepared, moved, prepared
from trencadis.backends.cuda.kernels import paged_attention, query_blocks_and_key_cuts
from trencadis.backends.cuda.launches import attention_work_items, bucket_capacity
from trencadis.core.buckets import Stage

BASE = Case((), group=2, kv_heads=1, d=16, invariant=True)
MANY, FEW = 132, 0
"""Processors: keys are cut for many of them; where there is none, a share is all work."""


@pytest.fixture(autouse=True)
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans of 128 keys, so that small prompts have several."""
    for module in (query_blocks_and_key_cuts, bucket_capacity, paged_attention):
        monkeypatch.setattr(module, "SPAN", 128)
    for module in (bucket_capacity, attention_work_items):
        monkeypatch.setattr(module, "LEAST", 128)


def ways(rng: np.random.Generator) -> tuple[Case, int, list[tuple[Case, int, int]]]:
    """(a prompt beside a row that leaves it whole, the token compared, five times (launch, row, its tokens))."""
    context, count = int(rng.integers(0, 500)), int(rng.integers(2, 12))
    last = int(rng.integers(1, count))
    base = dataclasses.replace(
        BASE, window=int(rng.choice((0, 0, 60, 200))), group=int(rng.choice((1, 2, 7))), seed=int(rng.integers(1 << 30))
    )
    place, part = context + last, int(rng.integers(1, last + 2))
    others = [(int(rng.integers(0, 300)), int(n)) for n in rng.integers(1, 9, 2)]
    single = [(int(rng.integers(0, 400)), 1) for _ in range(2)]
    chunk = (place + 1 - part, part)

    def case(rows: list[tuple[int, int]], processors: int, decode: bool = False) -> Case:
        return dataclasses.replace(base, rows=tuple(rows), processors=processors, decode=decode)

    return case([(context, count), (150, 1)], FEW), last, [
        (case([chunk], MANY), 0, part),
        (case([*others, chunk], MANY), 2, part),
        (case([(150, 2), chunk], FEW), 1, part),
        (case([(place, 1)], MANY, decode=True), 0, 1),
        (case([single[0], (place, 1), single[1]], FEW, decode=True), 1, 1),
    ]  # fmt: skip


def cuts(ready: Prepared, row: int) -> int:
    """Joins of a row of a launch."""
    return int((ready.tensors.attn.join_row == row).sum())


@pytest.mark.parametrize("prompts", [2, pytest.param(200, marks=pytest.mark.long)])
def test_the_bits_of_a_prompt_do_not_depend_on_its_company(prompts: int, device: torch.device) -> None:
    """Prompts times five ways; the last token compared stands anywhere in its chunk."""
    launches = joined = 0
    for i in range(prompts):
        alone, last, others = ways(np.random.default_rng(i))
        source = prepared(alone, device)
        assert not cuts(source, 0)
        wanted = source.run()[0][last]
        for case, row, part in others:
            target = prepared(case, device)
            launches, joined = launches + 1, joined + bool(cuts(target, row))
            assert torch.equal(moved(source, last, target, row, part), wanted), (i, case)
    print(f"\n{prompts} prompts, {launches} launches, {joined} of them with the prompt's keys cut: all bits equal")
    assert launches / 5 < joined < launches


def verified(rng: np.random.Generator) -> tuple[Case, int, list[tuple[Case, int, int]]]:
    """``ways`` of a token in rows with drafts: it is a draft, or drafts come after it; others have other numbers."""
    alone, last, _ = ways(rng)
    context, width = alone.rows[0][0], int(rng.integers(2, 9))
    found = []
    for processors in (MANY, FEW):
        after = int(rng.integers(0, width))
        part = min(int(rng.integers(1, width - after + 1)), last + 1)
        row = (context + last + 1 - part, part + after)
        others = [(int(rng.integers(0, 400)), int(count)) for count in rng.integers(1, width + 1, 2)]
        at = int(rng.integers(0, 3))
        rows = (*others[:at], row, *others[at:])
        case = dataclasses.replace(alone, rows=rows, processors=processors, verify=width)
        found.append((case, at, part))
    return alone, last, found


@pytest.mark.parametrize("prompts", [2, pytest.param(200, marks=pytest.mark.long)])
def test_a_token_has_the_same_bits_in_a_row_with_drafts(prompts: int, device: torch.device) -> None:
    """As alone in a prompt, whatever its drafts are, and however many rows and drafts are verified beside it."""
    joined = 0
    for i in range(prompts):
        alone, last, others = verified(np.random.default_rng(100 + i))
        source = prepared(alone, device)
        wanted = source.run()[0][last]
        for case, row, part in others:
            target = prepared(case, device)
            assert case.bucket.stage is Stage.VERIFY
            joined += bool(cuts(target, row))
            assert torch.equal(moved(source, last, target, row, part), wanted), (i, case)
    print(f"\n{prompts} prompts, {2 * prompts} VERIFY launches, {joined} with the prompt's keys cut: all bits equal")
    assert joined > prompts // 4


def test_a_join_in_another_order_is_found(device: torch.device) -> None:
    """Joins the same partial results from the last to the first: other bits, so the test above compares something."""
    alone, last, others = ways(np.random.default_rng(0))
    source = prepared(alone, device)
    wanted = source.run()[0][last]
    target = prepared(others[0][0], device)
    assert cuts(target, 0)
    assert torch.equal(moved(source, last, target, 0, others[0][2]), wanted)
    values, weight = (torch.flip(t, (0,)) for t in target.partial)
    used = int(target.tensors.attn.join_part[-1])
    rolled = paged_attention.Partial(*(torch.roll(t, used, 0).contiguous() for t in (values, weight)))
    again = torch.empty_like(target.out)
    paged_attention.join(rolled, target.tensors.attn, target.q, target.cache, again, True)
    begin = others[0][2] - 1
    assert not torch.equal(again[begin], wanted)
    torch.testing.assert_close(again[begin], wanted, rtol=1e-5, atol=1e-5)
