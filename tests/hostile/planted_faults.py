"""Mistakes planted into a copy of a backend, and which check must name each of them.

Each is planted from outside, over the protocol alone, so that the same mistake is made on every device. As a program
(``planted.py KIND [FAULT ...]``) it takes one kind of device through them and prints what was found as JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trencadis.assets import demo_path
from trencadis.backends.conformance import check_suite
from trencadis.backends.conformance.backend_under_test import CheckTarget, Make, make_target
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.device.backend import BackendConfig, Rotary
from trencadis.core.launches.host_inputs import own_positions

Plant = Callable[[Any], None]
ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Fault:
    """One mistake: what is changed in a backend, the check that must fail, and what it must say."""

    plant: Plant
    check: str
    says: str
    needs: str = ""  # a hook without which nobody could notice
    promise: str = ""  # a field of Policy without which the device says that it cannot do this


class Wrapped:
    """Ops of which one is replaced."""

    def __init__(self, ops: Any, name: str, other: Callable[..., Any]) -> None:
        self.__dict__["_ops"] = ops
        self.__dict__[name] = lambda *args, **kwargs: other(getattr(ops, name), *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)


def op(name: str, other: Callable[..., Any]) -> Plant:
    """``other(original, *args)`` in the place of one op."""

    def plant(backend: Any) -> None:
        backend.ops = Wrapped(backend.ops, name, other)

    return plant


def filling(change: Callable[[Any], Any]) -> Plant:
    """``change(inputs)`` before each fill of a text launch."""

    def plant(backend: Any) -> None:
        fill = backend.fill
        backend.fill = lambda program, x: fill(program, change(x) if hasattr(x, "context") else x)

    return plant


def programs(change: Callable[[Any, Any], None]) -> Plant:
    """``change(backend, program)`` to each new program."""

    def plant(backend: Any) -> None:
        make = backend.program

        def program(bucket: Bucket, body: Any) -> Any:
            made = make(bucket, body)
            change(backend, made)
            return made

        backend.program = program

    return plant


def _stale_fill(backend: Any) -> None:
    fill, seen = backend.fill, {}

    def other(program: Any, x: Any) -> None:
        if id(program) not in seen:
            fill(program, x)
        seen[id(program)] = program

    backend.fill = other


def _stale_replay(backend: Any) -> None:
    fill, first = backend.fill, {}

    def filled(program: Any, x: Any) -> None:
        first.setdefault(id(program), (program, x))
        fill(program, x)

    def change(_: Any, program: Any) -> None:
        replay = program.replay

        def stale() -> Any:
            if id(program) in first:
                fill(program, first[id(program)][1])
            return replay()

        program.replay = stale

    backend.fill = filled
    programs(change)(backend)


def _outside(backend: Any) -> None:
    make = backend.program

    def program(bucket: Bucket, body: Any) -> Any:
        more = 64 if bucket.stage is Stage.VISION else 1
        return make(Bucket(bucket.stage, (bucket.dims[0] + more, *bucket.dims[1:]), bucket.variant), body)

    backend.program = program


def _lies(backend: Any, program: Any) -> None:
    release = program.release
    program.release = lambda: release() + (4 << 20)


def _quiet_capture(backend: Any, program: Any) -> None:
    capture = program.capture

    def swallowed() -> None:
        with contextlib.suppress(Exception):
            capture()

    program.capture = swallowed


def _heads(attend: Any, q: Any, k: Any, v: Any, kv: Any, attn: Any, scale: float, *window: int) -> Any:
    """Query head i reads KV head i % g."""
    n, h, d = q.shape
    g = kv.k.shape[-2]
    out = attend(q.view(n, h // g, g, d).transpose(1, 2).reshape(n, h, d), k, v, kv, attn, scale, *window)
    return out.reshape(n, g, h // g, d).transpose(1, 2).reshape(n, h, d)


def _writes_zero(store: Any, q: Any, k: Any, v: Any, rotary: Any, kv: Any, attn: Any) -> Any:
    out = store(q, k, v, rotary, kv, attn)
    where = torch.zeros(1, dtype=torch.int64, device=q.device)
    kv.k.index_copy_(0, where, torch.ones((1, *kv.k.shape[1:]), dtype=kv.k.dtype, device=q.device))
    return out


def _leaks(act: Any, x: Any, kind: str) -> Any:
    out = act(x, kind)
    return out + out.mean(0, keepdim=True) * 1e-5


def _no_penalties(sample: Any, logits: Any, head: Any, state: Any, full: bool) -> Any:
    off = torch.zeros_like(head.presence)
    neutral = head._replace(presence=off, frequency=off, repetition=torch.ones_like(head.repetition))
    return sample(logits, neutral, state, full)


def _host_read(norm: Any, x: Any, *rest: Any) -> Any:
    float(x.sum())
    return norm(x, *rest)


def _earlier(x: Any) -> Any:
    return dataclasses.replace(x, context=(x.context - (x.context > 0)).astype(x.context.dtype))


def _shorter(x: Any) -> Any:
    if getattr(x, "upto", None) is None:
        return x
    own = own_positions(x.row_start, x.context)
    return dataclasses.replace(x, upto=(x.upto - 1).clip(own))


def _nearer(x: Any) -> Any:
    seen = getattr(x, "cross_attention", None)
    if seen is None or not hasattr(seen, "reach"):
        return x
    reach = (seen.reach - (seen.reach > 1)).astype(seen.reach.dtype)
    return dataclasses.replace(x, cross_attention=dataclasses.replace(seen, reach=reach))


def _wider(attend: Any, *args: Any) -> Any:
    """One key more; a device that has made ready for its model's windows alone takes another layer's."""
    try:
        return attend(*args[:6], *(w + 1 for w in args[6:]))
    except ValueError:
        return attend(*args[:6], *(100_000 for _ in args[6:]))


def _replaced(seg: Any, **values: Any) -> Any:
    """Segments with fields filled with a value, as far as the device's have them."""
    held = {name: torch.full_like(getattr(seg, name), v) for name, v in values.items() if name in seg._fields}
    return seg._replace(**held)


FAULTS: dict[str, Fault] = {
    "window mask shows padding": Fault(
        op("attend_windows", lambda f, q, k, v, seg, scale: f(
            q, k, v, _replaced(seg, real=64, seen=True), scale)),
        "op.attend_windows", "off by"),
    "images see each other": Fault(
        op("attend_images", lambda f, q, k, v, seg, scale: f(
            q, k, v, _replaced(seg, segment=0, image=0, key=0), scale)),
        "op.attend_images", "off by"),
    "context off by one": Fault(filling(_earlier), "op.attend", "off by"),
    "padding rows leak": Fault(op("act_mul", _leaks), "padding", "changes real rows"),
    "stale buffer": Fault(_stale_fill, "refill", "those of the earlier fill"),
    "sum in another order each time": Fault(
        op("linear", lambda f, x, w: f(x, w) * (1 + 3e-6 * random.random())), "determinism", "other bits"),
    "residual forgotten": Fault(
        op("rms_norm", lambda f, x, w, eps, residual=None: f(x, w, eps)), "op.rms_norm", "off by"),
    "mean partly left in": Fault(
        op("layer_norm", lambda f, x, w, b, eps, residual=None: f(x + 1e-2 * w, w, b, eps, residual)),
        "op.layer_norm", "off by"),
    "bias of the norm forgotten": Fault(
        op("layer_norm", lambda f, x, w, b, eps, residual=None: f(x, w, 0 * b, eps, residual)),
        "op.layer_norm", "off by"),
    "residual of the layer norm forgotten": Fault(
        op("layer_norm", lambda f, x, w, b, eps, residual=None: f(x, w, b, eps)), "op.layer_norm", "off by"),
    "gelu for its tanh": Fault(
        op("act", lambda f, x, kind: f(x, "gelu_tanh" if kind == "gelu" else kind)), "op.act", "off by"),
    "quick gelu for silu": Fault(
        op("act_mul", lambda f, x, kind: f(x, "quick_gelu" if kind == "silu" else kind)), "op.act_mul", "off by"),
    "halves exchanged": Fault(
        op("act_mul", lambda f, x, kind: f(x.roll(x.shape[1] // 2, 1), kind)), "op.act_mul", "off by"),
    "shares not divided by their sum": Fault(
        op("experts", lambda f, x, s, w, top, normalise, kind: f(x, s, w, top, False, kind)), "op.experts", "off by"),
    "one expert too few": Fault(
        op("experts", lambda f, x, s, w, top, normalise, kind: f(x, s, w, max(top - 1, 1), normalise, kind)),
        "op.experts", "off by"),
    "another token's experts": Fault(
        op("experts", lambda f, x, s, w, top, normalise, kind: f(x, s.roll(1, 0), w, top, normalise, kind)),
        "op.experts", "off by"),
    "ZERO written": Fault(op("rope_store", _writes_zero), "op.rope_store", "ZERO was written"),
    "wrong KV head": Fault(op("attend", _heads), "op.attend", "off by"),
    "window off by one": Fault(op("attend", _wider), "op.attend.window", "off by", promise="windows"),
    "window forgotten": Fault(op("attend", lambda f, *a: f(*a[:6])), "op.attend.window", "off by", promise="windows"),
    "spans end one token early": Fault(filling(_shorter), "op.attend.upto", "off by", promise="upto"),
    "a row of an image unseen": Fault(filling(_nearer), "op.attend_pictures", "off by", promise="cross_attention"),
    "an image seen twice counts once": Fault(
        op("cross_attend", lambda f, q, held, rows, seen, scale: f(
            q, held, rows, seen._replace(times=(seen.times > 0).to(seen.times.dtype)), scale)),
        "op.attend_pictures", "off by", promise="cross_attention"),
    "rotary sign": Fault(op("rotary", lambda f, *a: Rotary(f(*a).cos, -f(*a).sin)), "op.rotary", "sin: off by"),
    "mask ignored": Fault(
        op("sample", lambda f, logits, head, state, full: f(
            logits, head._replace(mask_row=torch.zeros_like(head.mask_row)), state, full)),
        "op.sample", "full: token"),
    "penalties off": Fault(op("sample", _no_penalties), "op.sample", "full: token"),
    "last token not kept": Fault(
        op("sample", lambda f, logits, head, state, full: f(
            logits, head, state._replace(last=torch.zeros_like(state.last)), full)),
        "op.sample", "greedy: last"),
    "groups leak": Fault(op("pool", lambda f, x, group, head: f(x, group, head).cumsum(0)), "op.pool", "off by"),
    "a NaN spoils the batch": Fault(
        op("pool", lambda f, x, group, head: f(x, group, head) + 0 * x.float().sum()), "op.pool", "values differ"),
    "shape outside the plan": Fault(_outside, "shapes", "its program states bucket"),
    "release lies": Fault(programs(_lies), "release", "although there was no graph"),
    "replay reads old inputs": Fault(_stale_replay, "replay", "inputs of an earlier fill"),
    "images not looked up": Fault(
        op("embed", lambda f, tokens, slot, last, row, arena, table: f(
            tokens, slot, last, torch.zeros_like(row), arena, table)),
        "op.embed", "off by"),
    "waits inside a launch": Fault(op("rms_norm", _host_read), "waiting", "on the host", "no_sync"),
    "lack of memory hidden": Fault(programs(_quiet_capture), "out-of-memory.capture", "raised nothing", "run_out"),
}  # fmt: skip


def planted(of: CheckTarget, fault: Fault) -> CheckTarget:
    """A copy of ``of`` with the mistake in it."""

    def make(cfg: BackendConfig) -> Any:
        backend = of.make(cfg)
        fault.plant(backend)
        return backend

    return CheckTarget(of.name, make, of.checkpoint, of.dtype, of.policy, of.quick)


def verdict(of: CheckTarget, fault: Fault, everything: bool = False) -> str:
    """Empty where the fault was named; else what was said instead."""
    random.seed(4)
    report = check_suite.run(planted(of, fault), () if everything else (fault.check,))
    found = {r.name: r for r in report.results}[fault.check]
    if found.status == "fail" and fault.says in found.reason:
        return ""
    return f"{found.name}: {found.status} {found.reason or found.figure}; failed: {report.failures()}"


def stub() -> Make:
    """The Gaudi backend over the stub of its plug-in; needs tests/stubs on the path and a process of its own."""
    from trencadis.backends.hpu.start import gaudi_card_and_plugin_detection

    gaudi_card_and_plugin_detection.find_stack = lambda: gaudi_card_and_plugin_detection.Stack(
        "1.21.0.555", "2.6.0+git1234", "2.6.0", True
    )
    gaudi_card_and_plugin_detection.find_machine = lambda environ: gaudi_card_and_plugin_detection.Machine(1, 1)
    from trencadis.backends.hpu.backend import HpuBackend
    from trencadis.backends.hpu.habana_bridge import emulator_hooks
    from trencadis.backends.hpu.shape_policy import policy
    from trencadis.backends.hpu.start.bridge_loader import open_bridge

    bridge = dataclasses.replace(open_bridge(0), device=torch.device("cpu"), compile=lambda m, fullgraph=True: m)
    assert emulator_hooks(bridge) is None
    return lambda cfg: HpuBackend(cfg, policy(""), bridge)


def numpy() -> Make:
    """The example package."""
    sys.path.append(str(ROOT / "examples" / "backend_numpy"))
    from trencadis_numpy import make_backend  # type: ignore[import-not-found]

    made: Make = make_backend
    return made


def of_kind(kind: str, quick: bool = True) -> CheckTarget:
    """cpu, padded (the CPU's other policy), hpu (emulated), stub, numpy."""
    demo = Path(demo_path())
    if kind == "stub":
        return CheckTarget("hpu", stub(), demo, quick=quick)
    if kind == "numpy":
        return CheckTarget("numpy", numpy(), demo, quick=quick)
    if kind == "hpu":
        os.environ["TRENCADIS_HPU_EMULATOR"] = "1"
    name = "cpu" if kind == "padded" else kind
    return make_target(name, demo, policy="padded" if kind == "padded" else "", quick=quick)


def noticeable(of: CheckTarget, names: Iterable[str]) -> list[str]:
    """Faults of ``names`` that concern this device."""
    backend = of.backend()
    hooks = getattr(backend, "hooks", None)
    return [
        name
        for name in names
        if (not (fault := FAULTS[name]).needs or getattr(hooks, fault.needs, None))
        and (not fault.promise or getattr(backend.policy, fault.promise))
    ]


def main(kind: str, names: list[str]) -> None:
    """Prints {"clean": failures of the device itself, "missed": {fault: what was said}, "named": count}."""
    of = of_kind(kind)
    able = noticeable(of, names or FAULTS)
    clean = check_suite.run(of)
    print(clean.summary(), file=sys.stderr)
    missed = {}
    for name in able:
        if said := verdict(of, FAULTS[name]):
            missed[name] = said
    failures = {r.name: r.reason for r in clean.results if r.status == "fail"}
    named = len(able) - len(missed)
    print(json.dumps({"clean": failures, "checks": len(clean.results), "missed": missed, "named": named}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
