"""Properties of the incremental detokenizers and of stop strings."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trencadis.server.prompts.output_processor import ByteDetokenizer, StopMatcher, WindowDetokenizer, make_detokenizers
from trencadis.server.text.checkpoint_tokenizer import Tokenizer

IDS = st.lists(st.integers(0, 720), max_size=40)
LETTERS = st.text("ab\n", max_size=30)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_checkpoint(checkpoint)


@given(ids=IDS, skip=st.booleans(), cut=st.integers(1, 5))
@settings(max_examples=300, deadline=None)
def test_deltas_concatenate_to_the_full_decode(tokenizer: Tokenizer, ids: list[int], skip: bool, cut: int) -> None:
    stream = make_detokenizers(tokenizer)(skip_special_tokens=skip)
    assert isinstance(stream, ByteDetokenizer)
    text = "".join(stream.feed(ids[i : i + cut]) for i in range(0, len(ids), cut)) + stream.finish()
    assert text == tokenizer.decode(ids, skip)


@given(text=st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_no_half_characters_are_emitted(tokenizer: Tokenizer, text: str) -> None:
    import unicodedata

    whole = unicodedata.normalize("NFC", text)
    for stream in (ByteDetokenizer(tokenizer.pieces), WindowDetokenizer(tokenizer)):
        out = ""
        for token in tokenizer.encode(text, allow_special=False):
            out += stream.feed([token])
            assert whole.startswith(out)
        assert out + stream.finish() == whole


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Letter by letter: the first end of any stop string, the longest where several end."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(
    text=LETTERS,
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=8),
    include=st.booleans(),
)
@settings(max_examples=600, deadline=None)
def test_stops_cut_where_the_reference_cuts(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    wanted, stop = reference(text, stops, include)
    matcher = StopMatcher(stops, include)
    edges = sorted({0, len(text), *(min(c, len(text)) for c in cuts)})
    out = ""
    for start, end in pairwise(edges):
        out += matcher.feed(text[start:end])
        assert wanted.startswith(out)
        if matcher.matched is None:
            assert end - len(out) < max((len(s) for s in stops), default=1)
    if matcher.matched is None:
        out += matcher.finish()
    assert (out, matcher.matched) == (wanted, stop)


def test_unarmed_text_never_matches() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.feed("ab a", armed=False) == "ab a"
    assert matcher.feed("b a") == "b " and matcher.feed("b c") == "" and matcher.matched == "ab"
