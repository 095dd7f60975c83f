"""``--stream-interval`` and its field, and ``--enable-prompt-tokens-details``."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.scripted_app import ScriptedApp, scripted_app
from tests.fakes.text_checkpoint import write_text_checkpoint
from trencadis.server.prompts.answer_reader import AnswerPart, CallPart
from trencadis.server.tools.reasoning_parser import AnswerContent, ReasoningContent

IMAGE = {"type": "image_url", "image_url": "data:image/png;base64,A"}


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> ScriptedApp:
    return scripted_app(write_text_checkpoint(tmp_path_factory.mktemp("intervals")))


def streamed(harness: ScriptedApp, **fields: Any) -> tuple[list[int], str, list[Any]]:
    """Tokens of each event, the text, and the events of a chat."""
    events = harness.events(
        harness.chat("Hi", stream=True, return_token_ids=True, max_tokens=11, ignore_eos=True, **fields)
    )
    shown = [e["choices"][0] for e in events if e["choices"] and "token_ids" in e["choices"][0]]
    return [len(c["token_ids"]) for c in shown], "".join(c["delta"].get("content") or "" for c in shown), events


def test_events_hold_as_many_tokens_as_asked_for_and_the_first_does_not_wait(harness: ScriptedApp) -> None:
    harness.app()
    plain, text, _ = streamed(harness)
    assert plain == [1] * 11
    harness.app(stream_interval=4)
    counts, joined, events = streamed(harness)
    assert counts == [1, 4, 4, 2] and joined == text
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert streamed(harness, stream_interval=10)[0] == [1, 10], "a request says otherwise"
    assert streamed(harness, stream_interval=1)[0] == plain
    answer = harness.chat("Hi", stream_interval=0, stream=True)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "stream_interval"
    assert "stream_interval" in harness.chat("Hi", stream_interval=3).headers["x-ignored-fields"], "it streams nothing"


def test_choices_and_completions_are_spaced_each_for_itself(harness: ScriptedApp) -> None:
    harness.app(stream_interval=3)
    fields = {"stream": True, "max_tokens": 7, "ignore_eos": True, "return_token_ids": True}
    events = harness.events(harness.chat("Hi", n=2, temperature=1, logprobs=True, **fields))
    for choice in (0, 1):
        mine = [c for e in events for c in e["choices"] if c["index"] == choice and "token_ids" in c]
        assert [len(c["token_ids"]) for c in mine] == [1, 3, 3]
        assert [len(c["logprobs"]["content"]) for c in mine] == [1, 3, 3]
    events = harness.events(harness.complete("Hi", **fields))
    assert [len(e["choices"][0]["token_ids"]) for e in events if e["choices"]] == [1, 3, 3]


def test_text_is_the_same_whatever_the_interval(harness: ScriptedApp) -> None:
    rng = random.Random(3)
    harness.app()
    for _ in range(6):
        stop = rng.choice([None, ["wör"], [", "], ["日"]])
        fields: dict[str, Any] = {"stream": True, "stop": stop, "max_tokens": rng.randint(1, 20)}
        texts = set()
        for interval in (1, 3, 50):
            events = harness.events(harness.chat("Hi", stream_interval=interval, **fields))
            texts.add("".join(c["delta"].get("content") or "" for e in events for c in e["choices"]))
            assert sum(bool(c.get("finish_reason")) for e in events for c in e["choices"]) == 1
        assert len(texts) == 1


def test_parts_of_an_answer_join_in_order() -> None:
    part = AnswerPart([ReasoningContent("a"), AnswerContent("b"), CallPart(0, "id", "f", "{")])
    part.extend(AnswerPart([CallPart(0, arguments="}"), CallPart(1, "id2", "g", ""), AnswerContent("c")]))
    part.extend(AnswerPart([AnswerContent("d")]))
    assert part.reasoning == "a" and part.content == "bcd"
    assert part.calls == [CallPart(0, "id", "f", "{}"), CallPart(1, "id2", "g", "")]


def test_usage_tells_kinds_of_prompt_tokens_unless_told_not_to(harness: ScriptedApp, tmp_path: Path) -> None:
    harness.app()
    details = harness.chat([IMAGE]).json()["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 3, "image_tokens": 6, "multimodal_tokens": {"image": 6}}
    harness.app(enable_prompt_tokens_details=False)
    for answer in (harness.chat([IMAGE]), harness.complete()):
        assert answer.json()["usage"]["prompt_tokens_details"] is None
    assert harness.chat([IMAGE], return_image_sizes=True).json()["usage"]["prompt_tokens_details"]["images"]
