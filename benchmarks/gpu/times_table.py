"""The table of docs/benchmarks.md: this engine's estimates by model, weights and load, each beside one of vLLM.

``python -m benchmarks.gpu.times --table`` prints it. The estimate of vLLM is the same simulator with what differs:

* layers run op by op, each as one kernel, at any number of rows;
* attention reaches FlashAttention-3's share of the peak on Hopper;
* codes of 4 and 8 bits are read and decoded within the product at no cost of their own, as Marlin does with few rows,
  and 8-bit floats are multiplied as such, their activations rounded by the kernel before;
* keys that are cut are joined within the kernel of attention.

It leaves out the time of vLLM's host, so that it is a lower bound for small steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from trencadis.backends.cuda.time_estimates.kernel_times import (
    PRODUCT,
    CardTimes,
    RecordedKernel,
    card,
    step_time,
    time_of,
)
from trencadis.backends.cuda.time_estimates.meta_launch_recorder import EIGHT_BITS, EXPERTS, DecodeRecorder
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.quant_config import online

WEIGHTS = {"bfloat16": "", "fp8": "fp8", "int4": "int4"}
"""Column of the table -> ``--quantization``."""

BITS = {"fp8": 8.0, "int4": 4.125}
"""Bits of a stored weight; int4 with a float16 scale for each 128."""

ROWS, PROMPTS = (1, 16, 32, 64, 256), (2048, 8192, 32_768)


class Estimates(NamedTuple):
    """Seconds: of a decoding step by rows, and to the first token by tokens of a prompt."""

    steps: dict[int, float]
    prompts: dict[int, float]


def estimate_ours(
    model: ModelConfig, ranks: int, on: CardTimes, context: int, rows: Sequence[int] = ROWS,
    prompts: Sequence[int] = PROMPTS,
) -> Estimates:  # fmt: skip
    """Estimates this engine, as ``plan --time`` does."""
    recorder = DecodeRecorder(model, ranks, int(on.processors))
    steps = {n: step_time(recorder.step(n, context), n, on)[1].step for n in rows}
    return Estimates(steps, {n: _prompt(recorder.prompt(n), on) for n in prompts})


def estimate_vllm(
    model: ModelConfig, kind: str, ranks: int, on: CardTimes, context: int, rows: Sequence[int] = ROWS,
    prompts: Sequence[int] = PROMPTS,
) -> Estimates:  # fmt: skip
    """Estimates vLLM on the 16-bit ``model`` with weights of ``kind``; "": 16 bits."""
    on = on.with_flash_attention_3()
    recorder = DecodeRecorder(model, ranks, int(on.processors), whole_layers=False)

    def launch(kernels: Sequence[RecordedKernel], count: int) -> list[RecordedKernel]:
        return [_as_vllm(k, kind, count) for k in kernels if k.name != "join_kernel"]

    steps = {n: step_time(launch(recorder.step(n, context), n), n, on)[1].step for n in rows}
    made = {}
    for n in prompts:
        recorded = recorder.prompt(n)
        made[n] = _prompt([launch(kernels, n // len(recorded)) for kernels in recorded], on)
    return Estimates(steps, made)


def _prompt(launches: Sequence[Sequence[RecordedKernel]], on: CardTimes) -> float:
    return sum(time_of(list(kernels), on).total for kernels in launches) + on.graph + on.host_step(1)


def _as_vllm(kernel: RecordedKernel, kind: str, rows: int) -> RecordedKernel:
    """Returns the kernel with weights of ``kind``; those of experts and of the head too.

    A product of ``rows`` rows has 2 x rows operations for each weight. The head multiplies fewer rows than a prompt
    has, so that its weights, a small part of a prompt, keep 16 bits there.
    """
    if not kind or kernel.kind != PRODUCT or not kernel.flops:
        return kernel
    rate = EIGHT_BITS if kind == "fp8" else 1.0
    if kernel.name in EXPERTS:
        share = BITS[kind] / 16
        rows_share = share if kind == "fp8" else 1.0
        loads = int(kernel.weight_loads * share + (kernel.loads - kernel.weight_loads) * rows_share)
        return replace(kernel, bytes=int(kernel.bytes * share), rate=rate, loads=loads)
    weights = kernel.flops // (2 * rows)
    saved = int(2 * weights * (1 - BITS[kind] / 16))
    return replace(kernel, bytes=max(kernel.bytes - saved, 0), rate=rate)


def table_lines(
    models: dict[str, tuple[ModelConfig, int]], name: str, context: int, kinds: Sequence[str] = tuple(WEIGHTS)
) -> Iterator[str]:
    """Yields the table: a line for each model and kind of weights, ours / vLLM's, in milliseconds."""
    on = card(name)
    heads = [*(f"{n} row{'s' * (n > 1)}" for n in ROWS), *(f"prompt of {n:,}" for n in PROMPTS)]
    yield "| model | weights | " + " | ".join(heads) + " |"
    yield "|---|---|" + "---|" * len(heads)
    for label, (model, ranks) in models.items():
        for kind in kinds:
            method = WEIGHTS[kind]
            own = replace(model, quant=online(method)) if method else model
            ours = estimate_ours(own, ranks, on, context)
            theirs = estimate_vllm(model, method, ranks, on, context)
            pairs = [(ours.steps[n], theirs.steps[n], 2) for n in ROWS]
            pairs += [(ours.prompts[n], theirs.prompts[n], 0) for n in PROMPTS]
            cells = [f"{1e3 * a:,.{digits}f} / {1e3 * b:,.{digits}f}" for a, b, digits in pairs]
            yield f"| {label} | {kind} | " + " | ".join(cells) + " |"
