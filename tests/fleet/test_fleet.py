"""Several engine processes behind one application: routes, metrics, pins; engines that die, sleep and drain."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import pytest

from tests.fakes.counting_engine import CRASH, SLOW
from tests.fakes.scripted_app import ScriptedApp, scripted_app
from tests.fakes.text_checkpoint import write_text_checkpoint
from tests.health.test_sleep import FACTORY, until
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import Unavailable
from trencadis.core.executor.engine_process_launcher import spawn_engine
from trencadis.core.request import Request, SamplingParams
from trencadis.server.config.server_config import ServerConfig
from trencadis.server.http.fastapi_app import create_app
from trencadis.server.processes.multi_engine_client import Fleet
from trencadis.server.processes.start_engines import divide_resources
from trencadis.server.routes.app_state import HttpSettings
from trencadis.server.routes.state_builder import make_state


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> ScriptedApp:
    return scripted_app(write_text_checkpoint(tmp_path_factory.mktemp("fleet")))


@asynccontextmanager
async def running(size: int, **options: Any) -> AsyncIterator[Fleet]:
    """A fleet of engines without a model, which takes requests; leaves no process behind."""
    configs = divide_resources(EngineConfig(model="m", engine=FACTORY, device="cpu", threads=size), size, {})
    fleet = Fleet(configs, [spawn_engine(c) for c in configs], **{"backoff": 0.05, **options})
    fleet.start()
    try:
        await until(lambda: all(e.accepting for e in fleet.engines))
        yield fleet
    finally:
        await fleet.stop()
        assert all(e.link.handle.process.returncode is not None for e in fleet.engines)


def ask(id: str, kind: int = SLOW, tokens: int = 3) -> Request:
    return Request(id, [kind, *range(40)], SamplingParams(max_tokens=tokens))


async def answer(fleet: Fleet, request: Request, seen: list[str] | None = None) -> list[int]:
    """The tokens of an answer; ``seen`` gets the id of a request whose first delta has come."""
    tokens: list[int] = []
    async for delta in fleet.submit(request, ()):
        if delta.finish == "error":
            raise Unavailable(delta.message)
        if not tokens and seen is not None:
            seen.append(request.id)
        tokens += delta.tokens
    return tokens


def test_engines_show_in_health_stats_buckets_and_metrics_and_a_header_pins_a_request(harness: ScriptedApp) -> None:
    async def body() -> None:
        async with running(2) as fleet:
            app = create_app(make_state(HttpSettings(ServerConfig(enable_sleep_mode=True)), fleet, harness.service))
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:

                async def complete(rank: str | None = None) -> httpx.Response:
                    headers = {} if rank is None else {"X-data-parallel-rank": rank}
                    return await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 4}, headers=headers)

                for _ in range(3):
                    assert (await complete("1")).status_code == 200
                assert (await complete("0")).status_code == 200
                health = (await http.get("/health")).json()
                assert [e["accepting"] for e in health["engines"]] == [True, True] and health["ready"]
                assert len((await http.get("/buckets")).json()["engines"]) == 2
                stats = (await http.get("/stats")).json()
                assert stats["steps"] == sum(e["steps"] for e in stats["engines"]) and len(stats["engines"]) == 2
                text = (await http.get("/metrics")).text
                count = r'vllm:request_generation_tokens_count\{engine="(\d)",model_name="[^"]*"\} (\S+)'
                assert {e: float(n) for e, n in re.findall(count, text)} == {"0": 1.0, "1": 3.0}
                assert set(re.findall(r'vllm:num_requests_running\{engine="(\d)"', text)) == {"0", "1"}
                helps = re.findall(r"^# HELP (\S+)", text, re.MULTILINE)
                assert len(helps) == len(set(helps)), "a family appears twice"
                for wrong in ("2", "-1", "x", "9" * 30):
                    refused = await complete(wrong)
                    assert refused.status_code == 400 and "0 to 1" in refused.json()["error"]["message"]
                assert (await http.post("/sleep?rank=2")).status_code == 400
                assert (await http.post("/sleep?rank=0&level=1")).status_code == 200
                health = (await http.get("/health")).json()
                assert health["engines"][0]["phase"] == "asleep" and health["accepting"]
                assert (await complete()).status_code == 200 and fleet.engines[0].sleep_level == 1
                assert (await http.post("/wake_up?rank=0")).status_code == 200 and fleet.engines[0].sleep_level == 0

    asyncio.run(body())


def test_a_server_with_one_engine_knows_rank_0_alone(harness: ScriptedApp) -> None:
    harness.app()
    good = harness.call("/v1/completions", {"prompt": "a"}, headers={"X-data-parallel-rank": "0"})
    bad = harness.call("/v1/completions", {"prompt": "a"}, headers={"X-data-parallel-rank": "1"})
    assert (good.status_code, bad.status_code) == (200, 400)
    assert "engines" not in harness.call("/health").json()


def test_a_request_that_kills_two_engines_is_not_tried_on_a_third_and_others_live_on() -> None:
    async def body() -> None:
        async with running(3) as fleet:
            bad = ask("bad", CRASH)
            with pytest.raises(Unavailable, match="retry"):
                await answer(fleet, bad)
            assert fleet.restarts + sum(not e.link.alive for e in fleet.engines) >= 2
            assert fleet.accepting
            assert await answer(fleet, ask("good")) == [0, 1, 2]
            assert fleet.retries == 1
            assert all(load.open == 0 and load.queued == 0 for load in fleet.router.loads)

    asyncio.run(body())


def test_a_pinned_request_dies_with_its_engine() -> None:
    async def body() -> None:
        async with running(2, backoff=30.0) as fleet:
            bad = ask("bad", CRASH)
            bad.replica = 1
            with pytest.raises(Unavailable):
                await answer(fleet, bad)
            assert fleet.engines[0].accepting and bad.replica == 1 and fleet.retries == 0 + 1

    asyncio.run(body())


def serves(engine: Any, requests: int) -> bool:
    return bool(engine.accepting and engine.open_requests >= requests)


def refuses(engine: Any) -> bool:
    return not engine.accepting


def reached(turns: list[int], least: list[int]) -> bool:
    return all(now >= wanted for now, wanted in zip(turns, least, strict=True))


async def under_fire(times: int, clients: int = 32, engines: int = 4) -> dict[str, int]:
    """Engines under load, of which one is killed ``times`` times; asserts what may fail, and counts it."""
    async with running(engines, max_restarts=10_000) as fleet:
        over, counts, turns = False, {"answered": 0, "cut": 0, "lost": 0}, [0] * clients

        async def client(number: int) -> None:
            while not over:
                turns[number] += 1
                request, seen = ask(f"{number}-{turns[number]}", SLOW, 4), list[str]()
                seed_id = request.id
                try:
                    assert await answer(fleet, request, seen) == [0, 1, 2, 3]
                    counts["answered"] += 1
                except Unavailable:
                    counts["cut" if seen else "lost"] += 1
                    await asyncio.sleep(0.01)
                assert request.id == seed_id

        tasks = [asyncio.create_task(client(i)) for i in range(clients)]
        for i in range(times):
            victim = fleet.engines[i % engines]
            await until(partial(serves, victim, 3))
            await asyncio.sleep(0.013 * (i % 5))
            os.kill(victim.link.handle.process.pid, signal.SIGKILL)
            await until(partial(refuses, victim))
            # A request that two engines in turn died under would end: those that this death touched go first.
            then = [turn + 1 for turn in turns]
            await until(partial(reached, turns, then))
        over = True
        await asyncio.gather(*tasks)
        assert all(load.open == 0 for load in fleet.router.loads)
        return counts | {"retries": fleet.retries}


def test_no_request_without_a_token_fails_when_an_engine_is_killed() -> None:
    counts = asyncio.run(under_fire(2, 16, 3))
    assert counts["lost"] == 0 and counts["answered"] > 16 and counts["cut"] + counts["retries"] > 0


@pytest.mark.long
def test_no_request_without_a_token_fails_in_twenty_kills_under_32_clients() -> None:
    counts = asyncio.run(under_fire(20))
    print(counts)
    assert counts["lost"] == 0 and counts["retries"] > 0


def test_a_rolling_restart_loses_no_request() -> None:
    async def body() -> None:
        async with running(2) as fleet:
            over, done = False, 0

            async def client(number: int) -> None:
                nonlocal done
                turn = 0
                while not over:
                    turn += 1
                    assert await answer(fleet, ask(f"{number}-{turn}")) == [0, 1, 2]
                    done += 1

            tasks = [asyncio.create_task(client(i)) for i in range(6)]
            before = [e.link.handle.process.pid for e in fleet.engines]
            for engine in fleet.engines:
                await until(partial(serves, engine, 1))
                await engine.sleep()
                await engine.wake()
            over = True
            await asyncio.gather(*tasks)
            assert done > 10 and not set(before) & {e.link.handle.process.pid for e in fleet.engines}

    asyncio.run(body())


def test_drain_waits_for_every_engine_and_an_abort_finds_its_own() -> None:
    async def body() -> None:
        async with running(2) as fleet:
            tasks = [asyncio.create_task(answer(fleet, ask(f"d{i}", SLOW, 8))) for i in range(6)]
            endless = ask("endless", SLOW, 100_000)
            gone = asyncio.create_task(answer(fleet, endless))
            await until(lambda: fleet.stats.running == 7)
            fleet.abort("endless")
            await fleet.drain(20.0)
            assert fleet.open_requests == 0 and not fleet.accepting and fleet.phase == "draining"
            assert [len(t) for t in await asyncio.gather(*tasks)] == [8] * 6
            assert len(await gone) < 1000
            with pytest.raises(Unavailable):
                fleet.submit(ask("late"), ())

    asyncio.run(body())


def test_requests_wake_an_engine_where_all_sleep() -> None:
    async def body() -> None:
        async with running(2) as fleet:
            await fleet.sleep()
            assert fleet.sleep_level == 1 and fleet.accepting and fleet.phase == "asleep"
            begun = time.monotonic()
            assert await answer(fleet, ask("a")) == [0, 1, 2]
            assert sorted(e.sleep_level for e in fleet.engines) == [0, 1], "one is enough"
            assert time.monotonic() - begun < 30

    asyncio.run(body())
