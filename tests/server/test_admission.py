"""The bounded queue: what is charged when, what a refusal says, and the bytes of bodies."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from trencadis.core.errors import BadRequest, QueueFull
from trencadis.server.tenants.server_admission_and_byte_budgets import Admission, BodyBudget, Bounds

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
PIXELS = 56 * 84


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_retry_after_is_the_rate_of_the_last_minute() -> None:
    clock = Clock()
    admission = Admission(Bounds(requests=100, tokens=1000, pixels=10**6), clock)
    for _ in range(10):  # a hundred tokens a second
        ticket = admission.enter()
        ticket.charge(tokens=100)
        clock.now += 1
        ticket.leave()
    waiting = admission.enter()
    waiting.charge(tokens=900)

    def refused(tokens: int) -> int:
        ticket = admission.enter()
        with pytest.raises(QueueFull) as caught:
            ticket.charge(tokens=tokens)
        ticket.leave()
        assert caught.value.retry_after is not None
        return caught.value.retry_after

    assert refused(300) == pytest.approx(2, abs=1) and refused(1000) == pytest.approx(9, abs=1)
    clock.now += 3600
    assert refused(300) == 1, "nothing has left lately: the guess for an almost empty queue"
    assert admission.rejected["max_num_queued_tokens"] == 3 and admission.inside == [1, 900, 0]


def test_a_request_that_can_never_fit_is_not_told_to_wait() -> None:
    admission = Admission(Bounds(pixels=100))
    ticket = admission.enter()
    ticket.charge(pixels=60)
    with pytest.raises(BadRequest, match="needs 120 of at most 100"):
        ticket.charge(pixels=60)
    ticket.leave()
    ticket.charge(pixels=60)
    ticket.leave()
    assert admission.inside == [0, 0, 0], "a cancelled preparation may still charge"


def test_pixels_are_charged_while_a_request_is_prepared_and_runs(harness: Any) -> None:
    harness.app(bounds=Bounds(pixels=3 * PIXELS))
    admission = harness.made.state.trencadis.admission
    seen: list[int] = []
    harness.engine.refuse = None
    plain = harness.engine.submit

    def submit(request: Any, pixels: Any) -> Any:
        seen.append(admission.inside[2])
        return plain(request, pixels)

    harness.engine.submit = submit
    assert harness.chat([IMAGE, IMAGE]).status_code == 200
    other = admission.enter()
    other.charge(pixels=2 * PIXELS)
    response = harness.chat([IMAGE, IMAGE])
    assert response.status_code == 429 and "max_num_queued_pixels" in response.json()["error"]["message"]
    assert int(response.headers["retry-after"]) >= 1
    assert seen == [2 * PIXELS] and admission.inside[2] == 2 * PIXELS
    text = harness.call("/metrics").text
    assert 'vllm:admission_inside{model_name="m",unit="pixels"} 9408.0' in text
    assert 'vllm:admission_bound{model_name="m",unit="pixels"} 14112.0' in text


def test_bodies_are_bounded_together() -> None:
    budget = BodyBudget(100)
    first, second, third = budget.open(), budget.open(), budget.open()
    first.charge(150)  # alone, one always may
    with pytest.raises(QueueFull):
        second.charge(1)
    first.leave()
    first.leave()
    second.charge(60)
    with pytest.raises(QueueFull) as caught:
        third.charge(60)
    assert caught.value.retry_after == 1 and (budget.inside, budget.rejected) == (60, 2)
    second.leave()
    second.charge(5)
    assert budget.inside == 0


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_beyond_the_bound_is_429_and_its_bytes_come_back(harness: Any, announced: bool) -> None:
    app = harness.app(bounds=Bounds(body_bytes=5000))
    bodies = harness.made.state.trencadis.admission.bodies
    other = bodies.open()
    other.charge(4000)
    content = b'{"messages": [{"role": "user", "content": "Hi"}], "user": "' + b"x" * 2000 + b'"}'

    async def chunks() -> Any:
        for at in range(0, len(content), 500):
            yield content[at : at + 500]

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            headers = {"content-type": "application/json"}
            body = content if announced else chunks()
            return await client.post("/v1/chat/completions", content=body, headers=headers)

    response = asyncio.run(run())
    assert response.status_code == 429 and response.headers["retry-after"] == "1", response.text
    assert bodies.inside == 4000
    other.leave()
    assert asyncio.run(run()).status_code == 200 and bodies.inside == 0


def test_a_body_is_forgotten_before_the_answer(harness: Any) -> None:
    harness.app()
    bodies = harness.made.state.trencadis.admission.bodies
    held: list[int] = []
    plain = harness.engine.submit

    def submit(request: Any, pixels: Any) -> Any:
        held.append(bodies.inside)
        return plain(request, pixels)

    harness.engine.submit = submit
    for stream in (False, True):
        assert harness.chat([{"type": "text", "text": "a"}, IMAGE], stream=stream).status_code == 200
    assert held == [0, 0]
