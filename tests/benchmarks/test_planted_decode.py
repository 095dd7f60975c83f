"""Mistakes planted in decoding, each found by what ``benchmarks.gpu`` measures: layers in Triton's interpreter, and
answers of an engine on the twin against prompts of the same ids."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu import decode, layers
from tests.oracles import interpreter
from tests.oracles.planted_mistakes import planted
from trencadis import LLM
from trencadis.backends.cuda.cpu_twin.ops import TwinOps
from trencadis.backends.cuda.launches import cuda_host_arrays
from trencadis.core.buckets import Stage

pytest.importorskip("triton", reason="triton is not installed")

from trencadis.backends.cuda.kernels import online_softmax, paged_attention
from trencadis.backends.cuda.kernels.layers import fused_decode_attention, fused_layer, skinny_gemm

BARS = {"error": 4.0, "mean": 3.0}
"""Of layers in float32, whose sums run in another order than plain torch's: theirs is near one."""


Plant = tuple[ModuleType, str, str, str]

LAYER_MISTAKES: dict[str, Plant] = {
    "a piece of the columns is lost": (skinny_gemm, "skinny_kernel", "range(0, PIECES)", "range(1, PIECES)"),
    "the last piece is not awaited": (
        skinny_gemm, "skinny_kernel", 'sem="acq_rel") == PIECES - 1', 'sem="acq_rel") == PIECES - 2'),
    "counters are left as they are": (skinny_gemm, "skinny_kernel", "tl.store(arrived + tile, 0)", "pass"),
    "pieces are added in the order of their ends": (
        skinny_gemm, "skinny_kernel",
        "            acc = tl.zeros([M, N], tl.float32)\n            up = tl.zeros([M, N], tl.float32)\n            "
        "square = tl.zeros([M], tl.float32)\n            for i in range(0, PIECES):\n"
        "                other = sums + (tile * PIECES + i) * rows * N + spot\n",
        "            acc = tl.zeros([M, N], tl.float32)\n            up = tl.zeros([M, N], tl.float32)\n            "
        "square = tl.zeros([M], tl.float32)\n            for j in range(0, PIECES):\n"
        "                i = (piece + j) % PIECES\n"
        "                other = sums + (tile * PIECES + i) * rows * N + spot\n"),
    "the norm has one piece's squares": (
        skinny_gemm, "skinny_kernel", "square += tl.load(left", "square = tl.load(left"),
    "the norm's mean is over a piece": (skinny_gemm, "_finish", "square / COLUMNS", "square / (COLUMNS // 2)"),
    "the norm's weight is left out": (skinny_gemm, "skinny_kernel", "(wide * factor)", "(wide)"),
    "the stream goes on without the residual": (
        skinny_gemm, "_add_residual", "tl.store(total + address, value, mask=kept)",
        "tl.store(total + address, more, mask=kept)"),
    "the bias is added twice": (
        skinny_gemm, "_finish", "mask=there, other=0.0).to(tl.float32)[None, :]\n        if GATE:",
        "mask=there, other=0.0).to(tl.float32)[None, :] * 2\n        if GATE:"),
    "gate and up change places": (
        skinny_gemm, "_finish", "acc = acc / (1.0 + tl.exp(-acc)) * up", "acc = up / (1.0 + tl.exp(-up)) * acc"),
    "the residual is left out": (skinny_gemm, "_finish", "if RESIDUAL:", "if RESIDUAL and GATE:"),
    "the key goes to the slot before": (
        fused_decode_attention, "turned_items_kernel", "slot = tl.load(slot_map + position)",
        "slot = tl.load(slot_map + position) - 1"),
    "the value is stored as key": (
        fused_decode_attention, "turned_items_kernel", "tl.store(v + at, value, mask=inside)",
        "tl.store(v + at, key, mask=inside)"),
    "the new key is not seen": (
        fused_decode_attention, "turned_items_kernel", "size = tl.where(newest, tl.full([M], 1.0, tl.float32), 0.0)",
        "size = tl.where(newest, tl.full([M], 0.0, tl.float32), 0.0)"),
    "keys are not turned": (
        fused_decode_attention, "norm_and_rotate", "return (near * cosine + other * sine).to(held.dtype)",
        "return tl.where(live[:, None] & (tl.num_programs(0) > 0), near, other).to(held.dtype)"),
    "turned the other way": (
        fused_decode_attention, "norm_and_rotate", "-sine, sine)", "sine, -sine)"),
    "a stored key is lost": (fused_decode_attention, "_stored_reach", "stop = tl.minimum(before, limit)",
                             "stop = tl.minimum(before - 1, limit)"),
    "a stale key is seen": (fused_decode_attention, "_stored_reach", "stop = tl.minimum(before, limit)",
                            "stop = tl.minimum(before + 1, limit)"),
    "a cut block loses its last part": (
        paged_attention, "join_kernel", "stop = tl.load(join_part + join + 1)",
        "stop = tl.load(join_part + join + 1) - 1"),
    "parts are joined without their peaks": (
        paged_attention, "join_kernel", "share = tl.exp2(high - best[None, :])",
        "share = tl.exp2(high - high)"),
    "scores are in other units": (
        online_softmax, "tile_weights", "weights = tl.exp2(scores * scale - best[:, None])",
        "weights = tl.exp(scores * scale - best[:, None])"),
    "heads of another group": (
        fused_decode_attention, "turned_items_kernel", "head = group * GROUP + lane", "head = lane * GROUPS + group"),
}  # fmt: skip

QUICK_LAYERS = ("the norm has one piece's squares", "the key goes to the slot before")
USERS = {
    "attend_part": (fused_decode_attention,), "leave_part": (fused_decode_attention,),
}  # fmt: skip


def layer_run(contexts: tuple[int, ...] = (600, 0)) -> layers.LayerRun:
    return layers.LayerRun(layers.SMALL["narrow"], contexts, torch.float32, torch.device("cpu"))


def found(results: list[layers.LayerResult]) -> bool:
    """Whether a figure is beyond its bar, or bits depend on the order of programs."""
    bad = any(r.error > BARS["error"] or r.mean > BARS["mean"] or r.elsewhere or r.moved or r.counters for r in results)
    return bad or len({r.digest for r in results}) > 1


def looked_at() -> list[layers.LayerResult]:
    """The layer with its programs in two orders, as a card may run them."""
    results = []
    for order in interpreter.ORDERS[:2]:
        with interpreter.order(order):
            results.append(layers.check(layer_run(), 1))
    return results


@pytest.fixture
def tiles_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter.install()


@pytest.mark.usefixtures("tiles_interpreted")
@pytest.mark.parametrize(
    "name", [n if n in QUICK_LAYERS else pytest.param(n, marks=pytest.mark.long) for n in LAYER_MISTAKES]
)
def test_a_mistake_in_a_layer_is_found(name: str) -> None:
    module, function, old, new = LAYER_MISTAKES[name]
    with planted(module, function, old, new, USERS.get(function, ())):
        results = [layers.check(layer_run((40, 0)), 1)] if name in QUICK_LAYERS else looked_at()
    assert found(results), results


@pytest.mark.usefixtures("tiles_interpreted")
@pytest.mark.parametrize("contexts", [(40, 0), pytest.param((600, 0), marks=pytest.mark.long)])
def test_a_layer_without_a_mistake_passes(contexts: tuple[int, ...]) -> None:
    result = layers.check(layer_run(contexts), 1)
    print(result)
    assert not found([result])


# Answers of an engine

TEXT = cuda_host_arrays.text
Change = Callable[[Any, Any], Any]


def decoding(change: Change) -> Callable[..., Any]:
    """``cuda_host_arrays.text`` whose arrays of DECODE launches went through ``change(arrays, inputs)``."""

    def text(bucket: Any, x: Any, sizes: Any, plans: Any) -> Any:
        made = TEXT(bucket, x, sizes, plans)
        return change(made, x) if bucket.stage is Stage.DECODE and len(x.tokens) else made

    return text


def of_attn(**changes: Callable[[Any], Any]) -> Change:
    """Replaces arrays of ``attn``."""
    return lambda made, x: made._replace(
        attn=made.attn._replace(**{name: change(getattr(made.attn, name)) for name, change in changes.items()})
    )


def rolled(array: Any, count: int) -> Any:
    """The first ``count`` values moved by one."""
    moved = array.copy()
    moved[..., :count] = np.roll(array[..., :count], 1, -1)
    return moved


def shifted_blocks(made: Any, x: Any) -> Any:
    """Each row but the first begins one block early."""
    start = made.attn.block_start.copy()
    start[1 : len(x.context)] -= 1
    return made._replace(attn=made.attn._replace(block_start=start))


def beyond_sixteen(made: Any, x: Any) -> Any:
    """Rows from the seventeenth on see no stored key."""
    context = made.attn.context.copy()
    context[16:] = 0
    return made._replace(attn=made.attn._replace(context=context))


def plain_sample(self: TwinOps, logits: Any, inputs: Any, state: Any, full: bool) -> Any:
    """A greedy head that never chooses what the other head would."""
    if not full:
        best = logits.argmax(1, keepdim=True)
        logits = logits.scatter(1, best, float("-inf"))
    return SAMPLE(self, logits, inputs, state, full)


def careless_norm(self: TwinOps, x: Any, weight: Any, eps: float, residual: Any = None) -> Any:
    """A norm that is 2 % too small in launches of few rows."""
    out, total = NORM(self, x, weight, eps, residual)
    return (out * 0.98 if len(x) <= 64 else out), total


SAMPLE, NORM = TwinOps.sample, TwinOps.rms_norm

ENGINE_MISTAKES: dict[str, tuple[Any, str, Any]] = {
    "positions are those of the token before": (
        cuda_host_arrays, "text", decoding(lambda made, x: made._replace(positions=np.maximum(made.positions - 1, 0)))),
    "a row sees one key less": (
        cuda_host_arrays, "text", decoding(of_attn(context=lambda a: np.maximum(a - 1, 0)))),
    "keys go to the slot before": (cuda_host_arrays, "text", decoding(of_attn(slot_map=lambda a: a - 1))),
    "keys are not stored": (cuda_host_arrays, "text", decoding(of_attn(slot_map=lambda a: a * 0 + 16))),
    "a row reads the blocks of the row before": (cuda_host_arrays, "text", decoding(shifted_blocks)),
    "a row goes on with its neighbour's token": (
        cuda_host_arrays, "text",
        decoding(lambda made, x: made._replace(from_slot=rolled(made.from_slot, len(x.tokens)))),
    ),
    "rows beyond sixteen lose their keys": (cuda_host_arrays, "text", decoding(beyond_sixteen)),
    "hidden rows change places": (
        cuda_host_arrays, "text", decoding(lambda made, x: made._replace(out_row=rolled(made.out_row, len(x.tokens))))),
    "the greedy head takes the second best": (TwinOps, "sample", plain_sample),
    "a norm of few rows is too small": (TwinOps, "rms_norm", careless_norm),
}  # fmt: skip

QUICK_ENGINES = ("keys go to the slot before",)
ROWS, TOKENS, LONG = 18, 6, 40


def start(model: Path, dtype: str) -> LLM:
    return LLM(
        str(model), device="cuda", policy="twin", dtype=dtype, max_model_len=512, max_num_seqs=20,
        kv_cache_memory_bytes=32 << 20, enable_prefix_caching=False, enforce_eager=True, threads=1,
        mm_processor_kwargs={"max_pixels": 56 * 56},
    )  # fmt: skip


def decoded(llm: LLM, rows: int = ROWS) -> tuple[list[decode.Answer], list[list[decode.Chances]], int]:
    answers, differ = decode.answer(llm, decode.prompts(llm, rows, LONG), TOKENS)
    return answers, decode.score(llm, answers), differ


@pytest.fixture(scope="module")
def noise(vl_checkpoint: Path) -> decode.Noise:
    """Of bfloat16, by what an engine without mistakes scores."""
    llm = start(vl_checkpoint, "bfloat16")
    answers, scored, _ = decoded(llm, 8)
    llm.close()
    exact = start(vl_checkpoint, "float32")
    made = decode.noise_of(scored, decode.score(exact, answers))
    exact.close()
    return made


def passes(figures: dict[str, float], differ: int) -> bool:
    return not figures["top1"] and not differ and figures["gap"] <= 2 and figures["mean"] <= 2


@pytest.mark.parametrize(
    "name", [n if n in QUICK_ENGINES else pytest.param(n, marks=pytest.mark.long) for n in ENGINE_MISTAKES]
)
def test_a_mistake_in_an_engine_is_found(
    name: str, noise: decode.Noise, vl_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, attribute, made = ENGINE_MISTAKES[name]
    monkeypatch.setattr(owner, attribute, made)
    llm = start(vl_checkpoint, "bfloat16")
    answers, scored, differ = decoded(llm)
    llm.close()
    figures = decode.judge(answers, scored, noise)
    print(name, figures, differ)
    assert not passes(figures, differ)


@pytest.mark.parametrize("rows", [4, pytest.param(ROWS, marks=pytest.mark.long)])
def test_an_engine_without_a_mistake_passes(noise: decode.Noise, vl_checkpoint: Path, rows: int) -> None:
    llm = start(vl_checkpoint, "bfloat16")
    answers, scored, differ = decoded(llm, rows)
    llm.close()
    figures = decode.judge(answers, scored, noise)
    print(figures, differ, noise)
    assert passes(figures, differ)


def test_twenty_mistakes_are_planted() -> None:
    assert len(LAYER_MISTAKES) + len(ENGINE_MISTAKES) >= 20 and fused_layer is not None
