"""Tokens of steps: what ``vllm:iteration_tokens_total`` counts, and what prompts with log-probabilities may take."""

from __future__ import annotations

import random

import pytest

from tests.oracles.shadow_engine import VOCAB, ScheduleDriver, shadow_engine
from trencadis.core.request import Request, SamplingParams
from trencadis.core.step import Step


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


def test_prompts_with_log_probabilities_leave_the_rest_of_each_step_to_others() -> None:
    """Forty prompts of 700 tokens with ``prompt_logprobs`` kept another chat waiting until all of them were scored."""
    engine, _ = shadow_engine(blocks=2000, size=4, rows=20, depth=0, caching=False, tokens=1024, length=400)
    driver, scored, others = ScheduleDriver(engine, random.Random(5), 400), list[int](), list[int]()
    schedule = engine.scheduler.schedule

    def count_tokens() -> Step | None:
        step = schedule()
        rows = () if step is None else step.rows
        scored.append(sum(len(row.tokens) for row in rows if row.targets is not None))
        others.append(sum(len(row.tokens) for row in rows if row.targets is None))
        return step

    engine.scheduler.schedule = count_tokens  # type: ignore[method-assign]
    for number in range(6):
        prompt = [1 + i % (VOCAB - 1) for i in range(300 + number)]
        driver.add(Request(f"scored{number}", prompt, SamplingParams(max_tokens=1, prompt_logprobs=2, seed=number)))
    driver.add(Request("chat", [1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True, seed=7)))
    driver.run_step()
    assert (scored, others) == ([128], [3]), "the chat starts in the first step, behind an eighth of it"
    driver.finish()
    driver.verify()
    assert max(scored) == 128 and sum(scored) == sum(300 + number for number in range(6))
    assert engine.scheduler.limits.scored_tokens == 128


def test_a_prompt_that_cannot_be_cut_is_scored_whole_and_alone() -> None:
    """Where chunks are off, the first such prompt of a step may pass the share; the next one waits for a step."""
    engine, _ = shadow_engine(
        blocks=2000, size=4, rows=20, depth=0, caching=False, tokens=1024, length=400, chunked=False
    )
    driver = ScheduleDriver(engine, random.Random(5), 400)
    for number in range(3):
        driver.add(Request(f"scored{number}", [1] * 200, SamplingParams(max_tokens=1, prompt_logprobs=0, seed=number)))
    driver.add(Request("chat", [1, 2, 3], SamplingParams(max_tokens=1, seed=7)))
    for left in (2, 1, 0):
        driver.run_step()
        assert len(engine.scheduler.waiting) == left
    driver.finish()
    driver.verify()
