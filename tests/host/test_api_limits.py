"""What API processes count together: bounds, tenants' limits, names of media, figures, and the order of deltas."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from trencadis.core.errors import Conflict, KeyLimitReached, QueueFull, StartupError
from trencadis.core.process import engine_messages
from trencadis.core.request import Delta, Request, SamplingParams
from trencadis.multimodal.media_uuids import UuidRegistry, name_digest
from trencadis.multimodal.processor_interface import PlaceholderRun, PreparedImage, PreparedVideo
from trencadis.server.config.server_config import ServerConfig
from trencadis.server.engine.engine_client_and_request_timing import DeltaCallback
from trencadis.server.engine.engine_process_link import OpenRequest
from trencadis.server.http import listener
from trencadis.server.processes import aggregated_metrics
from trencadis.server.processes.api_process_supervisor import RequestRelay
from trencadis.server.processes.ipc_messages_and_channel import DeltaBatch, RequestRouted
from trencadis.server.routes import shared_state_of_api_processes
from trencadis.server.routes.shared_state_of_api_processes import SharedProcessState
from trencadis.server.tenants import shared_limits_table
from trencadis.server.tenants.server_admission_and_byte_budgets import Admission, Bounds, Ticket
from trencadis.server.tenants.shared_limits_table import (
    HELD,
    UUID_WAYS,
    SharedAccount,
    SharedAdmission,
    SharedMediaUuids,
    SharedTable,
)
from trencadis.server.tenants.tenant_registry import Tenant, TenantAccount

COUNT = 3


@pytest.fixture
def tables() -> list[SharedTable]:
    """The table as each of three processes sees it."""
    first = SharedTable.create(COUNT)
    return [SharedTable(first.descriptor, COUNT, i) for i in range(COUNT)]


def test_random_tickets_of_three_processes_are_admitted_as_those_of_one(tables: list[SharedTable]) -> None:
    rng, bounds = random.Random(3), Bounds(6, 500, 900, 1000)
    parts, one = [SharedAdmission(bounds, one) for one in tables], Admission(bounds)
    held: list[tuple[Ticket, Ticket]] = []
    refused = 0
    for _ in range(2000):
        if held and rng.random() < 0.45:
            for ticket in held.pop(rng.randrange(len(held))):
                ticket.leave()
        else:
            wanted = {"requests": rng.randint(1, 2), "tokens": rng.randint(0, 200), "pixels": rng.randint(0, 400)}
            pair = Ticket(rng.choice(parts)), Ticket(one)
            answers = []
            for ticket in pair:
                try:
                    ticket.charge(**wanted)
                    answers.append("")
                except QueueFull as error:
                    answers.append(error.message)
            assert answers[0] == answers[1]
            if answers[0]:
                refused += 1
            else:
                held.append(pair)
        assert parts[0].inside == parts[1].inside == one.inside
        assert [sum(column) for column in zip(*(part.own for part in parts), strict=True)] == one.inside
    assert refused > 100 and sum(sum(p.rejected.values()) for p in parts) == sum(one.rejected.values())


def test_random_use_of_a_tenant_in_three_processes_is_limited_as_in_one(tables: list[SharedTable]) -> None:  # noqa: C901
    rng, now = random.Random(4), [1000.0]

    def clock() -> float:
        return now[0]

    tenants = [
        Tenant("ann", ("0" * 64,), rates={"requests_per_minute": 30, "tokens_per_minute": rate}, concurrency=4)
        for rate in (900, 1800)
    ]
    parts, one = [SharedAccount(tenants[0], clock, one) for one in tables], TenantAccount(tenants[0], clock)
    inside: list[tuple[TenantAccount, TenantAccount]] = []
    outcomes = {"": 0}
    for turn in range(3000):
        now[0] += rng.expovariate(1.0)
        part, what = rng.choice(parts), rng.random()
        if turn == 1500:
            for account in (*parts, one):
                list(account.make_headers())  # they count what has come since the last look
                account.update_tenant(tenants[1])
        if inside and what < 0.3:
            for account in inside.pop():
                account.leave(1)
            continue
        reported = []
        for account in (part, one):
            try:
                if what < 0.5:
                    account.enter(1)
                elif what < 0.6:
                    account.enter(1, more=True)
                elif what < 0.63:
                    account.refund("requests_per_minute", 1)
                elif what < 0.8:
                    account.take("tokens_per_minute", 60, 30)
                elif what < 0.85:
                    account.give_back("tokens_per_minute", 30)
                else:
                    account.spend("tokens_per_minute", 25)
                reported.append("")
            except KeyLimitReached as error:
                reported.append(f"{error.message} {error.retry_after}")
        assert reported[0] == reported[1]
        outcomes[reported[0]] = outcomes.get(reported[0], 0) + 1
        if what < 0.6 and not reported[0]:
            inside.append((part, one))
        assert dict(part.make_headers()) == dict(one.make_headers())
    assert sum(part.own for part in parts) == one.inside and len(outcomes) > 5
    assert sum(p.used["tokens_per_minute"] for p in parts) == one.used["tokens_per_minute"]


def test_what_a_dead_process_held_is_taken_back_and_what_it_spent_stays_spent(tables: list[SharedTable]) -> None:
    bounds = Bounds(4, 100, 100, 100)
    parts = [SharedAdmission(bounds, one) for one in tables]
    tenant = Tenant("ann", ("0" * 64,), rates={"requests_per_minute": 5}, concurrency=3)
    accounts = [SharedAccount(tenant, time.monotonic, one) for one in tables]
    for i, account in enumerate(accounts):
        Ticket(parts[i], account=account).charge(requests=1, tokens=10)
        parts[i].bodies.open().charge(20)
    with pytest.raises(KeyLimitReached, match="concurrency"):
        accounts[2].enter(1)
    tables[0].clear_process(1)
    assert parts[0].inside == [2, 20, 0] and parts[0].bodies.inside == 40
    accounts[0].enter(1)
    assert dict(accounts[2].make_headers())["x-ratelimit-remaining-requests"] == "1"


def test_a_name_of_media_is_known_to_all_and_means_one_thing(
    tables: list[SharedTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_limits_table, "UUID_SETS", 8)
    ticks = iter(range(1, 1 << 30))
    books = [SharedMediaUuids(each, lambda: next(ticks)) for each in tables]
    one, other = (f"{digit:064x}" for digit in (1, 2))
    assert books[1].find("t", "", "cat") is None
    books[0].remember("t", "", "cat", one)
    assert books[1].find("t", "", "cat") == one and books[2].find("u", "", "cat") is None
    with pytest.raises(Conflict) as caught:
        books[2].remember("t", "", "cat", other)
    with pytest.raises(Conflict, match="already names"):
        books[1].check("t", "", "cat", other)
    with pytest.raises(Conflict) as local:
        book = UuidRegistry()
        book.remember("t", "", "cat", one)
        book.remember("t", "", "cat", other)
    assert caught.value.message == local.value.message
    place = tables[0].find_uuid_set(name_digest("t", "", "cat"))
    names = (str(i) for i in range(1 << 20) if tables[0].find_uuid_set(name_digest("t", "", str(i))) == place)
    crowd = [next(names) for _ in range(UUID_WAYS + 4)]
    for i, name in enumerate(crowd):
        books[i % COUNT].remember("t", "", name, other)
        assert books[(i + 1) % COUNT].find("t", "", "cat") == one, "what is used stays"
    known = [books[0].find("t", "", name) for name in crowd]
    assert known == [None] * 5 + [other] * (UUID_WAYS - 1)


def test_connections_are_dealt_among_sockets_and_bounded_together(tables: list[SharedTable]) -> None:
    first = listener.open_listener(ServerConfig(host="127.0.0.1", port=0))
    name = first.getsockname()
    first.close()
    sockets = [
        listener.adopt_listener(ServerConfig(max_connections=10), listener.open_shared_listener(name).detach())
        for _ in range(2)
    ]
    for sock, seen in zip(sockets, tables, strict=False):
        sock.setblocking(False)
        sock.count_elsewhere = SharedProcessState(cast(Any, None), {}, seen).update_connections
    clients = [socket.create_connection(name) for _ in range(40)]
    kept: list[list[socket.socket]] = [[], []]
    for _ in range(60):
        for sock, mine in zip(sockets, kept, strict=True):
            with contextlib.suppress(BlockingIOError):
                mine.append(sock.accept()[0])
    assert [len(mine) for mine in kept] == [len(sock.open) for sock in sockets]
    assert sum(map(len, kept)) == 10 and all(kept), "both got some, and both together no more than the bound"
    with pytest.raises(StartupError, match="is in use"):
        listener.open_listener(ServerConfig(host="127.0.0.1", port=name[1]))
    sockets[0].close()
    for connection in (*clients, *kept[0], *kept[1]):
        connection.close()
    for _ in range(8):
        with socket.create_connection(name):
            until_accepted = time.monotonic() + 30
            while time.monotonic() < until_accepted:
                with contextlib.suppress(BlockingIOError):
                    sockets[1].accept()[0].close()
                    break
            else:
                raise AssertionError("a closed socket still gets connections")
    sockets[1].close()


HOLDER = """
import sys, time
from trencadis.server.tenants.shared_limits_table import SharedTable
table = SharedTable(int(sys.argv[1]), 3, 1)
table.put(0, 5)
with table:
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_process_that_dies_in_a_section_blocks_nobody(tables: list[SharedTable]) -> None:
    root = Path(__file__).resolve().parents[2]
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", HOLDER, str(tables[0].descriptor)], pass_fds=(tables[0].descriptor,),
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(root)}, text=True,
    )  # fmt: skip
    assert child.stdout is not None and child.stdout.readline() == "held\n"
    assert tables[0].total(0) == 5
    os.kill(child.pid, signal.SIGKILL)
    with tables[0]:
        tables[0].clear_process(1)
    child.wait()
    child.stdout.close()
    assert tables[2].total(HELD.index("requests")) == 0


def test_prepared_media_cross_whole() -> None:
    def make_image(seed: int, items: tuple[PreparedImage, ...] = ()) -> PreparedImage:
        pixels = np.random.default_rng(seed).integers(0, 256, (8, 12), np.uint8)
        layout = ("a", PlaceholderRun(0, 1, 2), PlaceholderRun(0, 3, 1, 4))
        return PreparedImage(f"d{seed}", pixels, (1, 4, 2), 3, 64, (56, 84), (60, 90), items, layout)

    whole = make_image(1, (make_image(2), make_image(3)))
    clip = PreparedVideo("v", (make_image(4), make_image(5)), (0, 2, 4, 6), 2.0, 1.0, 9, 24.0)
    for made in (whole, clip):
        found = shared_state_of_api_processes.unpack_media(shared_state_of_api_processes.pack_media(made))
        assert shared_state_of_api_processes.pack_media(found) == shared_state_of_api_processes.pack_media(
            made
        ) and type(found) is type(made)
        assert found.nbytes == made.nbytes and found.tokens == made.tokens
    back = shared_state_of_api_processes.unpack_media(shared_state_of_api_processes.pack_media(whole))
    assert isinstance(back, PreparedImage) and np.array_equal(back.items[1].pixels, whole.items[1].pixels)
    assert back.layout == whole.layout and back.grid == whole.grid


def test_figures_of_processes_add_up_and_those_of_a_dead_one_stay() -> None:
    def part(requests: int, seconds: Sequence[float], held: int) -> bytes:
        registry = CollectorRegistry()
        Counter("asked", "requests", ("how",), registry=registry).labels("a").inc(requests)
        histogram = Histogram("took", "seconds", buckets=(1, 2), registry=registry)
        for one in seconds:
            histogram.observe(one)
        Gauge("held", "inside", registry=registry).set(held)
        return aggregated_metrics.pack_registry(registry)  # type: ignore[arg-type]

    parts = [aggregated_metrics.unpack_registry(data) for data in (part(3, [0.5, 1.5], 2), part(4, [5.0], 1))]
    text = aggregated_metrics.format_text(aggregated_metrics.aggregate(parts)).decode()
    lines = text.splitlines()
    for line in ('asked_total{how="a"} 7.0', 'took_bucket{le="1.0"} 1.0', 'took_bucket{le="+Inf"} 3.0',
                 "took_count 3.0", "took_sum 7.0", "held 3.0"):  # fmt: skip
        assert line in lines
    created = [s.value for p in parts for f in p for s in f.samples if s.name == "asked_created"]
    (shown,) = [float(line.split()[-1]) for line in lines if line.startswith("asked_created{")]
    assert shown == pytest.approx(min(created), rel=1e-6)
    assert text.count("# TYPE asked_total counter") == 1
    after = (
        aggregated_metrics.format_text(
            aggregated_metrics.aggregate([aggregated_metrics.keep_counters(parts[0]), parts[1]])
        )
        .decode()
        .splitlines()
    )
    assert 'asked_total{how="a"} 7.0' in after and "held 1.0" in after


class HandDriven:
    """An engine whose deltas a test gives, through the queue that a real link has."""

    def __init__(self) -> None:
        self.open: dict[str, OpenRequest] = {}
        self.aborted: list[tuple[str, int]] = []
        self.closed: list[str] = []
        self.held = asyncio.Event()
        self.held.set()

    async def submit(self, request: Request, pixels: Any) -> AsyncIterator[Delta]:
        await self.held.wait()
        entry = self.open[request.id] = OpenRequest(pixels, 2)
        try:
            left = request.params.n
            while left:
                delta = await entry.next_delta()
                left -= delta.finish is not None
                yield delta
        finally:
            self.closed.append(request.id)

    def abort(self, id: str, choice: int = -1) -> None:
        self.aborted.append((id, choice))

    def set_delta_callback(self, id: str, callback: DeltaCallback) -> None:
        self.open[id].callback = callback


async def take_turns(count: int = 6) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("full", [0.0, 0.5], ids=["reads", "reads slowly"])
def test_deltas_keep_their_order_whether_they_wait_or_pass_straight_through(full: float) -> None:
    rng, reader = random.Random(7), random.Random(8)

    async def body() -> tuple[list[tuple[str, int, int]], int]:
        got: list[tuple[str, int, int]] = []
        frames = 0

        def write(message: msgspec.Struct) -> None:
            nonlocal frames
            if isinstance(message, DeltaBatch):
                frames += 1
                got.extend((d.id, d.choice, d.tokens[0]) for d in message.items)

        engine = HandDriven()
        relay = RequestRelay(engine, 1, write, False, lambda data: None, lambda: reader.random() < full)
        for i in range(8):
            await relay.receive(engine_messages.Add(Request(f"r{i}", [1], SamplingParams(n=2, max_tokens=9))), b"")
        await take_turns()
        assert sorted(engine.open) == [f"1-r{i}" for i in range(8)], "two processes may choose the same id"
        counts = {(id, choice): 0 for id in engine.open for choice in (0, 1)}
        while counts:
            for key in rng.sample(sorted(counts), rng.randint(1, len(counts))):
                number = counts[key]
                done = number == 29
                engine.open[key[0]].deliver(Delta(key[0], key[1], [number], finish="length" if done else None))
                counts[key] = number + 1
                if done:
                    del counts[key]
            if rng.random() < 0.6:
                await take_turns(rng.randint(1, 3))
        await take_turns(20)
        assert not relay.requests
        return got, frames

    got, frames = asyncio.run(body())
    assert len(got) == 8 * 2 * 30 and frames < len(got) / 2
    for i in range(8):
        for choice in (0, 1):
            assert [n for id, c, n in got if (id, c) == (f"r{i}", choice)] == [*range(30)]


def test_an_api_process_that_does_not_read_makes_the_front_hold_back_what_it_writes() -> None:
    """What waits is in the queues of requests then, which end a request whose answer is read too slowly."""

    async def body() -> None:
        engine, frames, room = HandDriven(), list[msgspec.Struct](), asyncio.Event()

        async def wait_for_room() -> None:
            await room.wait()

        relay = RequestRelay(
            engine, 1, frames.append, False, lambda data: None, lambda: not room.is_set(), wait_for_room
        )
        await relay.receive(engine_messages.Add(Request("r", [1], SamplingParams(max_tokens=900))), b"")
        await take_turns()
        entry = engine.open["1-r"]
        for number in range(500):
            assert entry.deliver(Delta("1-r", 0, [number]))
            await take_turns(2)
        assert not frames
        entry.deliver(Delta("1-r", 0, [500], finish="length"))
        room.set()
        await take_turns(20)
        sent = [d.tokens[0] for frame in frames if isinstance(frame, DeltaBatch) for d in frame.items]
        assert sent == [*range(501)] and not relay.requests

    asyncio.run(body())


def test_an_abort_reaches_a_request_in_every_state_and_a_dead_process_leaves_none() -> None:
    async def body() -> None:
        engine, reported = HandDriven(), list[msgspec.Struct]()
        relay = RequestRelay(engine, 0, reported.append, True, lambda data: None)

        def add(id: str) -> engine_messages.Add:
            return engine_messages.Add(Request(id, [1], SamplingParams(n=1, max_tokens=9), replica=2))

        await relay.receive(add("never begun"), b"")
        await relay.receive(engine_messages.Abort(["never begun"]), b"")
        engine.held.clear()
        await relay.receive(add("waits for an engine"), b"")
        await take_turns()
        await relay.receive(engine_messages.Abort(["waits for an engine"]), b"")
        engine.held.set()
        await relay.receive(add("runs"), b"")
        await take_turns()
        assert [*relay.requests] == ["runs"] and not engine.closed
        engine.open["0-runs"].deliver(Delta("0-runs", 0, [1]))
        await take_turns()
        assert RequestRouted("runs", 2) in reported
        await relay.receive(engine_messages.Abort(["runs"], 0), b"")
        assert engine.aborted == [("0-runs", 0)]
        await relay.receive(add("its process dies"), b"")
        await take_turns()
        relay.close()
        await take_turns()
        assert not relay.requests and sorted(engine.closed) == ["0-its process dies", "0-runs"]

    asyncio.run(body())


def test_settings_cross_whole() -> None:
    from tests.fakes.command_line import from_command_line
    from trencadis.server.processes import ipc_messages_and_channel

    settings = from_command_line(
        ["m", "--api-server-count", "2", "--api-key", "k1", "k2", "--limit-mm-per-prompt", "image=3",
         "--default-chat-template-kwargs", json.dumps({"a": [1, {"b": None}]})], {},
    )  # fmt: skip
    sent = ipc_messages_and_channel.make_frame(ipc_messages_and_channel.ServeOrder(settings, 1, 2, 1, 5, 6))
    found = ipc_messages_and_channel.decode_down(sent[engine_messages.HEADER.size :])
    assert (
        isinstance(found, ipc_messages_and_channel.ServeOrder)
        and found.settings == settings
        and (found.listener, found.table) == (5, 6)
    )
