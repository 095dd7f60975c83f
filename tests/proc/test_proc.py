"""The engine's process behind its socket, with an engine that has no model."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import psutil
import pytest

import trencadis
from tests.fakes.counting_engine import CRASH, DIGEST, HANG, REFUSE, SLOW, WORDS
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import Unavailable
from trencadis.core.executor import multiproc_executor
from trencadis.core.executor.engine_process_launcher import spawn_engine
from trencadis.core.media_spans import MediaSpan
from trencadis.core.output_constraints import Rule
from trencadis.core.process import child_process_environment_and_exit, engine_messages
from trencadis.core.request import Request, SamplingParams
from trencadis.multimodal.decode_workers.worker_process import WorkerProcess
from trencadis.multimodal.qwen2_vl.qwen2_and_qwen2_5_vision_config import PATCH_VALUES
from trencadis.server.engine import engine_process_link, supervisor
from trencadis.server.engine.engine_process_link import EngineLink
from trencadis.server.engine.supervisor import Supervisor

CONFIG = EngineConfig(engine="tests.fakes.counting_engine:CountingEngine.create", threads=1)


def config(model="m"):
    return EngineConfig(model=model, engine=CONFIG.engine, threads=1)


def request(id, kind=1, tokens=3, n=1, images=0, salt=""):
    spans = [MediaSpan(i, 1, "0", (1, 2, 2), 64) for i in range(images)]
    return Request(id, [kind, 2, 3], SamplingParams(n=n, max_tokens=tokens), spans, salt=salt)


async def collect(stream):
    return [d async for d in stream]


async def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        await asyncio.sleep(0.01)


def with_supervisor(body, model="m", **options):
    """Runs ``body(supervisor)`` and leaves no process behind."""

    async def main():
        handle = spawn_engine(config(model))
        supervisor = Supervisor(config(model), handle, **options)
        supervisor.start()
        try:
            return await body(supervisor)
        finally:
            await supervisor.stop()
            assert supervisor.link.handle.process.returncode is not None

    return asyncio.run(main())


def test_round_trip_and_several_choices():
    async def body(s):
        await until(lambda: s.accepting)
        assert s.info.device == "fake" and s.healthy and s.ready
        one, two = await asyncio.gather(collect(s.submit(request("a"), ())), collect(s.submit(request("b", n=2), ())))
        assert [d.tokens for d in one] == [[0], [1], [2]] and one[-1].finish == "length"
        assert sorted(d.choice for d in two if d.finish) == [0, 1] and len(two) == 6
        await until(lambda: s.stats.running == 0 and s.stats.steps >= 3)
        assert s.open_requests == 0

    with_supervisor(body)


def test_refused_request_is_a_reply():
    async def body(s):
        await until(lambda: s.accepting)
        (delta,) = await collect(s.submit(request("a", REFUSE), ()))
        assert (delta.finish, delta.status, delta.message) == ("error", 400, "no such thing")
        assert len(await collect(s.submit(request("a"), ()))) == 3

    with_supervisor(body)


@pytest.mark.parametrize("salt", ["", "again"])
def test_three_mebibytes_of_pixels_arrive_whole(salt):
    pixels = np.random.default_rng(0).integers(0, 256, (2675, PATCH_VALUES), np.uint8)
    assert pixels.nbytes > 3 << 20
    small = pixels[:4, ::-1]

    async def body(s):
        await until(lambda: s.accepting)
        deltas = await collect(s.submit(request("a", DIGEST, 64, images=2, salt=salt), [pixels, small]))
        got = bytes(d.tokens[0] for d in deltas)
        assert got == hashlib.sha256(pixels.tobytes()).digest() + hashlib.sha256(small.tobytes()).digest()

    with_supervisor(body)


def worded(id):
    return dataclasses.replace(request(id, WORDS, 33), rule=Rule("a grammar"))


def test_the_vocabulary_is_made_once_and_each_engine_gets_it_before_its_first_grammar():
    words = np.random.default_rng(0).bytes(2 * engine_messages.CHUNK + 5)
    made = []

    async def vocabulary():
        made.append(1)
        await asyncio.sleep(0.05)
        return words

    async def body(s):
        await until(lambda: s.accepting)
        assert len(await collect(s.submit(request("plain"), ()))) == 3 and not made
        for engine in range(2):
            answers = await asyncio.gather(*(collect(s.submit(worded(f"{engine}{i}"), ())) for i in range(3)))
            for deltas in answers:
                assert bytes(d.tokens[0] for d in deltas) == hashlib.sha256(words).digest() + b"\1"
            os.kill(s.link.handle.process.pid, signal.SIGKILL)
            await until(lambda: not s.accepting)
            await until(lambda: s.accepting)
        assert made == [1]

    with_supervisor(body, vocabulary=vocabulary, backoff=0.01)


def test_without_a_vocabulary_a_grammar_is_refused_and_nothing_stays_open():
    async def body(s):
        await until(lambda: s.accepting)
        with pytest.raises(Unavailable):
            await collect(s.submit(worded("a"), ()))
        s.vocabulary = lambda: b"late"
        assert len(await collect(s.submit(worded("a"), ()))) == 33 and s.open_requests == 0

    with_supervisor(body)


def test_missing_pixels_end_the_request():
    async def body(s):
        await until(lambda: s.accepting)
        (delta,) = await collect(s.submit(request("a", images=1), ()))
        assert delta.finish == "error" and delta.status == 500

    with_supervisor(body)


def test_abort_by_closing_and_by_choice():
    async def body(s):
        await until(lambda: s.accepting)
        stream = s.submit(request("a", SLOW, 10000), ())
        await anext(stream)
        await stream.aclose()
        await until(lambda: s.stats.running == 0 and s.open_requests == 0)
        got = []
        async for delta in s.submit(request("b", SLOW, 10, n=2), ()):
            if not got:
                s.abort("b", 0)
            got.append(delta)
        assert {d.choice: d.finish for d in got if d.finish} == {0: "abort", 1: "length"}

    with_supervisor(body)


def test_drain_finishes_what_runs():
    async def body(s):
        await until(lambda: s.accepting)
        task = asyncio.create_task(collect(s.submit(request("a", SLOW, 20), ())))
        await until(lambda: s.open_requests == 1)
        await s.drain(5.0)
        assert s.phase == "draining" and not s.accepting
        assert len(await task) == 20
        await s.stop()
        assert s.link.handle.process.returncode == 0 and s.phase == "stopped"

    with_supervisor(body)


def test_start_up_error_is_code_2():
    seen = []

    async def body(s):
        await asyncio.wait_for(s.task, 20)
        assert s.link.handle.process.returncode == 2

    with_supervisor(body, "missing", on_fatal=lambda *a: seen.append(a))
    assert seen == [("There is no such model.", 2)]


def test_crash_while_loading_is_code_1():
    seen = []

    async def body(s):
        await asyncio.wait_for(s.task, 20)

    with_supervisor(body, "crash", on_fatal=lambda *a: seen.append(a))
    assert seen == [("RuntimeError: broken weights", 1)]


def test_crash_in_a_step_ends_requests_and_restarts():
    async def body(s):
        await until(lambda: s.accepting)
        begun = time.monotonic()
        other = asyncio.create_task(collect(s.submit(request("b", images=1), [np.zeros((0, PATCH_VALUES), np.uint8)])))
        deltas = await collect(s.submit(request("a", CRASH, n=2), ()))
        assert [(d.choice, d.finish, d.status, d.message) for d in deltas] == [
            (i, "error", 503, "The engine stopped; please retry.") for i in (0, 1)
        ]
        assert (await other)[-1].finish in ("error", "length")
        assert time.monotonic() - begun < 2.0 and s.phase == "restarting"
        with pytest.raises(Exception, match="restarting"):
            s.submit(request("c"), ())
        await until(lambda: s.accepting)
        assert s.restarts == 1 and len(await collect(s.submit(request("c"), ()))) == 3

    with_supervisor(body, backoff=0.05)


def test_an_engine_that_never_holds_for_a_minute_is_failing(monkeypatch):
    async def body(s):
        for i in range(2):
            await until(lambda: s.accepting)
            assert not s.failing, i
            await collect(s.submit(request(f"r{i}", CRASH), ()))
            await until(lambda: not s.accepting)
        await until(lambda: s.failing)
        await until(lambda: s.accepting)
        assert s.failing, "it is up again, and has not held yet"
        monkeypatch.setattr(supervisor, "STEADY_SECONDS", 0.2)
        await until(lambda: not s.failing)
        await collect(s.submit(request("r"), ()))
        await collect(s.submit(request("r", CRASH), ()))
        assert not s.failing, "counted from the last steady time on"

    with_supervisor(body, backoff=0.0, max_restarts=1)


def test_time_spent_loading_is_not_steady(monkeypatch):
    monkeypatch.setattr(supervisor, "STEADY_SECONDS", 0.7)

    async def body(s):
        await until(lambda: s.accepting)
        await collect(s.submit(request("r", CRASH), ()))
        await until(lambda: s.failing)

    with_supervisor(body, "slow", backoff=0.0, max_restarts=0)


def test_no_secret_reaches_another_process(monkeypatch):
    reported = []

    def start(command, *, pass_fds, env, **_):
        reported.append((socket.socket(fileno=os.dup(pass_fds[0])), str(command), env))
        return types.SimpleNamespace(poll=lambda: 0, kill=lambda: None, wait=lambda *_, **__: 0, returncode=0)

    monkeypatch.setattr(subprocess, "Popen", start)
    for name in ("HF_TOKEN", "VLLM_API_KEY", "TRENCADIS_SOME_KEY"):
        monkeypatch.setenv(name, f"hidden {name}")
    secret = dataclasses.replace(config(), hf_token="hidden token", tensor_parallel_size=2)
    spawn_engine(secret).sock.close()
    ranks = multiproc_executor.MultiprocExecutor(secret)
    ranks.close()
    WorkerProcess({}).kill()
    assert len(reported) == 3
    for sock, command, env in reported:
        sock.settimeout(0.5)
        with sock, contextlib.suppress(TimeoutError):
            assert b"hidden" not in sock.recv(1 << 20)
        assert "hidden" not in command and "hidden" not in str(env) and env["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "HABANA_VISIBLE_DEVICES", "KEYBOARD", "MAX_TOKENS"])
def test_other_variables_stay(name):
    assert child_process_environment_and_exit.environment({name: "1"}, 1, False)[name] == "1"


def test_ten_kills_leave_nothing_behind():
    me = psutil.Process()
    others = len(me.children())

    async def body(s):
        await until(lambda: s.accepting)
        figures = []
        for i in range(10):
            s.backoff = 0.0
            task = asyncio.create_task(collect(s.submit(request(f"r{i}", SLOW, 1000), ())))
            await until(lambda: s.open_requests == 1)
            os.kill(s.link.handle.process.pid, signal.SIGKILL)
            assert (await asyncio.wait_for(task, 2))[-1].status == 503
            await until(lambda: s.accepting)
            figures.append((me.num_fds(), len(me.children()), len(asyncio.all_tasks()), me.memory_info().rss))
        fds, children, tasks, memory = zip(*figures, strict=True)
        assert len(set(fds[1:])) == 1 and set(children) == {others + 1} and len(set(tasks)) == 1, figures
        assert memory[-1] - memory[2] < 4 << 20, memory

    with_supervisor(body, backoff=0.0)


def test_a_step_that_hangs_is_killed(monkeypatch):
    monkeypatch.setattr(engine_process_link, "STALL_SECONDS", 0.3)
    monkeypatch.setattr(engine_process_link, "PING_INTERVAL", 0.1)

    async def body(s):
        await until(lambda: s.accepting)
        (delta,) = await asyncio.wait_for(collect(s.submit(request("a", HANG), ())), 5)
        assert delta.status == 503 and "step 1" in s.link.reason

    with_supervisor(body)


def test_a_stopped_process_is_dead(monkeypatch):
    monkeypatch.setattr(engine_process_link, "PING_INTERVAL", 0.05)

    async def body(s):
        await until(lambda: s.accepting)
        os.kill(s.link.handle.process.pid, signal.SIGSTOP)
        (delta,) = await asyncio.wait_for(collect(s.submit(request("a"), ())), 5)
        assert delta.status == 503 and "no sign of life" in s.link.reason

    with_supervisor(body)


def test_loading_has_its_own_limit():
    async def body(s):
        await until(lambda: s.link.reason, 5)
        assert "not ready" in s.link.reason

    with_supervisor(body, "slow", compile_timeout=0.2, backoff=5.0)


def test_parent_death_ends_the_engine_from_another_folder(tmp_path):
    """Also: the engine starts from an uninstalled checkout with another working directory."""
    code = (
        "import sys, time; from trencadis.core.engine_config import EngineConfig\n"
        "from trencadis.core.executor.engine_process_launcher import spawn_engine\n"
        f"h = spawn_engine(EngineConfig(engine={CONFIG.engine!r}, threads=1)); print(h.process.pid, flush=True)\n"
        "print(len(h.sock.recv(4096)) > 8, flush=True); time.sleep(60)"
    )
    root = str(Path(trencadis.__file__).resolve().parent.parent)
    env = os.environ | {"PYTHONPATH": root}
    parent = subprocess.Popen([sys.executable, "-P", "-c", code], cwd=tmp_path, env=env, stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        engine = psutil.Process(int(parent.stdout.readline()))
        assert parent.stdout.readline().strip() == b"True"
    finally:
        parent.kill()
        parent.wait()
    assert engine.wait(5) is None


def test_proc_imports_no_torch():
    code = (
        "import sys; import trencadis.core.process.engine_process, trencadis.server.cli.main, "
        "trencadis.server.cli.serve\n"
        "print('torch' in sys.modules, 'fastapi' in sys.modules)"
    )
    env = os.environ | {"PYTHONPATH": str(Path(trencadis.__file__).resolve().parent.parent)}
    out = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]


def test_link_without_process_life_refuses():
    link = EngineLink.__new__(EngineLink)
    link.alive, link.writer = False, None

    async def body():
        with pytest.raises(Exception, match="stopped"):
            await anext(link.submit(request("a"), ()))

    asyncio.run(body())
