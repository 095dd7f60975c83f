"""The demo model under grammars at temperature 1: whatever ends by itself has the form that was asked for."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.random_inputs.random_gbnf import RandomGrammar
from tests.random_inputs.random_schemas import REAL, random_schema
from tests.random_inputs.schema_instances import fits, validator
from trencadis import LLM, SamplingParams, StructuredOutputsParams
from trencadis.core.errors import BadRequest

DEMO = Path(__file__).resolve().parents[2] / "assets" / "demo"
Check = Callable[[str], bool]
Form = tuple[StructuredOutputsParams, Check]


def schemas(count: int) -> list[Form]:
    every = [*REAL, *(random_schema(random.Random(i)) for i in range(count - len(REAL)))]

    def checked(schema: dict[str, object]) -> Check:
        checks = validator(schema)
        return lambda text: fits(checks, text)

    return [
        (StructuredOutputsParams(json=one, disable_any_whitespace=i % 2 == 0), checked(one))
        for i, one in enumerate(every)
    ]


def regexes(count: int) -> list[Form]:
    pieces = ("a", "[a-f]+", "\\d{2}", "(yes|no)", "-", "\\w{1,4}", "[^x]", "é?", "( |_)")

    def made(number: int) -> str:
        rng = random.Random(number)
        return "".join(rng.choice(pieces) for _ in range(rng.randrange(1, 6)))

    def checked(pattern: str) -> Check:
        return lambda text: re.fullmatch(pattern, text) is not None

    return [(StructuredOutputsParams(regex=one), checked(one)) for one in map(made, range(count))]


def grammars(count: int) -> list[Form]:
    every = [RandomGrammar.of(number) for number in range(count)]
    return [(StructuredOutputsParams(grammar=one.text()), one.takes) for one in every]


def generate(forms: list[Form], each: int) -> tuple[int, int, int]:
    """Answers that ended, all answers, and forms that were refused; each one that ended is checked."""
    ended = total = refused = 0
    with (
        warnings.catch_warnings(),
        LLM(str(DEMO), dtype="float32", max_model_len=512, kv_cache_memory_bytes=64 << 20, max_num_seqs=32) as llm,
    ):
        warnings.simplefilter("ignore")
        for i, (form, check) in enumerate(forms):
            params = SamplingParams(
                n=each, temperature=1, seed=i, max_tokens=160, structured_outputs=form, ignore_eos=i % 3 == 0
            )
            try:
                answers = llm.generate(["Fill the form:"], params, use_tqdm=False)[0].outputs
            except BadRequest:
                refused += 1
                continue
            for answer in answers:
                total += 1
                if answer.finish_reason == "stop":
                    ended += 1
                    assert check(answer.text), (form, answer.text)
    return ended, total, refused


@pytest.mark.long
def test_two_thousand_generations() -> None:
    reported = []
    for name, forms in (("schemas", schemas(500)), ("regexes", regexes(100)), ("grammars", grammars(100))):
        ended, total, refused = generate(forms, 3)
        reported.append(f"{len(forms)} {name}: {ended} of {total} ended and have the form, {refused} refused")
        assert ended >= 0.5 * total and refused <= 0.1 * len(forms)
    print("\n" + "\n".join(reported))
