"""Blocks do not depend on how an answer was divided into pieces, and lose nothing."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from tests.traffic.written_calls import SCHEMAS, STYLES, damaged, pieces, written
from trencadis.core.request import TokenLogprob
from trencadis.server.prompts.answer_reader import AnswerPart, AnswerReader, CallPart
from trencadis.server.prompts.output_processor import TextPiece
from trencadis.server.routes.message_translation import AnswerBlock, BlockBuilder, BlockClosed, BlockDelta, BlockOpened
from trencadis.server.tools.parser_registry import TOOL_PARSERS
from trencadis.server.tools.reasoning_parser import AnswerContent, ReasoningContent, ReasoningParser


def read(style: str, parts: list[str]) -> list[tuple[str, str, str]]:
    """The blocks of an answer; checks that each change concerns the open block."""
    reader = AnswerReader(ReasoningParser("<think>", "</think>"), TOOL_PARSERS[style](SCHEMAS))
    blocks, open_block = BlockBuilder(), None
    grown: dict[int, str] = {}
    for i, part in enumerate([*parts, None]):
        reader.finish() if part is None else reader.feed(part)
        changes: list[Any] = list(blocks.feed(TextPiece(part or "", answer=reader.take_part())))
        changes += blocks.finish(False) if i == len(parts) else []
        for change in changes:
            if isinstance(change, BlockOpened):
                assert open_block is None and change.block.index == len(grown)
                open_block, grown[change.block.index] = change.block, ""
            else:
                assert change.block is open_block
                if isinstance(change, BlockDelta):
                    assert change.text
                    grown[change.block.index] += change.text
                else:
                    open_block = None
    assert open_block is None and [b.text for b in blocks.blocks] == list(grown.values())
    return [(b.kind, b.name, b.text) for b in blocks.blocks]


def check(seed: int, answers: int, divisions: int) -> None:
    rng = random.Random(seed)
    for i in range(answers):
        style = list(STYLES)[i % len(STYLES)]
        text = rng.choice(["", "<think>hm, so\n</think>\n\n"]) + written(style, rng).text
        text = damaged(text, rng) if rng.random() < 0.3 else text
        whole = read(style, [text])
        kinds = [kind for kind, _, _ in whole]
        assert all(a != b or a == "call" for a, b in pairwise(kinds)), "each block is of one kind"
        for _ in range(divisions):
            assert read(style, list(pieces(text, rng))) == whole, text


def test_blocks_do_not_depend_on_the_division() -> None:
    check(3, 60, 2)


@pytest.mark.long
def test_blocks_of_2000_answers_do_not_depend_on_10000_divisions() -> None:
    check(4, 2000, 5)
    print("2,000 answers, 10,000 divisions")


def score(token: int) -> TokenLogprob:
    return TokenLogprob(token, -0.5, 1, [], [])


def test_log_probabilities_follow_the_text_of_their_tokens() -> None:
    blocks = BlockBuilder({9})
    changes: list[Any] = []
    for text, token, finish in (("", 1, None), ("ö", 2, None), ("!", 3, None), ("", 9, "stop")):
        changes += blocks.feed(TextPiece(text, [token], [score(token)], finish))
    changes += blocks.finish(False)
    grown = [[one.token for one in c.logprobs] for c in changes if isinstance(c, BlockDelta)]
    assert grown == [[1, 2], [3]] and [one.token for one in blocks.blocks[0].logprobs] == [1, 2, 3]
    closed = changes[-1]
    assert isinstance(closed, BlockClosed) and not closed.cut and isinstance(closed.block, AnswerBlock)


def test_log_probabilities_of_thoughts_and_tags_are_not_the_texts() -> None:
    blocks = BlockBuilder()
    segments: list[list[Any]] = [
        [ReasoningContent("hm")],
        [],
        [AnswerContent("a")],
        [AnswerContent("b"), CallPart(0, "c", "f")],
        [],
    ]
    for token, some in enumerate(segments):
        list(blocks.feed(TextPiece("", [token], [score(token)], answer=AnswerPart(some))))
    assert [(b.kind, [one.token for one in b.logprobs]) for b in blocks.blocks] == [
        ("thought", []), ("text", [2, 3]), ("call", [])
    ]  # fmt: skip
