"""The head at Qwen's vocabulary: greedy, and with everything on, against torch and one read of the logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernels.case import Case
from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.backends.cuda.kernels import sample
from trencadis.core.device.backend import HeadTensors, SamplerState

VOCAB = 151_936
SETTINGS = {
    "no filter": {},
    "top-p 0.95": {"top_p": 0.95},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
    "penalties, top-p 0.9": {"top_p": 0.9, "repetition": 1.1, "presence": 0.2},
}


def inputs(rows: int, vocab: int, device: torch.device, **requested: float) -> tuple[HeadTensors, SamplerState]:
    """Rows that all ask for the same, with an empty state."""

    def full(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    def zeros(width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(rows + 1, width, dtype=dtype, device=device)

    ints = torch.arange(1, rows + 1, device=device)
    width = -(-vocab // 8)
    x = HeadTensors(
        hidden_row=ints, slot=ints, temperature=full(requested.get("temperature", 0.8)),
        top_k=full(requested.get("top_k", 0), torch.int32), top_p=full(requested.get("top_p", 1.0)),
        min_p=full(requested.get("min_p", 0.0)), presence=full(requested.get("presence", 0.0)), frequency=full(0.0),
        repetition=full(requested.get("repetition", 1.0)), uniform=torch.rand(rows, device=device),
        target=full(-1, torch.int64), mask_row=full(0, torch.int64),
        masks=torch.full((1, width), 255, dtype=torch.uint8, device=device),
    )  # fmt: skip
    last = torch.zeros(rows + 1, dtype=torch.int32, device=device)
    state = SamplerState(
        last, zeros(vocab, torch.int32), zeros(width, torch.uint8), zeros(300, torch.int64), zeros(300, torch.float32)
    )
    return x, state


def case(rows: int, vocab: int, setting: str, device: torch.device) -> Case:
    """``greedy`` or a name of SETTINGS."""
    # Gaussian logits of deviation 3: a nucleus of 0.95 holds some 9,000 ids, far more than a language model's.
    logits = (torch.randn(rows, vocab, device=device) * 3).bfloat16()
    full = setting != "greedy"
    x, state = inputs(rows, vocab, device, **SETTINGS.get(setting, {}))
    out, ops = sample.outputs(rows, vocab, device, full), ReferenceOps()
    room, parts = sample.scratch(rows, vocab, device), sample.greedy_scratch(rows, vocab, device)

    def run() -> object:
        if full:
            sample.draw_with_logprobs(logits, x, state, room, out)
        else:
            sample.pick_greedy(logits, x, state, parts, out)
        return out.token

    def eager() -> object:
        return ops.sample(logits, x, SamplerState(*(t.clone() for t in state)), full).token

    def differs() -> float:
        state.counts.zero_()
        reference = eager()
        assert isinstance(reference, torch.Tensor)
        run()
        return float((out.token != reference).float().mean())

    return Case(
        f"head {setting}, {rows} x {vocab}", "head" if full else "head_greedy", run, bytes=logits.nbytes, flops=0,
        bound="read", baselines={"torch (sort, softmax, cumsum)" if full else "argmax": eager}, check=differs,
        reset=state.counts.zero_,
    )  # fmt: skip


def cases(device: torch.device, small: bool = False) -> Iterator[Case]:
    """One row, a batch of 256; ``small``: sizes that an interpreter can run."""
    if small:
        yield case(2, 300, "greedy", device)
        yield case(2, 300, "top-k 50, top-p 0.9", device)
        return
    for rows in (1, 256):
        yield case(rows, VOCAB, "greedy", device)
        for setting in SETTINGS:
            yield case(rows, VOCAB, setting, device)
