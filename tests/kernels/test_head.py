"""The head's kernels sample as the CPU does: same uniform numbers, same ids; ties, odd rows, order of programs."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.oracles import head_cases as cases
from tests.oracles import interpreter
from tests.oracles.chi_square import chi_square_limit
from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.backends.cuda.kernels import sample
from trencadis.backends.cuda.ops import CudaOps
from trencadis.core.device.backend import HeadTensors, HeadTensorsOut, SamplerState
from trencadis.core.request import NO_LOGPROB

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def case(vocab: int, rows: int, seed: int = 0, **fixed: object) -> tuple[Tensor, HeadTensors, SamplerState]:
    rng = np.random.default_rng(seed)
    return cases.logits(rng, vocab, rows), cases.head(rng, vocab, rows, **fixed), cases.state(rng, vocab, rows)


@pytest.mark.parametrize(("vocab", "rows"), [(61, 30), (700, 12), (2048, 6), (3, 4)])
def test_rows_are_sampled_as_on_the_cpu(vocab: int, rows: int, device: torch.device) -> None:
    assert cases.compare(CudaOps(), *case(vocab, rows), device) <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits(dtype: torch.dtype, device: torch.device) -> None:
    raw, x, state = case(300, 6, 1)
    assert cases.compare(CudaOps(), raw.to(dtype), x, state, device) <= 1


def test_flat_and_steep_rows(device: torch.device) -> None:
    """A nucleus of nearly everything, one of a single id, and logits of any size."""
    for seed, scale in enumerate((0.01, 20.0, 1e4)):
        rng = np.random.default_rng(seed)
        x = cases.head(rng, 900, 5, temperature=1.0, mask_row=0, top_p=[0.99, 0.5, 0.05, 0.999, 1e-6], min_p=0.0)
        assert cases.compare(CudaOps(), cases.logits(rng, 900, 5, scale), x, cases.state(rng, 900, 5), device) <= 1


TIED = {"k": {"top_k": 3}, "p": {"top_p": 0.5}, "min_p": {"min_p": 0.3}, "k and p": {"top_k": 40, "top_p": 0.7}}


@pytest.mark.parametrize("filters", TIED.values(), ids=TIED)
def test_equal_scores_stay_or_go_together(filters: dict[str, float], device: torch.device) -> None:
    """Logits on six levels only: thresholds fall on ties, and every kept id is drawn by some uniform number."""
    rows = 12
    rng = np.random.default_rng(7)
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "mask_row": 0, "temperature": 1.0}
    neutral |= {"presence": 0.0, "frequency": 0.0, "repetition": 1.0, "slot": 0}
    x = cases.head(rng, 300, rows, **(neutral | filters), uniform=(np.arange(rows) + 0.37) / rows)
    state = cases.state(rng, 300, rows)
    raw = torch.from_numpy(rng.integers(0, 6, (1, 300)).astype(np.float32)).repeat(rows, 1)
    ours = CudaOps().sample(raw.to(device), cases.to(x, device), cases.to(state, device), True).token.cpu()
    reference = ReferenceOps().sample(raw, x, cases.to(state, torch.device("cpu")), True).token
    assert torch.equal(ours, reference)
    assert len(set(ours.tolist())) > 1


def test_odd_rows(device: torch.device) -> None:
    """NaN (padding reads anything), -inf, one id allowed, none allowed, cold, targets, uniform numbers at both ends."""
    rng = np.random.default_rng(3)
    raw = cases.logits(rng, 200, 8)
    raw[0] = float("nan")
    raw[1, 5:] = float("-inf")
    x = cases.head(rng, 200, 8, presence=0.0, frequency=0.0, repetition=1.0, temperature=1.0, min_p=0.0, top_k=0)
    state = cases.state(rng, 200, 8)
    state.bias_value.zero_()
    masks = np.zeros((4, 200), np.uint8)
    masks[0], masks[1, 77] = 1, 1
    x = x._replace(masks=torch.from_numpy(np.packbits(masks, axis=1, bitorder="little")))
    x.mask_row[:] = torch.tensor([0, 0, 1, 2, 0, 0, 0, 0])
    x.temperature[4], x.target[5], x.target[6] = 1e-4, 199, 0
    x.slot[5:7] = 0
    x.uniform[:] = torch.tensor([0.5, 0.999, 0.5, 0.5, 0.5, 0.5, 0.5, 1 - 2**-24])
    out = CudaOps().sample(raw.to(device), cases.to(x, device), cases.to(state, device), True)
    token = out.token.cpu().tolist()
    assert all(0 <= t < 200 for t in token)
    assert token[1] < 5 and token[2] == 77 and token[4] == int(raw[4].argmax()) and token[5:7] == [199, 0]
    assert out.logprob is not None and out.top_logprob is not None and out.top_id is not None
    assert out.top_logprob[1, 5:].isneginf().all() and sorted(out.top_id[1, :5].tolist()) == [0, 1, 2, 3, 4]
    torch.testing.assert_close(out.logprob.cpu()[5], raw[5].log_softmax(-1)[199], rtol=1e-5, atol=1e-5)
    first = x._replace(uniform=torch.zeros(8))
    assert CudaOps().sample(raw.to(device), cases.to(first, device), cases.to(state, device), True).token[1] < 5


@pytest.mark.parametrize(("vocab", "rows"), [(61, 12), (3000, 4)])
def test_a_draw_is_the_same_without_log_probabilities(vocab: int, rows: int, device: torch.device) -> None:
    """The variant tells the id alone, and notes it as the other does."""
    raw, x, state = case(vocab, rows, 6)
    states = [cases.to(state, device) for _ in range(2)]
    full = CudaOps().sample(raw.to(device), cases.to(x, device), states[0], True)
    bare = CudaOps().draw(raw.to(device), cases.to(x, device), states[1])
    assert torch.equal(bare.token, full.token) and bare[1:] == (None,) * 4
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_rows_that_want_no_log_probabilities_cost_none(device: torch.device) -> None:
    """They are drawn; nothing is told of them, and the others are told what they would be alone."""
    raw, x, state = case(900, 6, 8, slot=0)
    want = CudaOps().sample(raw.to(device), cases.to(x, device), cases.to(state, device), True)
    some = x._replace(target=torch.tensor([-1, NO_LOGPROB, -1, NO_LOGPROB, NO_LOGPROB, -1]))
    out = sample.outputs(6, 900, device, True)
    for t in out:
        assert t is not None
        t.fill_(77)
    scratch = sample.scratch(6, 900, device)
    sample.draw_with_logprobs(raw.to(device), cases.to(some, device), cases.to(state, device), scratch, out)
    assert torch.equal(out.token, want.token)
    reported = (some.target == -1).to(device)
    for got, wanted in zip(out[1:], want[1:], strict=True):
        assert got is not None and wanted is not None
        assert torch.equal(got[reported], wanted[reported]) and bool((got[~reported] == 77).all())


NEUTRAL: dict[str, Any] = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "mask_row": 0, "presence": 0.0, "frequency": 0.0,
    "repetition": 1.0,
}  # fmt: skip


def test_logits_are_read_once(interpreted: None, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the argmax, and by a draw without thresholds but for the one chunk of 128 ids that it falls into."""
    vocab, rows, seen = 3000, 2, 0
    raw, x, state = case(vocab, rows, 9, **NEUTRAL)
    begin, end = raw.data_ptr(), raw.data_ptr() + raw.nbytes
    checked = interpreter._Owned.check

    def count(pointers: Any, mask: Any, what: str) -> None:
        nonlocal seen
        at = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)]
        seen += int(((at >= begin) & (at < end)).sum())
        checked(pointers, mask, what)

    monkeypatch.setattr(interpreter._Owned, "check", count)
    CudaOps().sample(raw, x, state, False)
    assert seen == rows * vocab
    seen = 0
    CudaOps().draw(raw, x, state)
    assert rows * vocab < seen <= rows * (vocab + 128)
    seen = 0
    CudaOps().draw(raw, x._replace(top_p=torch.full((rows,), 0.9)), state)
    assert seen > 2 * rows * vocab, "a nucleus is searched"


@pytest.mark.parametrize("vocab", [5, 61, 9000])
def test_greedy(vocab: int, device: torch.device) -> None:
    """The lowest id of the largest logit, also across shares; only ``last`` is written."""
    raw, x, state = case(vocab, 6, 2)
    raw[1] = raw[1].round()
    raw[2] = float("nan")
    x.slot[3] = 0
    ours = cases.to(state, device)
    out = CudaOps().sample(raw.to(device), cases.to(x, device), ours, False)
    want = [int((r == r.max()).nonzero()[0]) for r in raw[[0, 1, 3, 4, 5]]]
    assert out.token.cpu()[[0, 1, 3, 4, 5]].tolist() == want and out.logprob is None
    assert 0 <= int(out.token[2]) < vocab
    assert ours.last.cpu()[[1, 2, 5, 6]].tolist() == [want[i] for i in (0, 1, 3, 4)] and ours.last[0] == 0
    assert torch.equal(ours.counts.cpu(), state.counts)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)], ids=["two", "every"])
def test_same_bits_in_every_order(every: bool, interpreted: None) -> None:
    raw, x, state = case(5000, 1, 4, temperature=0.8)
    wide, plain, other = case(61, 3, 5)

    def run() -> list[HeadTensorsOut]:
        fresh = cases.to(state, raw.device)
        return [
            CudaOps().sample(raw, x, fresh, True), CudaOps().sample(raw, x, fresh, False), fresh,
            CudaOps().sample(wide, plain, cases.to(other, raw.device), True),
        ]  # fmt: skip

    interpreter.in_all_orders(run, every)


# Draws follow the distribution

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "warm": {"temperature": 1.6},
    "top_k": {"top_k": 9},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.06},
    "all": {"temperature": 0.9, "top_k": 25, "top_p": 0.9, "min_p": 0.01, "mask_row": 2},
    "penalties": {"presence": 0.4, "frequency": 0.2, "repetition": 1.3, "top_p": 0.95},
}
DRAWS = 50_000


def steps_of(
    raw: Tensor, x: HeadTensors, state: SamplerState, device: torch.device, width: float
) -> tuple[list[int], list[float]]:
    """(ids, ends): the kernel gives ids[i] for uniform numbers in [ends[i - 1], ends[i]); ends to ``width``.

    Ids come in ascending order, so bisection between any two numbers with different ids finds each end.
    """

    def tokens(uniforms: list[float]) -> list[int]:
        count = len(uniforms)
        many = cases.pick(x, [0] * count)._replace(uniform=torch.tensor(uniforms, dtype=torch.float32))
        # A slot of its own for each row: what one draws is counted before the next one reads.
        many = many._replace(slot=torch.arange(1, count + 1))
        own = SamplerState(*(t[[0] + [int(x.slot[0])] * count] for t in state))
        out = CudaOps().draw(raw.repeat(count, 1).to(device), cases.to(many, device), cases.to(own, device))
        return out.token.cpu().tolist()

    known = dict(zip([0.0, 1 - 2**-24], tokens([0.0, 1 - 2**-24]), strict=True))
    while True:
        at = sorted(known)
        open_ = [(a, b) for a, b in pairwise(at) if known[a] != known[b] and b - a > width]
        if not open_:
            break
        middles = [(a + b) / 2 for a, b in open_]
        known.update(zip(middles, tokens(middles), strict=True))
    ids, ends = [known[at[0]]], []
    for a, b in pairwise(at):
        assert known[b] >= known[a], "a larger uniform number gave a lower id"
        if known[b] != known[a]:
            ends.append(b)
            ids.append(known[b])
    return ids, [*ends, 1.0]


def check_draws(setting: str, vocab: int, device: torch.device, width: float = 2**-22) -> float:
    """Chi-square of 50,000 draws through the kernel's own map from uniform numbers to ids, against float64."""
    rng = np.random.default_rng(11)
    neutral: dict[str, Any] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "mask_row": 0,
        "presence": 0.0,
    }
    neutral |= {"frequency": 0.0, "repetition": 1.0}
    raw, state = cases.logits(rng, vocab, 1, 1.5), cases.state(rng, vocab, 1)
    x = cases.head(rng, vocab, 1, **(neutral | SETTINGS[setting]))
    _, _, probs, limit = cases.exact(raw, x, state)
    kept = torch.where(probs >= limit, probs, 0.0)[0]
    exact = (kept / kept.sum()).numpy()
    ids, ends = steps_of(raw, x, state, device, width)
    drawn = np.asarray(ids)[np.searchsorted(ends, rng.random(DRAWS), side="right")]
    seen = np.bincount(drawn, minlength=vocab)
    assert not seen[exact == 0].any(), "an id was drawn that the filters remove"
    real = exact > 0
    statistic = float(((seen[real] - DRAWS * exact[real]) ** 2 / (DRAWS * exact[real])).sum())
    assert statistic < chi_square_limit(int(real.sum()) - 1), statistic
    return statistic


def test_draws_follow_the_distribution(device: torch.device) -> None:
    check_draws("all", 10, device, 2**-13)


@pytest.mark.long
@pytest.mark.parametrize("setting", SETTINGS)
def test_draws_of_every_setting(setting: str, device: torch.device) -> None:
    print(f"{setting}: chi-square {check_draws(setting, 61, device):.1f} of {DRAWS} draws")


@pytest.mark.long
@pytest.mark.parametrize(("vocab", "rows", "part"), [(2048, 5000, 250), (151_936, 50, 10)])
def test_many_rows_equal_the_cpu(vocab: int, rows: int, part: int, device: torch.device) -> None:
    """Equal, or within 1e-4 of a boundary in at most 1 % of rows."""
    near = sum(cases.compare(CudaOps(), *case(vocab, part, 100 + i), device) for i in range(rows // part))
    print(f"{rows} rows of {vocab}: {near} differ within {cases.NEAR} of a boundary, the others are equal")
    assert near <= rows // 100


@pytest.mark.long
@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes hours; a GPU seconds")
def test_many_wide_rows_on_a_card(device: torch.device) -> None:
    near = sum(cases.compare(CudaOps(), *case(151_936, 250, 500 + i), device) for i in range(20))
    print(f"5000 rows of 151936: {near} differ within {cases.NEAR} of a boundary")
    assert near <= 50


def test_rows_with_drafts_before_them_are_sampled_as_on_the_cpu(device: torch.device) -> None:
    """Of each slot's three rows all count, or the first, or two: drafts are what was drawn before them, or are not."""
    raw, x, state = case(300, 9, 4, temperature=1.0, target=-1)
    x = x._replace(slot=torch.tensor([1, 1, 1, 2, 2, 2, 3, 3, 3]))
    alone = ReferenceOps().sample(raw, x, cases.to(state, torch.device("cpu")), True).token
    ahead, place = torch.full((9, 2), -1), torch.tensor([0, 1, 2] * 3)
    ahead[1:3, 0], ahead[4:6, 0], ahead[7:, 0] = alone[0], (alone[3] + 1) % 300, alone[6]
    chained = x._replace(place=place, ahead=ahead)
    second = ReferenceOps().sample(raw, chained, cases.to(state, torch.device("cpu")), True).token
    ahead[2, 1], ahead[5, 1], ahead[8, 1] = second[1], second[4], (second[7] + 1) % 300
    wanted, found = cases.to(state, torch.device("cpu")), cases.to(state, device)
    theirs = ReferenceOps().sample(raw, chained, wanted, True)
    ours = CudaOps().sample(raw.to(device), cases.to(chained, device), found, True)
    assert torch.equal(ours.token.cpu(), theirs.token)
    assert torch.equal(found.counts.cpu()[1:], wanted.counts[1:]) and torch.equal(found.last.cpu()[1:], wanted.last[1:])
    assert [int((wanted.counts - state.counts)[slot].sum()) for slot in (1, 2, 3)] == [3, 1, 2]
