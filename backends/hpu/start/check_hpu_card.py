"""The lines of ``trencadis check-hpu`` that need the card: each kernel once, copies, a graph, a collective.

Each probe compares with the CPU and reports the error. No probe depends on another, so that one run shows everything
that is wrong.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trencadis.backends.hpu.habana_bridge import Bridge
from trencadis.backends.hpu.hccl_comm import find_fault
from trencadis.backends.hpu.launches.input_and_output_copies import OutputSets
from trencadis.backends.hpu.shape_policy import DRAWN
from trencadis.backends.hpu.start.check_hpu_kernels import Probe, kernel_probes
from trencadis.backends.hpu.start.kernel_cases import ProbeFailed, ProbeModule, error
from trencadis.core.device.backend import HeadTensorsOut


def probes(bridge: Bridge) -> Iterator[Probe]:
    """Yields (name, function to run) for every probe; the function returns the figure of its line, or raises."""
    yield from kernel_probes(bridge)
    others: dict[str, Callable[[Bridge], str]] = {
        "copies": copies, "pinned memory": pinned_upload, "fetch beside a launch": fetch_beside_launch,
        "events": events, "views of one upload": input_views, "store in place": store_in_place,
        "compile-only mode": compile_only, "memory": memory,
        "graph" if bridge.is_lazy() else "compiled launch": graph, "collective": collective,
    }  # fmt: skip
    if bridge.is_lazy():
        others["results in turn"] = results_in_turn
    else:
        others["collective in a compiled launch"] = compiled_collective
    for name, run_probe in others.items():
        yield name, partial(run_probe, bridge)


def input_views(bridge: Bridge) -> str:
    """Runs a launch on views of one uploaded piece, as every launch gets its inputs, and again with other values."""
    module: Any = ProbeModule(lambda a, b, c: a + b.sum() * c)
    piece = torch.zeros(96, dtype=torch.int32, device=bridge.device)
    views = piece[:32], piece[32:40].view(2, 4), piece[64:96]
    call = bridge.wrap_in_hpu_graph(module).forward if bridge.is_lazy() else bridge.compile(module)
    with torch.no_grad():
        for first in range(3):
            host = torch.arange(first, first + 96, dtype=torch.int32)
            piece.copy_(bridge.pin(host), non_blocking=bridge.pinned)
            out = call(*views)
            bridge.mark_step()
            error(out.cpu(), host[:32] + host[32:40].sum() * host[64:96])
    return "three launches read what was uploaded last"


def store_in_place(bridge: Bridge) -> str:
    """Stores rows into a large tensor inside a launch, as a layer stores keys, and checks that the others stay."""
    module: Any = ProbeModule(lambda cache, rows, x: cache.index_copy_(0, rows, x * 2))
    cache = torch.zeros((1 << 14, 64), dtype=torch.bfloat16, device=bridge.device)
    rows, x = torch.tensor([3, 1, 9000], dtype=torch.int64), torch.ones(3, 64, dtype=torch.bfloat16)
    call = module if bridge.is_lazy() else bridge.compile(module)
    with torch.no_grad():
        call(cache, rows.to(bridge.device), x.to(bridge.device))
        bridge.mark_step()
    found, wanted = cache.cpu(), torch.zeros(1 << 14, 64, dtype=torch.bfloat16)
    wanted[rows] = 2
    error(found, wanted)
    return "3 of 16,384 rows written"


def results_in_turn(bridge: Bridge) -> str:
    """Runs a graph that stores its results in two sets in turn, and fetches each while the next launch runs."""
    x, turn = (torch.zeros(n, dtype=torch.int32, device=bridge.device) for n in (64, 1))
    outputs = OutputSets(DRAWN, 64, bridge.device)

    def triple(x: torch.Tensor) -> HeadTensorsOut:
        return HeadTensorsOut(x * 3, None, None, None, None)

    module: Any = ProbeModule(outputs.bind(triple))
    call, found = bridge.wrap_in_hpu_graph(module).forward, []
    with torch.no_grad():
        for number in range(4):
            for target, value in ((x, number), (turn, number % 2)):
                target.copy_(bridge.pin(torch.full(target.shape, value, dtype=torch.int32)))
            call(x, turn)
            landing, event = bridge.pin(torch.zeros(64, dtype=torch.int32)), bridge.event()
            landing.copy_(outputs.sets[number % 2].token, non_blocking=bridge.pinned)
            event.record()
            found.append((landing, event))
            if number:
                found[number - 1][1].synchronize()
    bridge.synchronize()
    for number, (landing, _) in enumerate(found):
        error(landing.clone(), torch.full((64,), 3 * number))
    return "four results, each fetched beside the next launch"


def compile_only(bridge: Bridge) -> str:
    """Compiles a launch in the mode that computes nothing, then runs it."""
    module: Any = ProbeModule(lambda x: torch.softmax(x * 3, -1))
    x = torch.randn(4, 96)
    call = module if bridge.is_lazy() else bridge.compile(module)
    with torch.no_grad():
        held = x.to(bridge.device)
        with bridge.compile_only():
            call(held)
            bridge.mark_step()
        with bridge.metric_localcontext("graph_compilation") as metric:
            out = call(held)
            bridge.mark_step()
            off = error(out.cpu(), torch.softmax(x * 3, -1))
        return f"error {off:.0e}, {bridge.compilations(metric)} compilations left to the first run"


def memory(bridge: Bridge) -> str:
    """Takes 64 MiB and gives them back; compares with what the plug-in reports."""
    bridge.synchronize()
    before, total = bridge.mem_get_info()
    held = torch.zeros(64 << 20, dtype=torch.uint8, device=bridge.device)
    bridge.synchronize()
    taken = before - bridge.mem_get_info()[0]
    del held
    bridge.synchronize()
    back = taken - (before - bridge.mem_get_info()[0])
    if not 0 <= before <= total:
        raise ProbeFailed(f"{before} of {total} bytes are free")
    return f"64 MiB take {taken >> 20} MiB, {back >> 20} MiB come back"


def copies(bridge: Bridge) -> str:
    """Copies 8 MB to the card without blocking, and back with blocking."""
    host = torch.arange(2 << 20, dtype=torch.int32)
    target = torch.zeros(host.shape, dtype=host.dtype, device=bridge.device)
    bridge.synchronize()
    begun = time.perf_counter()
    target.copy_(host, non_blocking=True)
    bridge.synchronize()
    there = time.perf_counter() - begun
    begun = time.perf_counter()
    found = target.cpu()
    back = time.perf_counter() - begun
    if not torch.equal(found, host):
        raise ProbeFailed(f"{int((found != host).sum())} of {host.numel()} values differ after both copies")
    rate = host.nbytes / 1e9
    return f"to the card {rate / there:.1f} GB/s, back {rate / back:.1f} GB/s"


def pinned_upload(bridge: Bridge) -> str:
    """Copies 8 MB from the memory that uploads use, without blocking where it is pinned, and checks the values."""
    host = bridge.pin(torch.arange(2 << 20, dtype=torch.int32))
    target = torch.zeros(host.shape, dtype=host.dtype, device=bridge.device)
    bridge.synchronize()
    begun = time.perf_counter()
    target.copy_(host, non_blocking=bridge.pinned)
    bridge.synchronize()
    took = time.perf_counter() - begun
    wrong = int((target.cpu() != host).sum())
    if wrong:
        raise ProbeFailed(f"{wrong} of {host.numel()} values differ")
    kind = "pinned" if bridge.pinned else "refused: ordinary memory, and copies block"
    return f"{kind}, to the card {host.nbytes / 1e9 / took:.1f} GB/s"


def fetch_beside_launch(bridge: Bridge) -> str:
    """Fetches a result while another launch is queued, waits for an event alone, and checks the values."""
    x = torch.arange(1 << 16, dtype=torch.float32)
    first = x.to(bridge.device) + 1
    bridge.mark_step()
    landing, event = bridge.pin(torch.zeros_like(x)), bridge.event()
    landing.copy_(first, non_blocking=bridge.pinned)
    event.record()
    second = first * 2
    bridge.mark_step()
    while not event.query():
        time.sleep(1e-4)
    event.synchronize()
    off = error(landing.clone(), x + 1)
    error(second.cpu(), (x + 1) * 2)
    return f"the event waits for the fetch, error {off:.0e}"


def events(bridge: Bridge) -> str:
    """Records an event behind a copy and waits for it; measures a launch where events have times."""
    event, target = bridge.event(), torch.zeros(1 << 16, dtype=torch.int32, device=bridge.device)
    target.copy_(bridge.pin(torch.ones(1 << 16, dtype=torch.int32)), non_blocking=bridge.pinned)
    event.record()
    begun = time.perf_counter()
    event.synchronize()
    waited = f"{(time.perf_counter() - begun) * 1e6:.0f} us to wait for a copy of 256 KiB"
    if bridge.timed_event is None:
        return waited
    first, last = bridge.timed_event(), bridge.timed_event()
    first.record()
    target.add_(1)
    bridge.mark_step()
    last.record()
    bridge.synchronize()
    return f"{waited}, {first.elapsed_time(last) * 1e3:.0f} us between two events around a launch"


def graph(bridge: Bridge) -> str:
    """Captures (lazy mode) or compiles a small launch, and runs it again with other values in the same tensors."""
    module: Any = ProbeModule(lambda x, w: torch.softmax(x @ w, -1))
    x, w = torch.randn(4, 16), torch.randn(16, 16)
    static, weight = x.to(bridge.device), w.to(bridge.device)
    free = bridge.mem_get_info()[0]
    with torch.no_grad():
        wrapped = bridge.wrap_in_hpu_graph(module) if bridge.is_lazy() else None
        call = bridge.compile(module) if wrapped is None else wrapped.forward
        out = call(static, weight)
        bridge.synchronize()
        for _ in range(2):
            x = torch.randn(4, 16)
            static.copy_(x)
            out = call(static, weight)
            bridge.mark_step()
        off = error(out.cpu(), torch.softmax(x @ w, -1))
    taken = free - bridge.mem_get_info()[0]
    kind = "compiled and run again (compile mode has no graphs)"
    if wrapped is not None:
        wrapped.clear_cache()
        bridge.synchronize()
        kind = "captured, replayed and released"
    return f"{kind}, error {off:.0e}, {max(taken, 0)} bytes"


@contextmanager
def group_of_one(name: str) -> Iterator[None]:
    """Makes a group of one rank over the library ``name`` while the block runs."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{Path(folder, 'store')}"
        torch.distributed.init_process_group(name, init_method=meeting, rank=0, world_size=1)
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()


GROUP_EXISTS = "a group exists already"


def collective(bridge: Bridge) -> str:
    """Sums over a group of one, through the library that several ranks use."""
    name = bridge.collective_backend
    if torch.distributed.is_initialized():
        return GROUP_EXISTS
    with group_of_one(name):
        out = bridge.all_reduce(torch.ones(16).to(bridge.device)).cpu()
        error(bridge.all_gather(torch.ones(2, 8).to(bridge.device), 1).cpu(), torch.ones(2, 8))
    error(out, torch.ones(16))
    return f"all_reduce and all_gather over {name}, one rank"


def compiled_collective(bridge: Bridge) -> str:
    """Compiles functions with both collectives, as layers have them, in both forms of compile mode.

    A start does without those inside of graphs where they fail, and not without the others.
    """
    if torch.distributed.is_initialized():
        return GROUP_EXISTS
    with group_of_one(bridge.collective_backend):
        reduce, gather = bridge.opaque_collectives()

        def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return reduce(x * 2) + 1, gather(x * 3, 1)

        x = torch.arange(8.0).view(2, 4)
        with torch.no_grad():
            total, rows = (t.cpu() for t in bridge.compile(run)(x.to(bridge.device)))
            why = find_fault(bridge, 0, 1)
    error(total, x * 2 + 1)
    error(rows, x * 3)
    inside = f"not inside of them ({why})" if why else "and inside of them"
    return f"between compiled graphs {inside}"
