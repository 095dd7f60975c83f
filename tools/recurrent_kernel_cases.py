"""The launches of recurrent layers to compile: kernels of prompts and of decoding rows, of each type."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from trencadis.backends.cuda.kernels import causal_conv, delta_net_step, delta_rule
from trencadis.backends.cuda.kernels.attention_metadata import ItemRows, LaunchRows
from trencadis.core.device.launch_tensors import RecurrentRows
from trencadis.core.models.model_and_ops_api import DeltaNetWeights, RecurrentState

Case = tuple[str, Callable[[], None]]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGE, SMALL = (16, 48, 128), (2, 2, 64)
"""(key heads, value heads, size): those of Qwen3.5 27B, and small ones."""

SPACES = {"": (1, 128, 128, 64), " of 80": (8, 128, 128, 80)}
"""(groups, heads, size of keys, size of values) of the state spaces of Granite 4 Small and of Nemotron Nano 9B v2."""


def recurrent(arch: int) -> Iterator[Case]:
    """Yields the convolutions and delta rules of prompts and of decoding rows."""
    for dtype in DTYPES:
        kind, usual = str(dtype).removeprefix("torch."), dtype == torch.bfloat16
        for groups, heads, size in (LARGE, SMALL) if usual else (LARGE,):
            yield f"{kind} {groups}/{heads} heads of {size}, gates and norm", partial(_net, dtype, groups, heads, size)
        for name, rows in (("rows", _rows()), ("chunks", _chunks())):
            for groups, heads, size in (LARGE, SMALL) if usual else (LARGE,):
                case = f"{kind} {groups}/{heads} heads of {size}, {name}"
                yield case, partial(_delta_rule, dtype, groups, heads, size, rows)
            for label, sizes in SPACES.items():
                if usual or not label:
                    yield f"{kind} state space{label}, {name}", partial(_state_space, dtype, sizes, rows)
            for taps in (3, 4) if usual else (4,):
                yield f"{kind} {taps} taps, {name}", partial(_conv, dtype, taps, rows)


def _rows() -> RecurrentRows:
    slot, number = torch.zeros(17, dtype=torch.int64), torch.zeros(17, dtype=torch.int32)
    return RecurrentRows(slot, number, slot, number)


def _chunks() -> ItemRows:
    number = torch.zeros(160, dtype=torch.int32)
    return ItemRows(*_rows(), number[:18], number, number[:17], number[:10])


def _delta_rule(dtype: torch.dtype, groups: int, heads: int, size: int, rows: LaunchRows) -> None:
    n = 160 if isinstance(rows, ItemRows) else 16
    mixed = torch.zeros(n, (2 * groups + heads) * size, dtype=dtype)
    parts = torch.split(mixed, [groups * size, groups * size, heads * size], dim=1)
    q, k, v = (t.view(n, -1, size) for t in parts)
    gates, state = torch.zeros(n, heads), torch.zeros(4, heads, size, size)
    delta_rule.launch(q, k, v, gates, gates, state, rows, mixed.new_zeros(n, heads, size), 1e-6)


def _net(dtype: torch.dtype, groups: int, heads: int, size: int) -> None:
    x, gates = torch.zeros(16, (2 * groups + heads) * size, dtype=dtype), torch.zeros(16, heads * (size + 2))
    number, width = torch.zeros(heads), x.shape[1]
    weights = DeltaNetWeights(x.new_zeros(width, 4), number, number, x.new_zeros(size), 1e-6, groups)
    held = RecurrentState(x.new_zeros(4, 3, width), torch.zeros(4, heads, size, size))
    delta_net_step.run(x, gates.to(dtype), weights, held, _rows(), 1e-6)


def _state_space(dtype: torch.dtype, sizes: tuple[int, int, int, int], rows: LaunchRows) -> None:
    (groups, heads, keys, values), n = sizes, 160 if isinstance(rows, ItemRows) else 16
    inner = torch.zeros(n, 2 * groups * keys + heads * values, dtype=dtype)
    x, b, c = torch.split(inner, [heads * values, groups * keys, groups * keys], dim=1)
    x, b, c = x.view(n, heads, values), b.view(n, groups, keys), c.view(n, groups, keys)
    gates, state = torch.zeros(n, heads), torch.zeros(4, heads, keys, values)
    delta_rule.launch(c, b, x, gates, gates, state, rows, inner.new_zeros(n, heads, values), 1e-6, delta=False)


def _conv(dtype: torch.dtype, taps: int, rows: LaunchRows) -> None:
    n, width = 160 if isinstance(rows, ItemRows) else 16, 8192
    x, state = torch.zeros(n, width, dtype=dtype), torch.zeros(4, taps - 1, width, dtype=dtype)
    causal_conv.launch(x, x.new_zeros(width, taps), None, state, rows, "silu", x.new_zeros(n, width))
