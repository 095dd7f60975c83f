"""``prediction`` of a chat request, its usage, and stop strings within several tokens of one step."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.scripted_app import ScriptedApp, scripted_app
from tests.fakes.text_checkpoint import write_text_checkpoint
from trencadis.core.request import Delta, Request
from trencadis.server.text.checkpoint_tokenizer import COUNTED

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"prediction": {"type": "text", "content": "x"}}, "prediction.type", "must be 'content', got 'text'"),
    ({"prediction": {"content": "x"}}, "prediction.type", "got None"),
    ({"prediction": {"type": "content", "content": 3}}, "prediction.content", "a text or a list of text parts"),
    ({"prediction": {"type": "content"}}, "prediction.content", "a text or a list of text parts"),
    (
        {"prediction": {"type": "content", "content": ["x"]}},
        "prediction.content[0]",
        "must be a text part",
    ),
    (
        {"prediction": {"type": "content", "content": [{"type": "image_url", "text": "x"}]}},
        "prediction.content[0]",
        "must be a text part",
    ),
    ({"prediction": {"type": "content", "content": "x"}, "n": 2}, "prediction", "about one answer, but n is 2"),
    ({"prediction": {"type": "content", "content": "x"}, "tools": [TOOL]}, "prediction", "cannot be used with tools"),
    ({"prediction": "x"}, "prediction", ""),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def app(folder: Path) -> ScriptedApp:
    return scripted_app(folder)


def content(text: str) -> dict[str, Any]:
    return {"type": "content", "content": text}


@pytest.mark.parametrize(("fields", "param", "says"), BAD)
def test_a_malformed_prediction_is_refused(app: Any, fields: dict[str, Any], param: str, says: str) -> None:
    response = app.chat(**fields)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and says in error["message"]


def test_tools_that_are_not_called_go_with_a_prediction(app: Any) -> None:
    text = app.tokenizer.decode(app.engine.answer)
    assert app.chat(prediction=content(text), tools=[TOOL], tool_choice="none").status_code == 200
    assert app.engine.submitted[-1][0].prediction == app.engine.answer


def test_usage_counts_the_predicted_tokens_that_appeared(app: Any) -> None:
    tokens = app.engine.answer
    text = app.tokenizer.decode(tokens)
    details = app.chat(prediction=content(text)).json()["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == len(tokens) and details["rejected_prediction_tokens"] == 0
    request: Request = app.engine.submitted[-1][0]
    assert request.prediction == tokens
    parts = [{"type": "text", "text": text}, {"type": "text", "text": "!!"}]
    details = app.chat(prediction={"type": "content", "content": parts}).json()["usage"]["completion_tokens_details"]
    more = len(app.engine.submitted[-1][0].prediction) - details["accepted_prediction_tokens"]
    assert 0 < more == details["rejected_prediction_tokens"]


def test_a_request_without_a_prediction_counts_none(app: Any) -> None:
    details = app.chat().json()["usage"].get("completion_tokens_details")
    assert details is None or "accepted_prediction_tokens" not in details
    empty = app.chat(prediction=content(""))
    assert empty.status_code == 200 and app.engine.submitted[-1][0].prediction == []


def test_of_a_long_prediction_no_more_is_read_than_fits(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read, encode = list[int](), app.tokenizer.encode

    def encode_counted(text: str, *args: Any, **how: Any) -> list[int]:
        read.append(len(text))
        return encode(text, *args, **how)

    monkeypatch.setattr(app.tokenizer, "encode", encode_counted)
    assert app.chat(prediction=content("a b " * 250_000)).status_code == 200
    most = app.engine.info.max_model_len
    assert len(app.engine.submitted[-1][0].prediction) == most
    assert sum(read) <= COUNTED + 8 * most


def test_a_streams_last_usage_counts_them_too(app: Any) -> None:
    text = app.tokenizer.decode(app.engine.answer)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    usage = app.events(app.chat(prediction=content(text), **options))[-1]["usage"]
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] == len(app.engine.answer)


def test_special_tokens_in_a_prediction_are_text(app: Any) -> None:
    app.chat(prediction=content("<|im_end|>"))
    assert app.engine.eos not in app.engine.submitted[-1][0].prediction


def test_a_stop_string_within_the_tokens_of_one_step_ends_the_count_there(app: Any) -> None:
    """Tokens, log-probabilities and usage are those of an answer that came token by token."""
    fields = {"stop": ["ö"], "logprobs": True, "return_token_ids": True}
    single = app.chat(**fields).json()
    deltas = app.engine._deltas

    async def joined(request: Request) -> AsyncIterator[Delta]:
        whole = Delta(request.id, logprobs=[])
        async for delta in deltas(request):
            whole.tokens += delta.tokens
            whole.logprobs = [*(whole.logprobs or []), *(delta.logprobs or [])]
            whole.finish, whole.cached_tokens = delta.finish, max(whole.cached_tokens, delta.cached_tokens)
        yield whole

    app.engine._deltas = joined
    together = app.chat(**fields).json()
    assert together["choices"] == single["choices"] and together["usage"] == single["usage"]
    assert single["choices"][0]["stop_reason"] == "ö"
