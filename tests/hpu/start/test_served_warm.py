"""``serve --device hpu`` with a whole warm-up in containers of four releases, whose stub refuses what cards may."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hpu.start.test_container import LIMITS, SMALL, TOKENS
from tests.stubs.gaudi_container import PUBLISHED, make

pytestmark = [pytest.mark.part("gaudi"), pytest.mark.long]

RELEASES = ("1.20", "1.23", "1.24.1", "1.24.2")
REFUSALS: dict[str, dict[str, str]] = {
    "no pinned memory": {"HABANA_STUB_PIN": "refused"},
    "workspace, late": {"HABANA_STUB_PIN": "plain", "HABANA_STUB_OOM": "late:9"},
    "a graph, late": {"HABANA_STUB_GRAPH": "late:15", "TRENCADIS_HPU_DECODE_LAYERS": "2"},
}
"""What the stub refuses beside the builtin of FusedSDPA, which is always there."""
COARSE = {
    "VLLM_PROMPT_QUERY_BUCKET_MIN": "128", "VLLM_DECODE_BLOCK_BUCKET_MIN": "4", "VLLM_PROMPT_CTX_BUCKET_MAX": "4",
    "HABANA_STUB_GIB": "4",
}  # fmt: skip
"""A plan of few buckets, all of which a warm-up makes."""
READY = 900
"""Seconds that a start may take."""


@contextlib.contextmanager
def serve(env: dict[str, str], log: Path, *words: str) -> Iterator[str]:
    """Yields the URL of a server that is ready, or "" for one that has ended."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    line = [sys.executable, "-P", "-m", "trencadis", "serve", "--device", "hpu", "--port", str(port), *words]
    with open(log, "w") as out:
        server = subprocess.Popen(line, cwd=log.parent, env=env, stdout=out, stderr=out, start_new_session=True)
    try:
        end, url = time.monotonic() + READY, f"http://127.0.0.1:{port}"
        while server.poll() is None:
            assert time.monotonic() < end, log.read_text()[-4000:]
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/ready", timeout=2) as reply:
                if reply.status == 200:
                    break
            time.sleep(0.3)
        yield url if server.poll() is None else ""
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def ask(url: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(f"{url}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=300) as reply:
        found: dict[str, Any] = json.load(reply)
    return found


@pytest.mark.parametrize("refused", REFUSALS)
@pytest.mark.parametrize("release", RELEASES)
def test_a_warmed_server_answers_as_the_cpu_does_or_ends_in_one_line(
    release: str, refused: str, tmp_path: Path
) -> None:
    torch, plugin = next((t, p) for t, p in PUBLISHED.items() if p.startswith(release))
    container, log = make(tmp_path / "c", torch, plugin), tmp_path / "log"
    env = container.variables(**SMALL, **COARSE, **REFUSALS[refused])
    begun = time.monotonic()
    with serve(env, log, *shlex.split(LIMITS)) as url:
        seconds = time.monotonic() - begun
        if url:
            chat = {"messages": [{"role": "user", "content": "How many circles are there?"}], "temperature": 0}
            answer = ask(url, "/v1/chat/completions", {**chat, "max_tokens": 8, "return_token_ids": True})
            assert str(answer["choices"][0]["token_ids"]) == TOKENS
            buckets = ask(url, "/buckets")["buckets"]
            assert not [b for b in buckets if b["state"] == "planned" and not b["failed"]], "given up for no reason"
            outcome = f"right, {len(buckets)} buckets warm"
        else:
            (outcome,) = [text for text in log.read_text().splitlines() if text.startswith("trencadis: ")]
            assert any(text in outcome for text in ("workspace Allocation of size", "compiler refuses"))
    print(f"\n{release}, {refused}: {outcome} after {seconds:.0f} s")
    assert "Traceback" not in log.read_text(), log.read_text()[-4000:]
    assert f"hpu: habana-torch-plugin {plugin}, torch {torch}" in log.read_text()
