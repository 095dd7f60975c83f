"""``trencadis plan --time``: the estimated time of a decoding step and of prompts on a card, its parts, and its
sensitivity to each constant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from trencadis.backends.cuda.shape_policy import FLASH_3, FLASH_ATTN, OWN_KERNELS
from trencadis.backends.cuda.time_estimates.kernel_times import (
    DEFAULT,
    SCALED,
    CardTimes,
    KernelTimes,
    RecordedKernel,
    Timeline,
    card,
    sources,
    step_time,
    time_of,
)
from trencadis.core.buckets import Bucket, verified_width
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.errors import StartupError
from trencadis.core.json_types import JsonObject

if TYPE_CHECKING:
    from trencadis.backends.cuda.time_estimates.meta_launch_recorder import DecodeRecorder

ROWS, CONTEXT = (1, 32, 256), 1024
PROMPTS = (2048, 8192, 32_768)
"""Tokens of the prompts whose time to the first token is estimated."""
CHANGE = 0.5

LIMITS = {
    "products": "reading weights", "attention": "reading keys and values", "small kernels": "small kernels",
    "head": "the head", "collectives": "sums over ranks", "gaps": "gaps between kernels", "host": "the host",
}  # fmt: skip


PROMPT_PARTS = {**LIMITS, "products": "products", "attention": "attention"}


def parts(device: KernelTimes, line: Timeline) -> dict[str, float]:
    """Returns the seconds of a step by cause; they add up to the step."""
    waits = max(line.step - device.total, 0.0)
    return {**device.kinds, "gaps": device.gaps, "host": waits}


def sensitivity(kernels: Sequence[RecordedKernel], rows: int, on: CardTimes, depth: int) -> dict[str, list[float]]:
    """Returns how a step changes if one constant is CHANGE smaller or larger: constant -> changes as shares of the
    step.
    """
    base = step_time(kernels, rows, on, depth)[1].step

    def change_in_step(other: CardTimes) -> float:
        return step_time(kernels, rows, other, depth)[1].step / base - 1

    found = {
        name: [change_in_step(replace(on, **{name: getattr(on, name) * (1 + sign * CHANGE)})) for sign in (-1, 1)]
        for name in SCALED
    }
    hosts = [tuple((n, s * (1 + sign * CHANGE)) for n, s in on.host) for sign in (-1, 1)]
    return found | {"host": [change_in_step(replace(on, host=host)) for host in hosts]}


def weight_seconds(kernels: Sequence[RecordedKernel], on: CardTimes) -> float:
    """Returns the seconds that reading the weights of a step takes at the card's full bandwidth."""
    return sum(k.bytes for k in kernels if k.kind == "products") / on.bandwidth


def times(
    model: ModelConfig, ranks: int = 1, name: str = "", rows: Sequence[int] = ROWS, context: int = CONTEXT,
    depth: int = 1, prompts: Sequence[int] = PROMPTS, verified: Sequence[Bucket] = (), attention: str = "",
) -> JsonObject:  # fmt: skip
    """Computes the report as plain values, in seconds.

    Args:
        attention: value of ``--attention-backend``: what attends to prompts. None, on a Hopper: FlashAttention 3 if it
            is installed here, as ``serve`` would have it.
        verified: VERIFY buckets whose steps are estimated beside DECODE of as many rows.

    Raises:
        StartupError: there are no figures of the card, or this Python has no torch or no triton.
    """
    try:
        from trencadis.backends.cuda.time_estimates.meta_launch_recorder import DecodeRecorder
    except ImportError as error:
        raise StartupError(f"plan --time records launches and needs torch and triton: {error}") from error
    on = card(name or DEFAULT)
    recorder = DecodeRecorder(model, ranks, int(on.processors))
    loads = [_load(recorder.step(count, context), count, on, depth) for count in rows]
    longest = [n for n in prompts if n <= model.text.max_positions]
    third = on.flash_attention_3_share > 0 and (attention == FLASH_ATTN or (not attention and _has_flash_3()))
    attending = on.with_flash_attention_3() if third else on
    return {
        "model": model.name, "card": on.name, "ranks": ranks, "context": context, "depth": depth, "loads": loads,
        "verified": [_estimate_verify(recorder, bucket, context, on, depth) for bucket in verified],
        "attention": _explain_flash_3(attention) if third else _explain_own(attention, on),
        "prompts": [_prompt(recorder.prompt(count), count, attending) for count in longest],
        "sources": {**sources(on.name), "host": "our own: docs/benchmarks.md"},
    }  # fmt: skip


def _has_flash_3() -> bool:
    """Returns True if this Python has FlashAttention 3; imports nothing."""
    return any(find_spec(name.partition(".")[0]) is not None for name in FLASH_3)


def _explain_flash_3(attention: str) -> str:
    """Returns why FlashAttention 3 attends to prompts."""
    return f"flash-attn 3 ({'asked for' if attention else 'installed here'})"


def _explain_own(attention: str, on: CardTimes) -> str:
    """Returns what attends to prompts if FlashAttention 3 does not."""
    if attention and attention != OWN_KERNELS:
        return f"as this engine's own kernels, for want of figures of {attention} on {on.name}"
    other = f" ({FLASH_ATTN} with flash-attn 3: --attention-backend {FLASH_ATTN})" if on.flash_attention_3_share else ""
    return f"this engine's own kernels{other}"


def _load(kernels: Sequence[RecordedKernel], rows: int, on: CardTimes, depth: int) -> JsonObject:
    device, line = step_time(kernels, rows, on, depth)
    shares = parts(device, line)
    largest = max(shares, key=lambda part: shares[part])
    return {
        "rows": rows,
        "kernels": len(kernels),
        "tpot": line.step,
        "device": device.total,
        "idle": line.idle,
        "tokens_per_second": rows / line.step,
        "parts": shares,
        "limit": LIMITS[largest],
        "over_weights": line.step / weight_seconds(kernels, on),
        "sensitivity": sensitivity(kernels, rows, on, depth),
    }


def _estimate_verify(recorder: DecodeRecorder, bucket: Bucket, context: int, on: CardTimes, depth: int) -> JsonObject:
    """Returns the seconds of a step that verifies drafts, and of one of the same rows without."""
    rows, width = bucket.dims[0], verified_width(bucket)
    kernels = recorder.step(rows, context, width=width)
    step = step_time(kernels, rows * width, on, depth)[1].step
    plain = step_time(recorder.step(rows, context), rows, on, depth)[1].step
    return {"rows": rows, "drafts": width - 1, "kernels": len(kernels), "step": step, "ratio": step / plain}


def _prompt(launches: Sequence[Sequence[RecordedKernel]], tokens: int, on: CardTimes) -> JsonObject:
    """The first launch waits for the host; the others are issued while those before them run."""
    made = [time_of(list(kernels), on) for kernels in launches]
    shares = {kind: sum(one.kinds[kind] for one in made) for kind in made[0].kinds}
    shares |= {"gaps": sum(one.gaps for one in made), "host": on.host_step(1)}
    return {
        "tokens": tokens, "launches": len(made), "kernels": sum(map(len, launches)),
        "ttft": sum(shares.values()) + on.graph, "parts": shares,
    }  # fmt: skip


def lines(report: JsonObject) -> Iterator[str]:
    """Yields the lines of the printed report."""
    ranks = f"{report['ranks']} x " if report["ranks"] > 1 else ""
    yield (
        f"decoding on {ranks}{report['card']}, context {report['context']}: estimates from published figures, nothing "
        "measured here"
    )
    for load in report["loads"]:
        shares = sorted(load["parts"].items(), key=lambda part: -part[1])
        shares_text = ", ".join(f"{LIMITS[part]} {taken / load['tpot']:.0%}" for part, taken in shares if taken > 0)
        yield (
            f"  {load['rows']:>3} rows: TPOT {1e3 * load['tpot']:.2f} ms ({load['over_weights']:.2f} x reading the "
            f"weights), {load['tokens_per_second']:,.0f} tokens/s, {load['kernels']} kernels, device idle "
            f"{load['idle']:.1%}; limit: {load['limit']}"
        )
        yield f"            {shares_text}"
        changes = sorted(load["sensitivity"].items(), key=lambda one: -max(map(abs, one[1])))
        moved = ", ".join(
            f"{n} {less:+.0%}/{more:+.0%}" for n, (less, more) in changes if max(abs(less), abs(more)) >= 0.005
        )
        yield f"            a constant 50 % less / more: {moved}"
    for one in report["verified"]:
        yield (
            f"  {one['rows']:>3} rows of {one['drafts']} drafts: {1e3 * one['step']:.2f} ms a step, {one['kernels']} "
            f"kernels; pays from {one['ratio']:.2f} tokens a row on"
        )
    if report["prompts"]:
        yield f"  attention of prompts: {report['attention']}"
    for prompt in report["prompts"]:
        shares = sorted(prompt["parts"].items(), key=lambda part: -part[1])
        shares_text = ", ".join(
            f"{PROMPT_PARTS[part]} {taken / prompt['ttft']:.0%}" for part, taken in shares if taken > 0
        )
        yield f"  prompt of {prompt['tokens']:,} tokens: TTFT {1e3 * prompt['ttft']:.1f} ms; {shares_text}"
    yield "  sources:"
    yield from (f"    {name}: {source}" for name, source in report["sources"].items())
