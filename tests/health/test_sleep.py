"""An engine that sleeps: its process is gone, requests wake it, nothing is lost and nothing stays behind."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fakes.counting_engine import HELD, SLOW, STUCK, WORDS
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import Unavailable
from trencadis.core.executor.engine_process_launcher import spawn_engine
from trencadis.core.output_constraints import Rule
from trencadis.core.request import Delta, Request, SamplingParams
from trencadis.server.engine import engine_process_link
from trencadis.server.engine.supervisor import Supervisor

FACTORY = "tests.fakes.counting_engine:CountingEngine.create"


def request(id: str, kind: int = 1, tokens: int = 3) -> Request:
    return Request(id, [kind, 2, 3], SamplingParams(max_tokens=tokens))


async def collect(stream: Any) -> list[Delta]:
    return [delta async for delta in stream]


async def until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        await asyncio.sleep(0.01)


def with_engine(body: Callable[[Supervisor], Awaitable[None]], model: str = "m", **options: Any) -> None:
    """Runs ``body`` over a server's engine, and leaves no process behind."""

    async def main() -> None:
        config = EngineConfig(model=model, engine=FACTORY, threads=1)
        s = Supervisor(config, spawn_engine(config), **options)
        s.start()
        try:
            await until(lambda: s.accepting)
            await body(s)
        finally:
            await s.stop()
            assert s.link.handle.process.returncode is not None

    asyncio.run(main())


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_it_sleeps_without_a_process_and_a_request_wakes_it() -> None:
    async def body(s: Supervisor) -> None:
        took: list[tuple[str, float]] = []
        s.on_operation.append(lambda name, seconds: took.append((name, seconds)))
        before = await collect(s.submit(request("a"), ()))
        info, pid = s.info, s.link.handle.process.pid
        await s.sleep(1)
        assert not alive(pid) and s.link.handle.process.returncode == 0
        assert (s.sleep_level, s.phase, s.accepting, s.ready, s.healthy) == (1, "asleep", True, True, True)
        assert s.info is info and s.stats.running == 0 and s.progress is None and s.sleep_operation == ""
        await s.sleep(2)
        assert s.sleep_level == 1, "it slept already"
        after = await collect(s.submit(request("b"), ()))
        assert [d.tokens for d in after] == [d.tokens for d in before] and after[-1].finish == "length"
        assert s.sleep_level == 0 and s.phase != "asleep"
        assert (s.restarts, s.failures, s.failing) == (0, 0, False)
        assert [name for name, _ in took] == ["sleep", "wake"] and all(seconds > 0 for _, seconds in took)
        await s.wake()
        assert len(took) == 2, "it was awake"

    with_engine(body, max_restarts=0)


def test_what_runs_is_finished_first_and_what_comes_waits() -> None:
    async def body(s: Supervisor) -> None:
        running = asyncio.create_task(collect(s.submit(request("a", SLOW, 25), ())))
        await until(lambda: s.open_requests == 1)
        sleeping = asyncio.create_task(s.sleep())
        await until(lambda: s.sleep_operation == "sleep")
        assert s.phase == "falling asleep"
        late = asyncio.create_task(collect(s.submit(request("b"), ())))
        assert len(await running) == 25
        await sleeping
        assert len(await late) == 3 and s.sleep_level == 0
        running = asyncio.create_task(collect(s.submit(request("c", SLOW, 10_000), ())))
        await until(lambda: s.open_requests == 1)
        await s.sleep(2, abort=True)
        assert (await running)[-1].finish == "abort" and s.phase == "asleep"

    with_engine(body)


def test_many_wait_for_it_and_one_that_leaves_takes_nothing_along(tmp_path: Path) -> None:
    go = tmp_path / "go"
    go.touch()

    async def body(s: Supervisor) -> None:
        await s.sleep()
        go.unlink()
        tasks = [asyncio.create_task(collect(s.submit(request(f"r{i}"), ()))) for i in range(20)]
        await until(lambda: s.sleep_operation == "wake")
        assert s.stats.waiting == s.stats.deferred == s.open_requests == 20 and s.phase == "waking"
        assert s.progress is not None or s.accepting
        for task in tasks[:5]:
            task.cancel()
        await asyncio.gather(*tasks[:5], return_exceptions=True)
        assert s.open_requests == 15
        go.touch()
        assert {len(deltas) for deltas in await asyncio.gather(*tasks[5:])} == {3}
        assert s.open_requests == 0 and s.restarts == 0

    with_engine(body, f"{HELD}{go}")


def test_a_request_that_waits_for_its_grammar_is_not_overtaken_by_sleep() -> None:
    made = asyncio.Event()

    async def vocabulary() -> bytes:
        await made.wait()
        return b"words"

    async def body(s: Supervisor) -> None:
        worded = dataclasses.replace(request("a", WORDS, 33), rule=Rule("a grammar"))
        task = asyncio.create_task(collect(s.submit(worded, ())))
        await until(lambda: s.open_requests == 1)
        sleeping = asyncio.create_task(s.sleep())
        await asyncio.sleep(0.2)
        assert s.sleep_operation == "sleep" and s.link.alive
        made.set()
        assert len(await task) == 33
        await sleeping
        assert s.phase == "asleep"

    with_engine(body, vocabulary=vocabulary)


def test_it_falls_asleep_by_itself_once_nothing_comes() -> None:
    async def body(s: Supervisor) -> None:
        assert len(await collect(s.submit(request("a", SLOW, 40), ()))) == 40, "0.8 s, twice the time"
        assert s.sleep_level == 0
        await until(lambda: s.phase == "asleep")
        assert s.sleep_level == 2
        assert len(await collect(s.submit(request("b"), ()))) == 3
        await until(lambda: s.phase == "asleep")
        assert s.restarts == 0

    with_engine(body, sleep_after=0.4)


def test_an_engine_that_cannot_wake_up_is_one_that_failed() -> None:
    async def body(s: Supervisor) -> None:
        await s.sleep()
        s.config = dataclasses.replace(s.config, model="crash")
        with pytest.raises(Unavailable):
            await collect(s.submit(request("a"), ()))
        assert s.sleep_level == 0 and not s.accepting and s.restarts == 1 and s.open_requests == 0
        s.config = dataclasses.replace(s.config, model="m")
        await until(lambda: s.accepting)
        assert len(await collect(s.submit(request("b"), ()))) == 3

    with_engine(body, backoff=0.05)


@pytest.mark.long
def test_an_engine_that_dies_while_it_falls_asleep_is_started_again() -> None:
    async def body(s: Supervisor) -> None:
        running = asyncio.create_task(collect(s.submit(request("a", SLOW, 10_000), ())))
        await until(lambda: s.open_requests == 1)
        sleeping = asyncio.create_task(s.sleep())
        await until(lambda: s.sleep_operation == "sleep")
        os.kill(s.link.handle.process.pid, signal.SIGKILL)
        assert (await running)[-1].status == 503
        with pytest.raises(Unavailable):
            await sleeping
        await until(lambda: s.accepting)
        assert s.restarts == 1 and len(await collect(s.submit(request("b"), ()))) == 3
        s.leaving = True
        with pytest.raises(Unavailable):
            await s.sleep()

    with_engine(body, backoff=0.0)


@pytest.mark.parametrize("state", [pytest.param("asleep", marks=pytest.mark.long), "waking", "falling asleep"])
def test_the_end_of_the_server_ends_it_in_any_state(state: str, tmp_path: Path) -> None:
    go = tmp_path / "go"
    go.touch()
    ends: list[Any] = []

    async def body(s: Supervisor) -> None:
        if state == "falling asleep":
            ends.append(asyncio.create_task(collect(s.submit(request("a", SLOW, 10_000), ()))))
            await until(lambda: s.open_requests == 1)
            ends.append(asyncio.create_task(s.sleep()))
            await until(lambda: s.phase == state)
        else:
            await s.sleep()
        if state == "waking":
            go.unlink()
            ends.append(asyncio.create_task(collect(s.submit(request("a"), ()))))
            await until(lambda: s.phase == state)
        begun = time.monotonic()
        await s.stop()
        assert time.monotonic() - begun < 15
        for result in await asyncio.gather(*ends, return_exceptions=True):
            ended = [] if isinstance(result, BaseException) else result
            assert isinstance(result, Unavailable) or ended[-1].status == 503, result
        assert s.phase == "stopped" and not s.accepting

    with_engine(body, f"{HELD}{go}")


@pytest.mark.long
def test_draining_serves_those_who_wait_for_it(tmp_path: Path) -> None:
    async def body(s: Supervisor) -> None:
        await s.sleep()
        waiting = asyncio.create_task(collect(s.submit(request("a"), ())))
        await until(lambda: s.open_requests == 1)
        await s.drain(30.0)
        assert len(await waiting) == 3 and s.phase == "draining"
        with pytest.raises(Unavailable):
            s.submit(request("b"), ())

    with_engine(body)


def cycles(count: int) -> list[tuple[int, int, int, int]]:
    """Descriptors, children, tasks and resident bytes after each of ``count`` sleeps and wakes; answers are equal."""
    figures: list[tuple[int, int, int, int]] = []
    me = psutil.Process()

    async def body(s: Supervisor) -> None:
        first = await collect(s.submit(request("first"), ()))
        for i in range(count):
            await s.sleep()
            got = await collect(s.submit(request(f"r{i}"), ()))
            assert [d.tokens for d in got] == [d.tokens for d in first]
            figures.append((me.num_fds(), len(me.children()), len(asyncio.all_tasks()), me.memory_info().rss))
        assert (s.restarts, s.failures) == (0, 0)

    with_engine(body)
    return figures


def test_sleeps_and_wakes_leave_nothing_behind() -> None:
    fds, children, tasks, memory = zip(*cycles(2), strict=True)
    assert len(set(fds)) == len(set(children)) == len(set(tasks)) == 1
    assert memory[-1] - memory[0] < 4 << 20


@pytest.mark.long
def test_fifty_sleeps_and_wakes_leave_nothing_behind() -> None:
    fds, children, tasks, memory = zip(*cycles(50), strict=True)
    print(f"descriptors {fds[1]} to {fds[-1]}, resident {memory[1] >> 10} to {memory[-1] >> 10} KiB")
    assert len(set(fds[1:])) == len(set(children)) == len(set(tasks)) == 1
    assert memory[-1] - memory[5] < 4 << 20


def test_a_loop_that_is_stuck_outside_of_a_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process_link, "STALL_SECONDS", 0.3)
    monkeypatch.setattr(engine_process_link, "PING_INTERVAL", 0.1)

    async def body(s: Supervisor) -> None:
        (delta,) = await asyncio.wait_for(collect(s.submit(request("a", STUCK), ())), 30)
        assert delta.status == 503 and "limit" in s.link.reason

    with_engine(body, backoff=30.0)
