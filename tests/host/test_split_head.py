"""Greedy rows beside others: each kind has a launch of its own, and the answers are those of one launch."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from trencadis import LLM, SamplingParams
from trencadis.assets import demo_path
from trencadis.core.launch_inputs import HeadInputs
from trencadis.core.launches import model_runner
from trencadis.core.launches.greedy_and_masked_sample_launches import launch_split, select_rows
from trencadis.core.step_output import HeadOutput

GREEDY: dict[str, Any] = dict(temperature=0.0, max_tokens=9, ignore_eos=True)
ASKED = [
    GREEDY,
    {**GREEDY, "temperature": 0.9, "seed": 4},
    {**GREEDY, "max_tokens": 5},
    {**GREEDY, "logprobs": 2},
    {**GREEDY, "presence_penalty": 1.5, "repetition_penalty": 1.3},
    {**GREEDY, "logit_bias": {70: 30.0}},
    {**GREEDY, "temperature": 0.7, "top_k": 3, "seed": 8, "logprobs": 0},
    {**GREEDY, "min_tokens": 4, "ignore_eos": False},
    {**GREEDY, "n": 2, "temperature": 1.1, "seed": 9},
]


class Given:
    """``core.device.backend.Pending`` of an output that is there."""

    def __init__(self, output: HeadOutput) -> None:
        self.output = output

    def done(self) -> bool:
        return True

    def result(self) -> HeadOutput:
        return self.output


def inputs(rows: int) -> HeadInputs:
    """Each array counts its rows."""
    names = [field.name for field in dataclasses.fields(HeadInputs) if field.name != "masks"]
    return HeadInputs(**{name: np.arange(rows) for name in names}, masks=np.zeros((3, 2), np.uint8))  # type: ignore[arg-type]


def test_rows_return_to_their_places() -> None:
    full, seen = np.array([False, True, True, False, False]), list[tuple[list[int], bool, int]]()

    def launch(part: HeadInputs, which: bool) -> Given:
        seen.append((part.slot.tolist(), which, len(part.masks)))
        fields = [getattr(part, f.name) for f in dataclasses.fields(part) if f.name != "masks"]
        assert all(len(field) == len(part.slot) for field in fields if field is not None)
        token = (10 * part.slot).astype(np.int32)
        if not which:
            return Given(HeadOutput(token))
        return Given(HeadOutput(token, *(part.slot + 0.5, part.slot), np.stack([part.slot] * 2, 1), None))

    found = launch_split(inputs(5), full, launch)
    assert found.done() and found.result() is found.result()
    assert seen == [([0, 3, 4], False, 1), ([1, 2], True, 3)], "greedy rows take no masks along"
    out = found.result()
    assert out.token.tolist() == [0, 10, 20, 30, 40] and out.top_logprob is None
    assert out.logprob is not None and out.logprob[full].tolist() == [1.5, 2.5]
    assert out.top_id is not None and out.top_id[full].tolist() == [[1, 1], [2, 2]]
    assert select_rows(inputs(5), np.array([4, 0]), True).slot.tolist() == [4, 0]


def test_answers_beside_others_are_those_of_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    apart: list[int] = []

    def noted(inputs: HeadInputs, full: np.ndarray, launch: Any) -> Any:
        apart.append(int(full.sum()))
        return launch_split(inputs, full, launch)

    monkeypatch.setattr(model_runner, "launch_split", noted)
    llm = LLM(str(demo_path()), max_model_len=256, kv_cache_memory_bytes=1 << 24)
    try:
        prompts = [f"The mosaic of {place} is" for place in range(len(ASKED))]
        params = [SamplingParams(**requested) for requested in ASKED]
        alone = [sampled_tokens(llm.generate([p], [s])[0]) for p, s in zip(prompts, params, strict=True)]
        assert not apart
        together = [sampled_tokens(answer) for answer in llm.generate(prompts, params)]
    finally:
        llm.close()
    assert together == alone and len(apart) > 5


def sampled_tokens(answer: Any) -> list[Any]:
    """Tokens, reasons and log-probabilities to four places."""
    return [
        (
            tuple(one.token_ids),
            one.finish_reason,
            [{i: round(p.logprob, 4) for i, p in step.items()} for step in one.logprobs or ()],
        )
        for one in answer.outputs
    ]
