"""Slots of adapters: who gets one, who waits, what is uploaded; products over slots; bytes of slots; buckets."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fakes import checkpoints
from tests.fakes.adapters import adapter_of
from trencadis.backends.cpu.lora_adapter_products import add_masked_adapters, group_rows
from trencadis.backends.cpu.ops import CpuOps
from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.backends.hpu.backend import HpuBackend
from trencadis.backends.hpu.emulator.card_profiles_and_op_support import profile
from trencadis.backends.hpu.emulator.emulated_bridge import make_bridge
from trencadis.backends.hpu.emulator.emulated_device import EmulatedDevice
from trencadis.backends.hpu.joined_lora_adapters import JoinedAdapterOps, JoinedSlots
from trencadis.backends.hpu.shape_policy import policy as hpu_policy
from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import LORA, Stage
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.device.backend import AdapterWeights, BackendConfig, load
from trencadis.core.launches.launch_splitter import split_step
from trencadis.core.lora.adapter_files import read_adapter
from trencadis.core.lora.adapter_store import AdapterStore
from trencadis.core.memory.weight_bytes import AdapterSlotSizes, adapter_bytes, padded_rank
from trencadis.core.models.decoder import Decoder
from trencadis.core.request import AdapterRef, Request, SamplingParams
from trencadis.core.scheduling.sequence import Sequence
from trencadis.core.scheduling.step_builder_and_adapter_slots import MOST_OVERTAKES, AdapterLoads, AdapterSlots
from trencadis.core.shapes.bucket_options import BucketOptions
from trencadis.core.shapes.bucket_planner import TEXT, make_plan
from trencadis.core.shapes.shape_limits import ShapeLimits
from trencadis.core.step import AdapterUpload, BatchChange, Row, Step


def sequence(key: int, digest: str) -> Sequence:
    request = Request(f"r{key}", [1], SamplingParams(), adapter=AdapterRef(digest, "", "") if digest else None)
    return Sequence(
        key, request, 0, 0, [1], 1, frozenset(), (), block_hashes=None,  # type: ignore[arg-type]
    )  # fmt: skip


def admit(slots: AdapterSlots, waiting: list[Sequence], running: list[Sequence]) -> None:
    """One pass of the scheduler over its queue."""
    slots.begin_admission()
    for seq in [*waiting]:
        if slots.admits(seq):
            waiting.remove(seq)
            slots.start(seq)
            running.append(seq)
    slots.check(running)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(1, 3), st.randoms())
def test_everyone_runs_in_the_end_with_its_own_adapter(asked: list[int], count: int, random: Any) -> None:
    slots, held = AdapterSlots(count), {0: ""}
    waiting = [sequence(i + 1, f"d{a}" if a else "") for i, a in enumerate(asked)]
    running: list[Sequence] = []
    for _ in range(len(asked) + 1):
        admit(slots, waiting, running)
        for upload in slots.take_uploads():
            held[upload.slot] = upload.digest
        assert all(held[s.adapter_slot] == (s.request.adapter.digest if s.request.adapter else "") for s in running)
        assert all(not s.adapter_slot or s.adapter_slot <= count for s in running)
        if running:
            gone = running.pop(random.randrange(len(running)))
            slots.stop(gone)
            slots.check(running)
    assert not waiting


def test_an_adapter_that_is_there_is_not_uploaded_again_and_the_oldest_leaves() -> None:
    slots, running = AdapterSlots(2), list[Sequence]()
    for number, digest in enumerate(("a", "b", "a", "c", "a"), 1):
        seq = sequence(number, digest)
        admit(slots, [seq], running)
        slots.stop(running.pop())
    assert [(u.slot, u.digest) for u in slots.take_uploads()] == [(1, "a"), (2, "b"), (2, "c")]
    assert slots.take_uploads() == ()


def test_overtaking_ends() -> None:
    """Requests for the adapter in the only slot keep coming, and one for another adapter still gets its turn."""
    slots, running = AdapterSlots(1), list[Sequence]()
    admit(slots, [sequence(1, "a")], running)
    waiting, other = list[Sequence](), sequence(2, "b")
    for step in range(200):
        if other in running:
            break
        waiting = [other, *(seq for seq in waiting if seq is not other), sequence(10 + step, "a")]
        base = sequence(1000 + step, "")
        admit(slots, [*waiting, base], running)
        waiting = [seq for seq in waiting if seq not in running]
        assert base in running, "the base model needs no slot"
        slots.stop(running.pop(0))
    assert other in running and MOST_OVERTAKES <= step <= 2 * MOST_OVERTAKES + 4


class HostMemory:
    """Adapters that the ranks hold; ``answer``: what reading one says."""

    def __init__(self) -> None:
        self.held: list[str] = []
        self.answer = ""
        self.used = set[str]()
        self.done = True

    def load(self, ref: AdapterRef, drop: tuple[str, ...]) -> Future[str]:
        self.held = [digest for digest in self.held if digest not in drop]
        if not self.answer:
            self.held.append(ref.digest)
        pending: Future[str] = Future()
        if self.done:
            pending.set_result(self.answer)
        return pending


def test_adapters_that_were_used_longest_ago_leave_host_memory() -> None:
    memory = HostMemory()
    loads = AdapterLoads(memory.load, 2, lambda: memory.used)

    def use(*digests: str) -> str:
        for digest in digests:
            loads.load(AdapterRef(digest, "", ""))
        assert loads.count == len(memory.held)
        return "".join(memory.held)

    assert use("a", "b") == "ab"
    assert use("a", "c") == "ac", "a was used again, so that b leaves"
    memory.used = {"a", "c"}
    assert use("d") == "acd", "requests or slots use both others"
    memory.used = {"d"}
    assert use("e") == "de", "as many leave as are too many"
    assert use("e", "d") == "de", "what is held is not read again"
    memory.used = set()
    memory.answer = "the files have changed"
    assert loads.load(AdapterRef("f", "", "")).result() == memory.answer
    memory.answer = ""
    assert loads.load(AdapterRef("f", "", "")).result() == "" and "f" in memory.held, "read again after an error"
    memory.done = False
    loads.load(AdapterRef("g", "", ""))
    loads.load(AdapterRef("h", "", ""))
    assert use("i")[-3:] == "ghi", "what is being read stays"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.integers(1, 4), st.integers(0, 3))
def test_no_more_adapters_are_held_than_fit_or_are_used(asked: list[int], capacity: int, using: int) -> None:
    memory = HostMemory()
    loads, recent = AdapterLoads(memory.load, capacity, lambda: memory.used), list[str]()
    for number in asked:
        digest = str(number)
        recent = [*(one for one in recent if one != digest), digest]
        loads.load(AdapterRef(digest, "", ""))
        memory.used = {*recent[-using:]} if using else set()
        assert memory.used <= {*memory.held} and digest in memory.held and loads.count == len({*memory.held})
        assert loads.count <= max(capacity, using + 1)


def weights(generator: torch.Generator, slots: int, rank: int, inputs: int, widths: tuple[int, ...]) -> AdapterWeights:
    a = torch.randn((slots, len(widths), rank, inputs), generator=generator)
    return AdapterWeights(a, tuple(torch.randn((slots, rank, w), generator=generator) for w in widths))


@pytest.mark.parametrize("widths", [(24,), (16, 8, 8)])
@pytest.mark.parametrize("ids", [[0, 0, 0], [1, 1, 0, 3], [2], [*range(4)] * 9, [0] * 20 + [2] * 30 + [1, 3, 1]])
def test_products_are_those_of_each_row(ids: list[int], widths: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(len(ids))
    w, x = weights(generator, 3, 4, 12, widths), torch.randn((len(ids), 12), generator=generator)
    y = torch.randn((len(ids), sum(widths)), generator=generator)
    want = y.clone()
    for row, own in enumerate(ids):
        if own:
            parts = [x[row] @ w.a[own - 1, i].T @ b[own - 1] for i, b in enumerate(w.b)]
            want[row] += torch.cat(parts)
    slot, numbers = torch.tensor(ids, dtype=torch.int32), torch.arange(1, 4, dtype=torch.int32)
    grouped = group_rows(slot, numbers, x.dtype)
    assert (grouped.runs is None) == (len(ids) == 36)
    mask = grouped.mask
    for got in (
        add_masked_adapters(y.clone(), x, w, mask),
        CpuOps().add_adapters(y.clone(), x, w, grouped),
        CpuOps().add_adapters(y.clone(), x, w, grouped._replace(runs=None)),
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


class PlainRegions(JoinedAdapterOps):
    """The products of Gaudi on host tensors."""

    def __init__(self) -> None:
        self.adapter_slots = JoinedSlots(torch.device("cpu"), torch.float32)

    def region(self, run: Any, *args: Any) -> Any:
        return run(*args)


@pytest.mark.parametrize("widths", [(24,), (16, 8, 8)])
def test_joined_products_are_those_of_each_row(widths: tuple[int, ...]) -> None:
    """Slots of another matrix beside them; adapters of smaller ranks and without some parts, one after the other."""
    generator, ops = torch.Generator().manual_seed(3), PlainRegions()
    ops.allocate_adapters(3, 4, 12, (10, 10), torch.float32)
    w = ops.allocate_adapters(3, 4, 12, widths, torch.float32)
    x, base = (torch.randn((9, width), generator=generator) for width in (12, sum(widths)))
    held: dict[int, Any] = {}
    numbers = torch.arange(1, 4, dtype=torch.int32).repeat_interleave(4).repeat(3)
    cases: list[tuple[tuple[int, ...], int, tuple[int, ...]]] = [
        ((0, 2), 4, ()), ((2,), 2, ()), ((1, 2), 4, (0,)), ((1,), 3, ()),
    ]  # fmt: skip
    for slots, rank, missing in cases:
        shapes = [((rank, 12), (rank, width)) for width in widths]
        made: dict[int, Any] = {
            slot: [
                None if part in missing else tuple(torch.randn(shape, generator=generator) for shape in shapes[part])
                for part in range(len(widths))
            ]
            for slot in slots
        }
        ops.put_adapters(w, {slot: ops.pack_adapter(w, parts) for slot, parts in made.items()})
        held |= made
        ids = [0, 1, 2, 3, 3, 1, 0, 2, 3]
        want = base.clone()
        for row, own in enumerate(ids):
            parts = held.get(own - 1) or [None] * len(widths)
            added = [
                torch.zeros(n) if one is None else x[row] @ one[0].t() @ one[1]
                for one, n in zip(parts, widths, strict=True)
            ]
            want[row] += torch.cat(added)
        rows = ops.prepare_adapters(torch.tensor(ids, dtype=torch.int32), numbers, torch.float32)
        torch.testing.assert_close(ops.add_adapters(base.clone(), x, w, rows), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_slots_take_the_planned_bytes(tmp_path: Path, world: int, joined: bool) -> None:
    config = load_config(checkpoints.llama(tmp_path))
    backend: Any = load("cpu")(BackendConfig())
    backend.ops = ReferenceOps()  # the CPU's own kernels pad outputs to whole blocks
    if joined:
        backend = HpuBackend(
            BackendConfig(dtype=torch.float32), hpu_policy(""), make_bridge(EmulatedDevice(profile("")), True)
        )
    if world == 2:
        backend = OneOfTwo(backend)
    store = AdapterStore(Decoder(config, backend), backend, 3, padded_rank(9))
    assert store.nbytes == adapter_bytes(config, 4, world, AdapterSlotSizes(3, 16, joined))


class NotedOps(TorchDispatchMode):
    """Names of the operations that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("own", [True, False])
def test_an_upload_copies_and_lays_nothing_out(tmp_path: Path, own: bool) -> None:
    """Between two launches: what takes longer is done by the thread that reads the files."""
    checkpoint = checkpoints.llama(tmp_path / "llama")
    folder = adapter_of(checkpoint, tmp_path / "a", r".*layers\.0\.(self_attn|mlp)\.\w+_proj", rank=5)
    config = load_config(checkpoint)
    backend: Any = load("cpu")(BackendConfig())
    if not own:
        backend.ops = ReferenceOps()
    store = AdapterStore(Decoder(config, backend), backend, 2, 8)
    digest = read_adapter(folder, config).digest
    assert store.load(AdapterRef(digest, str(folder), "")).result() == ""
    with NotedOps() as noted:
        store.upload([AdapterUpload(2, digest)])
    views = {"select", "slice", "alias"}
    assert {*noted.names} - views == {"copy_", "zero_"}
    assert len([name for name in noted.names if name not in views]) <= 4 * 7 * config.text.layers


class OneOfTwo:
    """A backend whose ranks are two."""

    def __init__(self, backend: Any) -> None:
        self._backend, self.comm = backend, Pair()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


class Pair:
    rank, world = 0, 2


def row(adapter: int, tokens: int = 1) -> Row:
    return Row(1, 1, 4, (5,) * tokens, (2,), np.zeros((3, tokens), np.int32), adapter=adapter)


def test_launches_with_adapters_take_their_own_buckets() -> None:
    policy = load("cpu")(BackendConfig()).policy
    plan = Plan(policy, block_size=16)
    for rows, persistent, variant in (((0, 0), False, ""), ((0, 2), False, LORA), ((0,), True, LORA), ((), True, LORA)):
        change = BatchChange(1, 2, (), np.zeros((2, 0), np.int32), np.zeros(0, np.float32)) if persistent else None
        (launch,) = split_step(Step(1, tuple(map(row, rows)), batch=change), plan, persistent)
        assert launch.bucket.variant == variant and launch.bucket.stage is Stage.DECODE


def test_buckets_with_adapters_are_few_and_hold_every_need() -> None:
    limits = ShapeLimits(max_rows=64, max_tokens=4096, max_model_len=8192, block_size=128)
    for some in (limits, dataclasses.replace(limits, max_rows=8, max_tokens=512, max_model_len=1024)):
        plain = make_plan(hpu_policy(""), some, BucketOptions())
        plan = make_plan(hpu_policy(""), dataclasses.replace(some, adapters=8), BucketOptions())
        assert [b for b in plan.buckets if b.variant != LORA] == [*plain.buckets]
        assert len(plain.buckets) < len(plan.buckets) <= 1.3 * len(plain.buckets)
        for bucket in plain.buckets:
            if bucket.stage in TEXT:
                found = plan.find(bucket.stage, bucket.dims, LORA)
                assert found is not None and all(a >= b for a, b in zip(found.dims, bucket.dims, strict=True))
        rectangles = split_step(Step(1, (row(0, 20), row(3, 30))), plan)
        assert {launch.bucket in plan.buckets for launch in rectangles} == {True}
        assert any(launch.bucket.variant == LORA for launch in rectangles)
