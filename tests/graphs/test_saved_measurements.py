"""What a start measures is kept for the next, however it warms up, and is never replaced by less."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.meta_start import GIB, Started, card, config_of, on_paper, run
from tests.traffic.launch_lines import model_of
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.checkpoint.model_config import ImageNeeds
from trencadis.core.engine.startup_plan import StartupPlan
from trencadis.core.memory import graph_measurement_cache
from trencadis.core.memory.graph_measurement_cache import Measurements, merge_measurements
from trencadis.core.memory.graph_selection import GraphPrice, prices_by
from trencadis.core.shapes.bucket_profile import write_profile
from trencadis.core.shapes.launch_costs import layers_values, work_of
from trencadis.core.shapes.shape_need_histogram import NeedHistogram

MODEL = dataclasses.replace(model_of(1024, 1, 8, 2, 2048, vision=False), architecture="Qwen2ForCausalLM")
SEVEN = dataclasses.replace(model_of(3584, 28, 28, 4, 18944, vision=False), architecture="Qwen2ForCausalLM")
IMAGES = ImageNeeds()
FLAGS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 2, "max_num_batched_tokens": 64}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path))


def start(**flags: Any) -> Started:
    return run(MODEL, config_of(graph_reserved_mem=0.2, **FLAGS, **flags), IMAGES, card(24 * GIB))


def plan(**flags: Any) -> StartupPlan:
    return on_paper(MODEL, config_of(**FLAGS, **flags), IMAGES, 24 * GIB)


def known(started: Started) -> Measurements:
    found = graph_measurement_cache.load(started.start.key, graph_measurement_cache.folder())
    assert found is not None
    return found


def need(started: Started, count: int) -> list[Bucket]:
    """First uses of some buckets of each stage."""
    graphs = started.runner.graphs
    needed = [b for stage in Stage for b in started.runner.plan.of(stage)[:count]]
    for bucket in needed:
        graphs._prepare(bucket)
    return needed


def test_a_skipped_warmup_keeps_what_it_measures() -> None:
    first = start(warmup="skip")
    assert known(first).activations and not known(first).graphs, "the profile alone"
    assert plan(graph_memory="auto").settings.requested is None, "no graph was measured"
    needed = need(first, 2)
    captured = first.runner.graphs.list_captured()
    assert set(captured) == set(known(first).graphs) == set(known(first).seconds) == set(needed)
    requested = plan(graph_memory="auto").settings.requested
    start(warmup="full")
    whole = plan(graph_memory="auto").settings.requested
    assert requested is not None and whole is not None
    assert all(abs(some - all_) < 0.2 * all_ for some, all_ in zip(requested, whole, strict=True) if all_)


def test_a_background_warmup_keeps_what_it_measures() -> None:
    first = start(warmup="background")
    while first.runner.warm() is not None and not first.runner.graphs.list_captured():
        pass
    assert set(known(first).graphs) == set(first.runner.graphs.list_captured()), "the first piece is kept at once"
    while first.runner.warm() is not None:
        pass
    assert set(known(first).graphs) == set(first.runner.plan.buckets)


def test_memory_that_another_program_takes_meanwhile_is_no_activation() -> None:
    first = start(warmup="skip")
    before = known(first).activations
    first.card.allocator.allocate("tensors", 4 * GIB)
    need(first, 1)
    assert known(first).activations == before and known(first).graphs


def test_less_never_replaces_more() -> None:
    first = start(warmup="full")
    whole = known(first)
    need(start(warmup="skip"), 1)
    start(warmup="full", skip_captures=[str(min(whole.graphs))])
    after = known(first)
    assert set(after.graphs) == set(whole.graphs) and set(after.seconds) == set(whole.seconds)
    assert after.graphs == whole.graphs and after.activations == whole.activations


def test_seconds_of_launches_belong_to_the_code_that_took_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later release and other kernels begin anew; bytes of graphs are kept."""
    first = start(warmup="skip")
    bucket, code, folder = need(first, 1)[0], first.start._code, graph_measurement_cache.folder()
    first.captures.keep_launches({bucket: 0.5})
    assert known(first).code == code and known(first).launches == {bucket: 0.5}
    assert start(warmup="skip").captures.launches == {bucket: 0.5}
    config = dataclasses.replace(first.start.config, kv_cache_dtype="int8")
    assert dataclasses.replace(first.start, config=config)._code != code
    monkeypatch.setattr(sys.modules["trencadis"], "__version__", "9.9")
    graph_measurement_cache._digest_files.cache_clear()
    assert first.start._code != code
    graph_measurement_cache.add_measurements(
        first.start.key, Measurements(code=first.start._code), folder, complete=False
    )
    assert not known(first).launches and known(first).graphs
    graph_measurement_cache._digest_files.cache_clear()


def test_the_digest_of_the_code_reads_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        graph_measurement_cache.digest_code(m)
        for m in ("trencadis.backends.hpu.shape_policy", "trencadis.backends.cuda", "", "o")
    }
    assert len(found) == 3, "a backend of another package counts by its settings alone"
    file = tmp_path / "kernel.py"
    monkeypatch.setattr(graph_measurement_cache, "find_spec", lambda name: SimpleNamespace(
        submodule_search_locations=[str(tmp_path)] if name.endswith("hpu") else None))  # fmt: skip
    digests = []
    for text in ("a = 1", "a = 2", "a = 1"):
        graph_measurement_cache._digest_files.cache_clear()
        file.write_text(text)
        digests.append(graph_measurement_cache.digest_code("trencadis.backends.hpu.backend", "int8"))
    assert digests[0] == digests[2] != digests[1]
    graph_measurement_cache._digest_files.cache_clear()


def test_memory_of_graphs_is_that_of_the_shapes_of_a_profile(tmp_path: Path) -> None:
    """Not that of the plan of the limits: what fewer graphs do not take goes to the KV cache."""
    needs = NeedHistogram()
    needs.add(Stage.DECODE, (1, 1))
    write_profile(str(tmp_path / "needs.json"), needs, 128)
    key = graph_measurement_cache.MeasurementKey(
        graph_measurement_cache.fingerprint(MODEL), "hpu (emulated)", "16 bit", 1, 128
    )

    def plan_line(**flags: Any) -> StartupPlan:
        line = config_of(max_model_len=4096, max_num_seqs=16, max_num_batched_tokens=4096, **flags)
        return on_paper(MODEL, line, IMAGES, 24 * GIB)

    graphs = dict.fromkeys(plan_line().plan.buckets, 1 << 20)
    graph_measurement_cache.store(key, Measurements(graphs), graph_measurement_cache.folder())
    whole = plan_line(graph_memory="auto")
    few = plan_line(graph_memory="auto", bucket_profile=str(tmp_path / "needs.json"), max_graphs=8)
    for planned in (whole, few):
        taken, requested = sum(p.alone for p in planned.prices), planned.settings.requested
        assert requested is not None and sum(requested) == pytest.approx(1.1 * taken, rel=0.01)
    assert 2 * len(few.plan.buckets) < len(whole.plan.buckets)
    assert few.ledger.memory_split.kv > whole.ledger.memory_split.kv


@pytest.mark.parametrize(("ranks", "size", "all_count"), [(1, 128, False), (2, 128, False), (1, 64, True)])
def test_long_launches_get_no_memory_of_the_kv_cache_for_large_graphs(ranks: int, size: int, all_count: bool) -> None:
    """7,700 tokens of a 7B take a card a quarter of a second; twice as many tokens if two cards share them.

    Graphs of ``size`` MiB; those under a thousandth of the card count in any case.
    """
    key = graph_measurement_cache.MeasurementKey(
        graph_measurement_cache.fingerprint(SEVEN), "hpu (emulated)", "16 bit", ranks, 128
    )
    every = on_paper(SEVEN, config_of(), IMAGES, 96 * GIB, ranks).plan.buckets
    measured = Measurements(dict.fromkeys(every, size << 20))
    graph_measurement_cache.store(key, measured, graph_measurement_cache.folder())
    auto = on_paper(SEVEN, config_of(graph_memory="auto"), IMAGES, 96 * GIB, ranks)
    most = 1e14 * ranks / (2 * layers_values(SEVEN.text))
    work = work_of(SEVEN, 128)
    counted = [p for p in auto.prices if all_count or work(p.bucket) <= most]
    longest = max(b.dims[1] for p in counted if (b := p.bucket).stage is Stage.FRESH and b.dims[0] == 1)
    assert longest == 32768 if all_count else 0.7 * most <= longest <= most
    assert auto.settings.requested is not None
    assert sum(auto.settings.requested) == pytest.approx(1.1 * sum(p.alone for p in counted), rel=0.01)


def test_what_is_merged() -> None:
    a, b, c = (Bucket(Stage.DECODE, (n, n)) for n in (1, 2, 4))
    old = Measurements({a: 10, b: 20}, {a: 1.0}, {a: 100})
    new = Measurements({b: 15, c: 40}, {a: 2.0, b: 3.0}, {a: 50})
    some, all_ = merge_measurements(old, new, complete=False), merge_measurements(old, new, complete=True)
    assert some == Measurements({a: 10, b: 20, c: 40}, {a: 2.0, b: 3.0}, {a: 100})
    assert all_ == Measurements({a: 10, b: 15, c: 40}, {a: 2.0, b: 3.0}, {a: 50})
    assert merge_measurements(None, new, complete=False) == new
    mine, theirs = Measurements(launches={a: 0.1, b: 0.2}, code="1"), Measurements(launches={a: 0.3}, code="2")
    assert merge_measurements(mine, dataclasses.replace(theirs, code="1"), False).launches == {a: 0.3, b: 0.2}
    assert merge_measurements(mine, theirs, complete=False) == theirs


@pytest.mark.parametrize("which", [0, -1])
def test_one_measured_graph_does_not_price_the_others_as_itself(which: int) -> None:
    """A tiny launch is mostly code, a large one mostly what it works in: formulas know which."""
    formulas = [GraphPrice(Bucket(Stage.FRESH, (1, 64 << i)), 10, 64 << i) for i in range(8)]
    one = formulas[which]
    prices = prices_by({one.bucket: 2 * one.alone}, formulas, lambda b: 10 + b.dims[1], "sum")
    assert [p.alone for p in prices] == [2 * f.alone for f in formulas]
    shared = prices_by({one.bucket: 7}, formulas, lambda b: 10 + b.dims[1], "max")
    assert [p for p in shared if p.bucket != one.bucket] == [f for f in formulas if f is not one]
    other = [GraphPrice(Bucket(Stage.DECODE, (1, 1)), 5)]
    assert prices_by({one.bucket: 7}, other, lambda b: 10, "sum") == other
