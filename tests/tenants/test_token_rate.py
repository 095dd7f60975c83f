"""``tokens_per_minute`` holds for what starts at once: answers are charged before they begin, and settled later."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.scripted_app import ScriptedApp, scripted_app
from tests.fakes.text_checkpoint import write_text_checkpoint
from tests.tenants.test_tenant_routes import KEY, key_file
from trencadis.server.tenants.tenant_registry import FIRST_LENGTH, Tenant, TenantAccount

MESSAGES = [{"role": "user", "content": "Hi"}]
PATHS = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 50, "ignore_eos": True},
    "/v1/completions": {"prompt": ["Hi", "You"], "max_tokens": 25, "ignore_eos": True},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 50, "ignore_eos": True},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 50, "ignore_eos": True},
    "/v1/chat/completions/batch": {"messages": [MESSAGES, MESSAGES], "max_tokens": 25, "ignore_eos": True},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_checkpoint(tmp_path_factory.mktemp("rates"))


@pytest.fixture
def harness(checkpoint: Path) -> ScriptedApp:
    return scripted_app(checkpoint)


def ask_at_once(harness: ScriptedApp, count: int, path: str, body: dict[str, Any]) -> list[httpx.Response]:
    """``count`` equal requests, all before the first answer has begun."""
    app = harness.made or harness.app()

    async def main() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await asyncio.gather(*(client.post(path, json=body, headers=KEY) for _ in range(count)))

    return asyncio.run(main())


def account_of(harness: ScriptedApp) -> TenantAccount:
    assert harness.made is not None
    account: TenantAccount = harness.made.state.trencadis.tenants.accounts["ann"]
    return account


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_start_at_once_stay_below_the_rate(
    harness: ScriptedApp, tmp_path: Path, path: str, stream: bool
) -> None:
    if stream and path.endswith("batch"):
        pytest.skip("a batch is not streamed")
    harness.engine.delay = 0.002
    harness.app(api_key_file=key_file(tmp_path, "  tokens_per_minute: 300\n"))
    answers = ask_at_once(harness, 20, path, PATHS[path] | ({"stream": True} if stream else {}))
    statuses = [one.status_code for one in answers]
    assert set(statuses) == {200, 429} and 2 <= statuses.count(200) <= 6
    assert account_of(harness).used["tokens_per_minute"] <= 300
    assert all(int(one.headers["retry-after"]) >= 1 for one in answers if one.status_code == 429)


def test_what_an_answer_did_not_need_is_given_back(harness: ScriptedApp, tmp_path: Path) -> None:
    harness.app(api_key_file=key_file(tmp_path, "  tokens_per_minute: 1200\n"))
    for fields in ({}, {"stream": True}, {"n": 3, "temperature": 1}):
        body = {"messages": MESSAGES, "max_tokens": 300, **fields}
        response = harness.call("/v1/chat/completions", body, headers=KEY)
        assert response.status_code == 200
    account = account_of(harness)
    left = account.buckets["tokens_per_minute"].left
    assert account.used["tokens_per_minute"] < 200 and abs(1200 - left - account.used["tokens_per_minute"]) < 60


def test_failed_requests_and_clients_that_leave_get_it_back(harness: ScriptedApp, tmp_path: Path) -> None:
    harness.engine.delay = 0.01
    app = harness.app(api_key_file=key_file(tmp_path, "  tokens_per_minute: 1200\n"))
    body = {"messages": MESSAGES, "max_tokens": 900, "ignore_eos": True}

    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            for _ in range(3):
                task = asyncio.create_task(client.post("/v1/chat/completions", json=body, headers=KEY))
                while account_of(harness).buckets["tokens_per_minute"].left > 600:
                    await asyncio.sleep(0.001)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                async with asyncio.timeout(10):
                    while account_of(harness).buckets["tokens_per_minute"].left < 1000:
                        await asyncio.sleep(0.001)

    asyncio.run(main())
    harness.engine.fail_at = 1
    assert harness.call("/v1/chat/completions", body, headers=KEY).status_code == 503
    assert account_of(harness).buckets["tokens_per_minute"].left > 1000


def test_an_answer_without_a_limit_counts_as_the_usual_one(harness: ScriptedApp, tmp_path: Path) -> None:
    harness.engine.delay = 0.002
    harness.app(api_key_file=key_file(tmp_path, "  tokens_per_minute: 700\n"))
    body = {"messages": MESSAGES}
    statuses = [one.status_code for one in ask_at_once(harness, 10, "/v1/chat/completions", body)]
    assert statuses.count(200) == 2, "256 tokens each before anything is known"
    account = account_of(harness)
    for _ in range(60):
        account.record_answer(10, 1)
    assert 10 <= account.usual_length < 30
    account.give_back("tokens_per_minute", 700)
    statuses = [one.status_code for one in ask_at_once(harness, 10, "/v1/chat/completions", body)]
    assert statuses.count(200) == 10


def test_a_reservation_is_no_use_and_a_large_one_takes_a_full_bucket() -> None:
    now = [0.0]
    account = TenantAccount(Tenant("ann", ("a" * 64,), rates={"tokens_per_minute": 100.0}), lambda: now[0])
    account.take("tokens_per_minute", 10, 500)
    assert account.used["tokens_per_minute"] == 10 and account.buckets["tokens_per_minute"].left == -410
    account.record_answer(20, 2)
    account.give_back("tokens_per_minute", 500)
    assert account.used["tokens_per_minute"] == 30 and account.buckets["tokens_per_minute"].left == 70
    assert account.usual_length == FIRST_LENGTH + (10 - FIRST_LENGTH) / 16
    account.record_answer(0, 1)
    account.give_back("tokens_per_minute", 1000)
    assert account.buckets["tokens_per_minute"].left == 100, "never more than a minute's worth"
