"""The ledger and the graphs of ``trencadis plan`` are those of a start-up, row by row; equal layers are run once."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.meta_start import GIB, backend, card, config_of, on_paper, run
from tests.traffic.launch_lines import model_of
from trencadis.backends.hpu.emulator.emulated_bridge import make_bridge
from trencadis.backends.hpu.hpu_settings import HpuSettings
from trencadis.backends.hpu.launches.hpu_host_arrays import LaunchForm, arrays, leaves
from trencadis.backends.hpu.launches.input_and_output_copies import OutputSets, make_packing
from trencadis.backends.hpu.shape_policy import list_held_outputs, policy
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.checkpoint.model_config import ImageNeeds
from trencadis.core.device_shape_policy import GraphMemory, InputSizes
from trencadis.core.launches.kv_cache_and_state_allocation import allocate_persistent
from trencadis.core.memory.memory_estimator import MemoryEstimator
from trencadis.core.models import model_loader
from trencadis.core.vision_config import SlotForm
from trencadis.multimodal.qwen2_vl.qwen2_and_qwen2_5_vision_config import Qwen25VisionConfig

BEFORE = ("used by others", "weights", "image arena", "sampler state", "hidden rows", "static inputs")
IMAGES = ImageNeeds(4096, 64, 1024)
SLOT = SlotForm(1176, 4)
SMALL: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 2, "max_num_batched_tokens": 256}

SIZES = {
    "2B": ((1536, 28, 12, 2, 8960), 1), "7B": ((3584, 28, 28, 4, 18944), 1), "32B": ((5120, 64, 40, 8, 27648), 4),
    "72B": ((8192, 80, 64, 8, 29568), 8), "72B on 16": ((8192, 80, 64, 8, 29568), 16),
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path))


def compare(
    name: str, images: ImageNeeds, *, tied: bool = False, vision: bool = True, whole: bool = True, **flags: Any
) -> None:
    """A first start equals the plan in all that stands before the profile; the next plan equals it in every row.

    ``whole``: the reserve holds every planned graph.
    """
    sizes, ranks = SIZES[name]
    model = model_of(*sizes, vision=vision)
    kind = model.architecture if vision else "Qwen2ForCausalLM"
    model = dataclasses.replace(model, text=dataclasses.replace(model.text, tied=tied), architecture=kind)
    config = config_of(**flags)
    first = on_paper(model, config, images, 96 * GIB, ranks)
    started = run(model, config, images, card(96 * GIB), ranks)
    paper = dict(first.ledger.rows())
    before = (*BEFORE, *(["copies of host memory"] if config.kv_offloading_size else []))
    assert {n: paper[n] for n in before} == {n: started.rows[n] for n in before}
    assert started.rows["activations and workspace"] <= paper["activations and workspace"] * 1.001
    captured = set(started.runner.graphs.list_captured())
    assert {p.bucket for taken in first.selection.taken.values() for p in taken} == captured
    assert (captured == set(first.plan.buckets)) is whole
    second = on_paper(model, config, images, 96 * GIB, ranks)
    assert dict(second.ledger.rows()) == started.rows and not second.formula
    assert second.ledger.memory_split == started.captures.memory_split
    assert {p.bucket for taken in second.selection.taken.values() for p in taken} == captured


@pytest.mark.parametrize("name", ["2B", "72B"])
def test_a_small_line(name: str) -> None:
    compare(name, IMAGES, tied=name == "2B", whole=name == "2B", graph_reserved_mem=0.2, **SMALL)


def test_copies_of_host_memory() -> None:
    """Buffers, inputs and graphs of the launches that copy KV blocks have a row, which the plan knows."""
    compare("2B", IMAGES, graph_reserved_mem=0.2, kv_offloading_size=0.25, **SMALL)


def test_a_text_model() -> None:
    compare("7B", ImageNeeds(), vision=False, graph_reserved_mem=0.2, **SMALL)


@pytest.mark.long
@pytest.mark.parametrize("name", SIZES)
def test_the_guides_line(name: str) -> None:
    whole = name == "2B"
    compare(name, ImageNeeds(16384, 64, 4096), whole=whole, graph_reserved_mem=0.75 if whole else 0.5)


@pytest.mark.long
@pytest.mark.parametrize("name", ["32B", "72B", "72B on 16"])
def test_the_guides_line_with_a_small_reserve(name: str) -> None:
    """Which graphs get none is the same on paper, at a first start by formula, and at the next."""
    compare(name, ImageNeeds(16384, 64, 4096), whole=False, graph_reserved_mem=0.3)


def test_equal_layers_are_run_once() -> None:
    """Four layers, each run, against the figures of one of each kind repeated: bytes, code, compile seconds."""
    model = model_of(512, 4, 8, 2, 1024)
    assert isinstance(model.vision, Qwen25VisionConfig)
    model = dataclasses.replace(model, vision=dataclasses.replace(model.vision, depth=4, full_layers=(1, 3)))
    config = config_of(graph_reserved_mem=0.2, max_model_len=256, max_num_seqs=2, max_num_batched_tokens=128)
    plain = card(96 * GIB)
    there = make_bridge(plain)
    every = dataclasses.replace(there.hooks, layer=lambda layer, *args: layer(*args))
    whole = dataclasses.replace(there, hooks=every)
    one = ImageNeeds(12544, 12544, 3136)
    each, once = run(model, config, one, plain, bridge=whole), run(model, config, one, card(96 * GIB))
    assert once.rows == each.rows and once.captures.measured == each.captures.measured
    assert (once.card.clock.compiles, once.card.clock.seconds) == (each.card.clock.compiles, each.card.clock.seconds)
    assert once.card.allocator.used == each.card.allocator.used


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize(
    "kept", [GraphMemory(), GraphMemory(cut_layers=2), GraphMemory(cut_layers=0), GraphMemory(cached=False)]
)
def test_what_a_graph_keeps(kept: GraphMemory, ranks: int) -> None:
    """By formula as on a card: a graph of few ranks or many is priced to the byte, with and without its cache."""
    model = model_of(1024, 5, 8, 2, 2048)
    assert isinstance(model.vision, Qwen25VisionConfig)
    model = dataclasses.replace(model, vision=dataclasses.replace(model.vision, depth=5, full_layers=(1,)))
    graphs = dataclasses.replace(kept, outputs_apart=policy("", {}, lazy=True).graph_memory.outputs_apart)
    on = card(96 * GIB)
    made = backend(model, on, ranks, 256, 4, make_bridge(on, cached=kept.cached))
    made.hpu_ops.settings = HpuSettings(cut_layers=kept.cut_layers or 1, cuts=kept.cut_layers > 0)
    body = model_loader.load_model(model, made, config_of(**SMALL))
    body.bind(allocate_persistent(model, made, blocks=8, block_size=128, arena_rows=130, seqs=4, tokens=256))
    for bucket in (
        Bucket(Stage.FRESH, (2, 64)), Bucket(Stage.CONTEXT, (128, 2)), Bucket(Stage.DECODE, (3, 4)),
        Bucket(Stage.VISION, (512,)), Bucket(Stage.SAMPLE, (4,), "full"), Bucket(Stage.SAMPLE, (4,), "greedy"),
        Bucket(Stage.RESET, (2,)),
    ):  # fmt: skip
        head = partial(body.head, full=bucket.variant == "full")
        bodies: dict[Stage, Any] = {Stage.VISION: body.vision, Stage.SAMPLE: head, Stage.RESET: body.reset}
        program = made.program(bucket, bodies.get(bucket.stage, body.text))
        program.compile()
        program.capture()
        took = program.bytes - program.static.bytes
        assert took == MemoryEstimator(model, 2, ranks, graphs=graphs).price(bucket).alone, bucket


@pytest.mark.parametrize("bucket", [
    Bucket(Stage.FRESH, (3, 128)), Bucket(Stage.CONTEXT, (64, 7)), Bucket(Stage.DECODE, (5, 9)),
    Bucket(Stage.VISION, (256,)), Bucket(Stage.SAMPLE, (4,), "greedy"), Bucket(Stage.SAMPLE, (4,), "full"),
    Bucket(Stage.RESET, (3,)),
])  # fmt: skip
def test_bytes_of_inputs(bucket: Bucket) -> None:
    for lazy in (True, False):
        made = make_packing(leaves(arrays(bucket, None, LaunchForm(16, 1003, SLOT, shared=not lazy))))
        counted = policy("", {}, lazy).inputs
        forms = list_held_outputs(bucket) if lazy else ()
        sets = OutputSets(forms, bucket.dims[0], torch.device("cpu")).sets if forms else []
        held = sum(t.nbytes for outputs in sets for t in outputs if t is not None)
        turn = 4 if forms else 0  # which of the two sets is next
        assert counted is not None and counted(bucket, InputSizes(1003, slot=SLOT)) == made.bytes + held + turn
