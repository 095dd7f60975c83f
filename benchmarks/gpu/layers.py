"""Decoder layers of few rows at real sizes: values against a wider type, and equal bits each time they run.

PYTHONPATH=$PWD python -P -m benchmarks.gpu.layers OUT [--times 2000] [--small]
--small: narrow layers in Triton's interpreter, for machines without a card

A layer is the engine's own, over a cache whose blocks lie in random order. The unit of its error is the noise of its
type: how far the same formulas in plain torch, rounded after every call, are from those in the next wider type. A
kernel that keeps float32 between its steps stays below one unit; a mistake is many. The cache must hold the row's key
and value where its slot says, and nothing else may have changed. What a race leaves is a bit that differs between two
runs: on a card the layer is captured and replayed ``--times`` times.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.kernels.case import use_interpreter

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from trencadis.core.quant.quantised_tensor import QTensor
    from trencadis.core.quant.quantised_weight_layout_and_bytes import Scheme

EPS, BASE = 1e-6, 1e6


class LayerShape(NamedTuple):
    """Sizes of a layer.

    Args:
        gated: True if each query head is followed by its output gate.
        sinks: True if each head has a score that takes part in its softmax without a value.
    """

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    d: int
    gated: bool = False
    sinks: bool = False


SHAPES = {
    "3B": LayerShape(2048, 11_008, 16, 2, 128), "7B": LayerShape(3584, 18_944, 28, 4, 128),
    "attention of Qwen3.6-27B": LayerShape(5120, 2048, 24, 4, 256, gated=True),
    "attention of gpt-oss-20b": LayerShape(2880, 2048, 64, 8, 64, sinks=True),
}  # fmt: skip
SMALL = {
    "narrow": LayerShape(1024, 96, 4, 2, 32),
    "narrow, gates and sinks": LayerShape(1024, 96, 4, 2, 32, gated=True, sinks=True),
}
"""Wide enough that the columns of a product are cut among programs."""

CONTEXTS = {1: (1500,), 2: (700, 0), 16: (900, *range(1, 16))}
"""Rows -> stored keys of each: long enough to be cut, none at all, and around a block."""

SMALL_CONTEXTS = {1: (530,), 3: (40, 0, 15)}


class LayerRun:
    """A layer of seeded weights, its launch, and its cache.

    Args:
        contexts: stored keys of each row.
        quantised: scheme of its weights (``core.quant.quantised_weight_layout_and_bytes.Scheme``); None: dense.
    """

    def __init__(
        self, shape: LayerShape, contexts: tuple[int, ...], dtype: torch.dtype, device: torch.device,
        quantised: Any = None,
    ) -> None:  # fmt: skip
        import torch

        from benchmarks.kernels.attention_cases import Model, make_launch
        from trencadis.core.buckets import Bucket, Stage
        from trencadis.core.device.backend import LayerKV, Rotary

        self.shape, self.contexts, self.dtype, self.device = shape, contexts, dtype, device
        self.generator = torch.Generator().manual_seed(7)
        heads = Model(shape.heads, shape.kv_heads, shape.d, dtype)
        rows = [(context, 1) for context in contexts]
        self.buffers, (_, k, v) = make_launch(heads, rows, Bucket(Stage.DECODE, (len(rows),)), device)
        self.attn = self.buffers.tensors.attn
        self.weights = self._draw(quantised)
        self.clean = [self._random(*k.shape).to(device) for _ in range(2)]
        self.cache = LayerKV(k, v)
        self.x, self.residual = (self._random(len(rows), shape.hidden).to(device) for _ in range(2))
        angle = torch.tensor(contexts)[:, None] * BASE ** (-torch.arange(0, shape.d, 2) / shape.d)
        self.rotary = Rotary(*(f(angle).repeat(1, 2).to(device, torch.float32) for f in (torch.cos, torch.sin)))
        self.reset()

    def _random(self, *size: int, scale: float = 1.0) -> Tensor:
        import torch

        return (torch.randn(*size, generator=self.generator) * scale).to(self.dtype)

    def _draw(self, quantised: Any) -> dict[str, Any]:
        """Weights by name: [out, in], their values after rounding to codes where they are quantised."""
        from trencadis.core.quant import online_quant

        s = self.shape
        sizes = {
            "qkv": ((s.heads * (1 + s.gated) + 2 * s.kv_heads) * s.d, s.hidden), "out": (s.hidden, s.heads * s.d),
            "gate_up": (2 * s.inner, s.hidden), "down": (s.hidden, s.inner),
        }  # fmt: skip
        made: dict[str, Any] = {n: self._random(*size, scale=size[1] ** -0.5) for n, size in sizes.items()}
        if quantised is not None:
            quantise = quantise_blocks if quantised.block > 1 else online_quant.quantise
            made = {n: quantise(w, quantised, self.dtype) for n, w in made.items()}
        made |= {n: 1 + self._random(s.hidden, scale=0.1) for n in ("input_norm", "post_norm")}
        if s.sinks:
            made["sinks"] = 2 * self._random(s.heads).float()
        return made | {"bias": self._random(sizes["qkv"][0], scale=0.1)}

    def reset(self) -> None:
        """Fills the cache as it was before the launch."""
        self.cache.k.copy_(self.clean[0])
        self.cache.v.copy_(self.clean[1])

    def layer(self, ops: Any) -> Any:
        """The engine's layer over ``ops``."""
        from trencadis.core.checkpoint.model_config import TextConfig
        from trencadis.core.device.communicators_and_rank_agreement import SingleRank
        from trencadis.core.models.decoder import DecoderLayer

        s = self.shape
        config = TextConfig(s.hidden, 1, s.heads, s.kv_heads, s.d, s.inner, 50, EPS, BASE, 4096, False, True,
                            output_gate=s.gated, sinks=s.sinks)  # fmt: skip
        backend: Any = SimpleNamespace(
            ops=ops, comm=SingleRank(), device=self.device, values=True, dtype=self.dtype
        )  # fmt: skip
        layer, w = DecoderLayer(backend, config), self.weights
        mlp: Any = layer.mlp
        for name, linear in (
            ("qkv", layer.attention.qkv), ("out", layer.attention.out), ("gate_up", mlp.gate_up), ("down", mlp.down),
        ):  # fmt: skip
            weight = w[name].moved(self.device) if hasattr(w[name], "moved") else w[name].to(self.device)
            linear.pack(weight, w["bias"].to(self.device) if name == "qkv" else None)
        for name in ("input_norm", "post_norm"):
            getattr(layer, name).weight = w[name].to(self.device)
        if s.sinks:
            layer.attention.sinks = {"sinks": w["sinks"].to(self.device)}
        layer.attention.bind(self.cache)
        return layer

    def call(self, layer: Any, ops: Any) -> Tensor:
        """The stream with all that the layer adds."""
        x, left = ops.layer(layer, self.x, self.residual, self.rotary, self.attn)
        total: Tensor = x if left is None else x + left
        return total

    def plain(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """The same formulas in plain torch, rounded to ``dtype`` after every call: (stream, keys, values)."""
        import torch
        from torch.nn import functional

        s, n = self.shape, len(self.contexts)
        w = {name: self._values(t).to(self.device, dtype) for name, t in self.weights.items()}

        def norm(x: Tensor, weight: Tensor) -> Tensor:
            return x * torch.rsqrt(x.square().mean(1, keepdim=True) + EPS) * weight

        def rotate(x: Tensor) -> Tensor:
            cos, sin = (t.to(dtype)[:, None] for t in (self.rotary.cos, self.rotary.sin))
            first, second = x.chunk(2, -1)
            return x * cos + torch.cat([-second, first], -1) * sin

        stream = self.x.to(dtype) + self.residual.to(dtype)
        qkv = functional.linear(norm(stream, w["input_norm"]), w["qkv"], w["bias"]).view(n, -1, s.d)
        q, k, v = qkv.split([s.heads * (1 + s.gated), s.kv_heads, s.kv_heads], 1)
        q, *gates = q.unflatten(1, (s.heads, 2)).unbind(2) if s.gated else (q,)
        q, k = rotate(q), rotate(k)
        attended = torch.stack([self._attend(q[i], k[i], v[i], i, dtype) for i in range(n)])
        for gate in gates:
            attended = attended * gate.sigmoid()
        stream = stream + functional.linear(attended.flatten(1), w["out"])
        gate, up = functional.linear(norm(stream, w["post_norm"]), w["gate_up"]).chunk(2, 1)
        return stream + functional.linear(functional.silu(gate) * up, w["down"]), k, v

    def _values(self, weight: Any) -> Tensor:
        """A weight's values: of codes, what they stand for."""
        found: Tensor = weight.dequantised() if hasattr(weight, "dequantised") else weight
        return found

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, row: int, dtype: torch.dtype) -> Tensor:
        """Attention of one token over its row's stored keys and its own."""
        import torch

        begin, context = int(self.attn.block_start[row]), self.contexts[row]
        blocks = self.attn.blocks[begin : int(self.attn.block_start[row + 1])].long()
        held = [
            torch.cat([t[blocks].flatten(0, 1)[:context].to(dtype), own[None]])
            for t, own in ((self.clean[0], k), (self.clean[1], v))
        ]
        keys, values = (t.repeat_interleave(self.shape.heads // self.shape.kv_heads, 1) for t in held)
        scores = torch.einsum("hd,khd->hk", q, keys).mul(self.shape.d**-0.5)
        if self.shape.sinks:
            scores = torch.cat([scores, self.weights["sinks"].to(self.device, dtype)[:, None]], 1)
        shares = scores.softmax(1)[:, : len(keys)]
        return torch.einsum("hk,khd->hd", shares, values)


def quantise_blocks(weight: Tensor, scheme: Scheme, dtype: torch.dtype) -> QTensor:
    """Quantises a weight [out, in] with one scale for each block of rows and columns, both of whole blocks."""
    from trencadis.core.quant.online_quant import codes_of, spread
    from trencadis.core.quant.quantised_tensor import QTensor

    rows, columns = weight.shape
    blocks = weight.float().abs().view(rows // scheme.block, scheme.block, columns // scheme.group, scheme.group)
    largest = blocks.amax((1, 3))
    scale = (largest / 448).repeat_interleave(scheme.block, 0)
    codes = codes_of(weight.float(), spread(scale, columns, scheme.group), scheme)
    return QTensor(scheme, codes, scale, None, scheme.group, None, dtype)


class LayerResult(NamedTuple):
    """Largest error of the stream and of what was stored, and their mean error, in units of noise; values of the cache
    that changed elsewhere; runs whose bits differ from the first one's; counters that are not zero."""

    error: float
    mean: float
    elsewhere: int
    moved: int
    counters: int
    digest: str = ""
    """Digest of the bits of the residual stream."""


def check(run: LayerRun, times: int) -> LayerResult:
    """Runs a layer once, and ``times`` times more, captured on a card."""
    import torch

    from trencadis.backends.cuda.ops import CudaOps

    ops: Any = CudaOps()
    layer = run.layer(ops)
    n, wide = len(run.contexts), torch.float64 if run.dtype == torch.float32 else torch.float32
    exact, rough = run.plain(wide), run.plain(run.dtype)
    run.reset()
    stream = run.call(layer, ops).clone()
    slots = run.attn.slot_map[:n].long()
    got = (stream, *(t.flatten(0, 1)[slots] for t in (run.cache.k, run.cache.v)))
    error = mean = 0.0
    for ours, plain, want in zip(got, rough, exact, strict=True):
        away, noise = ((t.to(wide) - want).abs() for t in (ours, plain))
        error = max(error, float(away.nan_to_num(1e9).max() / noise.max().clamp_min(1e-12)))
        mean = max(mean, float(away.nan_to_num(1e9).mean() / noise.mean().clamp_min(1e-12)))
    elsewhere = 0
    for now, before in ((run.cache.k, run.clean[0]), (run.cache.v, run.clean[1])):
        differ = (now != before).flatten(0, 1).any(-1).any(-1)
        differ[slots] = False
        elsewhere += int(differ.sum())
    moved = repeat(lambda: run.call(layer, ops), times, run.device) if times else 0
    counters = int((ops._arrived != 0).sum()) if ops._arrived is not None else 0
    digest = hashlib.sha256(stream.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    return LayerResult(error, mean, elsewhere, moved, counters, digest)


def repeat(call: Callable[[], Tensor], times: int, device: torch.device) -> int:
    """Runs of ``call``, captured on a card, whose bits differ from those of the first run."""
    import torch

    first = call().clone()
    if device.type != "cuda":
        return sum(not torch.equal(first, call()) for _ in range(times))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = call()
    moved = torch.zeros((), dtype=torch.int64, device=device)
    bits = first.view(torch.uint8)
    for _ in range(times):
        graph.replay()
        moved += (out.view(torch.uint8) != bits).any()
    return int(moved)


def measure(times: int, small: bool) -> dict[str, Any]:
    """Every shape at every number of rows; a layer that fails is a line too."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    device = torch.device("cpu" if small else "cuda")
    dtype = torch.float32 if small else torch.bfloat16
    found: dict[str, Any] = {"layers": {}, "bits": {}, "failed": {}}
    for name, shape in (SMALL if small else SHAPES).items():
        for rows, contexts in (SMALL_CONTEXTS if small else CONTEXTS).items():
            label = f"{name}, {rows} rows"
            try:
                result = check(LayerRun(shape, contexts, dtype, device), times)
                found["layers"][label] = result._asdict()
                found["bits"][label] = found["layers"][label].pop("digest")
                print(f"  {label}: {result}", flush=True)
            except Exception as error:
                found["failed"][label] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return found | worst(found["layers"])


def worst(layers: dict[str, dict[str, float]]) -> dict[str, float]:
    """The worst figure of each kind; nothing without layers."""
    return {
        name: max(one[name] for one in layers.values()) for name in LayerResult._fields[:-1] if layers
    }  # fmt: skip


def main() -> None:
    """Runs the command line and writes OUT."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--times", type=int, default=2000, help="runs whose bits are compared")
    parser.add_argument("--small", action="store_true", help="narrow layers in Triton's interpreter")
    args = parser.parse_args()
    use_interpreter(args.small)
    args.out.write_text(json.dumps(measure(args.times, args.small)))


if __name__ == "__main__":
    main()
