"""Reasoning of an answer: where it begins and ends, its names, its tokens, and calls behind it."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from tests.calls.test_chat_tools import ANSWERS, TOOLS, joined, whole
from tests.fakes.text_checkpoint import TEMPLATE
from tests.traffic.tool_templates import OPENED, THINKING, THINKING_HERMES
from tests.traffic.written_calls import pieces
from trencadis.server.tools.reasoning_parser import AnswerContent, ReasoningContent, ReasoningParser

ANSWER = "<think>\nHm, 2 < 3.\n\nSo:\n</think>\n\nIt is 3.\n"


def split(parts: Any, **how: bool) -> tuple[str, str]:
    parser = ReasoningParser("<think>", "</think>", **how)
    events = [e for part in parts for e in parser.feed(part)] + parser.finish()
    kinds = [type(e) for e in events]
    assert kinds == sorted(kinds, key=[ReasoningContent, AnswerContent].index)
    return "".join(e.text for e in events if isinstance(e, ReasoningContent)), "".join(
        e.text for e in events if isinstance(e, AnswerContent)
    )


CASES: list[tuple[str, dict[str, bool], tuple[str, str]]] = [
    (ANSWER, {}, ("Hm, 2 < 3.\n\nSo:", "It is 3.\n")),
    (ANSWER, {"inside": True}, ("Hm, 2 < 3.\n\nSo:", "It is 3.\n")),
    ("a\n</think>\n\nb", {"inside": True}, ("a", "b")),
    ("a\n</think>\n\nb", {}, ("", "a\n</think>\n\nb")),
    ("a <think>b</think>", {}, ("", "a <think>b</think>")),
    (" \n<think>a</think>b</think>c", {}, ("a", "b</think>c")),
    ("<think>cut off </thi", {}, ("cut off </thi", "")),
    ("<think>blank \n", {}, ("blank \n", "")),
    ("<think>\n\n</think>\n\nb", {}, ("", "b")),
    (" \n b ", {}, ("", " \n b ")),
    ("<thin", {}, ("", "<thin")),
    (ANSWER, {"inside": True, "over": True}, ("", ANSWER)),
    ("", {"inside": True}, ("", "")),
]


@pytest.mark.parametrize(("text", "how", "expected"), CASES)
def test_thoughts_are_told_from_content(text: str, how: dict[str, bool], expected: tuple[str, str]) -> None:
    rng = random.Random(text)
    assert split([text], **how) == expected
    for _ in range(20):
        assert split(pieces(text, rng), **how) == expected


def reference(text: str, inside: bool = False, over: bool = False) -> tuple[str, str]:
    """The division of a whole text by an expression."""
    opened = re.match(r"\s*<think>", text)
    if over or not (inside or opened):
        return "", text
    thoughts, closed, rest = text[opened.end() if opened else 0 :].partition("</think>")
    if closed:
        return thoughts.strip(), rest.lstrip()
    return thoughts.lstrip(), ""


def check_splits(seed: int, answers: int, splits: int) -> None:
    rng = random.Random(seed)
    for _ in range(answers):
        words = ["<think>", "</think>", "<thi", "nk>", "</", "a", " ", "\n", "東", "<", "b c"]
        text = "".join(rng.choices(words, k=rng.randrange(12)))
        how = {"inside": rng.random() < 0.5, "over": rng.random() < 0.2}
        for _ in range(splits):
            assert split(pieces(text, rng), **how) == reference(text, **how), (text, how)


def test_divided_answers_read_as_the_reference_reads_them() -> None:
    check_splits(5, 300, 2)


@pytest.mark.long
def test_ten_thousand_divisions_of_two_thousand_answers() -> None:
    check_splits(6, 2000, 5)
    print("2,000 answers, 10,000 divisions")


def test_reasoning_comes_whole_and_in_deltas_under_both_names(serve: Any) -> None:
    harness = serve(THINKING, ANSWER)
    body = harness.chat().json()
    message = body["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "Hm, 2 < 3.\n\nSo:"
    assert message["content"] == "It is 3.\n" and body["choices"][0]["finish_reason"] == "stop"
    inside = len(harness.tokenizer.encode(ANSWER.partition("</think>")[0]))
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": inside}
    response = harness.chat(stream=True, stream_options={"include_usage": True})
    made = joined(harness, response)[0]
    assert made["reasoning"] == made["reasoning_content"] == message["reasoning"]
    assert made["content"] == message["content"]
    assert harness.events(response)[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": inside}


def test_an_answer_begins_inside_where_the_prompt_has_opened_the_reasoning(serve: Any) -> None:
    harness = serve(OPENED, "So it is.\n</think>\n\n3")
    message = harness.chat().json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("So it is.", "3")
    requested = harness.chat("What is <think>?", add_generation_prompt=False).json()["choices"][0]["message"]
    assert requested["reasoning"] is None and requested["content"].startswith("So it is."), "a user opens nothing"
    cut = harness.chat(max_tokens=2).json()["choices"][0]
    assert cut["message"]["content"] is None and cut["message"]["reasoning"] and cut["finish_reason"] == "length"


def test_a_prompt_that_closes_the_reasoning_leaves_only_content(serve: Any) -> None:
    harness = serve(THINKING, "<think>a</think>b", reasoning_parser="deepseek_r1")
    off = harness.chat(chat_template_kwargs={"enable_thinking": False}).json()
    assert off["choices"][0]["message"]["content"] == "<think>a</think>b"
    assert off["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert harness.chat().json()["choices"][0]["message"]["reasoning"] == "a"


def test_deepseek_r1_begins_inside_and_qwen3_does_not(serve: Any) -> None:
    for parser, thoughts in (("deepseek_r1", "a"), ("qwen3", None)):
        message = serve(TEMPLATE, "a</think>b", reasoning_parser=parser).chat().json()["choices"][0]["message"]
        assert message.get("reasoning") == thoughts and message["content"] == ("b" if thoughts else "a</think>b")


def test_any_pair_of_tags_even_special_ones(serve: Any) -> None:
    harness = serve(TEMPLATE, "[THINK]a[/THINK]b", reasoning_parser="[THINK],[/THINK]")
    message = harness.chat().json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("a", "b")
    plain = serve(TEMPLATE, "<think>a</think>b").chat().json()
    assert plain["choices"][0]["message"]["content"] == "<think>a</think>b", "a template without tags chooses no form"
    assert "completion_tokens_details" not in plain["usage"]
    none = serve(THINKING, "<think>a</think>b", reasoning_parser="none").chat().json()
    assert none["choices"][0]["message"]["content"] == "<think>a</think>b"


@pytest.mark.parametrize("stream", [False, True])
def test_include_reasoning_false_leaves_thoughts_out_and_counts_them(serve: Any, stream: bool) -> None:
    harness = serve(THINKING, ANSWER)
    response = harness.chat(
        include_reasoning=False, stream=stream, stream_options={"include_usage": True} if stream else None
    )
    assert "Hm" not in response.text and "x-ignored-fields" not in response.headers
    usage = harness.events(response)[-1]["usage"] if stream else response.json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] > 5
    assert serve(TEMPLATE).chat(include_reasoning=False).headers["x-ignored-fields"] == "include_reasoning"


def test_calls_follow_the_reasoning(serve: Any) -> None:
    call = ANSWERS["hermes"]
    harness = serve(THINKING_HERMES, f"I could <tool_call> now.\n</think>\n\nLooking.\n{call}")
    choice = harness.chat(tools=TOOLS).json()["choices"][0]
    content, calls, reason = whole(choice)
    assert (choice["message"]["reasoning"], content, reason) == ("I could <tool_call> now.", "Looking.", "tool_calls")
    made = joined(harness, harness.chat(tools=TOOLS, stream=True))[0]
    assert [(n, a) for _, n, a in made["calls"]] == calls and made["reasoning"] == choice["message"]["reasoning"]
    assert made["content"] == "Looking."


def test_a_continued_message_goes_on_inside_its_own_reasoning(serve: Any) -> None:
    harness = serve(THINKING, "more</think>said")
    for text, thoughts, content in (("<think>so", "more", "said"), ("<think>a</think>b", None, "more</think>said")):
        conversation = [{"role": "user", "content": "<think>"}, {"role": "assistant", "content": text}]
        body = harness.call("/v1/chat/completions", {"messages": conversation, "continue_final_message": True}).json()
        message = body["choices"][0]["message"]
        assert (message.get("reasoning"), message["content"]) == (thoughts, content)


def test_reasoning_effort_reaches_the_template(serve: Any) -> None:
    harness = serve(THINKING)

    def shown(**fields: Any) -> str:
        response = harness.chat(**fields)
        assert response.status_code == 200 and "x-ignored-fields" not in response.headers
        return str(harness.tokenizer.decode(harness.engine.submitted[-1][0].tokens, False))

    assert "E=low" in shown(reasoning_effort="low") and "</think>" not in shown(reasoning_effort="low")
    assert "E=none" in shown(reasoning_effort="none") and "</think>" in shown(reasoning_effort="none")
    kwargs = {"reasoning_effort": "mine", "enable_thinking": True}
    assert "E=mine" in shown(reasoning_effort="none", chat_template_kwargs=kwargs)
    assert "</think>" not in shown(reasoning_effort="none", chat_template_kwargs=kwargs)
    harness.app(reasoning_effort_map={"medium": "low", "xhigh": "max"})
    assert "E=low" in shown(reasoning_effort="medium") and "E=high" in shown(reasoning_effort="high")
    assert "E=medium" in shown(reasoning_effort="xhigh", chat_template_kwargs={"reasoning_effort": "medium"})
    only = serve(THINKING.replace("reasoning_effort", "effort"))
    assert only.chat(reasoning_effort="low").headers["x-ignored-fields"] == "reasoning_effort"
    assert "x-ignored-fields" not in only.chat(reasoning_effort="none").headers


def test_reasoning_of_the_history_reaches_the_template_under_either_name(serve: Any) -> None:
    harness = serve(THINKING)
    for name in ("reasoning", "reasoning_content"):
        conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", name: "deep"}]
        harness.call("/v1/chat/completions", {"messages": conversation})
        assert "<think>\ndeep\n</think>" in harness.tokenizer.decode(harness.engine.submitted[-1][0].tokens, False)
