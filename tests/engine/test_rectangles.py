"""Steps cut as a rectangular device would cut them, run on the CPU: the same answers as in one ragged launch."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from trencadis import LLM, SamplingParams
from trencadis.backends.hpu.shape_policy import RULES, SERVING
from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.device_shape_policy import AxisRule
from trencadis.core.launches import model_runner
from trencadis.core.launches.launch_splitter import Launch, split_step
from trencadis.core.shapes.bucket_options import BucketOptions
from trencadis.core.shapes.bucket_planner import make_plan
from trencadis.core.shapes.shape_limits import ShapeLimits
from trencadis.core.step import Step

SMALL = dataclasses.replace(
    SERVING,
    fresh_tokens=16,
    context_tokens=16,
    rules={
        **RULES,
        Stage.FRESH: (AxisRule(), AxisRule(minimum=8, step=8), AxisRule(minimum=8, step=8)),
        Stage.CONTEXT: (AxisRule(minimum=8, step=8), AxisRule()),
    },
)
PLAN = make_plan(SMALL, ShapeLimits(8, 96, 512, 16, image_slots=12544), BucketOptions())


def test_the_same_answers_whatever_the_launches(vl_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    shared = rng.integers(40, 250, 48).tolist()
    prompts = [[*shared, *rng.integers(40, 250, n).tolist()] for n in (1, 17, 40, 200)]
    prompts += [rng.integers(40, 250, n).tolist() for n in (1, 2, 9, 33, 90, 150)]
    image = Image.fromarray(rng.integers(0, 255, (120, 90, 3), dtype=np.uint8))
    chats = [[{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "What?"}]}]]
    seen: Counter[Stage] = Counter()

    def cut(step: Step, plan: Plan, adapters: bool, *needs: object) -> tuple[Launch, ...]:
        assert not adapters
        found = []
        for launch in split_step(step, PLAN):
            stage = launch.bucket.stage
            seen[stage] += 1
            assert launch.bucket in PLAN.buckets
            if stage in (Stage.FRESH, Stage.CONTEXT):
                launch = dataclasses.replace(
                    launch, bucket=Bucket(Stage.PREFILL, (launch.tokens(step), len(launch.items)))
                )
            elif stage is Stage.DECODE:
                launch = dataclasses.replace(launch, bucket=Bucket(Stage.DECODE, (len(launch.items),)))
            found.append(launch)
        return tuple(found)

    def answers() -> list[list[int]]:
        llm = LLM(
            str(vl_checkpoint), dtype="float32", kv_cache_memory_bytes=64 << 20, max_num_batched_tokens=96,
            max_num_seqs=8, max_model_len=512, block_size=16,
        )  # fmt: skip
        greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        outputs = [*llm.generate([{"prompt_token_ids": p} for p in prompts], greedy), *llm.chat(chats, greedy)]
        return [list(o.outputs[0].token_ids) for o in outputs]

    whole = answers()
    monkeypatch.setattr(model_runner, "split_step", cut)
    opened = model_runner.ModelRunner.__init__

    def rectangular(self: model_runner.ModelRunner, *args: Any, **more: Any) -> None:
        opened(self, *args, **more)
        self.ragged = False

    monkeypatch.setattr(model_runner.ModelRunner, "__init__", rectangular)
    differ = sum(a != b for a, b in zip(answers(), whole, strict=True))
    assert differ <= 1, "sums in another order may turn one near tie; more than that is a fault"
    assert all(seen[s] for s in (Stage.FRESH, Stage.CONTEXT, Stage.DECODE, Stage.VISION)), seen
