"""``vllm:iteration_tokens_total`` sums to all tokens of prompts and answers, each counted once."""

from __future__ import annotations

import random

import pytest

from tests.oracles.shadow_engine import VOCAB, ScheduleDriver, shadow_engine
from trencadis.core.request import Request, SamplingParams


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("chunk", [0, 3])
def test_steps_count_each_token_of_prompts_and_answers(depth: int, chunk: int) -> None:
    rng = random.Random(5)
    engine, _ = shadow_engine(blocks=400, size=4, rows=20, depth=depth, caching=False, chunk=chunk)
    driver, expected, counted = ScheduleDriver(engine, rng, 96), 0, 0
    for number in range(8):
        prompt = [rng.randrange(1, VOCAB) for _ in range(4 * rng.randint(1, 5))]
        params = SamplingParams(temperature=1.0, max_tokens=rng.randint(1, 9), ignore_eos=True, seed=number)
        driver.add(Request(f"r{number}", prompt, params))
        expected += len(prompt) + (params.max_tokens or 0)
        counted += sum(engine.stats().step_tokens)
        driver.run_step()
    driver.finish()
    assert counted + sum(engine.stats().step_tokens) == expected
