"""Tool parsers over answers of each style: calls are found, nothing is lost, and no division into pieces matters."""

from __future__ import annotations

import json
import random
import re
import time
from typing import Any

import pytest

from tests.traffic.written_calls import SCHEMAS, STYLES, damaged, pieces, written
from trencadis.server.prompts.answer_reader import AnswerReader
from trencadis.server.tools.parser_registry import TOOL_PARSERS
from trencadis.server.tools.tool_parser import AnswerText, CallArguments, CallEnded, CallStarted, ToolEvent

MARKUP = set(
    [
        "tool_call",
        "call",
        "name",
        "arguments",
        "parameters",
        "parameter",
        "function",
        "type",
        "id",
        "TOOL_CALLS",
        "ARGS",
        "CALL_ID",
        "python_tag",
        "python_start",
        "python_end",
        "tool_call_start",
        "tool_call_end",
        "True",
        "False",
        "None",
    ]
)


def read(style: str, parts: Any, tools: Any = None) -> list[ToolEvent]:
    parser = TOOL_PARSERS[style](SCHEMAS if tools is None else tools)
    return [event for part in parts for event in parser.feed(part)] + parser.finish()


def found(events: list[ToolEvent]) -> tuple[str, list[tuple[str, str]], list[str]]:
    """The content, the calls as (name, arguments as sent), and their ids. Checks that events come in order."""
    content, calls, ids, open_call = "", [], [], None
    for event in events:
        if isinstance(event, AnswerText):
            content += event.text
            continue
        if isinstance(event, CallStarted):
            assert open_call is None and event.index == len(calls)
            open_call = event.index
            calls.append((event.name, ""))
            ids.append(event.id)
        elif isinstance(event, CallArguments):
            assert event.index == open_call
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
        elif isinstance(event, CallEnded):
            assert event.index == open_call
            open_call = None
    assert open_call is None
    return content, calls, ids


def check_splits(style: str, seed: int, answers: int, splits: int) -> int:
    """Returns how many calls were found."""
    rng, calls = random.Random(f"{style}{seed}"), 0
    for _ in range(answers):
        answer = written(style, rng)
        whole = found(read(style, [answer.text]))
        assert whole[0] == answer.content, answer.text
        assert [(n, json.loads(a)) for n, a in whole[1]] == answer.calls, answer.text
        calls += len(whole[1])
        broken = damaged(answer.text, rng)
        for text in (answer.text, broken):
            expected = found(read(style, [text]))
            for _ in range(splits):
                parts = pieces(text, rng)
                assert found(read(style, parts)) == expected, (text, parts)
        if answer.text.startswith(broken):
            check_nothing_lost(broken, *found(read(style, [broken])))
    return calls


def check_nothing_lost(text: str, content: str, calls: list[tuple[str, str]], ids: list[str]) -> None:
    """Every word of a text that was cut off is content, a name or in the arguments."""
    sent = " ".join([content, *ids, *(f"{n} {a}" for n, a in calls)])
    if "\\" in text or not text.isascii():
        return  # escapes may be written in another way
    cut = re.search(r"\w*\Z", text)
    lost = [w for w in re.findall(r"\w+", text) if w not in MARKUP and w not in sent]
    assert [w for w in lost if cut is None or w != cut[0]] == [], (text, sent)


@pytest.mark.parametrize("style", STYLES)
def test_a_divided_answer_reads_like_a_whole_one(style: str) -> None:
    assert check_splits(style, 1, 80, 2) > 60


@pytest.mark.long
@pytest.mark.parametrize("style", STYLES)
def test_ten_thousand_divisions_of_two_thousand_answers_each(style: str) -> None:
    calls = check_splits(style, 2, 2000, 5)
    print(f"{style}: 2,000 answers and as many damaged ones, {calls} calls, 20,000 divisions")


GOLDEN: list[tuple[str, str, str | None, list[tuple[str, str]]]] = [
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1, [2], {"a": 3}]}</tool_call>', "",
     [("f", '[1, [2], {"a": 3}]')]),
    ("hermes", '<tool_call>[{"name": "f"}, {"name": "g"}]</tool_call>', "", [("f", "{}"), ("g", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": {"b": 1}</tool_call>ok', "ok", [("f", '{"a": {"b": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}}}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>', "",
     [("f", '{"a": "</tool_call>"}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}} so</tool_call>', "so</tool_call>", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>', None, []),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', None, []),
    ("hermes", "<tool_call>\n<tool_call>{\"name\": \"f\"}</tool_call>", "<tool_call>", [("f", "{}")]),
    ("qwen3", "<function=find><parameter=query>a</parameter> b\n</parameter></function>", "",
     [("find", '{"query": "a</parameter> b"}')]),
    ("qwen3", "<tool_call><function=find><parameter=tags>no list</parameter><parameter=new>1</parameter></function>",
     "", [("find", '{"tags": "no list", "new": "1"}')]),
    ("qwen3", "<function=get_weather><parameter=exact>True</parameter><parameter=days>true</parameter></function>",
     "", [("get_weather", '{"exact": true, "days": "true"}')]),
    ("qwen3", "<function=get_weather><parameter=days>NaN</parameter><parameter=city>\n\na\n\n</parameter></tool_call>",
     "", [("get_weather", '{"days": "NaN", "city": "\\na\\n"}')]),
    ("qwen3", "<function=now></function>", "", [("now", "{}")]),
    ("qwen3", "<function=now>\nwhat", "what", [("now", "")]),
    ("qwen3", "<function=get_weather><parameter=ci", "", [("get_weather", '{"ci')]),
    ("qwen3", '<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
    ("llama3_json", '{"name": "Ada", "parameters": {"age": 3}}', None, []),
    ("llama3_json", '[1, 2]', None, []),
    ("llama3_json", 'So:\n{"name": "now", "parameters": {}}', "So:", [("now", "{}")]),
    ("llama3_json", 'So {"name": "now", "parameters": {}}', None, []),
    ("llama3_json", '{"name": "now", "parameters": {}} {"name": "no"}', '{"name": "no"}', [("now", "{}")]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": [1, 2]}', "", [("f", '{"a": [1, 2]}')]),
    ("mistral", '[TOOL_CALLS]f{"a": [1[TOOL_CALLS]g{}', "", [("f", '{"a": [1'), ("g", "{}")]),
    ("mistral", "[TOOL_CALLS]what?", None, []),
    ("pythonic", "[find(query=\"\"\"a \"b, c) d\"\"\", tags=['x', r'\\d'], where={'a': (1, 2)}, score=None)]", "",
     [("find", '{"query": "a \\"b, c) d", "tags": ["x", "\\\\d"], "where": {"a": [1, 2]}, "score": null}')]),
    ("pythonic", "[get_weather(city=Paris, exact=true, days=-1)]", "",
     [("get_weather", '{"city": "Paris", "exact": true, "days": -1}')]),
    ("pythonic", "[get_weather(city='Par", "", [("get_weather", "{\"city\": 'Par")]),
    ("pythonic", "[now(1)]", None, []),
    ("pythonic", "[other(a=1)]", None, []),
    ("pythonic", "[now(), other(a=1)] so", ", other(a=1)] so", [("now", "{}")]),
    ("pythonic", "<|python_start|>[now()]<|python_end|>", "", [("now", "{}")]),
    ("gemma4", '<|tool_call>call:f{a:<|"|>x, {"y"}: <b><|"|>,b:[1,-2.5,true,null],c:{d:<|"|><|"|>}}<tool_call|>', "",
     [("f", '{"a": "x, {\\"y\\"}: <b>", "b": [1, -2.5, true, null], "c": {"d": ""}}')]),
    ("gemma4", '<|tool_call>call:f{}<tool_call|><|tool_call>call:g.h-1{a:None,}<tool_call|> so', "so",
     [("f", "{}"), ("g.h-1", '{"a": null}')]),
    ("gemma4", "<|tool_call>call:f{city:New York,n:007,x:NaN}<tool_call|>", "",
     [("f", '{"city": "New York", "n": "007", "x": "NaN"}')]),
    ("gemma4", '<|tool_call>call:f{<|"|>a b<|"|>:1,"c":2', "", [("f", '{"a b": 1, "\\"c\\"": 2')]),
    ("gemma4", '<|tool_call>call:f{city:<|"|>Par', "", [("f", '{"city": "Par')]),
    ("gemma4", "<|tool_call>call:f{ci", "", [("f", '{"ci')]),
    ("gemma4", "<|tool_call>call:f{a:[1,{b:2<tool_call|>so", "so", [("f", '{"a": [1, {"b": 2')]),
    ("gemma4", "<|tool_call>call f{}<tool_call|>", None, []),
    ("gemma4", "<tool_call>call:f{}", None, []),
    ("lfm2", "I look.\n<|tool_call_start|>[now(), f(a='b')]<|tool_call_end|> so", "I look.\nso",
     [("now", "{}"), ("f", '{"a": "b"}')]),
    ("lfm2", "[now()]", None, []),
    ("lfm2", "<|tool_call_start|>now", None, []),
]  # fmt: skip
"""Style, answer, content (None: all of it), calls."""


@pytest.mark.parametrize(("style", "text", "content", "calls"), GOLDEN)
def test_odd_answers_read_as_agreed(style: str, text: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    expected = (text if content is None else content, calls)
    rng = random.Random(text)
    for parts in ([text], *(pieces(text, rng) for _ in range(6))):
        assert found(read(style, parts))[:2] == expected, parts


def test_a_model_s_own_id_is_kept_where_it_can_serve() -> None:
    def ids(text: str) -> list[str]:
        reader = AnswerReader(None, TOOL_PARSERS["mistral"]({}))
        reader.feed(text)
        reader.finish()
        return [call.id for call in reader.take_part().calls if call.id]

    kept, again, odd = ids("".join(f"[TOOL_CALLS]f[CALL_ID]{i}[ARGS]{{}}" for i in ("abcdefghi", "abcdefghi", "x!")))
    assert kept == "abcdefghi" and again != kept and re.fullmatch(r"\w{9}", again) and re.fullmatch(r"\w{9}", odd)


SIZE = 60_000
BOMBS = (
    "<tool_call>",
    '<tool_call>{"arguments":[',
    '<tool_call>{"arguments":"',
    '\n{"parameters":["',
    '\n{"parameters":"\\',
    "<tool_call><function=f><parameter=a>",
    "</parameter>\n",
    "[TOOL_CALLS][",
    "[f(a=",
    "[f(a=1),",
    "(",
    "-",
    ".x",
    "<|tool_call>call:f{a:[{b:",
    '<|"|>',
    " ",
    "\\",
    "<",
)


@pytest.mark.parametrize("style", STYLES)
def test_no_answer_takes_long_to_read(style: str) -> None:
    """The bar is 2 s for an answer; the deadline five times that, against hangs."""
    tools = {"f": {"properties": {"a": {"type": "array"}}}}
    begin = {
        "qwen3": "<tool_call><function=f><parameter=a>",
        "pythonic": "[f(a=1",
        "gemma4": "<|tool_call>call:f{a:",
    }.get(style, "")
    for bomb in BOMBS:
        text = begin + bomb * (SIZE // len(bomb))
        start = time.process_time()
        sent = read(style, [text[i : i + 40] for i in range(0, len(text), 40)], tools)
        assert time.process_time() - start < 10, bomb
        found(sent)
