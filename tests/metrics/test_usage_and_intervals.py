"""``--stream-interval`` and its field, and ``--enable-prompt-tokens-details``."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.scripted_app import ScriptedApp, scripted_app
from tests.fakes.text_checkpoint import write_text_checkpoint
from trencadis.server.prompts.answer import AnswerPart, CallPart
from trencadis.server.reasoning.parser import Spoken, Thought

IMAGE = {"type": "image_url", "image_url": "data:image/png;base64,A"}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> ScriptedApp:
    return scripted_app(write_text_checkpoint(tmp_path_factory.mktemp("intervals")))


def streamed(rig: ScriptedApp, **fields: Any) -> tuple[list[int], str, list[Any]]:
    """Tokens of each event, the text, and the events of a chat."""
    events = rig.events(rig.chat("Hi", stream=True, return_token_ids=True, max_tokens=11, ignore_eos=True, **fields))
    shown = [e["choices"][0] for e in events if e["choices"] and "token_ids" in e["choices"][0]]
    return [len(c["token_ids"]) for c in shown], "".join(c["delta"].get("content") or "" for c in shown), events


def test_events_hold_as_many_tokens_as_asked_for_and_the_first_does_not_wait(rig: ScriptedApp) -> None:
    rig.app()
    plain, text, _ = streamed(rig)
    assert plain == [1] * 11
    rig.app(stream_interval=4)
    counts, joined, events = streamed(rig)
    assert counts == [1, 4, 4, 2] and joined == text
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert streamed(rig, stream_interval=10)[0] == [1, 10], "a request says otherwise"
    assert streamed(rig, stream_interval=1)[0] == plain
    answer = rig.chat("Hi", stream_interval=0, stream=True)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "stream_interval"
    assert "stream_interval" in rig.chat("Hi", stream_interval=3).headers["x-ignored-fields"], "it streams nothing"


def test_choices_and_completions_are_spaced_each_for_itself(rig: ScriptedApp) -> None:
    rig.app(stream_interval=3)
    fields = {"stream": True, "max_tokens": 7, "ignore_eos": True, "return_token_ids": True}
    events = rig.events(rig.chat("Hi", n=2, temperature=1, logprobs=True, **fields))
    for choice in (0, 1):
        mine = [c for e in events for c in e["choices"] if c["index"] == choice and "token_ids" in c]
        assert [len(c["token_ids"]) for c in mine] == [1, 3, 3]
        assert [len(c["logprobs"]["content"]) for c in mine] == [1, 3, 3]
    events = rig.events(rig.complete("Hi", **fields))
    assert [len(e["choices"][0]["token_ids"]) for e in events if e["choices"]] == [1, 3, 3]


def test_text_is_the_same_whatever_the_interval(rig: ScriptedApp) -> None:
    rng = random.Random(3)
    rig.app()
    for _ in range(6):
        stop = rng.choice([None, ["wör"], [", "], ["日"]])
        fields: dict[str, Any] = {"stream": True, "stop": stop, "max_tokens": rng.randint(1, 20)}
        texts = set()
        for interval in (1, 3, 50):
            events = rig.events(rig.chat("Hi", stream_interval=interval, **fields))
            texts.add("".join(c["delta"].get("content") or "" for e in events for c in e["choices"]))
            assert sum(bool(c.get("finish_reason")) for e in events for c in e["choices"]) == 1
        assert len(texts) == 1


def test_parts_of_an_answer_join_in_order() -> None:
    part = AnswerPart([Thought("a"), Spoken("b"), CallPart(0, "id", "f", "{")])
    part.extend(AnswerPart([CallPart(0, arguments="}"), CallPart(1, "id2", "g", ""), Spoken("c")]))
    part.extend(AnswerPart([Spoken("d")]))
    assert part.reasoning == "a" and part.content == "bcd"
    assert part.calls == [CallPart(0, "id", "f", "{}"), CallPart(1, "id2", "g", "")]


def test_usage_tells_kinds_of_prompt_tokens_unless_told_not_to(rig: ScriptedApp, tmp_path: Path) -> None:
    rig.app()
    details = rig.chat([IMAGE]).json()["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 3, "image_tokens": 6, "multimodal_tokens": {"image": 6}}
    rig.app(enable_prompt_tokens_details=False)
    for answer in (rig.chat([IMAGE]), rig.complete()):
        assert answer.json()["usage"]["prompt_tokens_details"] is None
    assert rig.chat([IMAGE], return_image_sizes=True).json()["usage"]["prompt_tokens_details"]["images"]
