"""Turns of tenants before their requests are prepared: the order, the bounds, and clients that leave before it."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.scripted_app import ScriptedApp, scripted_app
from tests.fakes.text_checkpoint import write_text_checkpoint
from tests.server.http.test_connection import Site, answer
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import Unavailable
from trencadis.server.tenants import fair_queue as turns_module
from trencadis.server.tenants.fair_queue import MIN_ADMITTED, FairQueueEntry, FairQueueStage, TenantFairQueue
from trencadis.server.tenants.server_admission_and_byte_budgets import Bounds

FAIR = EngineConfig(model="m", scheduling_policy="fair")


def in_loop(work: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(work(), 60)

    asyncio.run(main())


def begun(some: list[FairQueueEntry]) -> list[FairQueueEntry]:
    """Those whose turn has come and that are still prepared."""
    return [turn for turn in some if turn.stage is FairQueueStage.PREPARING]


def test_tenants_are_prepared_by_weight() -> None:
    async def main() -> None:
        fair_queue, order = TenantFairQueue(slots=1, max_admitted=1000), Counter[str]()
        waiting = [fair_queue.enter("one", 1.0, 1.0) for _ in range(400)]
        waiting += [fair_queue.enter("three", 3.0, 1.0) for _ in range(400)]
        for _ in range(400):
            turn = next(iter(begun(waiting)))
            order[turn.tenant] += 1
            turn.finish()
        assert order["three"] == pytest.approx(3 * order["one"], rel=0.05)

    in_loop(main)


def test_a_large_body_counts_for_more() -> None:
    async def main() -> None:
        fair_queue, order = TenantFairQueue(slots=1, max_admitted=1000), Counter[str]()
        waiting = [
            fair_queue.enter(name, 1.0, cost) for name, cost in (("large", 4.0), ("small", 1.0)) for _ in range(300)
        ]
        for _ in range(250):
            turn = next(iter(begun(waiting)))
            order[turn.tenant] += 1
            turn.finish()
        assert order["small"] == pytest.approx(4 * order["large"], rel=0.1)

    in_loop(main)


def test_a_flood_leaves_a_place_and_is_not_prepared_long_before_it_can_run() -> None:
    async def main() -> None:
        fair_queue = TenantFairQueue(slots=4, max_admitted=6)
        flood = [fair_queue.enter("flood", 1.0, 1.0) for _ in range(50)]
        assert len(begun(flood)) == 3 and fair_queue.waiting == 47
        mine = fair_queue.enter("mine", 1.0, 1.0)
        assert mine.stage is FairQueueStage.PREPARING, "the place that the flood cannot take"
        second = fair_queue.enter("mine", 1.0, 1.0)
        assert begun([mine, second]) == [mine]
        for _ in range(2):
            begun(flood)[0].mark_prepared()
        assert begun([mine, second]) == [mine, second], "one of the flood came before, at the same virtual time"
        while begun(flood):
            begun(flood)[0].mark_prepared()
        prepared = [turn for turn in flood if turn.stage is FairQueueStage.PREPARED]
        assert len(prepared) == 6 and not begun(flood), "the engine has enough of its requests"
        prepared[0].finish()
        assert len(begun(flood)) == 1

    in_loop(main)


def test_whoever_waits_for_somebody_else_gives_up_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "SLOT_TIMEOUT", 0.01)

    async def main() -> None:
        fair_queue = TenantFairQueue(slots=2, max_admitted=100)
        flood = [fair_queue.enter("slow", 1.0, 1.0) for _ in range(4)]
        for turn in flood[1:]:
            assert turn.admitted is not None
            await turn.admitted
        assert [turn.stage for turn in flood[:3]] == [FairQueueStage.PREPARED] * 3
        for turn in flood:
            turn.finish()

    in_loop(main)


def test_a_wait_that_ends_early_leaves_nothing() -> None:
    async def main() -> None:
        fair_queue = TenantFairQueue(slots=2, max_admitted=100)
        first, gone, last = (fair_queue.enter("a", 1.0, 1.0) for _ in range(3))
        gone.fail(ConnectionError())
        with pytest.raises(ConnectionError):
            assert gone.admitted is not None
            await gone.admitted
        gone.finish()
        first.finish()
        assert last.stage is FairQueueStage.PREPARING and fair_queue.waiting == 0
        last.finish()
        last.finish()
        assert fair_queue.enter("a", 1.0, 1.0).virtual_time == 2.0, "who was not served is not charged"

    in_loop(main)


def test_a_server_that_drains_gives_the_turns_it_promised() -> None:
    async def main() -> None:
        fair_queue = TenantFairQueue(slots=2, max_admitted=100)
        first, second = (fair_queue.enter("a", 1.0, 1.0) for _ in range(2))
        closing = asyncio.create_task(fair_queue.close(30, poll=0.001))
        await asyncio.sleep(0.01)
        with pytest.raises(Unavailable):
            fair_queue.enter("a", 1.0, 1.0)
        assert not closing.done()
        first.finish()
        assert begun([second]) == [second]
        await asyncio.sleep(0.01)
        assert not closing.done(), "it is not in the engine yet"
        second.mark_prepared()
        assert await closing == 0

        fair_queue = TenantFairQueue(slots=2, max_admitted=100)
        first, second = (fair_queue.enter("a", 1.0, 1.0) for _ in range(2))
        assert await fair_queue.close(0.01, poll=0.001) == 1
        with pytest.raises(Unavailable):
            assert second.admitted is not None
            await second.admitted

    in_loop(main)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.1, 1.0, 50.0]), st.integers(0, 4)), max_size=30),
    st.integers(1, 5), st.integers(1, 6), st.randoms(use_true_random=False),
)  # fmt: skip
def test_every_request_has_its_turn_within_the_bounds(
    requests: list[tuple[str, float, int]], places: int, ahead: int, rng: random.Random
) -> None:
    async def main() -> None:
        fair_queue, made = TenantFairQueue(places, ahead), list[FairQueueEntry]()
        weights: dict[str, float] = {}

        def act(leave: bool) -> bool:
            inside = [turn for turn in made if turn.stage in (FairQueueStage.PREPARING, FairQueueStage.PREPARED)]
            if inside:
                turn = inside[rng.randrange(len(inside))]
                (turn.finish if leave else turn.mark_prepared)()
            held = Counter(turn.tenant for turn in begun(made))
            let_in = Counter(
                turn.tenant for turn in made if turn.stage in (FairQueueStage.PREPARING, FairQueueStage.PREPARED)
            )
            assert held.total() <= places and max(held.values(), default=0) <= max(places - 1, 1)
            assert max(let_in.values(), default=0) <= ahead
            assert fair_queue.waiting == sum(turn.stage is FairQueueStage.WAITING for turn in made)
            return bool(inside)

        for tenant, weight, acts in requests:
            made.append(fair_queue.enter(tenant, weights.setdefault(tenant, weight), 1.0))
            for i in range(acts):
                act(leave=i % 2 == 0)
        while act(leave=True):
            pass
        assert all(turn.stage is FairQueueStage.DONE for turn in made) and fair_queue.waiting == 0

    in_loop(main)


# --- over HTTP ---


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_checkpoint(tmp_path_factory.mktemp("turns"))


class FairApp(ScriptedApp):
    """An application whose tenants take turns."""

    keys = ""

    def app(self, bounds: Bounds | None = None, **given: Any) -> FastAPI:
        return super().app(bounds, api_key_file=self.keys, engine=FAIR, max_running=0, **given)


@pytest.fixture
def harness(checkpoint: Path, tmp_path: Path) -> FairApp:
    plain = scripted_app(checkpoint)
    made = FairApp(plain.engine, plain.service, plain.images, plain.tokenizer)
    keys = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "weight": 1} for name in ("flood", "mine")
    ]
    keys[0]["requests_per_minute"] = 1000
    file = tmp_path / "keys.yaml"
    file.write_text(json.dumps({"keys": keys}))
    file.chmod(0o600)
    made.keys = str(file)
    made.app()
    return made


CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


async def ask(client: httpx.AsyncClient, name: str, body: Any = CHAT) -> httpx.Response:
    return await client.post("/v1/chat/completions", json=body, headers={"x-api-key": name})


def over_http(harness: FairApp, work: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    async def main() -> None:
        transport = httpx.ASGITransport(harness.made, raise_app_exceptions=False)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            await work(client)

    in_loop(main)


def test_a_tenant_beside_a_flood_is_prepared_next(harness: FairApp) -> None:
    harness.engine.delay = 0.02

    async def work(client: httpx.AsyncClient) -> None:
        flood = [asyncio.create_task(ask(client, "flood")) for _ in range(60)]
        await asyncio.sleep(0.01)
        fair_queue = harness.made.state.trencadis.fair_queue  # type: ignore[union-attr]
        assert fair_queue.waiting >= 40
        text = (await client.get("/metrics", headers={"x-api-key": "mine"})).text
        assert f'reason="turn"}} {float(fair_queue.waiting)}' in text
        stats = (await client.get("/stats", headers={"x-api-key": "mine"})).json()
        assert stats["waiting"] == stats["waiting_for_turn"] == fair_queue.waiting
        assert (await ask(client, "mine")).status_code == 200
        assert fair_queue.waiting > 20, "the flood's queue was not run first"
        assert {reported.status_code for reported in await asyncio.gather(*flood)} == {200}
        assert fair_queue.waiting == 0
        state = harness.made.state.trencadis  # type: ignore[union-attr]
        assert state.admission.inside == [0, 0, 0] and state.admission.bodies.inside == 0
        assert state.tenants.accounts["flood"].used["requests_per_minute"] == 60
        assert state.tenants.accounts["flood"].inside == 0

    over_http(harness, work)
    tenants = [request.tenant for request, _ in harness.engine.submitted]
    assert tenants.index("mine") < 40


def test_a_full_server_says_so_before_a_turn(harness: FairApp) -> None:
    harness.engine.delay = 1.0
    harness.made.state.trencadis.admission.bounds = Bounds(requests=30)  # type: ignore[union-attr]

    async def work(client: httpx.AsyncClient) -> None:
        tasks = [asyncio.create_task(ask(client, "flood")) for _ in range(40)]
        reported = [(await one).status_code for one in itertools.islice(asyncio.as_completed(tasks), 10)]
        assert reported == [429] * 10
        harness.engine.delay = 0.0
        several = asyncio.create_task(ask(client, "mine", CHAT | {"n": 2, "temperature": 1}))
        every = await asyncio.gather(*tasks, several)
        assert Counter(one.status_code for one in every) == {200: 30, 429: 11}
        assert harness.made.state.trencadis.admission.inside == [0, 0, 0]  # type: ignore[union-attr]

    over_http(harness, work)


def test_requests_without_a_key_take_no_place(harness: FairApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open paths take bodies from anybody: thousands of them would fill the queue, and its bound of requests."""
    fair_queue, entered = harness.made.state.trencadis.fair_queue, []  # type: ignore[union-attr]
    usual = fair_queue.enter
    monkeypatch.setattr(fair_queue, "enter", lambda name, *more: (entered.append(name), usual(name, *more))[1])

    async def work(client: httpx.AsyncClient) -> None:
        asked = [("POST", "/health"), ("GET", "/version"), ("OPTIONS", "/v1/chat/completions"), ("POST", "/v1/models")]
        for method, path in asked:
            assert (await client.request(method, path, json=CHAT)).status_code in (200, 401, 405), path
        assert not entered
        assert (await ask(client, "mine")).status_code == 200 and entered == ["mine"]

    over_http(harness, work)


def test_a_wait_counts_as_the_requests_own_time(harness: FairApp) -> None:
    harness.engine.delay = 0.03
    state = harness.made.state.trencadis  # type: ignore[union-attr]
    ended: list[Any] = []
    object.__setattr__(state.settings.config, "disable_log_stats", True)
    seen = state.metrics.record_finished

    def finished(timing: Any) -> None:
        ended.append(timing)
        seen(timing)

    state.metrics.record_finished = finished

    async def work(client: httpx.AsyncClient) -> None:
        await asyncio.gather(*(ask(client, "flood") for _ in range(40)))

    over_http(harness, work)
    waits = sorted(timing.fair_queue_seconds for timing in ended)
    assert waits[0] == 0.0 and waits[-1] > 0.03
    total = state.metrics.registry.get_sample_value(
        "vllm:time_to_first_token_seconds_sum", {"model_name": "m", "engine": "0"}
    )
    assert total == pytest.approx(sum(t.first - t.start + t.fair_queue_seconds for t in ended))
    turned = state.metrics.registry.get_sample_value(
        "vllm:request_stage_seconds_sum", {"model_name": "m", "engine": "0", "stage": "turn"}
    )
    assert turned == pytest.approx(sum(waits))


def post(name: str, body: bytes, size: int = 0) -> bytes:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nx-api-key: {name}\r\n"
    return f"{head}content-length: {size or len(body)}\r\n\r\n".encode() + body


def until(found: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not found():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_clients_that_leave_while_they_wait_leave_nothing_and_bodies_stay_with_the_system(harness: FairApp) -> None:
    hold = harness.engine.hold = threading.Event()
    site = Site(harness)
    state = harness.made.state.trencadis  # type: ignore[union-attr]

    def begun(count: int) -> bool:
        return bool(state.fair_queue._admitted["flood"] + state.fair_queue.waiting == count)

    with ExitStack() as stack:
        stack.callback(site.end)
        stack.callback(hold.set)
        sockets = [stack.enter_context(site.connect()) for _ in range(MIN_ADMITTED + 6)]
        for count, one in enumerate(sockets[:-1], 1):
            # One after the other: of heads that come at once, the last may begin first.
            one.sendall(post("flood", json.dumps(CHAT).encode()))
            until(partial(begun, count))
        assert state.fair_queue.waiting == 5
        large = sockets[-1]
        large.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        large.setblocking(False)
        sent = large.send(post("flood", b"[" * (4 << 20)))
        until(lambda: state.fair_queue.waiting == 6)
        with suppress(BlockingIOError):
            for _ in range(100):
                time.sleep(0.002)
                sent += large.send(b"[" * (4 << 20))
        assert sent < 3 << 20 and state.admission.bodies.inside < 1 << 20
        sockets[-2].close()
        sockets[-3].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sockets[-3].close()
        until(lambda: state.fair_queue.waiting == 4)
        large.close()
        hold.set()
        for one in sockets[:-3]:
            assert b" 200 OK" in answer(one)
        until(lambda: state.fair_queue.waiting == 0 and state.admission.inside == [0, 0, 0])
        assert state.admission.bodies.inside == 0 and state.tenants.accounts["flood"].inside == 0
        assert not state.fair_queue._admitted and not state.fair_queue._preparing and not state.fair_queue._slots_held
    assert len(harness.engine.submitted) == MIN_ADMITTED + 3


def test_other_policies_and_requests_without_a_body_have_no_turns(harness: FairApp, checkpoint: Path) -> None:
    plain = scripted_app(checkpoint)
    plain.app()
    assert plain.made.state.trencadis.fair_queue is None  # type: ignore[union-attr]
    state = harness.made.state.trencadis  # type: ignore[union-attr]
    state.fair_queue.stop()

    async def work(client: httpx.AsyncClient) -> None:
        assert (await client.get("/v1/models", headers={"x-api-key": "mine"})).status_code == 200
        refused = await ask(client, "mine")
        assert refused.status_code == 503 and refused.headers["retry-after"] == "5"

    over_http(harness, work)
