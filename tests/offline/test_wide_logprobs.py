"""More log-probabilities with a token than a SAMPLE launch reports, up to the whole vocabulary."""

from __future__ import annotations

import math
from typing import Any

import pytest

from trencadis import LLM, SamplingParams
from trencadis.assets import demo_path
from trencadis.backends.cpu import shape_policy as cpu_policy
from trencadis.backends.hpu.shape_policy import SERVING
from trencadis.core.buckets import Stage, wide_ids
from trencadis.core.errors import BadRequest
from trencadis.core.launches.launch_splitter import list_wide_variants, plan_wide_variants, wide_bucket
from trencadis.core.shapes.bucket_options import BucketOptions
from trencadis.core.shapes.bucket_planner import make_plan
from trencadis.core.shapes.shape_limits import ShapeLimits
from trencadis.outputs import RequestOutput

BASE: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_logprobs": -1,
}  # fmt: skip
DEVICES: dict[str, dict[str, Any]] = {
    "cpu": {"kv_cache_memory_bytes": 16 << 20},
    "padded": {"policy": "padded", "kv_cache_memory_bytes": 16 << 20, "async_depth": 1},
    "hpu": {"device": "hpu", "block_size": 64, "warmup": "skip", "num_gpu_blocks_override": 16},
    "twin": {"device": "cuda", "policy": "twin", "warmup": "skip", "num_gpu_blocks_override": 32},
}
PROMPT = "The picture shows a red square beside a blue circle, and three small squares."


def ask(llm: LLM, count: int, **more: Any) -> RequestOutput:
    """Three tokens of each of two prompts at once, one of which reports nothing."""
    asked = SamplingParams(temperature=0, max_tokens=3, logprobs=count, prompt_logprobs=count, ignore_eos=True, **more)
    plain = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return llm.generate([PROMPT, "Hello"], [asked, plain], use_tqdm=False)[0]


@pytest.mark.parametrize("device", DEVICES)
def test_the_whole_vocabulary_agrees_with_its_twenty_best(device: str) -> None:
    with LLM(str(demo_path()), **BASE, **DEVICES[device]) as llm:
        vocab = llm.llm_engine.service.limits.vocab
        few, some, every = ask(llm, 20), ask(llm, 45), ask(llm, -1)
        assert few.outputs[0].token_ids == some.outputs[0].token_ids == every.outputs[0].token_ids
        for output, count in ((some, 45), (every, vocab)):
            found = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
            known = [*(few.prompt_logprobs or [])[1:], *(few.outputs[0].logprobs or [])]
            assert len(found) == len(known) > 12
            for one, best in zip(found, known, strict=True):
                assert one is not None and best is not None
                assert len(one) in (count, count + 1), "the token itself may not be among them"
                assert sorted(v.rank or 0 for v in one.values())[:count] == [*range(1, count + 1)]
                for token, value in best.items():
                    if token in one:
                        assert one[token].logprob == pytest.approx(value.logprob, abs=1e-4)
        for one in every.outputs[0].logprobs or []:
            assert sum(math.exp(v.logprob) for v in one.values()) == pytest.approx(1.0, abs=1e-3)


def test_the_limit_holds_offline() -> None:
    with LLM(str(demo_path()), **BASE | {"max_logprobs": 30}, **DEVICES["cpu"]) as llm:
        assert len((ask(llm, 30).outputs[0].logprobs or [])[0]) >= 30
        for refused in (31, -1):
            with pytest.raises(BadRequest, match=f"logprobs must be between 0 and 30, got {refused}"):
                ask(llm, refused)
        with pytest.raises(BadRequest, match="between 0 and 30"):
            llm.generate(["a"], SamplingParams(max_tokens=1, prompt_logprobs=31), use_tqdm=False)


def test_variants_double_up_to_the_vocabulary() -> None:
    assert list_wide_variants(100) == {"top40": 40, "top80": 80, "top100": 100}
    assert [*list_wide_variants(151_936).values()][-1] == 151_936
    assert len(list_wide_variants(262_144)) < 16


@pytest.mark.parametrize(("most", "sizes"), [(20, []), (21, [40]), (100, [40, 80, 160]), (-1, [40, 80, 160, 300])])
def test_a_device_that_compiles_each_shape_plans_what_may_be_asked_for(most: int, sizes: list[int]) -> None:
    limits = ShapeLimits(5, 2048, 2048, 128, wide=plan_wide_variants(300, most, SERVING))
    plan = make_plan(SERVING, limits, BucketOptions())
    assert sorted(wide_ids(b) for b in plan.of(Stage.SAMPLE) if wide_ids(b)) == sizes
    for ids in range(21, most + 1 if most > 0 else 301):
        assert wide_bucket(3, ids, 300, plan) in plan.buckets
    assert plan_wide_variants(300, most, cpu_policy.SERVING) == ()
