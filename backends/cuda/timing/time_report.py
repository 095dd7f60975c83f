"""``trencadis plan --time``: the estimated time of a decoding step on a card, its parts, and its sensitivity to each
constant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from trencadis.backends.cuda.timing.constants import DEFAULT, SCALED, CardTimes, card, sources
from trencadis.backends.cuda.timing.kernel_times import KernelTimes, RecordedKernel, time_of
from trencadis.backends.cuda.timing.timeline import HostStep, Timeline, run
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.errors import StartupError

ROWS, CONTEXT, STEPS = (1, 32, 256), 1024, 200
CHANGE = 0.5

AFTER = 0.25
"""Share of the host's work that waits for the result of a step: update, and the work after it."""

LIMITS = {
    "products": "reading weights", "attention": "reading keys and values", "small kernels": "small kernels",
    "head": "the head", "collectives": "sums over ranks", "gaps": "gaps between kernels", "host": "the host",
}  # fmt: skip


def step_time(
    kernels: Sequence[RecordedKernel], rows: int, on: CardTimes, depth: int = 1
) -> tuple[KernelTimes, Timeline]:
    """Returns (the device's seconds, the timeline of host and device over several steps)."""
    device = time_of(list(kernels), on)
    host = on.host_step(rows)
    work = HostStep(host * (1 - AFTER), host * AFTER)
    return device, run(((work, device.total + on.graph) for _ in range(STEPS)), depth)


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
    depth: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """Computes the report as plain values, in seconds.

    Raises:
        StartupError: there are no figures of the card, or this Python has no torch or no triton.
    """
    try:
        from trencadis.backends.cuda.timing.kernel_recorder import DecodeRecorder
    except ImportError as error:
        raise StartupError(f"plan --time records launches and needs torch and triton: {error}") from error
    on = card(name or DEFAULT)
    recorder = DecodeRecorder(model, ranks, int(on.processors))
    loads = [_load(recorder.step(count, context), count, on, depth) for count in rows]
    return {
        "model": model.name, "card": on.name, "ranks": ranks, "context": context, "depth": depth, "loads": loads,
        "sources": {**sources(on.name), "host": "our own: docs/benchmarks.md"},
    }  # fmt: skip


def _load(kernels: Sequence[RecordedKernel], rows: int, on: CardTimes, depth: int) -> dict[str, Any]:
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


def lines(report: dict[str, Any]) -> Iterator[str]:
    """Yields the lines of the printed report."""
    ranks = f"{report['ranks']} x " if report["ranks"] > 1 else ""
    yield (
        f"decoding on {ranks}{report['card']}, context {report['context']}: estimates from published figures, nothing "
        "measured here"
    )
    for load in report["loads"]:
        shares = sorted(load["parts"].items(), key=lambda part: -part[1])
        told = ", ".join(f"{LIMITS[part]} {taken / load['tpot']:.0%}" for part, taken in shares if taken > 0)
        yield (
            f"  {load['rows']:>3} rows: TPOT {1e3 * load['tpot']:.2f} ms ({load['over_weights']:.2f} x reading the "
            f"weights), {load['tokens_per_second']:,.0f} tokens/s, {load['kernels']} kernels, device idle "
            f"{load['idle']:.1%}; limit: {load['limit']}"
        )
        yield f"            {told}"
        changes = sorted(load["sensitivity"].items(), key=lambda one: -max(map(abs, one[1])))
        moved = ", ".join(
            f"{n} {less:+.0%}/{more:+.0%}" for n, (less, more) in changes if max(abs(less), abs(more)) >= 0.005
        )
        yield f"            a constant 50 % less / more: {moved}"
    yield "  sources:"
    yield from (f"    {name}: {source}" for name, source in report["sources"].items())
