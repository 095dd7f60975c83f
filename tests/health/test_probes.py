"""The table of docs/operating.md, held against the routes over a real engine process; and the routes of sleep mode."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from tests.fakes.counting_engine import HELD, SLOW
from tests.fakes.scripted_app import ScriptedApp, scripted_app
from tests.fakes.text_checkpoint import write_text_checkpoint
from tests.health.test_sleep import FACTORY, until
from tests.operations.fake_server import FakeServer
from tests.traffic.server_process import free_port
from trencadis.core.engine_config import EngineConfig
from trencadis.core.executor.engine_process_launcher import spawn_engine
from trencadis.server.config.server_config import ServerConfig
from trencadis.server.engine.supervisor import Supervisor
from trencadis.server.http.fastapi_app import create_app
from trencadis.server.processes.server_lifecycle import Notifier
from trencadis.server.routes.app_state import HttpSettings
from trencadis.server.routes.state_builder import make_state

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operating.md"
BODY = {"prompt": "a", "max_tokens": 2}
PROBES = ("/live", "/health", "/ping", "/ready")


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> ScriptedApp:
    return scripted_app(write_text_checkpoint(tmp_path_factory.mktemp("health")))


def rows() -> dict[str, list[str]]:
    """Each state of the table with what it says of the four columns."""
    section = PAGE.read_text(encoding="utf-8").partition("\n## Health and sleep\n")[2].partition("\n## ")[0]
    found = re.findall(r"^\| (\w[^|]*?) \| (.*) \|$", section, re.MULTILINE)
    return {state: [cell.strip() for cell in cells.split("|")] for state, cells in found if state != "the server"}


@asynccontextmanager
async def served(
    harness: ScriptedApp, model: str, **options: Any
) -> AsyncIterator[tuple[Supervisor, httpx.AsyncClient]]:
    """The application over an engine process."""
    config = EngineConfig(model=model, engine=FACTORY, threads=1)
    supervisor = Supervisor(config, spawn_engine(config), backoff=30.0, **options)
    app = create_app(
        make_state(
            HttpSettings(ServerConfig(enable_sleep_mode=True, max_num_queued_reqs=3)), supervisor, harness.service
        )
    )
    supervisor.start()
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            yield supervisor, http
    finally:
        await supervisor.stop()


async def read_answer(http: httpx.AsyncClient) -> list[str]:
    """What the routes and a request answer, as the table has it."""
    statuses = [(await http.get(path)).status_code for path in PROBES]
    answer = await http.post("/v1/completions", json=BODY)
    said = {200: "run", 503: "503"}[answer.status_code]
    if answer.status_code == 503 and "retry-after" in answer.headers:
        said = "503 with Retry-After"
    assert statuses[1] == statuses[2], "/ping is /health"
    return [*map(str, (statuses[0], statuses[1], statuses[3])), said]


def test_the_table_says_what_the_routes_answer(harness: ScriptedApp, tmp_path: Path) -> None:
    go = tmp_path / "go"
    table = rows()
    seen: dict[str, list[str]] = {}

    async def body() -> None:
        async with served(harness, f"{HELD}{go}", max_restarts=0) as (s, http):
            seen["loads for the first time"] = await read_answer(http)
            go.touch()
            await until(lambda: s.accepting)
            seen["serves"] = await read_answer(http)
            assert (await http.post("/sleep?level=2")).json() == {"status": "sleeping", "level": 2}
            probes = [str((await http.get(path)).status_code) for path in ("/live", "/health", "/ready")]
            health = (await http.get("/health")).json()
            assert health["phase"] == "asleep" and (await http.get("/is_sleeping")).json() == {"is_sleeping": True}
            go.unlink()
            some = [asyncio.create_task(http.post("/v1/completions", json=BODY)) for _ in range(3)]
            await until(lambda: s.stats.waiting == 3)
            refused = await http.post("/v1/completions", json=BODY)
            assert refused.status_code == 429 and refused.headers["retry-after"]
            assert [str((await http.get(path)).status_code) for path in ("/live", "/health", "/ready")] == probes
            go.touch()
            assert {answer.status_code for answer in await asyncio.gather(*some)} == {200}, "it woke up"
            seen["sleeps, falls asleep or wakes up"] = [*probes, "wait, up to the queue's bounds"]
            s.leaving = True
            seen["was told to end, within `--drain-delay`"] = await read_answer(http)
            s.leaving = False
            s.max_restarts = 5
            os.kill(s.link.handle.process.pid, signal.SIGKILL)
            await until(lambda: s.restarts == 1)
            seen["starts its engine again"] = await read_answer(http)
            s.max_restarts = 0
            seen["has an engine that fails again and again"] = await read_answer(http)
            s.draining = True
            seen["finishes what runs"] = (await read_answer(http))[:3]

    asyncio.run(body())
    assert seen.keys() | {"has a stuck event loop"} == table.keys()
    for state, answers in seen.items():
        wanted = table[state]
        if "as above" in wanted:
            assert answers[0] == wanted[0] and answers[1:] == seen["starts its engine again"][1:]
        elif state == "finishes what runs":
            assert [{"503": "503", "200": "200"}[a] for a in answers[1:]] == wanted[1:3]
        else:
            assert answers == wanted, state


def test_a_stuck_loop_is_not_live(harness: ScriptedApp, tmp_path: Path) -> None:
    """Neither the probe nor systemd's watchdog hears of a server whose event loop is stuck."""
    app = harness.app()
    beats: list[float] = []
    stuck, go = threading.Event(), threading.Event()
    unit = Notifier({"NOTIFY_SOCKET": str(tmp_path / "unit"), "WATCHDOG_USEC": "100000"})
    unit.ready = True
    unit.send = lambda *lines: beats.append(time.monotonic())  # type: ignore[method-assign]

    @app.get("/stuck")
    async def block() -> None:
        stuck.set()
        go.wait(60)  # a mistake of ours: it blocks the loop

    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", lifespan="off"))

    async def main() -> None:
        reported = asyncio.create_task(unit.run(lambda: True, lambda: ""))
        await server.serve()
        reported.cancel()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    asker = None
    try:
        url = f"http://127.0.0.1:{port}"
        while not server.started:
            time.sleep(0.01)
        assert httpx.get(f"{url}/live", timeout=30).status_code == 200
        asker = threading.Thread(target=lambda: httpx.get(f"{url}/stuck", timeout=60))
        asker.start()
        assert stuck.wait(30)
        count = len(beats)
        with pytest.raises(httpx.TimeoutException):
            httpx.get(f"{url}/live", timeout=0.5)
        assert len(beats) == count, "the watchdog was not answered either"
        go.set()
        assert httpx.get(f"{url}/live", timeout=30).status_code == 200
    finally:
        go.set()
        server.should_exit = True
        thread.join()
        if asker is not None:
            asker.join()


def test_the_routes_of_sleep_mode(harness: ScriptedApp) -> None:
    harness.app(enable_sleep_mode=True)
    harness.engine.resets.clear()
    assert harness.call("/is_sleeping").json() == {"is_sleeping": False}
    assert harness.call("/sleep?level=1&mode=abort", method="POST").json() == {"status": "sleeping", "level": 1}
    assert harness.call("/is_sleeping").json() == {"is_sleeping": True}
    assert 'sleep_state="weights_offloaded"} 1.0' in harness.call("/metrics").text
    assert harness.call("/wake_up?tags=weights&tags=kv_cache", method="POST").json() == {
        "status": "awake", "tags": ["weights", "kv_cache"],
    }  # fmt: skip
    assert harness.call("/wake_up", method="POST").json() == {"status": "awake", "tags": None}
    assert harness.call("/sleep", method="POST").json() == {"status": "sleeping", "level": 1}
    assert harness.engine.resets == ["sleep 1 True", "sleep 1 False"], "without a mode what runs is finished"
    assert 'vllm:sleep_mode_operation_duration_seconds_count{operation="sleep"} 2.0' in harness.call("/metrics").text
    harness.engine.sleep_level = 0
    for query in ("level=0", "level=3", "mode=keep", "mode=later", "level=x"):
        answer = harness.call(f"/sleep?{query}", method="POST")
        assert answer.status_code == 400 and answer.json()["error"]["param"] in ("level", "mode", "query.level",
                                                                                "query.mode"), query  # fmt: skip
    assert harness.call("/wake_up?tags=everything", method="POST").status_code == 400
    assert harness.engine.sleep_level == 0


def test_keys_guard_sleep(harness: ScriptedApp) -> None:
    harness.app(enable_sleep_mode=True, api_key=["secret"])
    harness.engine.resets.clear()
    for path, method in (("/sleep", "POST"), ("/wake_up", "POST"), ("/is_sleeping", "GET"), ("/sleep/", "POST")):
        assert harness.call(path, method=method).status_code == 401
        assert harness.call(path, method=method, headers={"x-api-key": "wrong"}).status_code == 401
    assert harness.engine.resets == []
    assert harness.call("/sleep", method="POST", headers={"x-api-key": "secret"}).status_code == 200


@pytest.mark.parametrize(
    ("signals", "waiting"),
    [
        pytest.param(1, False, marks=pytest.mark.long), pytest.param(2, False, marks=pytest.mark.long), (1, True),
        pytest.param(2, True, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_signals_while_the_engine_sleeps(signals: int, waiting: bool, tmp_path: Path) -> None:
    """One signal serves whoever waits for the engine, a second one does not; without anybody both end at once."""
    go = tmp_path / "go"
    go.touch()
    shared = set(os.listdir("/dev/shm"))
    with FakeServer(f"{HELD}{go}", "--sleep-after", "0.3") as server:
        server.wait_for("the engine sleeps")
        lines: list[str] = []
        asker = None
        if waiting:
            go.unlink()
            asker = threading.Thread(target=lambda: lines.append(ask(f"{server.url}/whole?kind={SLOW}&tokens=5")))
            asker.start()
            server.wait_for("the engine wakes up")
        for _ in range(signals):
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
        if waiting and signals == 1:
            go.touch()
        assert server.end() == 0, server.text
        if asker is not None:
            asker.join()
            assert lines == (["200 5"] if signals == 1 else ["gone"]), lines
        assert "Traceback" not in server.text
    assert set(os.listdir("/dev/shm")) <= shared


def ask(url: str) -> str:
    """Status and text of an answer; ``gone`` for a 503 or a closed connection."""
    try:
        answer = httpx.get(url, timeout=75)
    except httpx.HTTPError:
        return "gone"
    return "gone" if answer.status_code == 503 else f"{answer.status_code} {answer.text}"
