"""Parameters that become rules, from offline callers to the tokens that come back."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from trencadis import LLM, RepetitionDetectionParams, SamplingParams
from trencadis.core.errors import BadRequest

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<think>\n{% endif %}</think>"
)
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def llm(vl_checkpoint: Path) -> Iterator[LLM]:
    made = LLM(str(vl_checkpoint), dtype="float32", max_model_len=128, max_num_seqs=4, num_gpu_blocks_override=64)
    yield made
    made.close()


def drawn(llm: LLM, prompt: list[int] | None = None, **params: object) -> list[list[int]]:
    given = SamplingParams(**{"max_tokens": 24, "temperature": 1.0, "seed": 3, "ignore_eos": True, **params})  # type: ignore[arg-type]
    (output,) = llm.generate([{"prompt_token_ids": prompt or PROMPT}], given, use_tqdm=False)
    return [list(c.token_ids) for c in output.outputs]


def test_allowed_ids_are_all_that_is_drawn(llm: LLM) -> None:
    found = drawn(llm, allowed_token_ids=[9, 40, 41], n=3)
    assert {t for tokens in found for t in tokens} == {9, 40, 41} and found[0] != found[1]


def test_bad_words_do_not_occur(llm: LLM) -> None:
    encode = llm.get_tokenizer().encode
    (q,), (z,) = (encode(letter, add_special_tokens=False) for letter in "qz")
    assert encode("qz", add_special_tokens=False) == [q, z]
    pairs = [p for tokens in drawn(llm, allowed_token_ids=[q, z], n=4) for p in pairwise(tokens)]
    assert (q, z) in pairs
    found = drawn(llm, allowed_token_ids=[q, z], bad_words=["qz"], n=4)
    assert not [p for tokens in found for p in pairwise(tokens) if p == (q, z)] and {q, z} == {*found[0], *found[1]}
    assert set(drawn(llm, allowed_token_ids=[q, z], bad_words=["z"])[0]) == {q}


def test_a_repeated_pattern_ends_an_answer(llm: LLM) -> None:
    requested = RepetitionDetectionParams(max_pattern_size=3, min_count=2)
    params = SamplingParams(
        temperature=1.0, seed=1, max_tokens=50, ignore_eos=True, min_tokens=5, allowed_token_ids=[9, 40],
        repetition_detection=requested,
    )  # fmt: skip
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    (choice,) = output.outputs
    ids = list(choice.token_ids)
    assert (choice.finish_reason, choice.stop_reason) == ("repetition", "repetition_detected")
    assert len(ids) >= 5 and any(ids[-n:] == ids[-2 * n : -n] for n in (1, 2, 3))


def test_a_budget_of_thought_needs_a_template_that_has_thoughts(llm: LLM) -> None:
    with pytest.raises(BadRequest, match="thinking_token_budget needs a model whose thoughts"):
        drawn(llm, thinking_token_budget=4)


def test_a_thought_ends_when_its_budget_is_spent(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    template = llm.llm_engine.service.template
    assert template is not None
    monkeypatch.setattr(template, "source", TEMPLATE)
    tokenizer = llm.get_tokenizer()
    start, end = (tokenizer.encode(tag, add_special_tokens=False) for tag in ("<think>", "</think>"))
    found = drawn(llm, [*PROMPT, *start], thinking_token_budget=4)[0]
    assert found[4 : 4 + len(end)] == end
    assert drawn(llm, thinking_token_budget=4) == drawn(llm), "no thought has begun"
