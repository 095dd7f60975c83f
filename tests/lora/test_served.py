"""Adapters behind a real server: names, cards, loading and unloading while it runs, several processes and engines."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import threading
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.fakes import checkpoints
from tests.fakes.adapters import adapter_of
from tests.oracles.transformers_model import make_image
from tests.traffic.server_process import RunningServer, server
from trencadis import LLM, SamplingParams
from trencadis.assets import demo_path
from trencadis.core.lora.adapter_files import CONFIG, WEIGHTS
from trencadis.offline_adapters import LoRARequest

MODEL = "trencadis-demo"
PROMPT = "The image shows a red circle and"
LENGTH = 12
CLIENT = httpx.Client(
    timeout=60, trust_env=False, verify=False, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
)
"""A connection for each request, so that API processes change; without certificates, which take long to read."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    allowed = tmp_path_factory.mktemp("allowed")
    return {
        name: adapter_of(demo_path(), allowed / name, seed=seed, rank=rank)
        for name, seed, rank in (("a", 1, 8), ("b", 2, 4), ("c", 3, 16), ("wide", 4, 32))
    }


@pytest.fixture(scope="module")
def broken(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of adapters that cannot be served -> what the answer says."""
    allowed = folders["a"].parent / "broken"
    other = checkpoints.llama(tmp_path_factory.mktemp("llama"))
    adapter_of(other, allowed / "of another base")
    adapter_of(demo_path(), allowed / "alpha 0", lora_alpha=0)
    adapter_of(demo_path(), allowed / "cut short", seed=5)
    adapter_of(demo_path(), allowed / "not finite", seed=6)
    adapter_of(demo_path(), allowed / "linked", seed=7)
    adapter_of(demo_path(), allowed / "dora", use_dora=True)
    (allowed / "empty").mkdir()
    file = allowed / "cut short" / WEIGHTS
    file.write_bytes(file.read_bytes()[:-10])
    file = allowed / "not finite" / WEIGHTS
    tensors = load_file(file)
    tensors[min(tensors)][0, 0] = float("nan")
    save_file(tensors, file)
    file = allowed / "linked" / WEIGHTS
    file.unlink()
    file.symlink_to(folders["a"] / WEIGHTS)
    says = {
        "of another base": "is for another model", "alpha 0": "lora_alpha is 0; it must be a number above 0",
        "cut short": "is cut short", "not finite": "holds values that are not finite",
        "linked": "is a link out of the folder", "dora": "use_dora is true", "empty": "holds no LoRA adapter",
        "missing": "is no folder of an adapter",
    }  # fmt: skip
    return {str(allowed / name): why for name, why in says.items()}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path]) -> Iterator[RunningServer]:
    flags = [
        "--dtype", "float32", "--kv-cache-memory-bytes", "64MiB", "--max-num-seqs", "8", "--api-server-count", "2",
        "--data-parallel-size", "2", "--enable-lora", "--max-loras", "2", "--max-cpu-loras", "3",
        "--allowed-lora-path", str(folders["a"].parent), "--lora-modules", f"a={folders['a']}",
        f'{{"name": "b", "path": "{folders["b"]}", "base_model_name": "acme"}}',
        "--default-mm-loras", json.dumps({"image": str(folders["a"])}),
    ]  # fmt: skip
    with server(tmp_path_factory.mktemp("served"), *flags, VLLM_ALLOW_RUNTIME_LORA_UPDATING="1") as started:
        yield started


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, str]:
    """The answer of the base and of each adapter, offline."""
    llm = LLM(str(demo_path()), dtype="float32", kv_cache_memory_bytes=64 << 20, enable_lora=True, max_loras=3)
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    names: list[str | None] = [None, "a", "b", "c"]
    asked = [None if n is None else LoRARequest(n, 1, str(folders[n])) for n in names]
    made = llm.generate([PROMPT] * 4, params, use_tqdm=False, lora_request=asked)
    llm.close()
    return {name or MODEL: one.outputs[0].text for name, one in zip(names, made, strict=True)}


def complete(running: RunningServer, model: str, **more: Any) -> httpx.Response:
    body = {
        "model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": LENGTH, "ignore_eos": True, **more
    }  # fmt: skip
    return CLIENT.post(f"{running.url}/v1/completions", json=body)


def text(running: RunningServer, model: str) -> str:
    answer = complete(running, model)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    found: str = answer.json()["choices"][0]["text"]
    return found


def change(running: RunningServer, what: str, **body: Any) -> tuple[int, str]:
    answer = CLIENT.post(f"{running.url}/v1/{what}_lora_adapter", json=body)
    return answer.status_code, answer.text


def test_a_name_answers_as_offline_in_any_process(running: RunningServer, expected: dict[str, str]) -> None:
    assert len(set(expected.values())) == 4
    for _ in range(4):  # connections and engines change
        for name in (MODEL, "a", "b"):
            assert text(running, name) == expected[name]
    cards = {card["id"]: card for card in httpx.get(f"{running.url}/v1/models", trust_env=False).json()["data"]}
    assert [*cards] == [MODEL, "a", "b"]
    assert (cards["a"]["parent"], cards["b"]["parent"], cards[MODEL]["parent"]) == (MODEL, "acme", None)
    metrics = httpx.get(f"{running.url}/metrics", trust_env=False).text
    assert "vllm:lora_requests_info{" in metrics and 'max_lora="2"' in metrics
    missing = complete(running, "nobody")
    assert missing.status_code == 404 and "Valid aliases: trencadis-demo, a, b" in missing.text


def test_the_openai_client_names_an_adapter_as_its_model(
    running: RunningServer, folders: dict[str, Path], expected: dict[str, str]
) -> None:
    """Follows the steps of vLLM's guide to adapters: list, load, complete, chat as a stream, unload."""
    import openai

    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        assert {"a", "b", MODEL} <= {one.id for one in client.models.list()}
        body = {"lora_name": "c", "lora_path": str(folders["c"])}
        assert "added" in client.post("/load_lora_adapter", body=body, cast_to=str)
        made = client.completions.create(
            model="c", prompt=PROMPT, temperature=0, max_tokens=LENGTH, extra_body={"ignore_eos": True}
        )
        assert (made.model, made.choices[0].text) == ("c", expected["c"])
        asked: Any = [{"role": "user", "content": "What is in the picture?"}]
        chats = {
            name: client.chat.completions.create(model=name, messages=asked, temperature=0, max_tokens=LENGTH)
            for name in ("c", MODEL)
        }
        whole = {name: chat.choices[0].message.content for name, chat in chats.items()}
        stream = client.chat.completions.create(
            model="c", messages=asked, temperature=0, max_tokens=LENGTH, stream=True
        )
        assert "".join(part.choices[0].delta.content or "" for part in stream if part.choices) == whole["c"]
        assert whole["c"] != whole[MODEL]
        assert "removed" in client.post("/unload_lora_adapter", body={"lora_name": "c"}, cast_to=str)
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="c", prompt=PROMPT, max_tokens=1)


def test_images_bring_their_default_adapter(running: RunningServer) -> None:
    """A request to the base model with an image has the adapter of ``--default-mm-loras``; one with text alone none."""
    data = io.BytesIO()
    make_image(np.random.default_rng(1), low=60, high=120, aspect=2).save(data, "PNG")
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64encode(data.getvalue()).decode()}"}}
    words = {"type": "text", "text": "What is in the picture?"}

    def chat(model: str, *parts: dict[str, Any]) -> str:
        body = {
            "model": model, "messages": [{"role": "user", "content": [*parts]}], "temperature": 0, "max_tokens": LENGTH,
            "ignore_eos": True,
        }  # fmt: skip
        answer = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
        assert answer.status_code == 200, answer.text
        found: str = answer.json()["choices"][0]["message"]["content"]
        return found

    seen, own, other = (chat(model, image, words) for model in (MODEL, "a", "b"))
    assert seen == own != other
    assert chat(MODEL, words) != chat("a", words)


def test_adapters_come_and_go(running: RunningServer, folders: dict[str, Path], expected: dict[str, str]) -> None:
    for body, status, says in (
        ({"lora_name": "a", "lora_path": str(folders["a"])}, 400, "has already been loaded"),
        ({"lora_name": MODEL, "lora_path": str(folders["a"])}, 400, "is the name of the base model"),
        ({"lora_name": "x", "lora_path": str(folders["wide"])}, 400, "has rank 32; --max-lora-rank 32"),
        ({"lora_name": "x", "lora_path": str(demo_path())}, 400, "is not inside the folder of --allowed-lora-path"),
        ({"lora_name": "x", "lora_path": "owner/name"}, 404, "There is no folder owner/name here"),
        ({"lora_name": "x"}, 400, "lora_path"),
    ):
        answer = change(running, "load", **body)
        assert answer[0] == status and says in answer[1], answer
    assert change(running, "unload", lora_name="x")[0] == 404
    assert change(running, "load", lora_name="c", lora_path=str(folders["c"]))[0] == 200
    for _ in range(4):
        assert text(running, "c") == expected["c"]
    replaced = change(running, "load", lora_name="c", lora_path=str(folders["a"]), load_inplace=True)
    assert replaced[0] == 200 and text(running, "c") == expected["a"]
    assert change(running, "unload", lora_name="c") == (200, "Success: LoRA adapter 'c' removed successfully.")
    for _ in range(4):
        assert complete(running, "c").status_code == 404


def test_more_adapters_are_served_than_host_memory_holds(
    running: RunningServer, folders: dict[str, Path], expected: dict[str, str]
) -> None:
    """``--max-cpu-loras`` is 3: engines read those that requests name again from their folders, as vLLM's do."""
    for name in ("a2", "b2", "c", "c2"):
        made = write_scaled(folders[name[0]], folders["a"].parent / name, 3) if name != "c" else folders["c"]
        assert change(running, "load", lora_name=name, lora_path=str(made))[0] == 200
    names = ["a", "b", "a2", "b2", "c", "c2", MODEL]
    assert [one["id"] for one in CLIENT.get(f"{running.url}/v1/models").json()["data"]] == [MODEL, *names[:-1]]
    first = {name: text(running, name) for name in names}
    assert len({*first.values()}) == len(names) and all(first[name] == expected[name] for name in expected)
    with ThreadPoolExecutor(len(names)) as pool:
        for _ in range(3):
            assert dict(zip(names, pool.map(lambda name: text(running, name), names), strict=True)) == first
    for name in ("a2", "b2", "c", "c2"):
        assert change(running, "unload", lora_name=name)[0] == 200


def write_scaled(source: Path, out: Path, times: int) -> Path:
    """Copies an adapter whose scale is ``times`` that of ``source``."""
    shutil.copytree(source, out, dirs_exist_ok=True)
    config = json.loads((out / CONFIG).read_text())
    (out / CONFIG).write_text(json.dumps({**config, "lora_alpha": config["lora_alpha"] * times}))
    return out


def test_what_cannot_be_loaded_is_one_line_and_running_requests_lose_nothing(
    running: RunningServer, broken: dict[str, str]
) -> None:
    """While an adapter answers: files that are at fault, also as other weights for its own name."""
    whole = complete(running, "a", max_tokens=300).json()["choices"][0]["text"]
    found: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        running_request = pool.submit(complete, running, "a", max_tokens=300)
        for path, why in broken.items():
            for name, inplace in (("x", False), ("a", True)):
                status, says = change(running, "load", lora_name=name, lora_path=path, load_inplace=inplace)
                missing = Path(path).name in ("empty", "missing")
                assert (
                    status == (404 if missing else 400)
                    and why in says
                    and "\\n" not in says
                    and "Traceback" not in says
                ), says
                found.append(says)
        assert running_request.result().json()["choices"][0]["text"] == whole
    assert complete(running, "x").status_code == 404
    assert complete(running, "a", max_tokens=300).json()["choices"][0]["text"] == whole
    assert len(found) == 2 * len(broken)


def test_a_running_request_finishes_with_an_unloaded_adapter(running: RunningServer, folders: dict[str, Path]) -> None:
    assert change(running, "load", lora_name="c", lora_path=str(folders["c"]))[0] == 200
    whole = complete(running, "c", max_tokens=300).json()["choices"][0]["text"]
    body = {"model": "c", "prompt": PROMPT, "temperature": 0, "max_tokens": 300, "ignore_eos": True, "stream": True}
    events = 0
    with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=60, trust_env=False) as answer:
        streamed = ""
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                events += 1
                streamed += httpx.Response(200, content=line[6:]).json()["choices"][0]["text"]
            if events == 3:
                assert change(running, "unload", lora_name="c")[0] == 200
                events += 1
    assert streamed == whole
    assert complete(running, "c").status_code == 404


def test_the_metric_names_the_adapter_of_a_running_request(running: RunningServer) -> None:
    def names() -> set[str]:
        text = httpx.get(f"{running.url}/metrics", trust_env=False).text
        return {*re.findall(r'vllm:lora_requests_info\{.*running_lora_adapters="(\w+)"', text)}

    with ThreadPoolExecutor(1) as pool:
        request, seen = pool.submit(complete, running, "b", max_tokens=400), set[str]()
        while not request.done():
            seen |= names()
            time.sleep(0.02)
    assert request.result().status_code == 200 and seen == {"b"}


def test_an_engine_that_was_killed_returns_with_its_adapters(
    running: RunningServer, folders: dict[str, Path], expected: dict[str, str]
) -> None:
    """Those of the start, and one that was loaded while it ran."""
    assert change(running, "load", lora_name="c", lora_path=str(folders["c"]))[0] == 200
    for pid in running.engine_pids():
        os.kill(pid, signal.SIGKILL)
    end, good = time.monotonic() + 120, 0
    while time.monotonic() < end and good < 6:  # both engines are back, and both API processes know it
        good = good + 1 if complete(running, "a").status_code == 200 else 0
        time.sleep(0.1)
    for _ in range(4):
        assert {name: text(running, name) for name in (MODEL, "a", "c")} == {n: expected[n] for n in (MODEL, "a", "c")}
    assert change(running, "unload", lora_name="c")[0] == 200


@pytest.mark.long
def test_two_thousand_changes_under_traffic(
    running: RunningServer, folders: dict[str, Path], expected: dict[str, str]
) -> None:
    """No request fails or gets another adapter's answer, and memory stays flat, of engines and of all processes."""
    import psutil

    want = {name: text(running, name) for name in (MODEL, "a", "b")}
    own = {str(folders[name]): expected[name] for name in ("b", "c")}
    done, wrong, answered, begun = threading.Event(), list[str](), Counter[str](), time.monotonic()

    def traffic(name: str) -> None:
        while not done.is_set():
            answer = complete(running, name)
            found = answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text
            answered[name] += 1
            if found != want[name]:
                wrong.append(f"{name}: {found}")

    def memory() -> tuple[int, int]:
        """Bytes of the engines, and of all processes of the server."""
        whole = psutil.Process(running.process.pid)
        engines = [psutil.Process(pid) for pid in running.engine_pids()]
        sets = engines, [whole, *whole.children(recursive=True)]
        first, second = (sum(p.memory_info().rss for p in some) for some in sets)
        return first, second

    threads = [threading.Thread(target=traffic, args=(name,)) for name in want]
    for one in threads:
        one.start()
    before = after = (0, 0)
    try:
        for number in range(int(os.environ.get("TRENCADIS_TEST_CHANGES", "2000")) // 2):
            source = str(folders["c" if number % 2 else "b"])
            assert change(running, "load", lora_name="c", lora_path=source)[0] == 200
            assert text(running, "c") == own[source]
            assert change(running, "unload", lora_name="c")[0] == 200
            if number % 50 == 49:
                after = memory()
                before = before if before[0] else after
                took, held = time.monotonic() - begun, [round(size / 2**20, 1) for size in after]
                print(
                    f"{2 * number + 2} changes, {took:.0f} s, {answered.total()} other requests, MiB {held}", flush=True
                )
    finally:
        done.set()
        for one in threads:
            one.join()
    assert not wrong and min(answered.values()) > 0
    assert all(last < first + (64 << 20) for first, last in zip(before, after, strict=True))
