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
    driver, scored, others = _count_tokens(tokens=1024)
    for number in range(6):
        _add_scored(driver, number)
    driver.add(Request("chat", [1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True, seed=7)))
    driver.run_step()
    assert (scored, others) == ([64], [3]), "the chat starts in the first step, beside a chunk"
    driver.finish()
    driver.verify()
    assert max(scored) == 128 and sum(scored) == sum(300 + number for number in range(6))


def test_steps_with_scored_prompts_are_shorter_while_others_run_and_for_two_seconds_after() -> None:
    """A chat waits for the step in flight and for its own: of an eighth each they kept it 1.8 to 2.3x of plain load."""
    driver, scored, others = _count_tokens(tokens=4096)
    for number in range(8):
        _add_scored(driver, number)
    driver.run_step()
    driver.add(Request("chat", [1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True, seed=7)))
    driver.finish()
    driver.verify()
    last = max(step for step, count in enumerate(others) if count)  # a step is a second of the virtual clock
    assert scored[0] == 512 and set(scored[1 : last + 2]) == {128}, "a quarter while the chat runs, and after it"
    assert 512 in scored[last + 2 : last + 5] and sum(scored) == sum(300 + number for number in range(8))


def _count_tokens(tokens: int) -> tuple[ScheduleDriver, list[int], list[int]]:
    """A driver, and the tokens of each of its steps: of prompts with log-probabilities, and of all others."""
    engine, _ = shadow_engine(blocks=2000, size=4, rows=20, depth=0, caching=False, tokens=tokens, length=400)
    scored, others = list[int](), list[int]()
    schedule = engine.scheduler.schedule

    def count_tokens() -> Step | None:
        step = schedule()
        if step is not None:
            scored.append(sum(len(row.tokens) for row in step.rows if row.targets is not None))
            others.append(step.tokens - scored[-1])
        return step

    engine.scheduler.schedule = count_tokens  # type: ignore[method-assign]
    return ScheduleDriver(engine, random.Random(5), 400), scored, others


def _add_scored(driver: ScheduleDriver, number: int) -> None:
    prompt = [1 + i % (VOCAB - 1) for i in range(300 + number)]
    driver.add(Request(f"scored{number}", prompt, SamplingParams(max_tokens=1, prompt_logprobs=2, seed=number)))


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
