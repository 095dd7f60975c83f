"""Decode workers: answers, limits, deaths, callers that leave, recycling; the loop stays free."""

import asyncio
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.fakes import worker_jobs
from tests.traffic.media import run_now
from trencadis.core.errors import BadRequest, TooLarge, TrencadisError, Unavailable
from trencadis.multimodal.decode_workers import worker_messages
from trencadis.multimodal.decode_workers import worker_pool as pool_module
from trencadis.multimodal.decode_workers import worker_process as decode_process
from trencadis.multimodal.decode_workers.worker_pool import Job, WorkerPool


@pytest.fixture
def make():
    made = []

    def build(size=1, **options):
        made.append(WorkerPool(size, jobs=worker_jobs.JOBS, **options))
        return made[-1]

    yield build
    for pool in made:
        pool.close()


@pytest.fixture(scope="module")
def shared():
    pool = WorkerPool(1, jobs=worker_jobs.JOBS)
    yield pool
    pool.close()


def refused(pool, job, data=b"", error=TrencadisError):
    with pytest.raises(error) as caught:
        run_now(pool, job, data)
    assert type(caught.value) is error
    return caught.value.message


def gone(pid, seconds=5.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not Path(f"/proc/{pid}").exists():
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("size", [0, 1, 70_000, 5_000_001])
def test_bytes_go_there_and_back(shared, size):
    data = os.urandom(size)
    answer = run_now(shared, Job("echo", {"a": [1, "é"]}), data)
    assert answer.values["options"] == {"a": [1, "é"]} and answer.values["pid"] in shared.pids()
    assert b"".join(b.tobytes() for b in answer.buffers) == data
    assert all(b.dtype == np.uint8 and b.base is not None for b in answer.buffers)


def test_errors_are_ours(shared):
    assert refused(shared, Job("refuse", {}), error=TooLarge) == "Ours."
    assert refused(shared, Job("oops", {}), error=BadRequest) == pool_module.UNDECODABLE
    assert refused(shared, Job("nothing", {}), error=BadRequest) == pool_module.UNDECODABLE
    assert shared.deaths == 0


def test_memory_is_granted_by_the_job_and_taken_back(shared):
    small, large = Job("hog", {"bytes": 300 << 20}, memory=64 << 20), Job("hog", {"bytes": 300 << 20}, memory=400 << 20)
    assert refused(shared, small, error=TooLarge) == "The media is too large to decode."
    assert run_now(shared, large, b"").values == {"size": 300 << 20}
    refused(shared, small, error=TooLarge)
    assert shared.deaths == 0


def test_an_answer_above_its_bound_ends_the_worker(shared):
    before = shared.deaths
    refused(shared, Job("flood", {"bytes": 2000}, reply=1999), error=BadRequest)
    assert shared.deaths > before
    assert run_now(shared, Job("flood", {"bytes": 2000}, reply=2000), b"").buffers[0].size == 2000


@pytest.mark.parametrize("options", [{"signal": "SIGKILL"}, {"signal": "SIGSEGV"}, {"segfault": True}])
def test_a_death_is_a_400_and_the_worker_is_replaced(shared, options):
    before, deaths = set(shared.pids()), shared.deaths
    assert refused(shared, Job("die", options), error=BadRequest) == pool_module.UNDECODABLE
    assert shared.deaths == deaths + 2, "a job is tried once more on a fresh worker"
    assert run_now(shared, Job("echo", {}), b"ok").values["pid"] not in before


def test_a_job_whose_worker_was_killed_for_another_reason_is_run_again(shared, tmp_path):
    run_now(shared, Job("echo", {}), b"")
    os.kill(shared.pids()[0], 9)
    assert run_now(shared, Job("echo", {}), b"ab").buffers[1].tobytes() == b"b"


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [("sleep", Unavailable, pool_module.NO_WORKER), ("spin", TooLarge, pool_module.TOO_LONG)],
)
def test_deadline(shared, name, error, said):
    start = time.monotonic()
    message = refused(shared, Job(name, {"seconds": 60}, seconds=0.5), error=error)
    assert message == said and time.monotonic() - start < 5
    assert run_now(shared, Job("echo", {}), b"x").buffers[1].tobytes() == b"x"


def test_cpu_time_is_limited_even_where_nobody_watches(make, monkeypatch):
    pool = make()
    monkeypatch.setattr(pool_module.PoolTicket, "check_deadline", lambda self: 0.05)
    assert refused(pool, Job("spin", {}, seconds=0.2), error=TooLarge) == pool_module.TOO_LONG


def test_a_caller_that_leaves_ends_its_job(make):
    pool = make()

    async def main():
        await pool.run(Job("echo", {}), b"")
        pid = pool.pids()[0]
        task = asyncio.ensure_future(pool.run(Job("spin", {}), b""))
        waiting = asyncio.ensure_future(pool.run(Job("echo", {}), b"never"))
        await asyncio.sleep(0.05)
        waiting.cancel()
        task.cancel()
        start = time.monotonic()
        await asyncio.to_thread(gone, pid)
        took = time.monotonic() - start
        assert (await pool.run(Job("echo", {}), b"ab")).buffers[1].tobytes() == b"b"
        return took

    assert asyncio.run(main()) < 5 * (pool_module.GRACE_SECONDS + pool_module.POLL_SECONDS)
    assert pool.deaths == 0 and pool.started == 2


def test_a_short_job_whose_caller_leaves_keeps_its_worker(make):
    pool = make()

    async def main():
        await pool.run(Job("echo", {}), b"")
        task = asyncio.ensure_future(pool.run(Job("sleep", {"seconds": 0.02}), b""))
        await asyncio.sleep(0.005)
        task.cancel()
        await pool.run(Job("echo", {}), b"")

    asyncio.run(main())
    assert pool.started == 1


def test_workers_start_when_needed_end_when_idle_and_are_recycled(make):
    pool = make(2, recycle=3, idle=0.3)
    assert pool.started == 0 and pool.pids() == []
    seen = [run_now(pool, Job("echo", {}), b"").values["pid"] for _ in range(5)]
    assert len(set(seen)) == 2 and seen[0] == seen[2] != seen[3] == seen[4] and gone(seen[0])

    pool.recycle = 1000

    async def both():
        return await asyncio.gather(*(pool.run(Job("sleep", {"seconds": 0.2}), b"") for _ in range(4)))

    # A job belongs to its worker before that has started, so that each has one however late it starts.
    assert len({answer.values["pid"] for answer in asyncio.run(both())}) == 2
    end = time.monotonic() + 60
    while len(pool.pids()) > 1 and time.monotonic() < end:
        time.sleep(0.02)
    assert len(pool.pids()) == 1, "one worker stays"
    assert run_now(pool, Job("echo", {}), b"").values["pid"] in pool.pids()


def test_a_worker_that_grew_is_replaced(make, monkeypatch):
    pool = make()
    monkeypatch.setattr(pool_module, "MAX_PEAK_BYTES", 200 << 20)
    pid = run_now(pool, Job("echo", {}), b"").values["pid"]
    run_now(pool, Job("hog", {"bytes": 300 << 20}), b"")
    assert run_now(pool, Job("echo", {}), b"").values["pid"] != pid and gone(pid)


def test_granted_memory_is_bounded(make):
    pool = make(3, budget=100)
    start = time.monotonic()

    async def three(memory):
        await asyncio.gather(*(pool.run(Job("sleep", {"seconds": 0.15}, memory=memory), b"") for _ in range(3)))

    asyncio.run(three(1 << 28))
    assert time.monotonic() - start > 0.45, "jobs above the budget run one at a time"
    assert pool._granted == 0


def test_close_ends_everything(make):
    pool = make()
    pid = run_now(pool, Job("echo", {}), b"").values["pid"]
    running, waiting = pool.submit(Job("spin", {}), b""), pool.submit(Job("echo", {}), b"")
    time.sleep(0.05)
    pool.close()
    for ticket in (running, waiting):
        assert type(ticket.future.exception(5)) is Unavailable
    assert gone(pid)
    with pytest.raises(Unavailable):
        pool.submit(Job("echo", {}), b"")


def test_a_worker_that_never_comes_up_is_a_503(make, monkeypatch):
    pool = make()
    monkeypatch.setattr(decode_process.sys, "executable", "/bin/false")  # type: ignore[attr-defined]
    refused(pool, Job("echo", {}), error=Unavailable)
    monkeypatch.setattr(decode_process.sys, "executable", "/nonexistent")  # type: ignore[attr-defined]
    refused(pool, Job("echo", {}), error=Unavailable)
    monkeypatch.undo()
    assert run_now(pool, Job("echo", {}), b"").buffers[0].size == 0


def test_what_a_worker_has(make, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    values = run_now(make(), Job("look", {"path": str(tmp_path / "x"), "modules": True}), b"").values
    assert "secret" not in values["environ"].values() and values["environ"]["OPENBLAS_NUM_THREADS"] == "1"
    assert not values["written"] and values["files"] <= 64
    assert {"numpy", "PIL"} <= set(values["modules"])
    assert not {"torch", "transformers", "fastapi", "httpx", "pydantic", "asyncio", "ssl"} & set(values["modules"])
    assert values["peak"] < 80 << 20


def test_the_loop_stays_free_while_large_answers_arrive(shared):
    data = bytes(20 << 20)

    async def main():
        gaps, done = [], asyncio.ensure_future(shared.run(Job("echo", {}), data))
        while not done.done():
            before = time.monotonic()
            await asyncio.sleep(0.001)
            gaps.append(time.monotonic() - before)
        await done
        return sorted(gaps)

    run_now(shared, Job("echo", {}), b"")
    gaps = asyncio.run(main())
    assert gaps[len(gaps) // 2] < 0.05


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"{}", b'{"sizes": 1}', b'{"sizes": [-1, 1]}', b'{"sizes": [1]}', b'{"sizes": ["0"]}', b"[" * 9999],
)
def test_garbled_frames(text):
    with pytest.raises(worker_messages.ProtocolError):
        worker_messages.unpack_message(text, 0)
    with pytest.raises(worker_messages.ProtocolError):
        worker_messages.read_lengths(worker_messages.HEAD.pack(1 << 30, 0), 0)


@pytest.mark.parametrize("message", [{"status": 200, "message": "x"}, {"status": 500, "message": "x"}, {"status": 400},
                                     {"values": []}, {"status": "413", "message": "x"}])  # fmt: skip
def test_a_worker_cannot_choose_its_error(message):
    assert pool_module._parse_answer(message, []).message == pool_module.UNDECODABLE


def test_a_stopped_worker_is_replaced_and_its_job_runs_on_another(make, monkeypatch):
    monkeypatch.setattr(decode_process, "STOPPED_SECONDS", 0.2)
    monkeypatch.setattr(decode_process, "LOOK_SECONDS", 0.05)
    pool = make()
    first = run_now(pool, Job("echo", {}), b"x").values["pid"]
    os.kill(first, signal.SIGSTOP)
    second = run_now(pool, Job("echo", {}), b"x").values["pid"]
    assert second != first and gone(first) and pool.pids() == [second] and pool.deaths == 1
    os.kill(second, signal.SIGSTOP)
    os.kill(second, signal.SIGCONT)
    assert run_now(pool, Job("echo", {}), b"x").values["pid"] == second, "continued in time"


def test_workers_that_are_stopped_again_and_again_are_a_503(make, monkeypatch):
    monkeypatch.setattr(decode_process, "STOPPED_SECONDS", 0.2)
    monkeypatch.setattr(decode_process, "LOOK_SECONDS", 0.05)
    pool = make()
    assert refused(pool, Job("stop", {}), error=Unavailable) == pool_module.NO_WORKER
    assert pool.deaths == 2
    assert run_now(pool, Job("echo", {}), b"x").values["options"] == {}
