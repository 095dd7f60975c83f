"""Start-ups on paper over utilisations, reserves, models and image limits: each fits, or names what would."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.traffic.launch_lines import MODELS, model_of
from trencadis.backends.cuda.shape_policy import SERVING as CUDA
from trencadis.backends.hpu.shape_policy import SERVING as HPU
from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig
from trencadis.core.checkpoint.model_registry import PLAIN_DECODER
from trencadis.core.engine.startup_checks import quantise_model
from trencadis.core.engine.startup_plan import DryRun, PlannedDevice, StartupPlan
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.shapes.bucket_options import BucketOptions
from trencadis.core.spec.draft_checkpoint import Drafter, EagleConfig

UTILISATIONS = (0.01, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9, 0.99)
RESERVES = (0.0, 0.1, 0.2, 0.4, 0.6)
IMAGE_COUNTS = (ImageNeeds(), ImageNeeds(12544, 64, 3136), ImageNeeds(65536, 64, 16384))
DEVICES = (("hpu", HPU, 96), ("hpu", HPU, 128), ("cuda", CUDA, 80), ("cuda", CUDA, 24))
LENGTHS = (None, 4096, 32768)
GRID = list(itertools.product(UTILISATIONS, RESERVES, MODELS[1:], IMAGE_COUNTS, DEVICES, LENGTHS))


def planned(start: DryRun) -> StartupPlan:
    """What every plan must satisfy."""
    found = start.plan_startup()
    assert sum(count for _, count in found.ledger.rows()) == found.ledger.memory_in_use.total
    assert all(count >= 0 for _, count in found.ledger.rows())
    assert found.ledger.memory_split.blocks >= found.limits.row_blocks
    assert sum(found.selection.spent.values()) <= found.ledger.memory_split.graphs
    return found


SMALL = (1024, 24, 8, 2, 4096)
"""Sizes of a model that drafts."""

KINDS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "draft model": (
        {"speculative_config": {"method": "draft_model", "model": "m", "num_speculative_tokens": 4}},
        ("draft weights", "draft KV"),
    ),
    "head": (
        {"speculative_config": {"method": "eagle3", "model": "m", "num_speculative_tokens": 3}},
        ("draft weights", "draft KV"),
    ),
    "adapters": ({"enable_lora": True, "max_loras": 8, "max_lora_rank": 16}, ("adapters",)),
    "adapters and a draft model": (
        {
            "enable_lora": True, "max_loras": 4, "max_lora_rank": 64,
            "speculative_config": {"method": "draft_model", "model": "m", "num_speculative_tokens": 7},
        },
        ("adapters", "draft weights", "draft KV"),
    ),
}  # fmt: skip
"""Flags, and the ledger's rows that they fill."""


def drafter_of(kind: str, target: ModelConfig) -> Drafter | None:
    """What drafts for ``target``, no files behind it."""
    if kind.endswith("draft model"):
        return dataclasses.replace(model_of(*SMALL, vision=False), architecture=PLAIN_DECODER)
    if kind != "head":
        return None
    kept = dataclasses.replace(target.text, layers=1, vocab=32_000, tied=False, kv=None)
    sizes = dataclasses.replace(target, architecture=PLAIN_DECODER, text=kept, vision=None)
    taps = 2, target.text.layers // 2, target.text.layers - 3
    return EagleConfig(Path("m"), sizes, taps, vocab=target.text.vocab, own_table=False)


def check(case: Any, variant: str = "") -> str:
    utilisation, reserve, sizes, images, (name, policy, size), length = case
    flags, rows = KINDS.get(variant, ({}, ()))
    config = EngineConfig(
        gpu_memory_utilization=utilisation, graph_reserved_mem=reserve, max_model_len=length, max_num_seqs=64,
        max_num_batched_tokens=16384, **flags,
    )  # fmt: skip
    model = model_of(sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], bool(images.slots))
    start = DryRun(
        config,
        model,
        policy,
        BucketOptions(),
        images,
        PlannedDevice(name, size << 30),
        draft=drafter_of(variant, model),
    )
    try:
        found = planned(start)
        assert all(dict(found.ledger.rows())[row] > 0 for row in rows), variant
        return "fits"
    except StartupError as error:
        text = str(error)
    if "would be needed" in text:
        return "none"
    changes: dict[str, object] = {}
    for flag, kind in (
        ("gpu-memory-utilization", float), ("max-model-len", int), ("max-num-batched-tokens", int),
        ("max-num-seqs", int),
        ("encoder-cache-images", int), ("cpu-offload-gb", float),
    ):  # fmt: skip
        values = re.findall(rf"--{flag} (\d+(?:\.\d+)?)(?= fits| --gpu)", text)
        changes |= {flag.replace("-", "_"): kind(v) for v in values}
    ranks = re.findall(r"--tensor-parallel-size (\d+)", text)
    device = dataclasses.replace(start.device, ranks=int(ranks[0]) if ranks else 1)
    if made := re.findall(r"--quantization (\w+)", text):
        changes["quantization"] = made[0]
        start = dataclasses.replace(start, model=quantise_model(start.model, made[0]))
    assert changes or ranks, text
    planned(dataclasses.replace(start, config=dataclasses.replace(config, **changes), device=device))  # type: ignore[arg-type]
    return "advised"


def test_a_sample_of_starts() -> None:
    seen = [check(case) for case in random.Random(1).sample(GRID, 14)]
    assert seen.count("fits") > 4 and seen.count("advised") > 0


FITS = 2
"""Starts of the sample of each kind that fit as they are, at least."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_of_starts_with_adapters_and_with_what_drafts(kind: str) -> None:
    seen = [check(case, kind) for case in random.Random(2).sample(GRID, 8)]
    assert seen.count("fits") >= FITS and seen.count("advised") > 0, seen


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_many_starts_with_adapters_and_with_what_drafts(kind: str) -> None:
    seen = [check(case, kind) for case in random.Random(3).sample(GRID, len(GRID) // 60)]
    print(f"{kind}: {len(seen)} starts, {Counter(seen)}")
    assert seen.count("fits") > len(seen) // 4 and seen.count("none") < len(seen) // 4


@pytest.mark.long
def test_every_start() -> None:
    seen = [check(case) for case in GRID]
    assert len(seen) == len(GRID) and seen.count("none") < len(GRID) // 10
