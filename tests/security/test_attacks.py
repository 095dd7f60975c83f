"""Every named attack on a real server over HTTP and on ``LLM.chat``: refused in time, at no cost, nothing broken."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

import httpx
import pytest

from tests.hostile import app as hostile_app
from tests.hostile.attacks import ATTACKS, CHAT, GOOD, Scene, data, lay_out
from tests.hostile.web import Web
from tests.traffic.server_process import ROOT, is_decode_worker, server
from trencadis import LLM, SamplingParams
from trencadis.core.errors import TrencadisError
from trencadis.multimodal.sources import http_fetch

FETCH = 0.5
"""Seconds that a fetch may take here."""
WITHIN = 5.0
"""Five times the bar of a second, for a busy machine."""
MEMORY = 64 << 20
OFFLINE = [name for name, attack in ATTACKS.items() if attack.offline]


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    web = Web(GOOD)
    yield Scene(web, lay_out(tmp_path_factory.mktemp("attacked")))
    assert web.trapped == [], "something behind the server's own address was asked"
    web.close()


@pytest.fixture(scope="module")
def running(scene, vl_checkpoint, tmp_path_factory):
    flags = [
        str(vl_checkpoint), "--app", "tests.hostile.app:build", "--dtype", "float32",
        "--kv-cache-memory-bytes", "32MiB",
        "--limit-mm-per-prompt", "image=4", "--image-fetch-timeout", str(FETCH), "--mm-processor-cache-gb", "0",
        "--allowed-local-media-path", str(scene.root), "--served-model-name", "m",
    ]  # fmt: skip
    path = str(ROOT)
    with server(tmp_path_factory.mktemp("server"), *flags, PYTHONPATH=path) as running:
        for _ in range(2):
            asyncio.run(together(running, 2 * (os.cpu_count() or 1)))
        running.files = len(os.listdir(f"/proc/{running.process.pid}/fd"))  # type: ignore[attr-defined]
        yield running


async def together(running, count):
    """Good images at a time, so that every worker is up."""
    async with httpx.AsyncClient(base_url=running.url, timeout=60, trust_env=False) as http:
        answers = await asyncio.gather(*(http.post(CHAT, json=chat([data(GOOD)])) for _ in range(count)))
    assert all(a.status_code == 200 for a in answers)


@pytest.fixture(scope="module")
def llm(scene, vl_checkpoint):
    patch = pytest.MonkeyPatch()
    patch.setattr(http_fetch, "is_public", http_fetch.is_public)
    patch.setattr(http_fetch.Fetcher, "_system_resolver", http_fetch.Fetcher._system_resolver)
    hostile_app.install()
    made = LLM(
        str(vl_checkpoint), dtype="float32", kv_cache_memory_bytes=32 << 20, limit_mm_per_prompt={"image": 4},
        mm_processor_cache_gb=0.0, allowed_local_media_path=scene.root,
    )  # fmt: skip
    made.service.images.loader._fetcher.timeout = FETCH
    yield made
    pool = made.service.images.decoder.pool
    assert 1 <= len(pool.pids()) <= pool.size
    made.close()
    assert pool.pids() == []
    patch.undo()


def chat(content, **fields):
    return {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 1, **fields}


def tree(pid):
    """A process and all that it started."""
    children = [int(c) for t in Path(f"/proc/{pid}/task").glob("*/children") for c in t.read_text().split()]
    return [pid, *(p for c in children for p in tree(c))]


def status(pid, key):
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(key)), 0)


class Meter:
    """Peak memory of a process and its children beyond what each held before (a new worker: what an idle one has)."""

    IDLE_SECONDS = 48 << 20

    def __init__(self, pid):
        self.pid = pid
        self.before = {}
        for p in tree(pid):
            Path(f"/proc/{p}/clear_refs").write_text("5")
            self.before[p] = status(p, "VmRSS")

    def extra(self):
        return sum(max(0, status(p, "VmHWM") - self.before.get(p, self.IDLE_SECONDS)) for p in tree(self.pid))


measured = []
"""(seconds, bytes, name) of every attack, for whoever runs this with -s."""


def judge(attack, code, took, extra):
    measured.append((took, extra, attack.name))
    assert code == (422 if attack.may_be_late and took > FETCH else attack.status)
    assert took < WITHIN + (FETCH if attack.slow else 0)
    assert not attack.slow or took > 0.5 * FETCH, "it is answered at its deadline"
    assert extra < MEMORY, f"{extra >> 20} MB"


def error_message(message, scene):
    """Our own words: short, and giving nothing away."""
    assert 0 < len(message) < 200
    for secret in ("PIL", "0x7", "Error", "Traceback", "/proc", "/etc", "127.", "169.254", "BytesIO", str(scene.root)):
        assert secret not in message, message


def send(running, attack, scene):
    if attack.body is not None:
        if isinstance(attack.body, bytes):
            return running.http.post(attack.path, content=attack.body, headers={"content-type": "application/json"})
        return running.http.post(attack.path, json={"model": "m", **attack.body})
    body = json.dumps(chat(attack.content(scene), **attack.fields)).encode()
    return running.http.post(attack.path, content=body, headers={"content-type": "application/json"})


@pytest.mark.parametrize("name", ATTACKS)
def test_over_http(running, scene, name):
    attack = ATTACKS[name]
    if attack.before is not None:
        assert running.http.post(CHAT, json=chat(attack.before(scene))).status_code == 200
    meter, start = Meter(running.process.pid), time.monotonic()
    answer = send(running, attack, scene)
    took = time.monotonic() - start
    judge(attack, answer.status_code, took, meter.extra())
    if attack.status == 200:
        assert attack.harmless(answer.json()["usage"]), answer.json()["usage"]
    else:
        error = answer.json()["error"]
        error_message(error["message"], scene)
        assert error["code"] == answer.status_code
    good = running.http.post(CHAT, json=chat([data(GOOD), {"type": "text", "text": "?"}]))
    assert good.status_code == 200 and good.json()["usage"]["prompt_tokens"] > 10


@pytest.mark.parametrize("name", OFFLINE)
def test_offline(llm, scene, name):
    attack = ATTACKS[name]
    params = SamplingParams(max_tokens=1)

    def ask(content):
        return llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)[0]

    if attack.before is not None:
        ask(attack.before(scene))
    content = attack.content(scene)
    meter, start = Meter(os.getpid()), time.monotonic()
    try:
        output, code = ask(content), 200
    except TrencadisError as error:
        code = error.status
        error_message(error.message, scene)
    judge(attack, code, time.monotonic() - start, meter.extra())
    if code == 200:
        assert attack.harmless({"prompt_tokens": len(output.prompt_token_ids)})
    assert len(ask([data(GOOD), {"type": "text", "text": "?"}]).prompt_token_ids) > 10


def test_there_are_enough_of_them():
    refused = [a for a in ATTACKS.values() if a.status >= 400]
    assert len(refused) >= 60 and len([a for a in refused if a.offline]) >= 60


def test_nothing_was_left_behind(running, scene):
    """After all attacks: no decode worker too many, no connection open, the same engine."""
    assert len(running.engine_pids()) == 1
    workers = [p for p in tree(running.process.pid) if is_decode_worker(p)]
    assert len(workers) <= min(8, os.cpu_count() or 1)
    assert len(os.listdir(f"/proc/{running.process.pid}/fd")) <= running.files + 8
    assert "Traceback" not in running.text()
    quick = [m for m in measured if not ATTACKS[m[2]].slow]
    for what, worst in (("slowest", max(quick)), ("largest", max(quick, key=lambda m: m[1]))):
        print(f"{what} of {len(quick)}: {worst[0]:.3f} s, {worst[1] >> 20} MB, {worst[2]}")
