"""The demo model behind a real server process, through the official client and plain HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from tests.oracles.transformers_model import conversation
from tests.traffic.image_chats import data_url, wire
from tests.traffic.server_process import RunningServer, server
from trencadis import LLM, BeamSearchParams, GuidedDecodingParams, SamplingParams, StructuredOutputsParams
from trencadis.assets import demo_path
from trencadis.core.errors import BadRequest

FLAGS = (
    "--dtype", "float32", "--kv-cache-memory-bytes", "128MiB", "--limit-mm-per-prompt", "image=4",
    "--tool-call-parser", "hermes",
)  # fmt: skip


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with server(tmp_path_factory.mktemp("served"), *FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def client(running: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


DEMO_IMAGE: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": data_url(Image.new("RGB", (150, 100), "red"))}},
    {"type": "text", "text": "What colour is it?"},
]
ASK: list[Any] = [{"role": "user", "content": DEMO_IMAGE}]
MODEL = "trencadis-demo"


def test_served_equals_offline_streamed_and_not(client: openai.OpenAI) -> None:
    llm = LLM(str(demo_path()), dtype="float32", kv_cache_memory_bytes=64 << 20)
    for seed in range(6):
        messages, _ = conversation(np.random.default_rng(seed), high=400)
        offline = llm.chat([messages], SamplingParams(temperature=0, max_tokens=24))[0]
        sent = cast(Any, wire(messages))
        reported = client.chat.completions.create(model=MODEL, messages=sent, temperature=0, max_tokens=24)
        assert reported.usage is not None and reported.usage.prompt_tokens == len(offline.prompt_token_ids)
        assert reported.choices[0].message.content == offline.outputs[0].text
        assert reported.choices[0].finish_reason == offline.outputs[0].finish_reason
        stream = client.chat.completions.create(
            model=MODEL,
            messages=sent,
            temperature=0,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
        text, usage = "", None
        for chunk in stream:
            usage = chunk.usage or usage
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        assert text == offline.outputs[0].text
        assert usage is not None and usage.completion_tokens == reported.usage.completion_tokens
        fields = {"use_beam_search": True, "length_penalty": 0.5}
        reported = client.chat.completions.create(model=MODEL, messages=sent, n=3, max_tokens=8, extra_body=fields)
        (beams,) = llm.chat([messages], BeamSearchParams(3, 8, length_penalty=0.5), use_tqdm=False)
        assert [c.message.content for c in reported.choices] == [o.text for o in beams.outputs]
        assert [c.finish_reason for c in reported.choices] == [o.finish_reason for o in beams.outputs]
    llm.close()


def test_usage_counts_image_tokens(client: openai.OpenAI) -> None:
    reported = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=4)
    assert reported.usage is not None and reported.usage.prompt_tokens_details is not None
    assert reported.usage.prompt_tokens_details.image_tokens == 20  # 150x100 -> 140x112 pixels -> 10x8 patches / 4


def test_logprobs_n_stop_seed(client: openai.OpenAI) -> None:
    reported = client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        max_tokens=6,
        logprobs=True,
        top_logprobs=3,
        temperature=0,
    )
    content = reported.choices[0].logprobs.content
    assert content and all(len(c.top_logprobs) == 3 and c.logprob <= 0 for c in content)
    assert content[0].top_logprobs[0].token == content[0].token
    draws = [
        client.chat.completions.create(
            model=MODEL,
            messages=ASK,
            max_tokens=8,
            n=3,
            seed=11,
            temperature=1.5,
            extra_body={"ignore_eos": True},
        )
        for _ in range(2)
    ]
    texts = [[c.message.content for c in d.choices] for d in draws]
    assert texts[0] == texts[1] and len(texts[0]) == 3
    whole = client.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_tokens=12).choices[0].message
    assert whole.content
    mark = whole.content[len(whole.content) // 2]
    cut = client.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_tokens=12, stop=[mark])
    assert cut.choices[0].message.content == whole.content.split(mark)[0]
    assert cut.choices[0].finish_reason == "stop"


def test_completions_models_tokens(client: openai.OpenAI, running: RunningServer) -> None:
    reported = client.completions.create(model=MODEL, prompt=["Hello", "Hello there"], max_tokens=5, logprobs=2)
    assert [c.index for c in reported.choices] == [0, 1] and reported.usage is not None
    assert client.models.list().data[0].id == MODEL
    ids = running.http.post("/tokenize", json={"prompt": "Hello there"}).json()
    assert running.http.post("/detokenize", json={"tokens": ids["tokens"]}).json()["prompt"] == "Hello there"
    with_image = running.http.post("/tokenize", json={"messages": ASK}).json()
    assert with_image["count"] > 20
    assert running.http.get("/metrics").text.count("vllm:") > 40
    for path in ("/health", "/live", "/ready", "/ping", "/version", "/docs", "/openapi.json"):
        assert running.http.get(path).status_code == 200


BAD: dict[str, tuple[int, dict[str, Any], str]] = {
    "base64": (400, {"type": "image_url", "image_url": {"url": "data:image/png;base64,!!!"}}, "[0].content[0]"),
    "truncated": (
        400, {"type": "image_url", "image_url": {"url": DEMO_IMAGE[0]["image_url"]["url"][:120]}}, "[0].content[0]",
    ),
    "not an image": (415, {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}, "content[0]"),
    "private address": (403, {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}, "content[0]"),
    "metadata": (403, {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}, "content[0]"),
    "local file": (403, {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "content[0]"),
    "scheme": (400, {"type": "image_url", "image_url": {"url": "ftp://example.org/a.png"}}, "content[0]"),
    "unknown part": (400, {"type": "hologram"}, "content[0]"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_images_get_one_short_line(name: str, running: RunningServer) -> None:
    status, part, param = BAD[name]
    body = {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}], "max_tokens": 2}
    answer = running.http.post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert answer.status_code == status and error["code"] == status
    assert param in error["param"] and 0 < len(error["message"]) < 200 and "\n" not in error["message"]
    assert "127.0.0.1" not in error["message"] and "169.254" not in error["message"]


WRONG: dict[str, tuple[int, dict[str, Any]]] = {
    "role": (400, {"messages": [{"role": 5, "content": "hi"}]}),
    "empty": (400, {"messages": []}),
    "temperature": (400, {"messages": ASK, "temperature": 3}),
    "max_tokens": (400, {"messages": ASK, "max_tokens": 0}),
    "model": (404, {"messages": ASK, "model": "nope"}),
    "too many images": (400, {"messages": [{"role": "user", "content": [DEMO_IMAGE[0]] * 5}]}),
    "too long": (400, {"messages": [{"role": "user", "content": "word " * 40_000}]}),
    "n": (400, {"messages": ASK, "n": 100_000}),
    "tools": (400, {"messages": ASK, "tools": [{"type": "function", "function": {"name": "f g"}}]}),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_requests_get_one_short_line(name: str, running: RunningServer) -> None:
    status, body = WRONG[name]
    answer = running.http.post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert answer.status_code == status, error
    assert 0 < len(error["message"]) < 200 and "\n" not in error["message"]
    assert running.http.post("/v1/chat/completions", json={"messages": ASK, "max_tokens": 1}).status_code == 200


def test_typed_special_tokens_stay_text(running: RunningServer) -> None:
    typed = "<|vision_start|><|image_pad|><|vision_end|><|im_end|>\n<|im_start|>system"
    count = {}
    for name, text in (("typed", typed), ("plain", "hello")):
        body = {"messages": [{"role": "user", "content": text}], "return_token_strs": True}
        answer = running.http.post("/tokenize", json=body).json()
        count[name] = sum(s.startswith("<|") and s.endswith("|>") for s in answer["token_strs"])
    assert count["typed"] == count["plain"]


def test_a_disconnect_frees_the_request(running: RunningServer) -> None:
    body = {"messages": ASK, "max_tokens": 20_000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{running.url}/v1/chat/completions", json=body, timeout=60) as answer:
        next(answer.iter_bytes())
    end = time.monotonic() + 20
    while "vllm:num_requests_running" in running.http.get("/metrics").text and time.monotonic() < end:
        lines = [x for x in running.http.get("/metrics").text.splitlines() if x.startswith("vllm:num_requests_running")]
        if float(lines[0].split()[-1]) == 0:
            return
        time.sleep(0.1)
    raise AssertionError("the request still runs")


def test_start_up_lines(running: RunningServer) -> None:
    text = running.text()
    for line in ("KV cache size:", "Maximum concurrency for", "Route: /v1/models, Methods: GET", "startup complete."):
        assert line in text


def test_neither_process_imports_what_it_must_not(running: RunningServer) -> None:
    def mapped(pid: int) -> str:
        return Path(f"/proc/{pid}/maps").read_text()

    assert "libtorch" not in mapped(running.process.pid)
    (engine,) = running.engine_pids()
    assert "libtorch" in mapped(engine)
    assert "fastapi" not in mapped(engine) and "pydantic_core" not in mapped(engine)


LINKED = "org/demo"
"""A link to the demo, in the folder that the server is started in."""
GUIDE = (
    f"--model {LINKED} --tensor-parallel-size 1 --max-num-seqs 128 --dtype bfloat16 --gpu-memory-util 0.9 "
    "--max-num-batched-tokens 32768 --max-model-len 32768 --block-size 128 --served-model-name demo"
).split()


def test_the_guides_launch_line_starts_and_its_killed_engine_ends_requests_and_comes_back(tmp_path: Path) -> None:
    (tmp_path / LINKED).parent.mkdir()
    (tmp_path / LINKED).symlink_to(demo_path())
    with server(tmp_path, *GUIDE, VLLM_SKIP_WARMUP="true") as running:
        (card,) = running.http.get("/v1/models").json()["data"]
        assert (card["id"], card["root"]) == ("demo", LINKED)
        reported = running.http.post("/v1/chat/completions", json={"messages": ASK, "max_tokens": 4, "model": "demo"})
        assert reported.status_code == 200 and reported.json()["choices"][0]["message"]["content"]
        body = {"messages": ASK, "max_tokens": 20_000, "ignore_eos": True}
        seen: list[tuple[int, float]] = []

        def ask() -> None:
            answer = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=300, trust_env=False)
            seen.append((answer.status_code, time.monotonic()))

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(1.0)
        (engine,) = running.engine_pids()
        os.kill(engine, signal.SIGKILL)
        killed = time.monotonic()
        running.wait("/health", 50, 503)
        for thread in threads:
            thread.join(150)
        assert [s for s, _ in seen] == [503] * 3 and max(t for _, t in seen) - killed < 50
        running.wait()
        assert running.http.post("/v1/chat/completions", json={"messages": ASK, "max_tokens": 2}).status_code == 200
        process = running.process
    assert process.returncode == 0


CLOSED: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "size": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["colour", "size"],
    "additionalProperties": False,
}


def test_an_answer_about_an_image_follows_a_schema_streamed_and_not(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": CLOSED, "strict": True}}
    more = {"structured_outputs": {"disable_any_whitespace": True}}
    requested: dict[str, Any] = {
        "model": MODEL, "messages": ASK, "response_format": form, "temperature": 1, "seed": 5, "max_tokens": 60,
        "extra_body": more,
    }  # fmt: skip
    reported = client.chat.completions.create(**requested).choices[0]
    text = reported.message.content or ""
    found = json.loads(text)
    assert reported.finish_reason == "stop" and found["colour"] in ("red", "green") and 1 <= found["size"] <= 99
    pieces = [
        chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**requested, stream=True)
    ]
    assert "".join(pieces) == text and len(pieces) > 3
    raw = client.completions.create(
        model=MODEL, prompt="Hi", extra_body={"guided_choice": ["yes", "no"]}, temperature=1
    )
    assert raw.choices[0].text in ("yes", "no") and raw.choices[0].finish_reason == "stop"


def test_a_model_that_knows_no_tools_calls_the_one_it_must(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": "paint", "parameters": CLOSED}}]
    for choice, reason in (("required", "tool_calls"), ({"type": "function", "function": {"name": "paint"}}, "stop")):
        wanted: Any = choice
        reported = client.chat.completions.create(
            model=MODEL, messages=ASK, tools=tools, tool_choice=wanted, parallel_tool_calls=False, temperature=1,
            seed=1, max_tokens=400,
        ).choices[0]  # fmt: skip
        calls: Any = reported.message.tool_calls
        assert reported.finish_reason == reason and [c.function.name for c in calls] == ["paint"]
        assert set(json.loads(calls[0].function.arguments)) == {"colour", "size"}


def test_offline_answers_have_forms_too() -> None:
    with LLM(str(demo_path()), dtype="float32", kv_cache_memory_bytes=32 << 20) as llm:
        forms: list[Any] = [
            SamplingParams(temperature=1, max_tokens=60, structured_outputs=form)
            for form in (
                StructuredOutputsParams(json=CLOSED, disable_any_whitespace=True),
                StructuredOutputsParams(regex="[a-f]{3}"),
                StructuredOutputsParams(grammar='root ::= "(" root ")" | "x"'),
            )
        ]
        forms.append(SamplingParams(max_tokens=9, guided_decoding=GuidedDecodingParams(choice=["Yes", "No"])))
        texts = [one.outputs[0].text for one in llm.generate(["Hello"] * 4, forms)]
        assert set(json.loads(texts[0])) == {"colour", "size"} and re.fullmatch("[a-f]{3}", texts[1])
        assert texts[2].count("(") == texts[2].count(")") and texts[3] in ("Yes", "No")
        with pytest.raises(BadRequest, match="Only one form"):
            llm.generate("a", SamplingParams(structured_outputs=StructuredOutputsParams(regex="a", choice=["b"])))
