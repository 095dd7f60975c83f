"""Checks of the ops of decoders that are built from parts: layer norms, activations, experts, cross-attention.

Checks POOL against the reference: sums by group, a class head over them, and non-finite values.

The check of products with quantised weights: the dequantised weight, in float32, times the activations.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from trencadis.backends.conformance.backend_under_test import CheckTarget
from trencadis.backends.conformance.check_result import CheckFailed, Skipped
from trencadis.backends.conformance.launch_harness import BLOCKS, all_buckets, spread_buckets
from trencadis.backends.conformance.op_checks import (
    TEXT,
    Put,
    Setup,
    Work,
    attention,
    check_close,
    compare_launches,
    error_summary,
    randn,
    vs_reference,
)
from trencadis.backends.conformance.program_checks import make_harness
from trencadis.backends.cpu.reference_ops import CLAMPED_SWIGLU
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.checkpoint.model_config import TextConfig
from trencadis.core.cross_attention_inputs import VARIANT, CrossAttentionInputs
from trencadis.core.device.backend import Backend, ExpertBiases, ExpertWeights, LayerKV, Ops, TextTensors
from trencadis.core.media_spans import RESERVED_ROWS
from trencadis.core.models.decoder import DecoderLayer
from trencadis.core.models.image_cross_attention import arena_row_numbers
from trencadis.core.models.mlp_and_norms import GatedMLP, RMSNorm
from trencadis.core.models.model_and_ops_api import CrossAttentionOps
from trencadis.core.quant import online_quant
from trencadis.core.quant.quantised_tensor import QTensor
from trencadis.core.quant.quantised_weight_layout_and_bytes import FLOATS8, FP4_HALVES, Scheme, groups_of

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2")

IMAGE_ROWS, UNITS = 70, np.array([4, 0, 2], np.int32)
"""Arena rows of an image, and the images that a launch sees, out of an arena of five; the launch is planned for one
more.
"""


def layer_norm(target: CheckTarget) -> str:
    """(x - mean) / deviation * w + b; with a residual, of the sum of both, which it returns too."""
    hidden = target.model.text.hidden
    errors: list[float] = []
    for rows in (1, 19):
        # Far from zero, so that a deviation computed without the mean shows.
        x, residual = 3 + randn(rows, hidden), 2 * randn(rows, hidden, seed=1)
        weight, bias = randn(hidden, seed=2), randn(hidden, seed=3)
        errors += vs_reference(target, lambda ops, put: lambda a, w, b: ops.layer_norm(a, w, b, 1e-2), x, weight, bias)
        errors += vs_reference(
            target, lambda ops, put: lambda a, w, b, r: ops.layer_norm(a, w, b, 1e-2, r), x, weight, bias, residual
        )
    return error_summary(errors)


def attend_window(target: CheckTarget) -> str:
    """As ``op.attend``, over the last keys of a window: shorter than a block, longer than one, longer than all rows."""
    if not target.policy_of("windows"):
        raise Skipped("Policy.windows is False: this device serves no model with windows")
    return compare_launches(target, attention(target, (0, 5, target.block_size + 3, 100_000)))


def attend_upto(target: CheckTarget) -> str:
    """As ``op.attend``, where tokens see each other up to the end of their span, with and without a window."""
    if not target.policy_of("upto"):
        raise Skipped("Policy.upto is False: this device attends causally")
    windows = (0, 7) if target.policy_of("windows") else (0,)
    return compare_launches(target, attention(target, windows, spans=True))


def attend_sinks(target: CheckTarget) -> str:
    """As ``op.attend``, where each head has a sink, with and without a window."""
    if not target.policy_of("sinks"):
        raise Skipped("Policy.sinks is False: this device serves no model with attention sinks")
    windows = (0, 5) if target.policy_of("windows") else (0,)
    return compare_launches(target, attention(target, windows, sinks=True))


def act(target: CheckTarget) -> str:
    """Each activation, also far from zero."""
    x = 4 * randn(13, target.model.text.intermediate)
    errors: list[float] = []
    for kind in ACTIVATIONS:
        errors += vs_reference(target, _by_kind("act", kind), x)
    return error_summary(errors)


def act_mul(target: CheckTarget) -> str:
    """Each activation of the first half times the second half."""
    x = 2 * randn(13, 2 * target.model.text.intermediate)
    errors: list[float] = []
    for kind in (*ACTIVATIONS, *((CLAMPED_SWIGLU,) if target.policy_of("sinks") else ())):
        errors += vs_reference(target, _by_kind("act_mul", kind), 4 * x if kind == CLAMPED_SWIGLU else x)
    return error_summary(errors)


class ExpertCase(NamedTuple):
    """Settings with which experts are checked: (experts a token, shares divided by their sum, activation)."""

    how: tuple[int, bool, str]
    biased: bool = False
    plain: bool = False


def experts(target: CheckTarget) -> str:
    """Each token takes its best experts, by their shares as they are or divided by their sum; padding takes some too.

    Scores differ clearly, so that rounding does not change the choice. One expert that is never chosen overflows.
    Experts without gates have the ups of the others.
    """
    hidden, inner, count, rows = target.model.text.hidden, 24, 5, 19
    gate_up = [randn(2 * inner, hidden, seed=i) / hidden**0.5 for i in range(count)]
    down = [randn(hidden, inner, seed=9 + i) / inner**0.5 for i in range(count)]
    gate_up[-1] = gate_up[-1] * 1e4
    ranks = torch.rand(rows, count - 1, generator=torch.Generator().manual_seed(2)).argsort(-1)
    scores = torch.cat([0.5 * ranks, torch.full((rows, 1), -40.0)], 1)
    errors: list[float] = []
    biases = [randn(2 * inner, seed=20 + i) for i in range(count)], [randn(hidden, seed=30 + i) for i in range(count)]
    cases = [ExpertCase((1, False, "silu")), ExpertCase((2, True, "silu")), ExpertCase((3, False, "gelu_tanh"))]
    cases += [ExpertCase((2, True, "silu"), plain=True), ExpertCase((3, False, "relu2"), plain=True)]
    if target.policy_of("sinks"):  # models with sinks are those whose experts have biases
        cases.append(ExpertCase((2, True, CLAMPED_SWIGLU), biased=True))
    for case in cases:
        for n in (1, rows):

            def setup(ops: Ops, put: Put, case: ExpertCase = case) -> Work:
                own = [ExpertBiases(*([put(b) for b in some] for some in biases))] if case.biased else []
                first = inner if case.plain else 0
                packed = ops.pack_experts([put(w[first:]) for w in gate_up], [put(w) for w in down], *own)
                if (packed.count, packed.inner) != (count, inner):
                    raise CheckFailed(f"pack_experts says {packed.count} experts of {packed.inner} columns")
                return lambda x, s: [ops.experts(x, s, packed, *case.how)]

            errors += vs_reference(target, setup, _spread(n, hidden), scores[:n])
    return error_summary(errors)


def _spread(rows: int, width: int) -> Tensor:
    """Returns tokens of different magnitudes."""
    return randn(rows, width, seed=rows) * (1 + torch.arange(rows)[:, None] % 3)


def _by_kind(name: str, kind: str) -> Setup:
    """Returns the set-up of op ``name`` with its activation, for ``vs_reference``."""
    return lambda ops, put: lambda x: [getattr(ops, name)(x, kind)]


class CrossAttentionCheck:
    """A body of cross_attend: over the second of three layers whose keys and values the arena holds.

    Queries are looked up by token id; the other layers' columns are NaN.
    """

    def __init__(self, backend: Backend, target: CheckTarget, dtype: torch.dtype) -> None:
        t, width = target.model.text, 2 * target.model.text.kv_heads * target.model.text.head_dim
        self.ops, self.heads, self.d = backend.ops, t.heads, t.head_dim
        self.cross_ops = cast(CrossAttentionOps, backend.ops)

        def put(x: Tensor) -> Tensor:
            return x.to(target.dtype).to(dtype).to(backend.device)

        self.table = put(randn(t.vocab, t.heads * t.head_dim, seed=7))
        arena = randn(RESERVED_ROWS + 5 * IMAGE_ROWS, 3 * width, seed=5)
        arena[:, :width] = arena[:, 2 * width :] = torch.nan
        self.held = put(arena)[:, width : 2 * width]
        self.out = backend.zeros((400, t.heads * t.head_dim), dtype)

    def __call__(self, x: TextTensors) -> None:
        n, images = x.out_row.shape[0], x.cross_attention
        assert images is not None
        q = self.ops.gather_rows(self.table, x.tokens[:n].long()).reshape(n, self.heads, self.d)
        rows = arena_row_numbers(images.units, IMAGE_ROWS) if self.cross_ops.gathers else None
        out = self.cross_ops.cross_attend(q, self.held, rows, images, self.d**-0.5)
        self.ops.scatter_rows(self.out, x.out_row, out.reshape(n, -1))


WIDE, INNER = 1024, 192
"""Widths of the checked layer: products of few rows over so many columns are cut into pieces on some devices."""


class LayerCheck:
    """A body of one decoder layer, whose input is looked up by token id."""

    def __init__(self, backend: Backend, target: CheckTarget, dtype: torch.dtype, block: int) -> None:
        t = target.model.text
        self.ops, self.d = backend.ops, t.head_dim

        def put(x: Tensor) -> Tensor:
            return x.to(target.dtype).to(dtype).to(backend.device)

        config = TextConfig(
            WIDE, 1, t.heads, t.kv_heads, t.head_dim, INNER, t.vocab, 1e-6, 1e4, t.max_positions, False, True
        )  # fmt: skip
        self.layer = DecoderLayer(backend, config)
        attention, mlp = self.layer.attention, cast(GatedMLP, self.layer.mlp)
        heads = t.heads * t.head_dim
        outputs = heads + 2 * t.kv_heads * t.head_dim
        for i, (linear, rows, columns) in enumerate((
            (attention.qkv, outputs, WIDE), (attention.out, WIDE, heads), (mlp.gate_up, 2 * INNER, WIDE),
            (mlp.down, WIDE, INNER),
        )):  # fmt: skip
            bias = put(0.1 * randn(rows, seed=20)) if linear is attention.qkv else None
            linear.pack(put(randn(rows, columns, seed=10 + i) / columns**0.5), bias)
        for i, norm in enumerate((self.layer.input_norm, self.layer.post_norm)):
            cast(RMSNorm, norm).weight = put(1 + 0.1 * randn(WIDE, seed=30 + i))
        caches = randn(2, BLOCKS + 2, block, t.kv_heads, t.head_dim, seed=5)
        caches[:, :2] = 0
        flat = caches.flatten(1, 2) if backend.policy.flat_kv else caches
        self.kv = LayerKV(put(flat[0]), put(flat[1]))
        attention.bind(self.kv)
        self.table, self.residual = (put(randn(t.vocab, WIDE, seed=n)) for n in (7, 8))
        self.out = backend.zeros((400, WIDE), dtype)
        half = t.head_dim // 2
        self.frequency = torch.linspace(1, 0.01, half).to(backend.device)
        self.axis = (torch.arange(half) % 3).to(backend.device)
        self.heads = t.heads

    def __call__(self, x: TextTensors) -> None:
        n = x.out_row.shape[0]
        tokens = x.tokens[:n].long()
        rotary = self.ops.rotary(x.positions[:, :n], self.frequency, self.axis)
        attn = self.ops.prepare_attn(x.attn, self.heads, self.kv)
        given, residual = self.ops.gather_rows(self.table, tokens), self.ops.gather_rows(self.residual, tokens)
        out, left = self.ops.layer(self.layer, given, residual, rotary, attn)
        assert out is not None, "a layer without a next one returns its MLP's output"
        self.ops.scatter_rows(self.out, x.out_row, out if left is None else out + left)
        self.ops.cut("layer")


def layer(target: CheckTarget) -> str:
    """A decoder layer of 1,024 values: norms, products, attention, MLP and residual, as devices may fuse them."""
    harness, errors = make_harness(target), []
    for stage in [s for s in harness.stages if s in TEXT]:
        for bucket in spread_buckets(all_buckets(harness.plan, stage), 2 if target.quick else 4):
            inputs, _ = harness.inputs(bucket, np.random.default_rng(3))
            n = len(inputs.tokens)
            outs = []
            for backend, dtype, shape in (
                (harness.backend, target.dtype, bucket),
                (target.reference(), torch.float32, Bucket(Stage.PREFILL, (n, len(inputs.context)))),
            ):
                body = LayerCheck(backend, target, dtype, harness.block)
                program = backend.program(shape, body)
                backend.fill(program, inputs)
                program.run()
                backend.synchronize()
                outs.append(body.out.cpu()[1 : n + 1])
            errors.append(check_close(str(bucket), outs[0], outs[1], target.dtype))
    return error_summary(errors)


def cross_attend(target: CheckTarget) -> str:
    """Each token attends to the rows of each image that it sees, as often as it sees it."""
    if not target.policy_of("cross_attention"):
        raise Skipped("Policy.seen is False: this device serves no model whose layers use cross-attention")
    harness, errors = make_harness(target), []
    harness.backend.slot = harness.backend.slot._replace(cross_attention_rows=IMAGE_ROWS)
    for stage in [s for s in harness.stages if s in TEXT]:
        for bucket in spread_buckets(all_buckets(harness.plan, stage), 2 if target.quick else 4):
            inputs, _ = harness.inputs(bucket, np.random.default_rng(3))
            inputs.cross_attention, n = _make_cross_attention(len(inputs.tokens)), len(inputs.tokens)
            outs = []
            for backend, dtype, shape in (
                (harness.backend, target.dtype, replace(bucket, variant=f"{VARIANT}{len(UNITS) + 1}")),
                (target.reference(), torch.float32, Bucket(Stage.PREFILL, (n, len(inputs.context)), f"{VARIANT}3")),
            ):
                body = CrossAttentionCheck(backend, target, dtype)
                program = backend.program(shape, body)
                backend.fill(program, inputs)
                program.run()
                backend.synchronize()
                outs.append(body.out.cpu()[1 : n + 1])
            blind = torch.from_numpy(~inputs.cross_attention.reach.any(1))
            if not outs[0][blind].isfinite().all():
                raise CheckFailed(f"{bucket}: a token that sees no image is not finite")
            errors.append(check_close(str(bucket), outs[0][~blind], outs[1][~blind], target.dtype))
    return error_summary(errors)


def _make_cross_attention(tokens: int) -> CrossAttentionInputs:
    """Returns tokens that see none, some or all of the images, up to three times."""
    rng = np.random.default_rng(tokens)
    reach = rng.integers(1, IMAGE_ROWS + 1, (tokens, len(UNITS))) * (rng.random((tokens, len(UNITS))) < 0.6)
    reach[0, 0] = IMAGE_ROWS
    times = np.where(reach > 0, rng.integers(1, 4, reach.shape), 0)
    return CrossAttentionInputs(UNITS, reach.astype(np.int32), times.astype(np.int32), np.full(tokens, 2, np.int32))


GROUPS = (1, 2, 2, 2, 3, 1, 4, 0, 0)
"""Group of each of nine rows: groups of several rows, one whose rows are not adjacent, and padding."""


def pool(target: CheckTarget) -> str:
    """Rows summed by group, the class head, padding in no sum; a NaN or an infinity spoils its own group alone."""
    hidden = target.model.text.hidden
    rows, group = randn(len(GROUPS), hidden, seed=3), torch.tensor(GROUPS, dtype=torch.int32)
    errors: list[float] = []
    for classes in (0, 1, 5):
        weight = randn(classes, hidden, seed=4) / hidden**0.5 if classes else None

        def sums(ops: Ops, put: Put, weight: Tensor | None = weight) -> Work:
            head = None if weight is None else put(weight).float()
            return lambda x, g: [ops.pool(x, g, head)]

        errors += vs_reference(target, sums, rows, group)
    spoiled = rows.clone()
    spoiled[2, 7], spoiled[4, 0], spoiled[8, 3] = float("nan"), float("inf"), float("nan")

    def fine(ops: Ops, put: Put) -> Work:
        return lambda x, g: [(ops.pool(x, g, None).abs() <= torch.finfo(torch.float32).max).int()]

    errors += vs_reference(target, fine, spoiled, group)
    return error_summary(errors)


ROUNDED = {"int": 2e-2, "float": 4e-2}
"""Largest allowed error of a row, as a share of its norm, if activations are rounded to 8 bits of a kind."""

SCHEMES = (
    Scheme(8), Scheme(8, activations="token"), Scheme(8, group=32), Scheme(4, group=32), Scheme(4, group=64),
    Scheme(4, group=32, symmetric=False), Scheme(8, "float", activations="token"),
)  # fmt: skip
EXPERT_SCHEMES = (*SCHEMES, Scheme(8, group=32, fp4=True))


def quantised_linear(target: CheckTarget) -> str:
    """x W^T + b of weights in 8 and 4 bits, by row and by group; the weight states its widths and its bytes."""
    hidden, wide = target.model.text.hidden, 96
    errors: list[float] = []
    host = target.backend().policy.quantised == FLOATS8
    for scheme in SCHEMES[: 4 if target.quick else None]:
        q = _weight(randn(wide, hidden, seed=1) / hidden**0.5, scheme)

        def close(what: str, found: Tensor, wanted: Tensor, dtype: torch.dtype, scheme: Scheme = scheme) -> float:
            return _check_near(f"{scheme.label}, {what}", found, wanted, dtype, scheme)

        for rows in (1, 5, 37):

            def setup(ops: Ops, put: Put, q: QTensor = q) -> Work:
                bias = put(randn(wide, seed=2))
                packed = ops.pack_quantised(_move_weight(q, bias, host), bias)
                if (packed.out_features, packed.in_features) != q.shape:
                    raise CheckFailed(f"pack_quantised says {packed.out_features} x {packed.in_features}")
                return lambda x: [ops.linear(x, packed)]

            errors += vs_reference(target, setup, randn(rows, hidden, seed=rows), close=close)
    return error_summary(errors)


def quantised_experts(target: CheckTarget) -> str:
    """Experts whose matrices are codes, where the device keeps them; each token takes its best two."""
    hidden, inner, count = target.model.text.hidden, 32, 4
    errors: list[float] = []
    scores = 0.5 * torch.rand(19, count, generator=torch.Generator().manual_seed(2)).argsort(-1)
    host = target.backend().policy.quantised == FLOATS8
    for scheme in EXPERT_SCHEMES[1::2] if target.quick else EXPERT_SCHEMES:
        up = [_weight(randn(2 * inner, hidden, seed=i) / hidden**0.5, scheme) for i in range(count)]
        down = [_weight(randn(hidden, inner, seed=9 + i) / inner**0.5, scheme) for i in range(count)]

        def close(what: str, found: Tensor, wanted: Tensor, dtype: torch.dtype, scheme: Scheme = scheme) -> float:
            return _check_near(f"experts of {scheme.label}, {what}", found, wanted, dtype, scheme, products=3)

        for rows in (1, 19):

            def setup(ops: Ops, put: Put, up: list[QTensor] = up, down: list[QTensor] = down) -> Work:
                like = put(torch.zeros(1))
                held = [[_move_weight(q, like, host) for q in some] for some in (up, down)]
                pack = getattr(ops, "pack_quantised_experts", None)
                packed: ExpertWeights | None = None if pack is None else pack(*held)
                if packed is None:
                    packed = ops.pack_experts([put(q.values()) for q in up], [put(q.values()) for q in down])
                return lambda x, s: [ops.experts(x, s, packed, 2, True, "silu")]

            errors += vs_reference(target, setup, _spread(rows, hidden), scores[:rows], close=close)
    return error_summary(errors)


def _weight(weight: Tensor, scheme: Scheme) -> QTensor:
    """Quantises a weight as loading does; asymmetric schemes get arbitrary zero points, and 4-bit floats scales of
    powers of two.
    """
    if scheme.fp4:
        table, groups = torch.tensor(FP4_HALVES, dtype=torch.int8), groups_of(weight.shape[1], scheme.group)
        scale = torch.exp2(weight[:, :groups].sign() - 5)
        return QTensor(scheme, table[(weight * 97).long() % 16], scale, None, scheme.group, None, torch.float32)
    q = online_quant.quantise(weight, scheme, torch.float32)
    if scheme.symmetric:
        return q
    zero = torch.arange(q.scale.numel()).view(q.scale.shape) % 5 - 2
    return replace(q, zero=zero.to(torch.int8))


def _move_weight(q: QTensor, bias: Tensor, host: bool) -> QTensor:
    """Puts a weight where a loader would leave it (``host``: not on the device), with the dtype of ``bias``."""
    found = replace(q, dtype=bias.dtype)
    return found if host or bias.device.type == "cpu" else found.moved(bias.device)


def _check_near(
    what: str, found: Tensor, wanted: Tensor, dtype: torch.dtype, scheme: Scheme, products: int = 1
) -> float:
    """Runs ``check_close``; 8-bit activations, and groups that are rounded again, are compared by rows instead, by the
    tolerance of each of ``products`` products.
    """
    try:
        return check_close(what, found, wanted, dtype)
    except CheckFailed:
        if found.shape != wanted.shape:
            raise
    away = (found.cpu().float() - wanted.float()).norm(dim=1) / wanted.float().norm(dim=1)
    error, most = float(away.max()), products * ROUNDED[scheme.kind]
    if not error <= most:
        raise CheckFailed(f"{what}: off by {error:.2g} of a row's norm; the tolerance is {most:.0e}")
    return error
