"""Both clients against the demo model: texts, images and streams are those of a chat completion."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.traffic.server_process import ROOT, server

pytestmark = pytest.mark.long
LIMIT = 24
DEMO_IMAGE = base64.b64encode((ROOT / "assets" / "demo_picture.png").read_bytes()).decode()
QUESTIONS = ["How many red circles are there?", "What is in the picture?", "Say hello."]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with server(
        Path(tmp_path_factory.mktemp("demo")), str(ROOT / "assets" / "demo"), "--served-model-name", "demo"
    ) as running:
        yield running.url


def ask(question: str, image: bool, api: str) -> Any:
    """A user's message in the form of one API."""
    address = f"data:image/png;base64,{DEMO_IMAGE}"
    source = {"type": "base64", "media_type": "image/png", "data": DEMO_IMAGE}
    parts: dict[str, list[Any]] = {
        "chat": [{"type": "image_url", "image_url": {"url": address}}, {"type": "text", "text": question}],
        "responses": [
            {"type": "input_image", "image_url": address, "detail": "auto"},
            {"type": "input_text", "text": question},
        ],
        "messages": [{"type": "image", "source": source}, {"type": "text", "text": question}],
    }
    return [{"role": "user", "content": parts[api] if image else question}]


@pytest.mark.parametrize("image", [False, True])
@pytest.mark.parametrize("question", QUESTIONS)
def test_the_three_apis_say_the_same(url: str, question: str, image: bool) -> None:
    open_ai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    claude = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    body: Any = {"model": "demo", "temperature": 0}
    chat = open_ai.chat.completions.create(
        **body, max_tokens=LIMIT, messages=ask(question, image, "chat")
    )  # fmt: skip
    text, usage = chat.choices[0].message.content, chat.usage
    assert text and usage is not None

    items = ask(question, image, "responses")
    response = open_ai.responses.create(**body, max_output_tokens=LIMIT, input=items)
    type(response).model_validate(response.to_dict(), strict=True)
    assert response.output_text == text and response.usage is not None
    assert response.usage.input_tokens == usage.prompt_tokens
    assert response.usage.output_tokens == usage.completion_tokens
    with open_ai.responses.stream(**body, max_output_tokens=LIMIT, input=items) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == text
    counted = open_ai.responses.input_tokens.count(model="demo", input=items)
    assert counted.input_tokens == usage.prompt_tokens

    conversation = ask(question, image, "messages")
    # The newest client takes no temperature any more.
    body = {"model": "demo", "max_tokens": LIMIT, "extra_body": {"temperature": 0}}
    message = claude.messages.create(**body, messages=conversation)
    type(message).model_validate(message.to_dict(), strict=True)
    assert message.content[0].type == "text" and message.content[0].text == text
    whole = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    assert (whole, message.usage.output_tokens) == (usage.prompt_tokens, usage.completion_tokens)
    with claude.messages.stream(**body, messages=conversation) as events:
        assert "".join(events.text_stream) == text
        assert events.get_final_message().stop_reason == message.stop_reason
    assert claude.messages.count_tokens(model="demo", messages=conversation).input_tokens == usage.prompt_tokens


def test_many_at_a_time(url: str) -> None:
    async def run() -> tuple[list[str], list[str]]:
        open_ai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        claude = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)

        async def respond(i: int) -> str:
            body: Any = {"model": "demo", "max_output_tokens": LIMIT, "temperature": 0, "stream": i % 2 == 0}
            made: Any = await open_ai.responses.create(**body, input=ask(QUESTIONS[i % 3], i % 4 > 1, "responses"))
            if i % 2:
                return str(made.output_text)
            return "".join([e.delta async for e in made if e.type == "response.output_text.delta"])

        async def message(i: int) -> str:
            body: Any = {"model": "demo", "max_tokens": LIMIT, "extra_body": {"temperature": 0}}
            conversation = ask(QUESTIONS[i % 3], i % 4 > 1, "messages")
            async with claude.messages.stream(**body, messages=conversation) as stream:
                return await stream.get_final_text()

        first = await asyncio.gather(*(respond(i) for i in range(24)))
        second = await asyncio.gather(*(message(i) for i in range(24)))
        return first, second

    first, second = asyncio.run(run())
    assert first == second and all(first)
