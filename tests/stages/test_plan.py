"""``trencadis plan`` of pipeline stages: the rows of each are those of its start-up; what crosses, and who waits."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.meta_start import GIB, Started, card, config_of, run
from tests.plan.test_rows import BEFORE, IMAGES, SIZES, SMALL
from tests.traffic.launch_lines import model_of
from trencadis.backends.hpu.backend import HpuBackend
from trencadis.backends.hpu.emulator.emulated_bridge import make_bridge
from trencadis.backends.hpu.hpu_settings import HpuSettings
from trencadis.backends.hpu.shape_policy import SERVING
from trencadis.core.buckets import Stage
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.device.backend import BackendConfig
from trencadis.core.devices import policy_of
from trencadis.core.engine.pipeline_startup_plan import planned_stages
from trencadis.core.engine.startup_plan import DryRun, PlannedDevice, StartupPlan
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.launches.pipeline_transfer import LAST
from trencadis.core.memory import graph_measurement_cache
from trencadis.core.shapes.bucket_options import BucketOptions
from trencadis.core.shapes.pipeline_partition import check_ranks, split_model
from trencadis.server.plan.plan_command import main
from trencadis.server.plan.plan_report import make_pipeline_report

PARTLY = {"16 of 72B's 80 layers": ((8192, 16, 64, 8, 29568), 8)}
"""Sizes as ``SIZES`` has them; a start's time grows with its layers."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path))


class Meeting:
    """``Pipe`` of start-ups that run one after the other: what others say is known from an earlier run.

    ``strict``: they said it under the same agreements, so that even the shapes must be the same.
    """

    def __init__(self, others: Sequence[Sequence[tuple[int, ...]]] = (), strict: bool = False) -> None:
        self.said: list[tuple[int, ...]] = []
        self.others, self.strict = others, strict

    def bind(self, stream: Any, hidden: Any) -> None:
        """Nothing is prepared."""

    def send(self, hidden: Any, count: int) -> None:
        raise AssertionError("a start-up sends no rows")

    receive = send

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        at = len(self.said)
        self.said.append(tuple(values))
        if not self.strict and tuple(values) == (values[0], -values[0]):
            return tuple(values)
        return tuple(min(v) for v in zip(values, *(other[at] for other in self.others), strict=True))


def start(model: ModelConfig, config: EngineConfig, ranks: int, pipe: Meeting, total: int) -> Started:
    """Rank 0 of a stage on a card without values."""
    on = card(total)
    share, limits = model.share, (config.max_num_batched_tokens or 0, config.max_num_seqs or 0)
    cfg = BackendConfig(
        dtype=torch.bfloat16, block_size=128, max_tokens=limits[0], max_rows=limits[1], vocab_size=model.text.vocab,
        windows=model.text.windows, world=ranks, stage=share.stage, stages=share.stages,
    )  # fmt: skip
    made = HpuBackend(cfg, SERVING, make_bridge(on), HpuSettings())
    made.pipe = pipe
    return run(model, config, IMAGES, on, ranks, made)


def on_paper(parts: Sequence[ModelConfig], config: EngineConfig, ranks: int, total: int) -> tuple[StartupPlan, ...]:
    device, starts = PlannedDevice("hpu", total, 0, ranks, 2), []
    for part in parts:
        known = graph_measurement_cache.load(
            graph_measurement_cache.MeasurementKey(
                graph_measurement_cache.fingerprint(part), "hpu (emulated)", "16 bit", ranks, 128
            ),
            graph_measurement_cache.folder(),
        )
        starts.append(DryRun(config, part, SERVING, BucketOptions(), IMAGES, device, known))
    return planned_stages(starts)


def text_buckets(planned: StartupPlan) -> set[Any]:
    return {b for b in planned.plan.buckets if b.stage not in (Stage.VISION, *LAST)}


@pytest.mark.parametrize(
    ("name", "length", "total"),
    [
        ("16 of 72B's 80 layers", 1024, 24 * GIB),
        pytest.param("72B", 1024, 96 * GIB, marks=pytest.mark.long),
        pytest.param("2B", None, 3400 << 20, marks=pytest.mark.long),
    ],
)
def test_each_stages_rows_are_those_of_its_start(name: str, length: int | None, total: int) -> None:
    """A 72B over 8 cards and 2 stages, and a 2B whose first stage holds requests of half its length."""
    sizes, ranks = PARTLY.get(name) or SIZES[name]
    model = model_of(*sizes, vision=True)
    model = dataclasses.replace(model, text=dataclasses.replace(model.text, max_positions=8192))
    config = config_of(graph_reserved_mem=0.2, **{**SMALL, "max_model_len": length})
    parts = split_model(model, 2)
    heard: list[Any] = []
    for strict in (False, False, True):
        first = on_paper(parts, config, ranks, total)  # as measured by then
        pipes = [Meeting(heard, strict) for _ in parts]
        started = [start(part, config, ranks, pipe, total) for part, pipe in zip(parts, pipes, strict=True)]
        heard = [pipe.said for pipe in pipes]
    assert len({s.cache.num_blocks for s in started}) == 1
    assert length == 1024 or 4096 <= first[1].limits.max_model_len < 8192
    assert len({s.limits.max_model_len for s in started}) == 1 == len({frozenset(text_buckets(p)) for p in first})
    for planned, found in zip(first, started, strict=True):
        paper = dict(planned.ledger.rows())
        assert sum(paper.values()) == total == sum(found.rows.values())
        assert {n: paper[n] for n in BEFORE} == {n: found.rows[n] for n in BEFORE}
        assert paper["KV cache"] == found.rows["KV cache"] and not planned.formula
        assert planned.ledger.memory_split.blocks == found.cache.num_blocks
        assert {p.bucket for t in planned.selection.taken.values() for p in t} == set(
            found.runner.graphs.list_captured()
        )
    a, b = (dict(p.ledger.rows()) for p in first)
    assert a["vision graphs"] > 0 == b["vision graphs"] and a["image arena"] > b["image arena"]
    assert a["sampler state"] < b["sampler state"] and a["hidden rows"] < b["hidden rows"]


def test_a_model_of_72b_is_planned_soon() -> None:
    """The bar is 5 s on a quiet machine; a hang ends at five times that."""
    begun = time.process_time()
    sizes, ranks = SIZES["72B"]
    plans = on_paper(split_model(model_of(*sizes, vision=True), 2), config_of(), ranks, 96 * GIB)
    report = make_pipeline_report(plans, nodes=2, batch=64)
    spent = time.process_time() - begun
    print(f"planned in {spent:.1f} s")
    assert spent < 25
    assert [s["node"] for s in report["stages"]] == [0, 1]
    assert report["crossing"]["decode"] == {"tokens": 32, "bytes": 32 * 8192 * 2}
    assert (report["crossing"]["links"], report["crossing"]["over_nodes"]) == (8, 8)
    assert 0 <= report["bubble"] < 0.2


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--memory", "96GiB", "--device", "hpu", "-pp", "2", "-tp", "2", "--nodes", "2", "--max-num-seqs", "8"]
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    pipeline = report["pipeline"]
    assert [s["layers"] for s in pipeline["stages"]] == [[0, 1], [1, 4]]
    assert [s["holds"] for s in pipeline["stages"]] == [["tower", "embedding"], ["head"]]
    for stage in pipeline["stages"]:
        assert sum(row["bytes"] for row in stage["ledger"]) == stage["total"] == (96 << 30) - (384 << 20)
        assert stage["kv_blocks"] == report["kv_blocks"]
    assert pipeline["crossing"]["decode"] == {"tokens": 4, "bytes": 4 * 256 * 2}
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "2,2")
    assert main([*words, "--batch", "1"]) == 0
    said = capsys.readouterr().out
    assert "stage 0" in said and "0..1" in said and "2..3" in said and "on each of 2 links, 2 of them between" in said
    # One request: a step enters when the one before has left, so that at any time one of two stages works.
    assert "with 1 decoding requests 1 steps are in flight" in said and "stages wait 50.0 %" in said


def test_what_a_device_cannot_start_is_not_planned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--memory", "80GiB", "--device", "cuda", "-pp", "2", "-tp", "2"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "stage 1" in said and "refused" not in said
    assert main([*words, "--mm-encoder-tp-mode", "data"]) == 0
    assert "refused" not in capsys.readouterr().out
    bare = dataclasses.replace(policy_of("cuda", ""), encoder_data_parallel=False, stages=False)
    monkeypatch.setattr("trencadis.server.plan.plan_command.policy_of", lambda *_: bare)
    with pytest.raises(StartupError, match="--mm-encoder-tp-mode data: ranks of the cuda"):
        main([*words, "--mm-encoder-tp-mode", "data"])
    (first, _) = split_model(model_of(*SIZES["2B"][0], vision=True), 2)
    with pytest.raises(StartupError, match=r"--pipeline-parallel-size 2: the other backend passes no rows between"):
        check_ranks(first, "other", dataclasses.replace(SERVING, stages=False))


def test_a_stage_that_does_not_fit_is_named() -> None:
    sizes, _ = SIZES["72B"]
    with pytest.raises(StartupError, match=r"^pipeline stage [01] of 2: .*") as refused:
        on_paper(split_model(model_of(*sizes, vision=True), 2), config_of(), 1, 24 * GIB)
    assert "\n" not in str(refused.value)


def test_nodes_that_ranks_do_not_fill_are_refused() -> None:
    with pytest.raises(StartupError, match=r"--nodes 3 does not divide 4 ranks"):
        main(["--memory", "96GiB", "--device", "hpu", "-pp", "2", "-tp", "2", "--nodes", "3"])
    with pytest.raises(StartupError, match=r"--nodes none: a whole number"):
        main(["--memory", "96GiB", "--nodes", "none"])


def test_text_of_one_stage_is_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--memory", "96GiB", "--device", "hpu", "--json"]) == 0
    assert "pipeline" not in json.loads(capsys.readouterr().out)


def test_a_share_has_measurements_of_its_own() -> None:
    model = model_of(*SIZES["2B"][0], vision=True)
    parts = split_model(model, 2)
    names = {graph_measurement_cache.fingerprint(m) for m in (model, *parts)}
    assert len(names) == 3 and graph_measurement_cache.fingerprint(dataclasses.replace(parts[0], part=None)) in names
