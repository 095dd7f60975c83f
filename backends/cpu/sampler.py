"""Sampling in plain torch with static shapes; this module defines the meaning of every sampling parameter.

raw logits -> raw logprobs (these are reported) -> bias -> repetition, frequency, presence penalties -> mask ->
temperature -> min_p, top_k, top_p -> one draw by inverting the cumulated distribution in vocabulary order.

Filters are thresholds on probabilities, so ids of equal probability are kept or dropped together: top_k keeps all that
are no less probable than the k-th; top_p keeps the shortest run of best ids whose share of the probability left by
min_p and top_k reaches top_p, and all ids of equal probability.

Probabilities are summed as whole numbers of 2^-30 (``count_units``), which no order of additions rounds: a sort and a
bisection, one thread and many, find the same threshold and the same id.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trencadis.core.device.backend import HeadTensors, HeadTensorsOut, SamplerState
from trencadis.core.request import GREEDY_BELOW, MAX_LOGPROBS


def sample_full(
    logits: Tensor,
    head: HeadTensors,
    state: SamplerState,
    limit: Callable[[Tensor, HeadTensors], Tensor],
    note: Callable[[Tensor, HeadTensors, SamplerState, bool], None],
    targets_only: bool = False,
    rules: tuple[bool, bool] = (True, True),
    find: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> HeadTensorsOut:
    """Samples with all features: [r, V] logits -> tokens and logprobs.

    Args:
        limit, note: the backend's ``thresholds`` and ``update``.
        targets_only: every row has a target, so that nothing is drawn: as prompts are scored.
        rules: False where no row has penalties, and where no row has a mask.
        find: the backend's ``count_until``.
    """
    raw = logits.float()
    logprobs = raw.log_softmax(-1)
    token = head.target.long()
    if not targets_only:
        scores, allowed = apply_penalties(raw, head, state, *rules)
        token = torch.where(head.target >= 0, head.target, draw(scores, allowed, head, limit, find))
    own = logprobs.gather(1, token[:, None])
    rank = (logprobs > own).int().sum(-1) + 1
    top = logprobs.topk(min(MAX_LOGPROBS, logprobs.shape[1]), dim=-1)
    note(token, head, state, True)
    return HeadTensorsOut(token.int(), own[:, 0], rank.int(), top.indices.int(), top.values)


def sample_in_parts(
    logits: Tensor,
    head: HeadTensors,
    state: SamplerState,
    limit: Callable[[Tensor, HeadTensors], Tensor],
    note: Callable[[Tensor, HeadTensors, SamplerState, bool], None],
    targets_only: bool,
    size: int,
) -> HeadTensorsOut:
    """Runs ``sample_full`` over ``size`` rows at a time, whose tensors of the vocabulary stay in a CPU's caches."""
    found = []
    for start in range(0, len(logits), size):
        rows = slice(start, start + size)
        fields = (x if x is None or x is head.masks else x[rows] for x in head)
        part = HeadTensors(*fields)  # type: ignore[arg-type]
        rules = has_penalties(part), bool(part.mask_row.any())
        found.append(sample_full(logits[rows], part, state, limit, _note_later, targets_only, rules, search_until))
    out = HeadTensorsOut(*map(torch.cat, zip(*found, strict=True)))
    note(out.token.long(), head, state, True)
    return out


def _note_later(token: Tensor, head: HeadTensors, state: SamplerState, full: bool) -> None:
    """Stores nothing: the ids of all parts are stored at once, as drafts may go on from one part to the next."""


def has_penalties(head: HeadTensors) -> bool:
    """Returns True if a row has a penalty. Reads tensors on the host."""
    return bool(((head.repetition != 1) | (head.frequency != 0) | (head.presence != 0)).any())


def apply_penalties(
    raw: Tensor, head: HeadTensors, state: SamplerState, penalised: bool = True, masked: bool = True
) -> tuple[Tensor, Tensor]:
    """Returns ([r, V] scores after bias and penalties, [r, V] or [r, 1] bool ids that the mask allows).

    Args:
        penalised, masked: False where no row has penalties, or a mask: the same scores at less cost.
    """
    vocab = raw.shape[1]
    ids, values = (t.index_select(0, head.slot) for t in (state.bias_id, state.bias_value))
    scores = raw.scatter_add(1, ids, values)
    if penalised:
        scores = _penalise(scores, head, state)
    if not masked:
        return scores, torch.ones_like(head.mask_row, dtype=torch.bool)[:, None]
    return scores, unpack(head.masks.index_select(0, head.mask_row), vocab)


def _penalise(scores: Tensor, head: HeadTensors, state: SamplerState) -> Tensor:
    """Returns ``scores`` after penalties for ids of the prompt and ids drawn so far."""
    counts, bits = (t.index_select(0, head.slot) for t in (state.counts, state.prompt_mask))
    if head.ahead is not None:
        counts = counts.scatter_add(1, head.ahead.clamp_min(0), (head.ahead >= 0).to(counts.dtype))
    drawn = counts > 0
    seen = unpack(bits, scores.shape[1]) | drawn
    factor = head.repetition[:, None]
    scores = torch.where(seen, torch.where(scores > 0, scores / factor, scores * factor), scores)
    return scores - head.frequency[:, None] * counts - head.presence[:, None] * drawn


def draw(
    scores: Tensor,
    allowed: Tensor,
    head: HeadTensors,
    limit: Callable[[Tensor, HeadTensors], Tensor],
    find: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Returns int64 [r]: argmax, or the first id at which the cumulated probability exceeds the row's uniform
    number.
    """
    low = torch.finfo(torch.float32).min
    best = torch.where(allowed, scores, low).argmax(-1)
    warm = scores / head.temperature.clamp_min(GREEDY_BELOW)[:, None]
    probs = torch.where(allowed, warm, low).softmax(-1)
    kept = count_units(torch.where(probs >= limit(probs, head), probs, 0.0))
    cumulated = kept.cumsum(-1, dtype=torch.int32)
    total = cumulated[:, -1:]
    # A uniform number that rounds to the total must still find an id of positive probability: the last one.
    goal = torch.minimum((head.uniform[:, None] * total.to(probs.dtype)).int(), total - 1)
    found = (find or count_until)(cumulated, goal)
    return torch.where(head.temperature < GREEDY_BELOW, best, found)


def count_until(cumulated: Tensor, goal: Tensor) -> Tensor:
    """Returns int64 [r]: how many values of ``cumulated``, ascending int32 [r, V], are up to ``goal``, int32 [r, 1]."""
    return (cumulated <= goal).int().sum(-1)


def search_until(cumulated: Tensor, goal: Tensor) -> Tensor:
    """Returns what ``count_until`` does, by bisection, which reads few values."""
    return torch.searchsorted(cumulated, goal, right=True)[:, 0]


UNITS = 2.0**30
"""Units of one probability. The sum of a row stays below 2^31, although rounding may lift it a little above 1."""


def count_units(probs: Tensor) -> Tensor:
    """Returns ``probs``, whose rows sum to at most 1, in whole units of 2^-30 as int32, rounded down.

    Below 2^-30, nothing is left of a probability: over 151,936 ids that is less than 1.5e-4 together.
    """
    return (probs * UNITS).int()


def find_bound(total: Tensor, share: Tensor) -> Tensor:
    """Returns int32 [r, 1]: the least whole number not below ``share``, float [r], of ``total``, int32 [r, 1]."""
    return torch.minimum((share[:, None] * total.to(share.dtype)).ceil().int(), total)


def thresholds(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Returns [r, 1] least probability kept; filters that are off (top_k 0, top_p 1, min_p 0) let everything
    through.
    """
    return cut_ordered(probs.sort(-1, descending=True).values, top_k, top_p, min_p)


def cut_ordered(ordered: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Returns what ``thresholds`` does, for probabilities [r, V] in descending order."""
    vocab = ordered.shape[1]
    k = torch.where(top_k > 0, top_k.clamp_max(vocab), vocab).long()
    least = torch.maximum(ordered.gather(1, k[:, None] - 1), min_p[:, None] * ordered[:, :1])
    left = torch.where(ordered >= least, ordered, 0.0)
    units = count_units(left)
    cumulated = units.cumsum(-1, dtype=torch.int32)
    inside = cumulated - units < find_bound(cumulated[:, -1:], top_p)
    inside = (inside & (left > 0)) | (torch.arange(vocab, device=ordered.device) == 0)
    nucleus = torch.where(inside, left, 2.0).amin(-1, keepdim=True)
    return torch.where(top_p[:, None] < 1.0, torch.maximum(least, nucleus), least)


def update(token: Tensor, head: HeadTensors, state: SamplerState, full: bool) -> None:
    """Sets last[slot] = token, and counts[slot, token] += 1 in the full variant; targets and padding have slot 0.

    Rows after a draft that was not drawn write to slot 0. Of the rows of one slot, the last other one sets ``last``.
    """
    slot, final = (head.slot, head.slot) if head.ahead is None else accepted_slots(token, head)
    state.last.index_copy_(0, final, token.int())
    if full:
        ones = torch.ones_like(slot, dtype=state.counts.dtype)
        state.counts.index_put_((slot, token), ones, accumulate=True)


def accepted_slots(token: Tensor, head: HeadTensors) -> tuple[Tensor, Tensor]:
    """Returns int64 [r] twice: each row's slot, or 0 if a draft before it was not drawn; and the same, but 0 for all
    rows of a slot except the last of these.
    """
    if head.ahead is None or head.place is None:
        return head.slot, head.slot
    count, width = head.ahead.shape
    rows = torch.arange(count, device=token.device)
    first = rows - head.place
    at = (first[:, None] + torch.arange(width, device=token.device)).clamp_max(count - 1)
    drawn = token.index_select(0, at.flatten()).view(count, width)
    accepted = ((drawn == head.ahead) | (head.ahead < 0)).all(1)
    # No constant of type bool: a Gaudi's compiler leaves those out of its graphs.
    goes_on = torch.cat([accepted[1:] & (head.place[1:] > 0), rows[:1] < 0])
    slot = torch.where(accepted, head.slot, 0)
    return slot, torch.where(goes_on, 0, slot)


def unpack(bits: Tensor, vocab: int) -> Tensor:
    """Unpacks uint8 [r, ceil(V / 8)] in little bit order -> bool [r, V]."""
    bit = torch.arange(8, device=bits.device, dtype=torch.uint8)
    return ((bits[:, :, None] >> bit) & 1).bool().flatten(1)[:, :vocab]
