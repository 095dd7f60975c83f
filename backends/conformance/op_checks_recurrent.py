"""Checks of the recurrent ops: results and states, over every text stage, with NaN in padding and in unused states."""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from trencadis.backends.conformance.backend_under_test import CheckTarget
from trencadis.backends.conformance.check_result import CheckFailed, Skipped
from trencadis.backends.conformance.launch_harness import all_buckets, spread_buckets
from trencadis.backends.conformance.op_checks import TEXT, check_close, error_summary, needs_values, randn
from trencadis.backends.conformance.program_checks import make_harness
from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.device.backend import Attn, Backend, TextTensors
from trencadis.core.device.launch_tensors import RecurrentRows
from trencadis.core.launch_inputs import StepInputs
from trencadis.core.models.model_and_ops_api import RecurrentOps

NAN = float("nan")


class DeltaSizes(NamedTuple):
    """Key heads, value heads and their sizes, and the taps of a convolution."""

    groups: int
    heads: int
    dk: int
    dv: int
    taps: int

    @property
    def parts(self) -> list[int]:
        """Columns of queries, keys and values."""
        return [self.groups * self.dk, self.groups * self.dk, self.heads * self.dv]


SIZES = (DeltaSizes(1, 2, 32, 16, 4), DeltaSizes(2, 2, 16, 64, 3), DeltaSizes(1, 3, 24, 40, 2))
"""The last are sizes that no kernel is made for."""


class CheckStates(NamedTuple):
    """A pool of states: the last inputs of the convolution, those of the delta rule, and those of a state space."""

    conv: Tensor  # [slots, taps - 1, columns] of the backend's dtype
    state: Tensor  # float32 [slots, heads, dk, dv]
    scanned: Tensor  # float32 [slots, heads, dk, dv]


class RecurrentLayer:
    """All ops over the same inputs, called as a model calls a layer: x are queries, keys and values, the residual
    gates.
    """

    def __init__(self, ops: RecurrentOps, sizes: DeltaSizes, weight: Tensor, bias: Tensor, state: CheckStates) -> None:
        self.ops, self.sizes, self.weight, self.bias, self.state = ops, sizes, weight, bias, state

    def __call__(self, x: Tensor, residual: Tensor, rows: RecurrentRows, attn: Attn) -> tuple[Tensor, Tensor]:
        n, s, ops = len(x), self.sizes, self.ops
        mixed = ops.causal_conv(x, self.weight, self.bias, self.state.conv, rows, attn, "silu")
        q, k, v = torch.split(x, s.parts, dim=1)
        g, beta = torch.split(residual, [s.heads, s.heads], dim=1)
        heads = q.reshape(n, -1, s.dk), k.reshape(n, -1, s.dk), v.reshape(n, -1, s.dv)
        out = ops.delta_rule(*heads, g, beta, self.state.state, rows, attn)
        scanned = ops.state_space(*heads, g, beta, self.state.scanned, rows, attn)
        return torch.cat([mixed, out.reshape(n, -1), scanned.reshape(n, -1)], dim=1), residual + 0


class RecurrentBody:
    """A body of one layer; values are looked up by token id, and those of padding are NaN."""

    def __init__(self, backend: Backend, layer: RecurrentLayer, tables: list[Tensor], rows: RecurrentRows) -> None:
        self.ops, self.layer, self.tables, self.rows = backend.ops, layer, tables, rows
        width = tables[0].shape[1] + 2 * layer.sizes.parts[2]
        self.out = backend.zeros((400, width), tables[0].dtype)

    def __call__(self, x: TextTensors) -> None:
        n, last = len(x.out_row), len(self.tables[0]) - 1
        ids = torch.where(x.out_row > 0, x.tokens[:n].long(), last)
        values, gates = (self.ops.gather_rows(table, ids) for table in self.tables)
        rows = cast(RecurrentOps, self.ops).prepare_recurrent(self.rows, x.attn)
        out, _ = self.ops.layer(self.layer, values, gates, rows, x.attn)
        self.ops.scatter_rows(self.out, x.out_row, out)
        self.ops.cut("layer")


def recurrent(target: CheckTarget) -> str:
    """Results and states of ragged rows equal the reference's; other states keep their bits."""
    needs_values(target.backend())
    if not target.policy_of("recurrent"):
        raise Skipped("Policy.recurrent is False: this device serves no model with recurrent layers")
    errors: list[float] = []
    harness = make_harness(target)
    for stage in [s for s in harness.stages if s in TEXT]:
        for bucket in spread_buckets(all_buckets(harness.plan, stage), 2 if target.quick else 5):
            for sizes in SIZES:
                inputs, _ = harness.inputs(bucket, np.random.default_rng(3))
                errors += _check_bucket(target, harness.backend, bucket, inputs, sizes)
    return error_summary(errors)


def _check_bucket(
    target: CheckTarget, backend: Backend, bucket: Bucket, inputs: StepInputs, sizes: DeltaSizes
) -> list[float]:
    n, real = len(inputs.tokens), len(inputs.context)
    many = 1 if bucket.stage is Stage.CONTEXT else bucket.dims[bucket.stage is Stage.PREFILL]
    rows, states = _rows(inputs, many), _states(inputs, many + 4, sizes, target.dtype)
    tables = _tables(target.model.text.vocab, sizes)
    columns = sum(sizes.parts)
    weight, bias = randn(columns, sizes.taps, seed=11), randn(columns, seed=12)

    def put(t: Tensor) -> Tensor:
        return t.to(target.dtype).to(backend.device)

    there = CheckStates(*(t.clone().to(backend.device) for t in states))
    layer = RecurrentLayer(cast(RecurrentOps, backend.ops), sizes, put(weight), put(bias), there)
    mine = RecurrentBody(
        backend, layer, [put(tables[0]), tables[1].to(backend.device)],
        RecurrentRows(*(t.to(backend.device) for t in rows)),
    )  # fmt: skip
    program = backend.program(bucket, mine)
    backend.fill(program, inputs)
    program.run()
    backend.synchronize()
    wanted, after = _reference(target, inputs, sizes, weight, bias, tables, states)
    name = f"{bucket}, {sizes.groups}/{sizes.heads} heads of {sizes.dk} and {sizes.dv}: "
    used = torch.zeros(len(states.conv), dtype=torch.bool)
    used[1 : real + 1] = True
    found = CheckStates(*(t.cpu() for t in there))
    for part, own, before in zip(("inputs", "states", "scanned states"), found, states, strict=True):
        if not torch.equal(own[~used][1:].nan_to_num(7), before[~used][1:].nan_to_num(7)):
            raise CheckFailed(f"{name}{part} of slots that are not in the launch were written")
        if not torch.isfinite(own[used].float()).all():
            raise CheckFailed(f"{name}stored {part} are not finite")
    return [
        check_close(f"{name}results", mine.out.cpu()[1 : n + 1], wanted, target.dtype),
        check_close(f"{name}stored inputs", found.conv[used], after.conv[used], torch.float32),
        check_close(f"{name}stored states", found.state[used], after.state[used], torch.float32),
        check_close(f"{name}scanned states", found.scanned[used], after.scanned[used], torch.float32),
    ]


def _rows(inputs: StepInputs, many: int) -> RecurrentRows:
    """Returns the rows of a launch of ``many`` rows: row r has slot r + 1; the last real row reads another slot."""
    real = len(inputs.context)
    slot, source = np.zeros(many + 1, np.int64), np.zeros(many + 1, np.int64)
    slot[:real] = source[:real] = np.arange(1, real + 1)
    source[real - 1] = many + 2
    begins, count = np.ones(many + 1, np.int32), np.zeros(many + 1, np.int32)
    begins[:real] = inputs.context[:real] == 0
    count[:real] = np.diff(inputs.row_start[: real + 1])
    return RecurrentRows(*map(torch.from_numpy, (slot, begins, source, count)))


def _states(inputs: StepInputs, slots: int, sizes: DeltaSizes, dtype: torch.dtype) -> CheckStates:
    """Returns random states; those of slot 0 and of rows that begin are NaN."""
    conv = randn(slots, sizes.taps - 1, sum(sizes.parts), seed=13).to(dtype)
    state, scanned = (randn(slots, sizes.heads, sizes.dk, sizes.dv, seed=seed) for seed in (14, 17))
    spoiled = [0, *(1 + row for row, context in enumerate(inputs.context) if context == 0)]
    conv[spoiled], state[spoiled], scanned[spoiled] = NAN, NAN, NAN
    return CheckStates(conv, state, scanned)


def _tables(vocab: int, sizes: DeltaSizes) -> list[Tensor]:
    """Returns values and gates of each token id, and a last row of NaN for padding."""
    values, gates = randn(vocab + 1, sum(sizes.parts), seed=15), randn(vocab + 1, 2 * sizes.heads, seed=16)
    gates = torch.cat([-functional.softplus(gates[:, : sizes.heads]), gates[:, sizes.heads :].sigmoid()], dim=1)
    values[-1], gates[-1] = NAN, NAN
    return [values, gates]


def _reference(
    target: CheckTarget, inputs: StepInputs, sizes: DeltaSizes, weight: Tensor, bias: Tensor, tables: list[Tensor],
    states: CheckStates,
) -> tuple[Tensor, CheckStates]:  # fmt: skip
    """Returns results [n, columns] and the states after the launch, float32 from operands of the backend's dtype."""

    def wide(t: Tensor) -> Tensor:
        return t.to(target.dtype).float()

    n, real = len(inputs.tokens), len(inputs.context)
    after = CheckStates(states.conv.float(), states.state.clone(), states.scanned.clone())
    layer = RecurrentLayer(cast(RecurrentOps, ReferenceOps()), sizes, wide(weight), wide(bias), after)
    rows = _rows(inputs, len(states.conv) - 4)
    rows = RecurrentRows(*(torch.cat([t[:real], t[-1:]]) for t in rows))
    start = torch.from_numpy(np.append(inputs.row_start[: real + 1], n).astype(np.int32))
    attn = Attn(start, start[:-1], start[:-1, None], torch.zeros(n, dtype=torch.int64))
    ids = torch.from_numpy(inputs.tokens.astype(np.int64)).clamp(min=0)
    return layer(wide(tables[0])[ids], tables[1][ids], rows, attn)[0], after
