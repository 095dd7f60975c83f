"""Checks of each op against the reference, inside a launch of the backend and with its own ``fill``.

The reference computes in float32 from operands rounded to the backend's dtype; each dtype has a tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trencadis.backends.conformance.backend_under_test import CheckTarget
from trencadis.backends.conformance.check_result import CheckFailed, Skipped
from trencadis.backends.conformance.launch_harness import BLOCKS, all_buckets, plan_of, spread_buckets
from trencadis.backends.conformance.program_checks import make_harness
from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.device.backend import Backend, LayerKV, Ops, SinksArgument, TextTensors
from trencadis.core.launch_inputs import StepInputs
from trencadis.core.launches import host_inputs as host
from trencadis.core.launches.kv_cache_and_state_allocation import by_block
from trencadis.core.step import Int32, Reset

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest allowed error per dtype, as a share of the result's largest magnitude."""

OPS = (
    "pack_weight", "linear", "rms_norm", "layer_norm", "silu_mul", "act", "act_mul", "pack_experts", "experts",
    "rotary", "rope_store", "attend", "patches", "rope_vision", "attend_windows", "attend_images", "embed",
    "interpolate", "gather_rows", "scatter_rows", "sample", "reset", "pool",
)  # fmt: skip
TEXT = (Stage.PREFILL, Stage.FRESH, Stage.CONTEXT, Stage.DECODE)
DRAFTED = (*TEXT, Stage.VERIFY)
"""Stages of launches whose tokens attend to earlier ones, and to no image."""


def list_inherited_ops(ops: Ops) -> list[str]:
    """Returns the names of the ops that ``ops`` inherits from ReferenceOps unchanged."""
    return [n for n in OPS if getattr(type(ops), n, None) is getattr(ReferenceOps, n)]


def check_close(what: str, found: Tensor, wanted: Tensor, dtype: torch.dtype) -> float:
    """Compares tensors of any equal shape; integers must be equal.

    Returns:
        The largest error as a share of the largest magnitude.

    Raises:
        CheckFailed: the shape differs, a value is not finite, or the error exceeds the tolerance of ``dtype``.
    """
    found, wanted = found.cpu(), wanted.cpu()
    if found.shape != wanted.shape:
        raise CheckFailed(f"{what}: shape {list(found.shape)}, the reference gives {list(wanted.shape)}")
    if not wanted.dtype.is_floating_point:
        wrong = int((found.long() != wanted.long()).sum())
        if wrong:
            raise CheckFailed(f"{what}: {wrong} of {wanted.numel()} values differ from the reference")
        return 0.0
    if not torch.isfinite(found.float()).all():
        raise CheckFailed(f"{what}: not finite")
    top = max(float(wanted.float().abs().max()), 1e-6)
    error = float((found.float() - wanted.float()).abs().max()) / top
    if error > TOLERANCE[dtype]:
        raise CheckFailed(f"{what}: off by {error:.2g} of the largest value; the tolerance is {TOLERANCE[dtype]:.0e}")
    return error


def error_summary(errors: Sequence[float]) -> str:
    """Returns the figure of a check that compares tensors."""
    return f"error at most {max(errors, default=0.0):.1e}, {len(errors)} comparisons"


# Ops of tensors alone

Work = Callable[..., Sequence[Tensor]]
Put = Callable[[Tensor], Tensor]
"""Moves a tensor to a device, and floats to its dtype."""
Setup = Callable[[Ops, Put], Work]
"""Returns the work of a launch on a backend's ops."""


class OpBody:
    """A program body that ignores its inputs: it applies ``work`` to fixed operands and copies the results to
    ``outs``.
    """

    def __init__(self, work: Work, operands: list[Tensor], outs: list[Tensor]) -> None:
        self.work, self.operands, self.outs = work, operands, outs

    def __call__(self, inputs: object) -> None:
        for destination, value in zip(self.outs, self.work(*self.operands), strict=True):
            destination.copy_(value)


def vs_reference(
    target: CheckTarget, setup: Setup, *operands: Tensor,
    close: Callable[[str, Tensor, Tensor, torch.dtype], float] | None = None,
) -> list[float]:  # fmt: skip
    """Runs one op in a launch of the backend and on the reference.

    Args:
        setup: (ops, put) -> the work of the launch; ``put`` moves a tensor to the device and its dtype.
        operands: operands of the work, any shape; floats are rounded to the backend's dtype.
        close: function that compares results; None: ``check_close``.

    Returns:
        The errors of the results (see ``check_close``).
    """
    backend, dtype = target.backend(), target.dtype
    needs_values(backend)

    def rounded(t: Tensor) -> Tensor:
        return t.to(dtype) if t.is_floating_point() else t

    def wide(t: Tensor) -> Tensor:
        return rounded(t).float() if t.is_floating_point() else t

    with torch.no_grad():
        # Copies, because an op may work in place.
        wanted = setup(ReferenceOps(), wide)(*(wide(t).clone() for t in operands))
        outs = [backend.zeros(t.shape, dtype if t.is_floating_point() else t.dtype) for t in wanted]
        work = setup(backend.ops, lambda t: rounded(t).to(backend.device))
        on_device = [rounded(t).clone().to(backend.device) for t in operands]
    bucket = plan_of(backend, target.model, target.block_size).fit(Stage.RESET, (1,))
    program = backend.program(bucket, OpBody(work, on_device, outs))
    backend.fill(program, host.reset_inputs([Reset(1, (), ())], target.model.text.vocab))
    program.run()
    backend.synchronize()
    compare = close or check_close
    return [compare(f"result {i}", f, w, dtype) for i, (f, w) in enumerate(zip(outs, wanted, strict=True))]


def needs_values(backend: Backend) -> None:
    if not backend.values:
        raise Skipped("this device computes shapes only (Backend.values is False): there is nothing to compare")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linear(target: CheckTarget) -> str:
    """x W^T + b for several row counts; ``pack_weight`` states both widths."""
    hidden, wide = target.model.text.hidden, target.model.text.intermediate
    errors: list[float] = []
    for rows in (1, 5, 37):
        for bias in (False, True):
            weight, b = randn(wide, hidden, seed=1) / hidden**0.5, randn(wide, seed=2) if bias else None

            def setup(ops: Ops, put: Put, weight: Tensor = weight, b: Tensor | None = b) -> Work:
                packed = ops.pack_weight(put(weight), None if b is None else put(b))
                if (packed.out_features, packed.in_features) != tuple(weight.shape):
                    raise CheckFailed(f"pack_weight says {packed.out_features} x {packed.in_features}")
                return lambda x: [ops.linear(x, packed)]

            errors += vs_reference(target, setup, randn(rows, hidden, seed=rows))
    return error_summary(errors)


def rms_norm(target: CheckTarget) -> str:
    """x / rms(x) * w; with a residual, of the sum of both, which it returns too."""
    hidden = target.model.text.hidden
    errors: list[float] = []
    for rows in (1, 19):
        x, residual, weight = randn(rows, hidden), randn(rows, hidden, seed=1), randn(hidden, seed=2)
        errors += vs_reference(target, lambda ops, put: lambda a, w: ops.rms_norm(a, w, 1e-6), x, weight)
        errors += vs_reference(
            target, lambda ops, put: lambda a, w, r: ops.rms_norm(a, w, 1e-6, r), x, weight, residual
        )
    return error_summary(errors)


def silu_mul(target: CheckTarget) -> str:
    """silu(first half) * second half."""
    x = randn(13, 2 * target.model.text.intermediate)
    return error_summary(vs_reference(target, lambda ops, put: lambda x: [ops.silu_mul(x)], x))


def gather_rows(target: CheckTarget) -> str:
    """Reads rows by index."""
    rows = torch.tensor([4, 0, 4, 9, 1])
    return error_summary(
        vs_reference(target, lambda ops, put: lambda s, r: [ops.gather_rows(s, r)], randn(10, 32), rows)
    )


def scatter_rows(target: CheckTarget) -> str:
    """Writes rows by index and leaves the others."""

    def setup(ops: Ops, put: Put) -> Work:
        def work(destination: Tensor, rows: Tensor, values: Tensor) -> list[Tensor]:
            ops.scatter_rows(destination, rows, values)
            return [destination]

        return work

    rows = torch.tensor([4, 0, 9])
    return error_summary(vs_reference(target, setup, randn(10, 32), rows, randn(3, 32, seed=1)))


# Text: through the backend's own fill


class AttentionCheck:
    """A body of rope_store and attend; activations are looked up by token id, so that padding has activations too."""

    def __init__(
        self, backend: Backend, target: CheckTarget, dtype: torch.dtype, block: int, windows: tuple[int, ...] = (0,),
        sinks: bool = False,
    ) -> None:  # fmt: skip
        t, self.windows = target.model.text, windows
        self.ops, self.heads, self.groups, self.d = backend.ops, t.heads, t.kv_heads, t.head_dim
        width = (t.heads + 2 * t.kv_heads) * t.head_dim

        def put(x: Tensor) -> Tensor:
            return x.to(target.dtype).to(dtype).to(backend.device)

        self.table = put(randn(t.vocab, width, seed=7))
        caches = randn(2, BLOCKS + 2, block, t.kv_heads, t.head_dim, seed=5)
        caches[:, :2] = 0
        flat = caches.flatten(1, 2) if backend.policy.flat_kv else caches
        self.kv = LayerKV(put(flat[0]), put(flat[1]))
        self.block = block
        self.outs = [backend.zeros((400, t.heads * t.head_dim), dtype) for _ in windows]
        self.rotated = backend.zeros((400, t.heads * t.head_dim), dtype)
        half = t.head_dim // 2
        self.frequency = torch.linspace(1, 0.01, half).to(backend.device)
        self.axis = (torch.arange(half) % 3).to(backend.device)
        self.sinks: SinksArgument = {"sinks": (2 * randn(t.heads, seed=8)).to(backend.device)} if sinks else {}

    def __call__(self, x: TextTensors) -> None:
        n, d = x.out_row.shape[0], self.d
        parts = [self.heads * d, self.groups * d, self.groups * d]
        q, k, v = torch.split(self.ops.gather_rows(self.table, x.tokens[:n].long()), parts, dim=1)
        rotary = self.ops.rotary(x.positions[:, :n], self.frequency, self.axis)
        attn = self.ops.prepare_attn(x.attn, self.heads, self.kv)
        q, k, v = self.ops.rope_store(
            q.reshape(n, -1, d), k.reshape(n, -1, d), v.reshape(n, -1, d), rotary, self.kv, attn
        )
        self.ops.scatter_rows(self.rotated, x.out_row, q.reshape(n, -1))
        for window, into in zip(self.windows, self.outs, strict=True):
            own = (window,) if window else ()
            out = self.ops.attend(q, k, v, self.kv, attn, d**-0.5, *own, **self.sinks)
            self.ops.scatter_rows(into, x.out_row, out.reshape(n, -1))
        self.ops.cut("layer")


class AttentionLaunch(NamedTuple):
    """A launch of ``tokens`` tokens, run by a body on the backend (``mine``) and by one on the reference."""

    bucket: Bucket
    tokens: int
    mine: AttentionCheck
    wanted: AttentionCheck


def attention(
    target: CheckTarget, windows: tuple[int, ...] = (0,), spans: bool = False, sinks: bool = False
) -> list[AttentionLaunch]:
    """Runs buckets of every text stage on the backend and on the reference.

    Args:
        windows: sliding windows, used one after the other, as by the layers of a model.
        spans: True: in every other row all tokens see each other, in the rest the later half.
        sinks: True: each head has a sink.
    """
    found = []
    plain = windows == (0,) and not spans and not sinks
    other_backend = None if plain else target.backend_with(windows, spans, sinks)
    harness = make_harness(target, other_backend)
    for stage in [s for s in harness.stages if s in (TEXT if spans else DRAFTED)]:
        for bucket in spread_buckets(all_buckets(harness.plan, stage), 2 if target.quick else 5):
            inputs, _ = harness.inputs(bucket, np.random.default_rng(3))
            if spans:
                inputs.upto = _span_ends(inputs)
            mine = AttentionCheck(harness.backend, target, target.dtype, harness.block, windows, sinks)
            program = harness.backend.program(bucket, mine)
            harness.backend.fill(program, inputs)
            program.run()
            harness.backend.synchronize()
            theirs = _run_reference(target, inputs, harness.block, windows, sinks)
            found.append(AttentionLaunch(bucket, len(inputs.tokens), mine, theirs))
    return found


def _span_ends(inputs: StepInputs) -> Int32:
    upto = host.own_positions(inputs.row_start, inputs.context)
    for row, context in enumerate(inputs.context):
        start, stop = inputs.row_start[row], inputs.row_start[row + 1]
        upto[start + row % 2 * (stop - start) // 2 : stop] = context + stop - start - 1
    return upto


def _run_reference(
    target: CheckTarget, inputs: StepInputs, block: int, windows: tuple[int, ...], sinks: bool
) -> AttentionCheck:
    reference = target.reference(inputs.upto is not None)
    theirs = AttentionCheck(reference, target, torch.float32, block, windows, sinks)
    program = reference.program(Bucket(Stage.PREFILL, (len(inputs.tokens), len(inputs.context))), theirs)
    reference.fill(program, inputs)
    program.run()
    return theirs


def rope_store(target: CheckTarget) -> str:
    """Rotated queries are returned; rotated keys and values are stored at their slots; ZERO stays zero."""
    errors = []
    for bucket, n, mine, wanted in attention(target):
        name = f"{bucket}: "
        errors.append(check_close(name + "q", mine.rotated[1 : n + 1], wanted.rotated[1 : n + 1], target.dtype))
        for part, one, other in zip("kv", mine.kv[:2], wanted.kv[:2], strict=True):
            stored, expected = by_block(one.cpu(), mine.block), by_block(other, mine.block)
            errors.append(check_close(f"{name}stored {part}", stored[2:], expected[2:], target.dtype))
            if stored[0].any():
                raise CheckFailed(f"{name}ZERO was written")
    return error_summary(errors)


def attend(target: CheckTarget) -> str:
    """Each token attends to its row's stored tokens up to itself, through its group's KV head."""
    return compare_launches(target, attention(target))


def compare_launches(target: CheckTarget, ran: list[AttentionLaunch]) -> str:
    """Compares the launches that ``attention`` made, and returns the figure."""
    errors = []
    for bucket, n, mine, wanted in ran:
        for window, one, other in zip(mine.windows, mine.outs, wanted.outs, strict=True):
            name = f"{bucket}, window {window}" if window else str(bucket)
            errors.append(check_close(name, one[1 : n + 1], other[1 : n + 1], target.dtype))
    return error_summary(errors)


def rotary(target: CheckTarget) -> str:
    """cos and sin in float32 for positions in three axes."""
    half = target.model.text.head_dim // 2
    axis = torch.arange(half) % 3
    positions = torch.stack([torch.arange(11) * (i + 1) for i in range(3)]).int()
    frequency = torch.logspace(0, -3, half)
    backend = target.backend()
    needs_values(backend)

    class RotaryBody:
        def __init__(self) -> None:
            self.outs = [backend.zeros((11, 2 * half), torch.float32) for _ in range(2)]
            self.args = [t.to(backend.device) for t in (positions, frequency, axis)]

        def __call__(self, inputs: object) -> None:
            for destination, value in zip(self.outs, backend.ops.rotary(*self.args)[:2], strict=True):
                destination.copy_(value)

    body = RotaryBody()
    program = backend.program(plan_of(backend, target.model, target.block_size).fit(Stage.RESET, (1,)), body)
    backend.fill(program, host.reset_inputs([Reset(1, (), ())], target.model.text.vocab))
    program.run()
    backend.synchronize()
    wanted = ReferenceOps().rotary(positions, frequency, axis)
    return error_summary(
        [check_close(n, f, w, torch.float32) for n, f, w in zip(("cos", "sin"), body.outs, wanted[:2], strict=True)]
    )


class EmbedBody:
    """A body that writes embeddings to the launch's output rows."""

    def __init__(self, ops: Ops, last: Tensor, arena: Tensor, table: Tensor, out: Tensor) -> None:
        self.ops, self.last, self.arena, self.table, self.out = ops, last, arena, table, out

    def __call__(self, x: TextTensors) -> None:
        found = self.ops.embed(x.tokens, x.from_slot, self.last, x.image_row, self.arena, self.table)
        self.ops.scatter_rows(self.out, x.out_row, found[: x.out_row.shape[0]])


def embed(target: CheckTarget) -> str:
    """The embedding of a token's id or of its slot's last token, or a row of the arena."""
    harness, errors = make_harness(target), []
    vocab, hidden = harness.vocab, target.model.text.hidden
    values = [randn(300, hidden, seed=1).to(target.dtype), randn(vocab, hidden, seed=2).to(target.dtype)]
    last = torch.arange(17, dtype=torch.int32) * 7 % vocab
    images = pending = 0
    for stage in [s for s in harness.stages if s in TEXT]:
        for bucket in spread_buckets(all_buckets(harness.plan, stage), 2 if target.quick else 5):
            inputs, _ = harness.inputs(bucket, np.random.default_rng(3))
            images, pending = images + int((inputs.image_row > 0).sum()), pending + int((inputs.from_slot > 0).sum())
            outs = []
            for backend, dtype, shape in (
                (harness.backend, target.dtype, bucket),
                (target.reference(), torch.float32, Bucket(Stage.PREFILL, (len(inputs.tokens), len(inputs.context)))),
            ):
                on = [t.to(dtype).to(backend.device) for t in values]
                out = backend.zeros((400, hidden), dtype)
                program = backend.program(shape, EmbedBody(backend.ops, last.to(backend.device), on[0], on[1], out))
                backend.fill(program, inputs)
                program.run()
                outs.append(out.cpu()[1 : len(inputs.tokens) + 1])
            errors.append(check_close(str(bucket), outs[0], outs[1], target.dtype))
    return f"{error_summary(errors)}; {images} tokens from the arena, {pending} from slots"
