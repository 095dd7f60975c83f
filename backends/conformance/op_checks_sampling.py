"""Checks SAMPLE and RESET against the reference: tokens, log-probabilities, ranks, and the resulting state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from trencadis.backends.conformance.backend_under_test import CheckTarget
from trencadis.backends.conformance.check_result import CheckFailed
from trencadis.backends.conformance.op_checks import check_close, error_summary, randn
from trencadis.backends.conformance.program_checks import make_harness
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.device.backend import Backend, SamplerState
from trencadis.core.launches import host_inputs as host
from trencadis.core.models.model_and_ops_api import DrawingOps, PenalisingOps
from trencadis.core.request import MAX_BIAS, MAX_LOGPROBS
from trencadis.core.step import Bias, Reset, Sample


class SamplingCheck:
    """A body of SAMPLE, by its variant, or of RESET over given logits and state."""

    def __init__(self, backend: Backend, logits: Tensor, state: SamplerState, variant: str) -> None:
        self.ops, self.logits, self.state, self.variant = backend.ops, logits, state, variant

    def __call__(self, x: Any) -> Any:
        if hasattr(x, "temperature"):
            if self.variant == "draw":
                return cast(DrawingOps, self.ops).draw(self.logits, x, self.state)
            if self.variant == "penalised":
                return cast(PenalisingOps, self.ops).take_penalised(self.logits, x, self.state)
            return self.ops.sample(self.logits, x, self.state, self.variant == "full")
        return self.ops.reset(x, self.state)


def _state(backend: Backend, slots: int, vocab: int) -> SamplerState:
    rng = np.random.default_rng(5)
    made = SamplerState(
        last=torch.zeros(slots, dtype=torch.int32),
        counts=torch.from_numpy(rng.integers(0, 2, (slots, vocab), dtype=np.int32)),
        prompt_mask=torch.from_numpy(rng.integers(0, 256, (slots, -(-vocab // 8)), dtype=np.uint8)),
        bias_id=torch.from_numpy(rng.integers(0, vocab, (slots, MAX_BIAS))),
        bias_value=torch.from_numpy(rng.standard_normal((slots, MAX_BIAS)).astype(np.float32)),
    )
    held = SamplerState(*(backend.zeros(t.shape, t.dtype) for t in made))
    for destination, value in zip(held, made, strict=True):
        destination.copy_(value)
    return held


CASES = (
    Sample(full=True),
    Sample(0.7, uniform=0.31, full=True),
    Sample(1.0, top_k=3, uniform=0.92, full=True),
    Sample(0.9, top_p=0.6, uniform=0.55, full=True),
    Sample(0.8, min_p=0.2, uniform=0.77, full=True),
    Sample(0.0, presence=2.0, frequency=1.0, repetition=1.5, full=True),
    Sample(0.6, 7, 0.8, 0.02, 0.4, 0.3, 1.2, 0.41, full=True),
)


def sample(target: CheckTarget) -> str:
    """Argmax, draws, filters, penalties, bias, masks, targets; log-probabilities, ranks, counts and last tokens."""
    harness = make_harness(target)
    vocab, rows = harness.vocab, len(CASES) + 2
    slots, errors = rows + 2, []
    raw = randn(64, vocab, seed=11) * 3
    banned = [tuple(int(t) for t in raw[i].argsort(descending=True)[:5]) for i in range(rows)]
    policy = harness.backend.policy
    more = [name for name, there in (("draw", policy.drawn_head), ("penalised", policy.penalised_head)) if there]
    for variant in ("greedy", "full", *more):
        full = variant != "greedy"
        cases = [CASES[i % len(CASES)] if full else Sample() for i in range(rows)]
        if full:
            cases[0] = Sample(full=True, banned=banned[0])
            cases[-1] = Sample(1.0, uniform=0.5, full=True, banned=banned[-1])
            cases = [replace(c, logprobs=MAX_LOGPROBS if variant == "full" else -1) for c in cases]
        if variant == "penalised":
            cases = [replace(c, temperature=0.0) for c in cases]
        inputs = host.head_inputs([host.SampleRow(i, 1 + i, s) for i, s in enumerate(cases)], vocab)
        if full:
            inputs.target[-2], inputs.slot[-2] = 17, 0
        outs = []
        for backend, dtype in ((harness.backend, target.dtype), (target.reference(), torch.float32)):
            own = backend is harness.backend
            asked = variant if own or variant == "greedy" else "full"
            bucket = harness.plan.fit(Stage.SAMPLE, (rows,), variant)
            bucket = bucket if own else Bucket(Stage.SAMPLE, (rows,), asked)
            logits = raw[: bucket.dims[0]].to(target.dtype).to(dtype).to(backend.device)
            state = _state(backend, slots, vocab)
            program = backend.program(bucket, SamplingCheck(backend, logits, state, asked))
            backend.fill(program, inputs)
            head = backend.fetch(program.run(), rows).result()
            found = {n: getattr(head, n) for n in ("token", "logprob", "rank", "top_id", "top_logprob")}
            outs.append({n: torch.from_numpy(np.array(v)) for n, v in found.items() if v is not None})
            outs[-1] |= {"last": state.last.cpu()[1:].clone(), "counts": state.counts.cpu()[1:].clone()}
        wanted_of = {n: t for n, t in outs[1].items() if variant not in more or n in ("token", "last", "counts")}
        if missing := sorted(set(wanted_of) - set(outs[0])):
            raise CheckFailed(f"no {', '.join(missing)}")
        for name, wanted in wanted_of.items():
            what = f"{variant}: {name}"
            errors.append(check_close(what, outs[0][name], wanted, torch.float32 if full else target.dtype))
    return error_summary(errors)


def reset(target: CheckTarget) -> str:
    """Whole rows of sampler state replaced, the others left."""
    harness, outs = make_harness(target), []
    resets = [Reset(2, (3, 5, 9), (7, 7, 11), (Bias(4, 1.5), Bias(8, -2.0))), Reset(5, (1,), (), ())]
    inputs = host.reset_inputs(resets, harness.vocab)
    for backend in (harness.backend, target.reference()):
        state = _state(backend, 9, harness.vocab)
        fitting = harness.plan.fit(Stage.RESET, (2,))
        bucket = fitting if backend is harness.backend else Bucket(Stage.RESET, (2,))
        program = backend.program(bucket, SamplingCheck(backend, torch.zeros(1), state, ""))
        backend.fill(program, inputs)
        program.run()
        backend.synchronize()
        outs.append([t.cpu()[1:].clone() for t in state])
    names = SamplerState._fields
    return error_summary([check_close(n, f, w, torch.float32) for n, f, w in zip(names, *outs, strict=True)])
