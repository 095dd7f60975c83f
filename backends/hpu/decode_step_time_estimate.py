"""``trencadis plan --time --device hpu``: a decoding step on a Gaudi, on paper, beside vLLM's plug-in. Torch-free.

A step reads its weights once. Attention over a flat list of blocks gathers keys and values: they are read, written and
read again, three times their bytes; ours also writes and reads queries and weights that are spread over the KV heads.
The reference is vllm-gaudi with its default gather. Nothing was measured on a card.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trencadis.backends.hpu.hpu_settings import HpuSettings
from trencadis.core.buckets import Bucket
from trencadis.core.checkpoint.model_config import GATED, ModelConfig, TextConfig
from trencadis.core.errors import StartupError

BLOCK = 128
CONTEXTS = (1024, 4096, 8192)
ROWS = (1, 32, 128)
ITEM = 2
GATHERED = 3
"""Times that the bytes of listed keys and values move: read and written by the gather, read by the product."""


@dataclass(frozen=True)
class GaudiTimes:
    """Published figure of a card: bytes a second of its memory, and where it is from."""

    name: str
    bandwidth: float
    source: str


CARDS = {
    "gaudi2": GaudiTimes("Gaudi 2", 2.45e12, "Intel Gaudi 2 data sheet: 2.45 TB/s"),
    "gaudi3": GaudiTimes("Gaudi 3", 3.7e12, "Intel Gaudi 3 white paper: 3.7 TB/s"),
}
DISPATCH = 0.1e-3
"""Seconds of the host to dispatch one compiled region: an estimate, 3 to 4 ms a step of 36 layers alone."""

AROUND = 6
"""Regions of a step besides its layers: masks, start, end in pieces, SAMPLE, its counts."""


def weight_bytes(model: ModelConfig, rows: int, ranks: int = 1) -> float:
    """Returns the bytes of weights that a step of ``rows`` rows reads; of experts those that some row chose.

    Rows choose by chance, so that each of n experts is read with probability 1 - (1 - top / n) ^ rows.
    """
    t = model.text
    recurrent = 0 if t.recurrent is None else len(t.recurrent.layers) * t.recurrent.values(t.hidden)
    attention = sum(t.of_layer(layer).attention_values for layer in _attending(t)) + recurrent
    total = float(attention + t.dense_layers * (3 if t.mlp == GATED else 2) * t.hidden * t.intermediate)
    if t.experts is not None:
        e = t.experts
        read = e.count * (1 - (1 - e.top / e.count) ** rows)
        each = e.matrices * (e.latent or t.hidden) * e.inner
        total += t.expert_layers * (t.hidden * (e.count + 2 * e.latent) + read * each + e.shared_values(t.hidden))
    return ITEM * (total + t.vocab * t.hidden) / ranks


def kv_bytes(model: ModelConfig, rows: int, context: int, ranks: int = 1) -> float:
    """Returns the bytes of keys and values in the blocks of ``rows`` rows of ``context`` tokens."""
    t = model.text
    blocks = rows * -(-context // BLOCK)
    return 2.0 * ITEM * len(_attending(t)) * blocks * BLOCK * t.kv_heads * t.head_dim / ranks


def state_bytes(model: ModelConfig, rows: int, ranks: int = 1) -> float:
    """Returns the bytes of the states of recurrent layers that ``rows`` rows read and write."""
    r = model.text.recurrent
    return 0.0 if r is None else 2.0 * rows * len(r.layers) * r.slot_bytes(ITEM, ranks)


def _attending(t: TextConfig) -> tuple[int, ...]:
    """Returns the layers that attend to tokens or to images."""
    return tuple(i for i in range(t.layers) if t.mixes_tokens(i) and i not in t.recurrent_layers)


def spread_bytes(model: ModelConfig, rows: int, context: int, ranks: int = 1) -> float:
    """Returns the bytes of queries and weights spread over the KV heads, written and read once each."""
    t = model.text
    blocks = rows * -(-context // BLOCK)
    spread = t.heads * t.kv_heads / ranks**2 * (t.head_dim + BLOCK)
    return 2.0 * ITEM * len(_attending(t)) * blocks * spread


def times(
    model: ModelConfig, ranks: int = 1, name: str = "", rows: Sequence[int] = ROWS,
    contexts: Sequence[int] = CONTEXTS, depth: int = 1, verified: Sequence[Bucket] = (),
    attention: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Computes the report as plain values, in seconds.

    Args:
        verified: VERIFY buckets of the plan; their steps are not estimated.
        attention: value of ``--attention-backend``, which changes nothing on these cards.

    Raises:
        StartupError: there are no figures of the card.
    """
    on = CARDS.get((name or "gaudi2").lower().replace(" ", ""))
    if on is None:
        raise StartupError(f"plan --time: there are figures of {', '.join(CARDS)}, not of {name}")
    loads = [_load(model, on, count, context, ranks, depth) for count in rows for context in contexts]
    return {"model": model.name, "card": on.name, "ranks": ranks, "depth": depth, "loads": loads,
            "sources": {"card": on.source, "gather": "vllm-gaudi extension/ops.py: flat_pa with its default gather",
                        "host": "0.1 ms a compiled region: an estimate"}}  # fmt: skip


def _load(model: ModelConfig, on: GaudiTimes, rows: int, context: int, ranks: int, depth: int) -> dict[str, Any]:
    weights, keys = weight_bytes(model, rows, ranks), kv_bytes(model, rows, context, ranks)
    reference = (weights + GATHERED * keys + state_bytes(model, rows, ranks)) / on.bandwidth
    device = reference + spread_bytes(model, rows, context, ranks) / on.bandwidth
    group = HpuSettings().decode_layers
    host = DISPATCH * (-(-model.text.layers // group) + AROUND)
    step = max(device, host) if depth else device + host
    return {
        "rows": rows, "context": context, "weights": weights, "kv": keys, "device": device, "host": host,
        "tpot": step, "reference": reference, "tokens_per_second": rows / step,
        "limit": "the host" if host > device else "reading weights" if weights > GATHERED * keys else
                 "reading keys and values",
    }  # fmt: skip


def lines(report: dict[str, Any]) -> Iterator[str]:
    """Yields the lines of the printed report."""
    ranks = f"{report['ranks']} x " if report["ranks"] > 1 else ""
    yield f"decoding on {ranks}{report['card']}: estimates from published figures, nothing measured"
    yield "   rows context  TPOT ms  reference ms  tokens/s  limit"
    for load in report["loads"]:
        yield (
            f"  {load['rows']:>5} {load['context']:>7} {1e3 * load['tpot']:>8.2f} {1e3 * load['reference']:>13.2f} "
            f"{load['tokens_per_second']:>9,.0f}  {load['limit']}"
        )
    yield "  sources:"
    yield from (f"    {name}: {source}" for name, source in report["sources"].items())
