"""From request fields to the rule of a choice: allowed ids, words, a budget of thought, repetitions."""

from __future__ import annotations

from typing import Any

import pytest

from trencadis.core.output_constraints import Repetition, RepetitionDetectionParams, Rule, ThinkingBudget
from trencadis.core.request import SamplingParams


def rule(harness: Any, path: str = "complete", prompt: str = "One two", **fields: Any) -> Rule | None:
    """What the engine is told."""
    response = getattr(harness, path)(prompt, **fields)
    assert response.status_code == 200, response.text
    found: Rule | None = harness.engine.submitted[-1][0].rule
    return found


@pytest.mark.parametrize("path", ["complete", "chat"])
def test_fields_become_a_rule(harness: Any, path: str) -> None:
    assert rule(harness, path) is None
    assert rule(harness, path, allowed_token_ids=[9, 5, 9]) == Rule(allowed=(5, 9))
    requested = {"max_pattern_size": 3, "min_count": 2}
    assert rule(harness, path, repetition_detection=requested) == Rule(repetition=Repetition(1, 3, 2))
    assert rule(harness, path, repetition_detection={}) == Rule()
    assert rule(harness, path, thinking_token_budget=-1) is None


def test_words_are_banned_at_the_start_of_a_text_and_behind_a_blank(harness: Any) -> None:
    encode = harness.tokenizer.encode
    for word in ("two", " two", "<|im_end|>", "zzqy"):
        found = rule(harness, bad_words=[word])
        assert found is not None
        bare, *more = found.words
        text = word.lstrip()
        assert bare == tuple(encode(text, False)), "control tokens of a user's text are text"
        blank = tuple(encode(f" {text}", False))
        assert more == ([blank] if len(blank) == len(bare) and blank[0] != bare[0] else [])


def test_a_budget_begins_where_the_prompt_leaves_off(harness: Any) -> None:
    harness.app(reasoning_parser="qwen3")
    encode = harness.tokenizer.encode
    start, end = tuple(encode("<think>")), tuple(encode("</think>"))

    def thinking(prompt: str) -> ThinkingBudget | None:
        found = rule(harness, prompt=prompt, thinking_token_budget=7)
        assert found is not None
        return found.thinking

    assert thinking("Say") == ThinkingBudget(7, start, end)
    assert thinking("Say <think>\n") == ThinkingBudget(7, start, end, open=True)
    assert thinking("Say <think> so </think>") is None, "the thought is over"


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids", "at least one token"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids", "outside the vocabulary"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids", "outside the vocabulary"),
        ({"bad_words": [""]}, "bad_words", "not empty"),
        ({"bad_words": ["x" * 257]}, "bad_words", "at most 256 characters"),
        ({"bad_words": ["x"] * 129}, "bad_words", "At most 128"),
        ({"bad_words": [f"{chr(97 + i // 9)}{i}" for i in range(128)]}, "bad_words", "at most 128 sequences"),
        ({"thinking_token_budget": -2}, "thinking_token_budget", "-1 for any"),
        ({"thinking_token_budget": 4}, "thinking_token_budget", "--reasoning-parser"),
        ({"repetition_detection": {"max_pattern_size": 2}}, "repetition_detection", "min_count must be in [2, 1024]"),
        ({"repetition_detection": {"max_pattern_size": 9999}}, "repetition_detection", "in [0, 1024]"),
        ({"repetition_detection": {"max_pattern_size": True}}, "repetition_detection", "max_pattern_size"),
        ({"repetition_detection": {"min_pattern_size": 3}}, "repetition_detection", "min_pattern_size"),
        ({"repetition_detection": {"max_size": 2}}, "repetition_detection", "no field 'max_size'"),
    ],
    ids=str,
)
def test_bad_values_are_one_line_that_names_the_field(harness: Any, fields: Any, param: str, says: str) -> None:
    response = harness.complete("One", **fields)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param
    assert says in error["message"] and "\n" not in error["message"]


def test_an_end_by_repetition_says_so(harness: Any) -> None:
    deltas = harness.engine._deltas

    async def repeating(request: Any) -> Any:
        async for delta in deltas(request):
            delta.finish = "repetition" if delta.finish else None
            yield delta

    harness.engine._deltas = repeating
    for choice in (harness.chat().json()["choices"][0], harness.complete().json()["choices"][0]):
        assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")


def test_offline_parameters_are_those_of_requests() -> None:
    params = SamplingParams(
        allowed_token_ids=[3], bad_words=["a", "a"], thinking_token_budget=-1,
        repetition_detection=RepetitionDetectionParams(4, 2, 3),
    )  # fmt: skip
    assert params.bad_words == ["a"] and params.thinking_token_budget is None
    copy = params.clone()
    assert copy == params
    assert copy.allowed_token_ids is not None
    copy.allowed_token_ids.append(4)
    assert params.allowed_token_ids == [3]
