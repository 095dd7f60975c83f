"""One model on ranks that come over TCP gives the tokens of one rank: headless nodes, and torchrun's processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.oracles.transformers_model import assert_same
from tests.parallel.test_same_tokens import BASE, EMULATED, GREEDY, TIES, Wanted, answered, chats, same_of_many
from tests.traffic.image_chats import answers
from trencadis import LLM
from trencadis.assets import demo_path

pytestmark = pytest.mark.long

TP: dict[str, Any] = {"tensor_parallel_size": 2, "allow_tp_over_nodes": True}
GROUPS: dict[str, dict[str, Any]] = {
    "cpu, 2 ranks": TP, "hpu, 2 ranks": {**TP, **EMULATED}, "cpu, 2 stages": {"pipeline_parallel_size": 2},
}  # fmt: skip


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def wanted() -> Iterator[Wanted]:
    llm = LLM(str(demo_path()), **BASE)
    yield cache(lambda seeds: answered(llm, seeds))
    llm.close()


@pytest.mark.parametrize("name", GROUPS)
def test_two_hundred_prompts_over_two_nodes(
    name: str, wanted: Wanted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second node's rank outlives an engine and serves its successor."""
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    key, port = tmp_path / "group.key", free_port()
    key.write_text("k" * 44)
    key.chmod(0o600)
    shape = ["-pp", "2"] if "stages" in name else ["-tp", "2", "--allow-tp-over-nodes"]
    group = [*shape, "--nnodes", "2", "--master-port", str(port), "--group-key-file", str(key)]
    node = subprocess.Popen(
        [sys.executable, "-P", "-m", "trencadis.server.cli.main", "serve", str(demo_path()), *group, "--node-rank", "1",
         "--headless"],
    )  # fmt: skip
    shared = dict(nnodes=2, master_port=port, group_key_file=str(key), **GROUPS[name])
    try:
        llm = LLM(str(demo_path()), **{**BASE, **shared})
        print(f"\n{name}, two nodes: {same_of_many(llm, wanted)}")
        llm.close()
        again = LLM(str(demo_path()), **{**BASE, **shared})
        found = answers(again, chats(range(3)), GREEDY)
        assert_same([(a.tokens, b) for a, b in zip(found, wanted(range(20))[0][:3], strict=True)])
        again.close()
    finally:
        node.send_signal(signal.SIGTERM)
        assert node.wait(20) == 0


SCRIPT = """
import json, sys
from tests.parallel.test_same_tokens import BASE, answered
from trencadis import LLM
from trencadis.assets import demo_path
llm = LLM(str(demo_path()), **BASE, **json.loads(sys.argv[3]), distributed_executor_backend="external_launcher",
          master_port=int(sys.argv[2]))
for start in range(0, 200, 20):
    greedy, drawn = answered(llm, range(start, start + 20))
    open(sys.argv[1], "a").write(json.dumps([[a.tokens for a in greedy], drawn]) + "\\n")
llm.close()
"""


@pytest.mark.parametrize("shape", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_torchrun_starts_the_ranks(shape: str, wanted: Wanted, tmp_path: Path) -> None:
    """Rank 0 writes the answers; the other process stays in the constructor until then and ends well."""
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": os.getcwd(), "TRENCADIS_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run([*words, str(out), str(free_port()), json.dumps({shape: 2})], env=env, timeout=1500)
    assert done.returncode == 0
    chunks = [json.loads(line) for line in out.read_text().splitlines()]
    other = total = 0
    for number, (ours, ours_drawn) in enumerate(chunks):
        greedy, drawn = wanted(range(20 * number, 20 * number + 20))
        assert_same([(a, b) for a, b in zip(ours, greedy, strict=True)])
        other += sum(a != b for a, b in zip(ours_drawn, drawn, strict=True))
        total += len(drawn)
    print(f"\ntorchrun, {shape} 2: 200 prompts, {total} drawn answers, {other} differ")
    assert len(chunks) == 10 and other <= TIES * total
    assert not list((tmp_path / "groups").iterdir()), "the key is gone"


def test_a_server_whose_node_is_gone_waits_for_it(tmp_path: Path) -> None:
    """Its engine ends with the node's ranks, starts again, and serves once they have come back."""
    key, port, http = tmp_path / "group.key", free_port(), free_port()
    key.write_text("k" * 44)
    key.chmod(0o600)
    group = ["-tp", "2", "--nnodes", "2", "--allow-tp-over-nodes"]
    group += ["--master-port", str(port), "--group-key-file", str(key)]
    command = [sys.executable, "-P", "-m", "trencadis.server.cli.main", "serve", str(demo_path()), *group]
    command += ["--max-model-len", "512", "--kv-cache-memory-bytes", "64MiB"]
    far = [*command, "--node-rank", "1", "--headless"]
    server = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(http)])
    node = subprocess.Popen(far)
    try:
        _ready(http)
        node.kill()
        node.wait()
        node = subprocess.Popen(far)
        time.sleep(1)
        _ready(http)
    finally:
        for process in (server, node):
            process.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0 and node.wait(30) == 0


def _ready(port: int) -> None:
    import httpx

    end, body = time.monotonic() + 120, {"model": "", "prompt": "a", "max_tokens": 2}
    while True:
        try:
            body["model"] = httpx.get(f"http://127.0.0.1:{port}/v1/models").json()["data"][0]["id"]
            if httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=30).status_code == 200:
                return
        except httpx.HTTPError:
            assert time.monotonic() < end, "the server does not answer"
        time.sleep(0.3)
        assert time.monotonic() < end, "the server does not answer"
