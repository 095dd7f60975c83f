"""How much the API process grows by the largest answers that are allowed, and by many ordinary requests."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.checkpoints import classifier
from tests.operations.test_lost_processes import make_image
from tests.traffic.server_process import RunningServer, server
from trencadis.assets import demo_path

MIB = 1 << 20
GROWTH = (256 + 64) * MIB
"""Bytes by which the API process may grow: all answers that wait, and one more."""
AT_ONCE = 8
SLOPE = 0.4
"""MB by which 1,000 requests may make the API process grow."""
TEXT = "word " * 200
FIT = {"n": 60, "max_tokens": 500, "temperature": 1.0, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 20}
LARGEST: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT | FIT,
    "/v1/completions": {"prompt": [TEXT] * 128, "prompt_logprobs": 20, "max_tokens": 1},
    "/v1/completions echo": {"prompt": [TEXT] * 60, "echo": True, "logprobs": 20, "max_tokens": 1},
    "/v1/chat/completions/batch": {"messages": [CHAT["messages"]] * 60, "logprobs": True, "top_logprobs": 20,
                                   "max_tokens": 500, "ignore_eos": True},
    "/v1/responses": {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 20,
                      "max_output_tokens": 30_000, "ignore_eos": True},
    "/v1/messages": {"messages": CHAT["messages"], "max_tokens": 8_000, "ignore_eos": True},
    "/tokenize": {"prompt": "a b " * 20_000, "return_token_strs": True},
}  # fmt: skip
ONE_LAYER = (
    "--threads", "1", "--max-num-seqs", "128", "--load-format", "dummy",
    "--hf-overrides", '{"text_config": {"num_hidden_layers": 1}}',
)  # fmt: skip
"""The demo with one random layer: only the API process is measured. The whole demo attends to 30,000 tokens of eight
answers for half an hour; a message has no log-probabilities, so that 30,000 of its tokens take 200 KB."""
POOLED: dict[str, dict[str, Any]] = {
    "/pooling": {"input": [[5] * 256] * 1000, "task": "token_embed"},
    "/v1/embeddings": {"input": [[5]] * 1024},
    "/rerank": {"query": "a", "documents": [f"word {i}" for i in range(1000)]},
}


def grown(running: RunningServer) -> int:
    """Bytes of the API process's largest size so far."""
    status = Path(f"/proc/{running.process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) << 10


def size_of(running: RunningServer) -> int:
    status = Path(f"/proc/{running.process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) << 10


def ask_at_once(running: RunningServer, path: str, body: Any, count: int) -> Counter[int]:
    statuses = Counter[int]()

    def ask() -> None:
        with (
            httpx.Client(base_url=running.url, timeout=600, trust_env=False) as client,
            client.stream("POST", path, json=body) as answer,
        ):
            for _ in answer.iter_bytes(1 << 16):
                pass
            statuses[answer.status_code] += 1

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return statuses


def measure_growth(running: RunningServer, requests: dict[str, dict[str, Any]]) -> Iterator[tuple[str, int]]:
    """Route -> bytes by which it made the process grow at most, each after the last one's answers have gone."""
    for name, body in requests.items():
        path = name.split(" ")[0]
        ask_at_once(running, path, body, 1)
        Path(f"/proc/{running.process.pid}/clear_refs").write_text("5")
        before = size_of(running)
        statuses = ask_at_once(running, path, body, AT_ONCE)
        assert set(statuses) <= {200, 429} and statuses[200], (name, statuses)
        print(name, dict(statuses), f"{(grown(running) - before) / MIB:.0f} MiB", flush=True)
        yield name, grown(running) - before


@pytest.mark.long
def test_the_largest_answers_of_each_route(tmp_path: Path) -> None:
    with server(tmp_path, "--model", str(demo_path()), *ONE_LAYER) as running:
        found = dict(measure_growth(running, LARGEST))
    model = classifier(tmp_path / "classes")
    pooled = ("--runner", "pooling", "--convert", "embed", "--threads", "1", "--max-model-len", "512")
    with server(tmp_path, "--model", str(model), *pooled) as running:
        found |= dict(measure_growth(running, POOLED))
    assert max(found.values()) <= GROWTH, found


def mixed(number: int) -> tuple[str, dict[str, Any]]:
    """One of many sorts of requests, none like another."""
    rng = random.Random(number)
    talk = [{"role": "user", "content": f"{number} " + "word " * rng.randint(1, 40)}]
    image = [{"type": "image_url", "image_url": {"url": make_image(number)}}, {"type": "text", "text": f"{number}?"}]
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [f"a{number % 500}", "b"]}}}
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": talk, "max_tokens": 4}),
        ("/v1/chat/completions", {"messages": talk, "max_tokens": 4, "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": image}], "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": talk, "max_tokens": 4, "response_format": form}),
        ("/v1/chat/completions", {"messages": talk, "temperature": 9}),
        ("/v1/completions", {"prompt": talk[0]["content"], "max_tokens": 3, "logprobs": 3}),
        ("/v1/messages", {"messages": talk, "max_tokens": 3}),
        ("/v1/responses", {"input": talk[0]["content"], "max_output_tokens": 3}),
        ("/tokenize", {"prompt": talk[0]["content"]}),
        ("/nothing", {}),
    ]
    return rng.choice(kinds)


@pytest.mark.long
def test_twenty_thousand_mixed_requests(tmp_path: Path) -> None:
    """The caches are filled by the first quarter; they are small here, so that they are full by then."""
    flags = ("--threads", "1", "--mm-processor-cache-gb", "0.01", "--num-gpu-blocks-override", "2000")
    count, sizes = 20_000, list[tuple[int, int]]()
    with server(tmp_path, "--model", str(demo_path()), *flags) as running:
        todo, lock = iter(range(count)), threading.Lock()

        def ask() -> None:
            with httpx.Client(base_url=running.url, timeout=120, trust_env=False) as client:
                while True:
                    with lock:
                        number = next(todo, None)
                    if number is None:
                        return
                    path, body = mixed(number)
                    client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
                    if number % 1000 == 999:
                        sizes.append((number, size_of(running)))

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    later = [(n, s) for n, s in sizes if n >= count // 4]
    slope = (min(s for _, s in later[-4:]) - min(s for _, s in later[:4])) / (later[-1][0] - later[0][0]) * 1000 / 1e6
    print([round(s / MIB) for _, s in sizes], f"{slope:.2f} MB per 1,000")
    assert slope <= SLOPE, sizes
