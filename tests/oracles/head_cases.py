"""Seeded inputs of the head, and when two samplers agree (docs/architecture.md, "What same answer means")."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.backends.cpu.sampler import apply_penalties, thresholds
from trencadis.core.device.backend import HeadTensors, HeadTensorsOut, SamplerState
from trencadis.core.request import GREEDY_BELOW

NEAR = 1e-4


def state(rng: np.random.Generator, vocab: int, slots: int) -> SamplerState:
    """Counts and seen bits in every slot from 1, bias pairs (two of them for one id) in every other one."""
    width = -(-vocab // 8)
    counts = rng.poisson(0.4, (slots + 1, vocab)).astype(np.int32)
    seen = np.packbits(rng.random((slots + 1, vocab)) < 0.3, axis=1, bitorder="little")
    ids, values = np.zeros((slots + 1, 300), np.int64), np.zeros((slots + 1, 300), np.float32)
    for slot in range(1, slots + 1, 2):
        some = min(5, vocab)
        ids[slot, :some] = rng.choice(vocab, some, replace=False)
        ids[slot, some] = ids[slot, 0]
        values[slot, : some + 1] = rng.normal(0, 2, some + 1)
    counts[0], seen[0] = 0, 0
    last = np.zeros(slots + 1, np.int32)
    assert seen.shape[1] == width
    return SamplerState(*(torch.from_numpy(x) for x in (last, counts, seen, ids, values)))


def head(rng: np.random.Generator, vocab: int, rows: int, **fixed: Any) -> HeadTensors:
    """Every parameter on in about half of the rows; ``fixed`` values hold for all rows."""

    def some(values: Any, neutral: float) -> Any:
        return np.where(rng.random(rows) < 0.5, values, neutral).astype(np.float32)

    allowed = rng.random((5, vocab)) < 0.6
    allowed[0], allowed[:, vocab // 2] = True, True
    made = {
        "hidden_row": np.zeros(rows, np.int64), "slot": np.arange(1, rows + 1, dtype=np.int64),
        "temperature": some(rng.uniform(0.3, 2, rows), 0.0), "top_k": some(rng.integers(1, 30, rows), 0),
        "top_p": some(rng.uniform(0.2, 1, rows), 1.0), "min_p": some(rng.uniform(0, 0.2, rows), 0.0),
        "presence": some(rng.normal(0, 1, rows), 0.0), "frequency": some(rng.normal(0, 1, rows), 0.0),
        "repetition": some(rng.uniform(0.7, 1.6, rows), 1.0), "uniform": rng.random(rows, dtype=np.float32),
        "target": np.full(rows, -1, np.int64), "mask_row": rng.integers(0, 5, rows),
        "masks": np.packbits(allowed, axis=1, bitorder="little"),
    }  # fmt: skip
    for name, value in fixed.items():
        made[name] = np.broadcast_to(np.asarray(value, made[name].dtype), made[name].shape).copy()
    made["top_k"] = made["top_k"].astype(np.int32)
    return HeadTensors(**{name: torch.from_numpy(x) for name, x in made.items()})


def logits(rng: np.random.Generator, vocab: int, rows: int, scale: float = 3.0) -> Tensor:
    """float32 [rows, vocab]."""
    return torch.from_numpy(rng.standard_normal((rows, vocab), np.float32) * np.float32(scale))


def to(values: Any, device: torch.device) -> Any:
    """A named tuple of tensors on ``device``, copied."""
    return type(values)(*(None if t is None else t.to(device, copy=True) for t in values))


def pick(x: HeadTensors, rows: Any) -> HeadTensors:
    """Some rows of the inputs."""
    kept = (t if name == "masks" or t is None else t[rows] for name, t in zip(x._fields, x, strict=True))
    return HeadTensors._make(kept)


def exact(raw: Tensor, x: HeadTensors, state: SamplerState) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """float64 (scores, ids the mask allows, probabilities, least probability that is kept) of each row."""
    scores, allowed = apply_penalties(raw.double(), x, state._replace(bias_value=state.bias_value.double()))
    warm = torch.where(allowed, scores / x.temperature.double().clamp_min(GREEDY_BELOW)[:, None], -1e300)
    probs = warm.softmax(-1)
    return scores, allowed, probs, thresholds(probs, x.top_k, x.top_p.double(), x.min_p.double())


def disagreements(
    raw: Tensor, x: HeadTensors, before: SamplerState, ours: HeadTensorsOut, reference: HeadTensorsOut
) -> tuple[list[int], list[int]]:
    """(rows that differ and may, rows that differ and may not).

    A row may differ where the uniform number lies within NEAR of a boundary of either token in the CDF, where a
    probability lies within NEAR (relative) of the threshold, or where two best scores of a greedy row are so close.
    """
    rows = (ours.token != reference.token).nonzero()[:, 0].tolist()
    if not rows:
        return [], []
    part = pick(x, rows)
    scores, allowed, probs, limit = exact(raw[rows], part, before)
    edge = ((probs - limit).abs() <= NEAR * limit).sum(-1) > ((probs == limit).sum(-1) > 0).long()
    kept = torch.where(probs >= limit, probs, 0.0)
    cdf = kept.cumsum(-1) / kept.sum(-1, keepdim=True)
    close, far = [], []
    for i, row in enumerate(rows):
        tokens = [int(ours.token[row]), int(reference.token[row])]
        ends = [float(cdf[i, t]) for t in tokens] + [float(cdf[i, t - 1]) if t else 0.0 for t in tokens]
        near = min(abs(e - float(part.uniform[i])) for e in ends) < NEAR
        best = torch.where(allowed[i], scores[i], -1e300).topk(2).values
        greedy = float(part.temperature[i]) < GREEDY_BELOW
        fine = float(best[0] - best[1]) < NEAR if greedy else near or bool(edge[i])
        (close if fine else far).append(row)
    return close, far


def compare(ops: Any, raw: Tensor, x: HeadTensors, before: SamplerState, device: torch.device) -> int:
    """Asserts that ``ops`` samples as the reference does; the number of rows that differ within NEAR."""
    ours_state, their_state = to(before, device), to(before, torch.device("cpu"))
    ours = ops.sample(raw.to(device), to(x, device), ours_state, True)
    ours = HeadTensorsOut(*(t.cpu() for t in ours))
    reference = ReferenceOps().sample(raw, x, their_state, True)
    close, far = disagreements(raw, x, before, ours, reference)
    assert not far, f"rows {far[:5]} differ"
    same = torch.ones(len(raw), dtype=torch.bool)
    same[close] = False
    for name in ("logprob", "top_logprob"):
        got, want = getattr(ours, name)[same], getattr(reference, name)[same]
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    plain = raw.float()
    own = plain.gather(1, ours.token[:, None].long())
    assert torch.equal(ours.rank.long(), (plain > own).sum(1) + 1)
    assert torch.equal(plain.gather(1, ours.top_id.long()), plain.topk(ours.top_id.shape[1]).values)
    drawn = x.slot[same & (x.slot > 0)]
    assert torch.equal(ours_state.last.cpu()[drawn], their_state.last[drawn])
    assert torch.equal(ours_state.counts.cpu()[drawn], their_state.counts[drawn])
    for before_part, after in zip(before, ours_state, strict=True):
        assert torch.equal(before_part[0], after.cpu()[0]), "slot 0 was written"
    return len(close)
