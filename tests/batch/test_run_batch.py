"""The runner of ``run-batch``: order, bounds, error lines, a server that is busy or gone, what ``--resume`` finds."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from tests.batch.files import read, request, write
from tests.fakes.scripted_app import scripted_app
from tests.fakes.text_checkpoint import write_text_checkpoint
from trencadis.core.errors import StartupError
from trencadis.server.cli import batch_lines, batch_targets
from trencadis.server.cli.batch_lines import LineReader, ResultFile
from trencadis.server.cli.batch_runner import BatchLimits, BatchProgress, BatchRunner


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_text_checkpoint(tmp_path_factory.mktemp("checkpoint"))


class HeldTarget:
    """Answers when told to; knows what runs."""

    def __init__(self, answer=None) -> None:
        self.waiting: dict[str, asyncio.Event] = {}
        self.asked: list[str] = []
        self.most = 0
        self.answer = answer or (lambda text: httpx.Response(200, json={"echo": text}))
        self.client = httpx.AsyncClient(transport=httpx.MockTransport(self.serve), base_url="http://x")
        self.readied = 0

    async def serve(self, requested: httpx.Request) -> httpx.Response:
        text = json.loads(requested.content)["messages"][0]["content"]
        self.asked.append(text)
        self.waiting[text] = asyncio.Event()
        self.most = max(self.most, len(self.waiting))
        await self.waiting[text].wait()
        del self.waiting[text]
        found = self.answer(text)
        if isinstance(found, Exception):
            raise found
        return found

    async def wait_ready(self) -> None:
        self.readied += 1


def made(tmp_path: Path, target, limits: BatchLimits, resume: bool = False) -> BatchRunner:
    reader = LineReader(tmp_path / "in.jsonl", limits.longest)
    progress = BatchProgress(batch_lines.count(tmp_path / "in.jsonl"))
    return BatchRunner(target, reader, ResultFile(tmp_path / "out.jsonl", resume), progress, limits)


async def play(runner: BatchRunner, target: HeldTarget, seed: int) -> None:
    """Runs to the end; answers come in a random order."""
    rng, task = random.Random(seed), asyncio.create_task(runner.run())
    while not task.done():
        await asyncio.sleep(0)
        if target.waiting and rng.random() < 0.3:
            rng.choice(list(target.waiting.values())).set()
    await task


@pytest.mark.parametrize("seed", range(6))
def test_answers_stand_in_the_inputs_order_and_memory_has_bounds(tmp_path, seed):
    rng = random.Random(seed)
    texts = [f"q{i}" + "x" * rng.choice((0, 10, 3000)) for i in range(150)]
    write(tmp_path / "in.jsonl", (request(i, t) for i, t in enumerate(texts)))
    limits = BatchLimits(running=8, window=16, request_bytes=4000, answer_bytes=6000)
    target = HeldTarget()
    runner = made(tmp_path, target, limits)
    seen = []
    put = runner.results.write

    def watched(number, line):
        seen.append((number - runner.results.next, runner.held))
        put(number, line)
        assert runner.results.early_bytes <= limits.answer_bytes + 8 * 4000

    runner.results.write = watched
    asyncio.run(play(runner, target, seed))
    found = read(tmp_path / "out.jsonl")
    assert [line["custom_id"] for line in found] == [f"r{i}" for i in range(150)]
    assert [line["response"]["body"]["echo"] for line in found] == texts
    assert 1 < target.most <= 8 and max(ahead for ahead, _ in seen) < 16
    assert max(held for _, held in seen) <= 4000 and runner.held == runner.running == 0


def test_lines_that_are_no_requests_become_error_lines(tmp_path):
    bad = [
        "not json\n", "\n", '{"custom_id": "torn"\n', "[1]\n", "\xff\n",
        json.dumps({"custom_id": "no-url", "body": {}}) + "\n",
        json.dumps({**request(1), "custom_id": 7}) + "\n", request(2, method="GET"), request(3, url="/v1/none"),
        request(4, url="/sleep"), request(5, body={"stream": True}), request(6, body={"stream": "yes"}), request(7),
        request(7), request(8, body={"stream": False, "messages": [{"role": "user", "content": "fine"}]}),
        json.dumps(request(9, "x" * 600)) + "\n", request(10),
    ]  # fmt: skip
    write(tmp_path / "in.jsonl", bad)
    target = HeldTarget()
    runner = made(tmp_path, target, BatchLimits(longest=500))
    asyncio.run(play(runner, target, 0))
    found = read(tmp_path / "out.jsonl")
    said = [(line["custom_id"], (line["error"] or {}).get("code")) for line in found]
    assert said == [
        (None, "invalid_json_line"), (None, "invalid_json_line"), (None, "invalid_request_line"),
        (None, "invalid_json_line"), ("no-url", "invalid_request_line"), (None, "invalid_request_line"),
        ("r2", "invalid_method"), ("r3", "invalid_url"), ("r4", "invalid_url"), ("r5", "invalid_request_line"),
        ("r6", "invalid_request_line"), ("r7", None), ("r7", "duplicate_custom_id"), ("r8", None),
        (None, "line_too_long"), ("r10", None),
    ]  # fmt: skip
    assert sorted(target.asked) == ["fine", "question 10", "question 7"]
    assert runner.progress.failed == 13 and runner.first_error.startswith("line 1: This line is not valid JSON")
    assert batch_lines.count(tmp_path / "in.jsonl") == len(found) == runner.progress.total


def test_errors_stand_where_openais_readers_and_vllms_look(tmp_path):
    reported = {"error": {"message": "too long", "type": "BadRequestError", "code": 400}}
    answers = {
        "bad": httpx.Response(400, json=reported, headers={"x-request-id": "abc"}),
        "page": httpx.Response(500, text="<html>"),
        "pretty": httpx.Response(200, text='{\n  "a": 1,\r\n "b": "x\\ny"}'),
    }
    write(tmp_path / "in.jsonl", (request(i, t) for i, t in enumerate(answers)))
    target = HeldTarget(answers.get)
    asyncio.run(play(made(tmp_path, target, BatchLimits()), target, 0))
    bad, page, pretty = read(tmp_path / "out.jsonl")
    assert bad["response"] == {"status_code": 400, "request_id": "abc", "body": reported}
    assert bad["error"] == {"code": "BadRequestError", "message": "too long"}
    assert page["response"] is None and page["error"]["code"] == "invalid_response"
    assert pretty["response"]["body"] == {"a": 1, "b": "x\ny"} and pretty["error"] is None


def test_a_server_that_is_busy_or_away_is_asked_again(tmp_path, monkeypatch):
    monkeypatch.setattr(random, "uniform", lambda a, b: 0.0)
    script: dict[str, list[Any]] = {
        "busy": [httpx.Response(429, json={}, headers={"retry-after": "0"})] * 6 + [httpx.Response(200, json={})],
        "away": [httpx.ConnectError("x"), httpx.Response(503, json={}), httpx.Response(200, json={})],
        "dead": [httpx.ReadError("x")] * 3, "down": [httpx.Response(503, json={"error": {"message": "no"}})] * 3,
    }  # fmt: skip
    write(tmp_path / "in.jsonl", (request(i, t) for i, t in enumerate(script)))
    target = HeldTarget(lambda text: script[text].pop(0))
    asyncio.run(play(made(tmp_path, target, BatchLimits()), target, 0))
    found = read(tmp_path / "out.jsonl")
    codes = [(line["response"] or {}).get("status_code") for line in found]
    assert codes == [200, 200, None, 503] and not any(script.values())
    assert found[2]["error"]["code"] == "connection_error" and target.readied == 6


def test_a_server_that_is_gone_for_good_ends_the_run_and_writes_no_errors(tmp_path, monkeypatch):
    monkeypatch.setattr(random, "uniform", lambda a, b: 0.0)
    write(tmp_path / "in.jsonl", (request(i) for i in range(50)))
    target = HeldTarget(lambda text: httpx.ConnectError("x") if text != "question 0" else httpx.Response(200, json={}))

    async def never() -> None:
        raise StartupError("gone")

    target.wait_ready = never
    with pytest.raises(StartupError, match="gone"):
        asyncio.run(play(made(tmp_path, target, BatchLimits()), target, 0))
    assert [line["error"] for line in read(tmp_path / "out.jsonl")] in ([], [None])


@pytest.mark.parametrize("kept", [0, 1, 7, 20])
@pytest.mark.parametrize("torn", ["", '{"id": "x", "custom_id": "r'])
def test_resume_goes_on_after_the_last_whole_line(tmp_path, kept, torn):
    write(tmp_path / "in.jsonl", ["no json\n" if i == 3 else request(i) for i in range(20)])
    target = HeldTarget()
    asyncio.run(play(made(tmp_path, target, BatchLimits(running=4)), target, 1))
    whole = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_bytes(b"".join(whole[:kept]) + torn.encode())
    target = HeldTarget()
    runner = made(tmp_path, target, BatchLimits(running=4), resume=True)
    runner.skip_written()
    asyncio.run(play(runner, target, 2))
    again = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
    assert again[:kept] == whole[:kept] and len(target.asked) == 20 - kept - (kept < 4)
    assert [json.loads(a)["custom_id"] for a in again] == [json.loads(a)["custom_id"] for a in whole]


def test_resume_refuses_an_output_of_another_input(tmp_path):
    write(tmp_path / "in.jsonl", (request(i) for i in range(3)))
    out = tmp_path / "out.jsonl"
    for text, why in (
        ("".join(f'{{"id": "x", "custom_id": "r{i}"}}\n' for i in (0, 2)), r"line 2 of .* is about 'r2'.*'r1'"),
        ("".join(f'{{"id": "x", "custom_id": "r{i}"}}\n' for i in range(4)), "is not there"),
        ("something else\n", "line 1 of .* is no line of a batch's output"),
    ):  # fmt: skip
        out.write_text(text)
        with pytest.raises(StartupError, match=why):
            made(tmp_path, HeldTarget(), BatchLimits(), resume=True).skip_written()


class Restarting:
    """A supervisor whose engine is away at first."""

    def __init__(self, accepting_after: int) -> None:
        self.left, self.failing, self.task = accepting_after, False, None
        self.on_fatal: Any = None

    @property
    def accepting(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_an_engine_of_its_own_is_asked_through_the_servers_app(tmp_path, checkpoint, monkeypatch):
    monkeypatch.setattr(batch_targets, "POLL", 0.0)
    harness = scripted_app(checkpoint)
    pooled = request(3, url="/v1/embeddings", body={"input": "x"})
    write(tmp_path / "in.jsonl", [
        request(0), request(1, url="/v1/completions", body={"prompt": ["a", "b"], "n": 2}),
        request(2, url="/v1/responses", body={"input": "x"}), pooled, request(4, body={"messages": 7}),
    ])  # fmt: skip

    async def work() -> None:
        supervisor = Restarting(3)
        target = batch_targets.LocalEngine(harness.app(), cast(Any, supervisor))
        await target.wait_ready()
        await made(tmp_path, target, BatchLimits()).run()
        supervisor.left, supervisor.failing = 9, True
        with pytest.raises(StartupError, match="ends again and again"):
            await target.wait_ready()
        supervisor.on_fatal("no such model", 2)
        with pytest.raises(StartupError, match="no such model"):
            await target.wait_ready()

    asyncio.run(work())
    chat, texts, response, refused, wrong = read(tmp_path / "out.jsonl")
    assert (
        chat["response"]["body"]["choices"][0]["message"]["content"] == "Hello wörld, 日本!" and chat["error"] is None
    )
    assert len(texts["response"]["body"]["choices"]) == 4 and response["response"]["body"]["object"] == "response"
    assert (refused["response"]["status_code"], wrong["response"]["status_code"]) == (400, 400)
    assert "--runner pooling" in refused["error"]["message"] and wrong["error"]["code"] == "BadRequestError"
    assert len(chat["response"]["request_id"]) == 32
