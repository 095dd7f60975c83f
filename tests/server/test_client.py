"""The official client against a real server socket, and clients that go away."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import uvicorn

ANSWER = "Hello wörld, 日本!"
CHAT: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def base(harness: Any) -> Iterator[str]:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    config = uvicorn.Config(harness.app(api_key=["k"]), log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    server.should_exit = True
    thread.join(5)
    sock.close()


@pytest.fixture
def client(base: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{base}/v1", api_key="k", max_retries=0) as made:
        yield made


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="m", messages=CHAT, n=2, seed=1, stop=["!"], logprobs=True, top_logprobs=2
    )
    assert [c.message.content for c in answer.choices] == [ANSWER[:-1]] * 2
    assert answer.choices[0].finish_reason == "stop"
    content = answer.choices[0].logprobs
    assert content is not None and content.content is not None and len(content.content[0].top_logprobs) == 2
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert client.chat.completions.with_raw_response.create(model="m", messages=CHAT).headers["x-request-id"]


def test_prediction(client: openai.OpenAI) -> None:
    predicted: Any = {"type": "content", "content": ANSWER}
    answer = client.chat.completions.create(model="m", messages=CHAT, prediction=predicted)
    assert answer.choices[0].message.content == ANSWER and answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None and details.rejected_prediction_tokens == 0
    assert details.accepted_prediction_tokens == answer.usage.completion_tokens - 1  # the end is not predicted
    with pytest.raises(openai.BadRequestError, match="about one answer"):
        client.chat.completions.create(model="m", messages=CHAT, prediction=predicted, n=2)


def test_stream(client: openai.OpenAI) -> None:
    text, usage = "", None
    for chunk in client.chat.completions.create(
        model="m", messages=CHAT, stream=True, stream_options={"include_usage": True}
    ):
        text += "".join(c.delta.content or "" for c in chunk.choices)
        usage = chunk.usage
    assert text == ANSWER and usage is not None and usage.completion_tokens > 1


def test_completions_and_models(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="m", prompt=["a", "b"], max_tokens=100, logprobs=1)
    assert [c.text for c in answer.choices] == [ANSWER, ANSWER]
    assert "".join(c.choices[0].text for c in client.completions.create(model="m", prompt="a", stream=True)) != ""
    assert [m.id for m in client.models.list()] == ["m", "alias"]
    assert client.models.retrieve("alias").id == "alias"


def test_errors(harness: Any, client: openai.OpenAI, base: str) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="m", messages=CHAT, temperature=9)
    assert bad.value.param == "temperature" and bad.value.type == "BadRequestError"
    with pytest.raises(openai.NotFoundError, match="Valid aliases"):
        client.chat.completions.create(model="x", messages=CHAT)
    with pytest.raises(openai.AuthenticationError) as key:
        openai.OpenAI(base_url=f"{base}/v1", api_key="wrong").models.list()
    assert isinstance(key.value.body, dict) and "API key" in key.value.body["message"]
    harness.engine.fail_at = 2
    with pytest.raises(openai.APIError, match="The engine stopped"):
        list(client.chat.completions.create(model="m", messages=CHAT, stream=True))
    harness.engine.fail_at, harness.engine.accepting = None, False
    with pytest.raises(openai.InternalServerError, match="not accepting"):
        client.chat.completions.create(model="m", messages=CHAT)


def wait_for(condition: Any) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_closed_stream_frees_the_request(harness: Any, client: openai.OpenAI) -> None:
    harness.engine.delay = 0.02
    stream = client.chat.completions.create(model="m", messages=CHAT, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    wait_for(lambda: harness.engine.aborted == [(harness.engine.submitted[0][0].id, -1)])
    wait_for(lambda: harness.made.state.trencadis.admission.inside == [0, 0, 0])
    assert 'finished_reason="abort"' in harness.made.state.trencadis.metrics.format_text().decode()


@pytest.mark.parametrize("stream", [False, True])
def test_a_timeout_frees_the_request(harness: Any, client: openai.OpenAI, stream: bool) -> None:
    harness.engine.delay = 10.0
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.2).chat.completions.create(model="m", messages=CHAT, stream=stream)
    wait_for(lambda: harness.engine.aborted == [(harness.engine.submitted[0][0].id, -1)])
    wait_for(lambda: harness.made.state.trencadis.admission.inside == [0, 0, 0])


def test_keep_alive_comments(harness: Any, client: openai.OpenAI, base: str) -> None:
    import httpx

    harness.engine.delay = 0.05
    object.__setattr__(harness.made.state.trencadis.settings.config, "sse_keep_alive_interval", 0.01)
    body = {"messages": CHAT, "stream": True, "max_tokens": 3}
    response = httpx.post(f"{base}/v1/chat/completions", json=body, headers={"authorization": "Bearer k"})
    assert ": keep-alive\n\n" in response.text and response.text.endswith("data: [DONE]\n\n")
