"""Drafts on devices with planned shapes (the emulated Gaudi in both modes, the twin of an NVIDIA card): VERIFY.

Answers are those without drafts, nothing compiles after warm-up, and the ledger holds to the byte.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.families.test_same_tokens import prompts
from tests.families.text_checkpoints import family_checkpoint
from tests.oracles.gaudi_launches import BLOCK, AttentionLayer, references, step_inputs
from tests.speculation.test_cpu_answers import Answers, SampledTraffic, draft_by
from tests.speculation.test_eagle3 import DRAFTS as DRAFTED_IDS
from tests.speculation.test_eagle3 import KEYS as HEAD_KEYS
from tests.speculation.test_eagle3 import SIZE as HEAD_SIZE
from tests.speculation.test_eagle3 import head_at, weights_of
from tests.traffic.ruled_requests import vocabulary
from trencadis.backends.cpu import make_backend as make_cpu
from trencadis.backends.hpu.backend import HpuBackend
from trencadis.backends.hpu.emulator.card_profiles_and_op_support import profile
from trencadis.backends.hpu.emulator.emulated_bridge import make_bridge
from trencadis.backends.hpu.emulator.emulated_device import EmulatedDevice
from trencadis.backends.hpu.hpu_settings import HpuSettings
from trencadis.backends.hpu.shape_policy import graph_input_bytes, policy
from trencadis.core.buckets import DRAFT, Bucket, Stage, ahead_variant, is_drafting, padded_tokens, verify_variant
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_registry import family_options
from trencadis.core.device.backend import BackendConfig
from trencadis.core.device_shape_policy import InputSizes
from trencadis.core.engine import device_startup
from trencadis.core.engine.engine import Engine
from trencadis.core.engine.engine_builder import create_engine
from trencadis.core.engine.startup_plan import StartupPlan
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.kv_cache_format import RESERVED_BLOCKS
from trencadis.core.launches.draft_loading import open_beside
from trencadis.core.request import Request, SamplingParams
from trencadis.core.scheduling.sequence import Sequence

LENGTH, DRAFTS = 96, 3
FLAGS: dict[str, Any] = {
    "dtype": "float32", "threads": 1, "max_model_len": LENGTH, "max_num_seqs": 3, "max_num_batched_tokens": 64,
    "block_size": 16, "num_gpu_blocks_override": 14, "encoder_cache_images": 2,
    "mm_processor_kwargs": {"min_pixels": 56 * 56, "max_pixels": 112 * 112},
}  # fmt: skip
DEVICES = ("twin", "lazy", pytest.param("compiled", marks=pytest.mark.long))
SPECULATION = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_min": 1}
SEEN = (0, 3, 8, 1000)
"""Windows: inside a block, whole blocks, longer than all."""

Make = Callable[..., Engine]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, vl_checkpoint: Path, tmp_path: Path) -> Iterator[Make]:
    """``make("twin", spec_always=True)``: an engine of a device; closed with the test."""
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path))
    monkeypatch.setenv("VLLM_MULTIMODAL_BUCKETS", "64,128")
    made: list[Engine] = []

    def create(device: str, **flags: Any) -> Engine:
        if device == "twin":
            own = {"device": "cuda", "policy": "twin"}
        else:
            own = {"device": "hpu"}
            monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
            monkeypatch.setenv("PT_HPU_LAZY_MODE", "1" if device == "lazy" else "0")
        made.append(create_engine(EngineConfig(**{"model": str(vl_checkpoint), **FLAGS, **own, **flags})))
        return made[-1]

    yield create
    for engine in made:
        engine.close()


def answers_of(engine: Engine, seed: int, count: int, most: int = 8, **more: Any) -> SampledTraffic:
    """Answers of random requests with every sampling field, some under grammars, some with images.

    ``more``: fields of the traffic.
    """
    sizes = engine.scheduler.limits
    engine.set_vocabulary(vocabulary(engine.info().vocab_size, sizes.eos).pack())
    vocab = engine.info().vocab_size
    traffic = SampledTraffic(engine, seed, count, LENGTH * 2 // 3, vocab, most=most, aborts=0.0, **more)
    traffic.run()
    engine.scheduler.check()
    assert engine.scheduler.pool.used == 0
    return traffic


def graphs_of(engine: Engine) -> Any:
    return engine.executor._rank.graphs  # type: ignore[attr-defined]


def check_ledger(engine: Engine) -> None:
    """Rows of the ledger sum to the device, and what they call used is what the device calls used."""
    captures, memory = engine._watch.captures, graphs_of(engine).backend.memory  # type: ignore[union-attr]
    assert captures is not None
    captures.observe()
    rows = dict(captures.ledger.rows())
    assert sum(rows.values()) == memory.total()
    assert memory.total() - memory.free() == memory.total() - rows["margin"] - rows["graph reserve unused"]


def count_different(a: Answers, b: Answers) -> int:
    return sum(a[key] != b[key] for key in a)


@pytest.mark.parametrize("device", DEVICES)
def test_answers_are_those_without_drafts_and_nothing_compiles(device: str, make: Make) -> None:
    warmup = {"warmup": "full"} if device == "twin" else {}
    plain = answers_of(make(device, warmup="skip"), 1, 14)
    engine = make(device, speculative_config=SPECULATION, spec_always=True, **warmup)
    draft_by(engine, plain.tokens, "mixed", DRAFTS)
    before = graphs_of(engine).backend.compilations()
    drafted = answers_of(engine, 1, 14)
    assert set(drafted.tokens) == set(plain.tokens)
    assert count_different(plain.tokens, drafted.tokens) <= 1, "a draw flips where its number is at an edge"
    totals = engine.scheduler.totals
    assert totals.spec_accepted and totals.spec_accepted < totals.spec_draft_tokens
    verified = [b for b in graphs_of(engine).hits if b.stage is Stage.VERIFY]
    assert verified and {b for b in graphs_of(engine).hits} <= graphs_of(engine).planned
    assert any(b.variant == ahead_variant(DRAFTS) for b in graphs_of(engine).hits), "penalties beside drafts"
    assert graphs_of(engine).backend.compilations() == before, "a shape was not planned"
    check_ledger(engine)


@pytest.mark.parametrize("device", ["twin", pytest.param("lazy", marks=pytest.mark.long)])
def test_drafts_are_weighed_by_the_planned_launches(device: str, make: Make) -> None:
    """Until steps were measured a launch of VERIFY costs what the plan says: little more than reading the weights."""
    engine = make(device, **FEW, speculative_config=SPECULATION)
    drafting, plan = engine.scheduler.drafting, graphs_of(engine).plan
    assert drafting is not None and drafting.shapes is not None
    rows = max(b.dims[0] for b in plan.buckets if b.stage is Stage.VERIFY)
    verify = next(b for b in plan.buckets if b.stage is Stage.VERIFY and b.dims[0] == rows)
    assert drafting.shapes.count_tokens(rows, rows) == padded_tokens(verify) == rows * (DRAFTS + 1)
    launch = plan.policy.cost.launch
    assert drafting.seconds.ratio(1, 3) == pytest.approx((launch + 4) / (launch + 1))


def test_forced_ids_need_no_launch_where_drafts_are_asked_for(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    forced, append = list[int](), Sequence.append_forced

    def noted(seq: Sequence, token: int) -> None:
        forced.append(token)
        append(seq, token)

    monkeypatch.setattr(Sequence, "append_forced", noted)
    plain = answers_of(make("twin", **FEW), 1, 14)
    assert not forced
    free = answers_of(make("twin", **FEW, speculative_config=SPECULATION, spec_always=True), 1, 14)
    assert forced and count_different(plain.tokens, free.tokens) <= 1, "a draw flips where its number is at an edge"


def scripted(engine: Engine, most: int) -> float:
    """Launches of text per token of an answer whose prediction has every tenth id changed, from the first token on."""
    prompt = list(range(5, 25))
    params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)

    def answer(name: str, prediction: list[int]) -> list[int]:
        engine.add(Request(name, prompt, params, prediction=prediction))
        found: list[int] = []
        while not engine.idle():
            for delta in engine.step():
                found += delta.tokens
        return found

    known = answer("plain", [])
    vocab = engine.info().vocab_size
    before = sum(graphs_of(engine).hits.values())
    assert answer("predicted", [(t + 1) % vocab if at % 10 == 9 else t for at, t in enumerate(known)]) == known
    return (sum(graphs_of(engine).hits.values()) - before) / most


@pytest.mark.parametrize("device", ["twin", *(pytest.param(d, marks=pytest.mark.long) for d in ("lazy", "compiled"))])
def test_a_prediction_needs_few_launches(device: str, make: Make) -> None:
    """At most 0.45 launches a token, SAMPLE and the prompt included."""
    asked = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 4}
    flags = {"max_num_seqs": 1, "warmup": "skip", "max_model_len": 192, "max_num_batched_tokens": 64}
    flags |= {"num_gpu_blocks_override": 16, "speculative_config": asked, "spec_always": True}
    assert scripted(make(device, **flags), 64) <= 0.45


def drafting(draft: Path, drafts: int = DRAFTS) -> dict[str, Any]:
    """Flags by which the model at ``draft`` drafts."""
    asked = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": drafts}
    return {"speculative_config": asked, "spec_always": True}


def heading(head: Path, drafts: int = DRAFTS) -> dict[str, Any]:
    """Flags by which the head at ``head`` drafts."""
    asked = {"method": "eagle3", "model": str(head), "num_speculative_tokens": drafts}
    return {"speculative_config": asked, "spec_always": True}


FEW: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "warmup": "skip"}
"""Flags by which the plan has few shapes, each compiled at its first use."""

BOOKED = ("image arena", "sampler state", "hidden rows", "static inputs")
"""Rows of the ledger that a plan knows to the byte; the twin of a card leaves some weights out."""


def note_papers(monkeypatch: pytest.MonkeyPatch) -> list[StartupPlan]:
    """The plans of later starts, made before anything is loaded."""
    papers: list[StartupPlan] = []
    plan = device_startup._paper

    def noted(*args: Any) -> StartupPlan:
        papers.append(plan(*args))
        return papers[-1]

    monkeypatch.setattr(device_startup, "_paper", noted)
    return papers


@pytest.mark.parametrize("device", ["twin", *(pytest.param(d, marks=pytest.mark.long) for d in ("lazy", "compiled"))])
def test_a_model_drafts_and_the_plan_knows_it(
    device: str, make: Make, checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft of other sizes than the target's: answers are those without it, and the ledger is the plan's."""
    draft = checkpoint("qwen2", seed=9)
    plain = answers_of(make(device, **FEW), 2, 5, most=4)
    papers = note_papers(monkeypatch)
    engine = make(device, **FEW, **drafting(draft))
    drafted = answers_of(engine, 2, 5, most=4)
    assert count_different(plain.tokens, drafted.tokens) <= 1, "a draw flips where its number is at an edge"
    assert engine.scheduler.totals.spec_draft_tokens > 10
    launched = [b for b in graphs_of(engine).hits if is_drafting(b)]
    assert {Stage.SAMPLE, Stage.DECODE, Stage.VERIFY} <= {b.stage for b in launched}
    assert set(graphs_of(engine).hits) <= graphs_of(engine).planned
    assert {str(b) for b in launched} <= {use.bucket for use in engine.stats().buckets}, "metrics count its launches"
    check_ledger(engine)
    booked, held = dict(papers[0].ledger.rows()), dict(engine._watch.captures.ledger.rows())  # type: ignore[union-attr]
    known = BOOKED if device == "twin" else ("weights", "draft weights", *BOOKED)
    assert {row: held[row] for row in known} == {row: booked[row] for row in known}
    cells = (FLAGS["num_gpu_blocks_override"] + RESERVED_BLOCKS) * FLAGS["block_size"]
    text = load_config(draft).text
    assert held["draft KV"] == cells * text.layers * 2 * text.kv_heads * text.head_dim * 4


def head_bytes(own_table: bool) -> int:
    """Bytes of the head of the tests in float32: weights, ids of drafts, and rotary frequencies with their axes."""
    held = sum(t.nbytes for name, t in weights_of(1, own_table).items() if name != "d2t")
    return held + 4 * DRAFTED_IDS + 12 * HEAD_SIZE // 2


@pytest.mark.parametrize("device", ["twin", *(pytest.param(d, marks=pytest.mark.long) for d in ("lazy", "compiled"))])
def test_a_head_drafts_and_the_plan_knows_it(
    device: str, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head of other sizes than the target's layers: answers are those without it, and the ledger is the plan's."""
    own_table = device == "lazy"
    head = head_at(tmp_path / "head", weights_of(1, own_table))
    plain = answers_of(make(device, **FEW), 2, 5, most=4)
    papers = note_papers(monkeypatch)
    engine = make(device, **FEW, **heading(head))
    drafted = answers_of(engine, 2, 5, most=4)
    assert count_different(plain.tokens, drafted.tokens) <= 1, "a draw flips where its number is at an edge"
    assert engine.scheduler.totals.spec_draft_tokens > 10
    hits = graphs_of(engine).hits
    launched = [b for b in hits if is_drafting(b)]
    assert {Stage.SAMPLE, Stage.DECODE, Stage.VERIFY} <= {b.stage for b in launched}
    assert {b.variant for b in launched if b.stage is Stage.SAMPLE} == {f"greedy-{DRAFT}"}
    assert set(hits) <= graphs_of(engine).planned
    check_ledger(engine)
    booked, held = dict(papers[0].ledger.rows()), dict(engine._watch.captures.ledger.rows())  # type: ignore[union-attr]
    known = BOOKED if device == "twin" else ("weights", "draft weights", *BOOKED)
    assert {row: held[row] for row in known} == {row: booked[row] for row in known}
    assert booked["draft weights"] == head_bytes(own_table)
    cells = (FLAGS["num_gpu_blocks_override"] + RESERVED_BLOCKS) * FLAGS["block_size"]
    assert held["draft KV"] == cells * 2 * HEAD_KEYS * HEAD_SIZE * 4


@pytest.mark.long
@pytest.mark.parametrize("device", ["twin", "lazy", "compiled"])
def test_a_model_drafts_for_itself_and_nothing_compiles(device: str, make: Make, vl_checkpoint: Path) -> None:
    """Most guesses are wrong: the draft knows no penalties, grammars and images, and these models know no text."""
    plain = answers_of(make(device, warmup="skip"), 3, 60)
    engine = make(device, warmup="full", **drafting(vl_checkpoint))
    before = graphs_of(engine).backend.compilations()
    drafted = answers_of(engine, 3, 60)
    assert count_different(plain.tokens, drafted.tokens) <= 1, "a draw flips where its number is at an edge"
    totals = engine.scheduler.totals
    assert 0 < totals.spec_accepted < totals.spec_draft_tokens
    assert graphs_of(engine).backend.compilations() == before and graphs_of(engine).lazy_compiles == 0
    check_ledger(engine)
    print(f"{device}: {totals.spec_accepted} of {totals.spec_draft_tokens} drafts accepted, 0 compiled")


TEXTS: dict[str, Any] = {
    **FEW, "max_num_batched_tokens": 64, "encoder_cache_images": None, "mm_processor_kwargs": {},
    "num_gpu_blocks_override": 20,
}  # fmt: skip
FORMS: list[tuple[str, str, dict[str, Any]]] = [
    ("mistral", "no window", {}), ("gemma3", "windows of 8, four layers", {}), ("mixtral", "plain", {}),
    ("mistral", "no window", {"kv_cache_dtype": "int8"}), ("mistral", "no window", {"quantization": "int8"}),
]  # fmt: skip


def greedy_answers(engine: Engine) -> dict[str, list[int]]:
    """Greedy tokens of four prompts."""
    found: dict[str, list[int]] = {}
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    for number, prompt in enumerate(prompts(4, 60)):
        engine.add(Request(f"r{number}", list(prompt)[:60], params))
    while not engine.idle():
        for delta in engine.step():
            found.setdefault(delta.id, []).extend(delta.tokens)
    return found


@pytest.mark.long
@pytest.mark.parametrize("device", ["twin", "lazy"])
@pytest.mark.parametrize(("family", "form", "flags"), FORMS)
def test_each_family_accepts_its_own_drafts(
    device: str, family: str, form: str, flags: dict[str, Any], make: Make, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With windows, experts, 8-bit caches and weights: a card's ledger is the plan's."""
    path = family_checkpoint(tmp_path / "m", family=family, form=form)
    plain = greedy_answers(make(device, model=str(path), **TEXTS, **flags))
    papers = note_papers(monkeypatch)
    engine = make(device, model=str(path), **TEXTS, **flags, **drafting(path))
    assert greedy_answers(engine) == plain
    totals = engine.scheduler.totals
    assert totals.spec_accepted == totals.spec_draft_tokens > 30
    check_ledger(engine)
    booked, held = dict(papers[0].ledger.rows()), dict(engine._watch.captures.ledger.rows())  # type: ignore[union-attr]
    known = BOOKED if device == "twin" else ("weights", "draft weights", *BOOKED)
    assert {row: held[row] for row in known} == {row: booked[row] for row in known}
    assert held["draft KV"] == held["KV cache"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"kv_offloading_size": 1.0}, "does not go with --kv-offloading-size"),
        ({"learn_buckets": "on"}, "does not go with --learn-buckets on"),
        ({"tensor_parallel_size": 2}, "leave out -tp and -pp"),
    ],
)
def test_what_does_not_go_with_a_draft_model_is_refused(
    flags: dict[str, Any], says: str, make: Make, vl_checkpoint: Path
) -> None:
    with pytest.raises(StartupError, match=says) as error:
        make("twin", **flags, **drafting(vl_checkpoint))
    assert "\n" not in str(error.value)


def gaudi(lazy: bool, windows: tuple[int, ...], kernels: bool = True) -> HpuBackend:
    bridge = make_bridge(EmulatedDevice(profile("")), lazy)
    if not kernels:
        missing = ("fused_sdpa", "fused_rms_norm", "apply_rotary", "sdpa_parts", "product", "block_adjustment")
        without: dict[str, Any] = dict.fromkeys(missing)
        bridge = replace(bridge, **without)
    return HpuBackend(
        BackendConfig(block_size=BLOCK, windows=windows, vocab_size=50), policy(""), bridge, HpuSettings()
    )


@pytest.mark.parametrize("lengths", [[(9, 4), (1, 1), (150, 2), (3, 4), (8, 3)], [(14, 4)], [(15, 2), (16, 4)]])
def test_rows_of_several_tokens_attend_as_the_reference_does(lengths: list[tuple[int, int]]) -> None:
    """Their tokens lie in one block or in two; windows hide some blocks from some tokens of a row."""
    inputs = step_inputs(lengths, np.random.default_rng(1))
    wanted, _ = references(inputs, SEEN)
    bucket = Bucket(Stage.VERIFY, (8, 64), verify_variant(4))
    for lazy, kernels, own in ((True, True, SEEN), (False, True, SEEN), (True, False, (0,))):
        backend = gaudi(lazy, own, kernels)
        layer = AttentionLayer(backend, float("nan"), windows=own)
        program = backend.program(bucket, layer)
        backend.fill(program, inputs)
        program.run()
        for window, out in zip(own, layer.outs, strict=True):
            found = out.cpu()[1 : len(inputs.tokens) + 1]
            np.testing.assert_allclose(found, wanted[SEEN.index(window)], rtol=1e-5, atol=1e-5)


def test_the_planner_counts_the_inputs_to_the_byte() -> None:
    for windows in ((0,), (0, 8)):
        backend = gaudi(True, windows)
        for bucket in (Bucket(Stage.VERIFY, (4, 16), verify_variant(5)), Bucket(Stage.SAMPLE, (8,), ahead_variant(4))):
            made = backend.program(bucket, lambda x: None)
            sizes = InputSizes(50, BLOCK, windows=any(windows))
            assert graph_input_bytes(bucket, sizes) == made.bytes and policy("", lazy=True).inputs is graph_input_bytes


def test_a_draft_models_backend_has_the_settings_of_its_own_family(vl_checkpoint: Path) -> None:
    """Those that the target's family sets, and those that follow from its attention, are the target's alone."""
    target = BackendConfig(block_size=BLOCK, vocab_size=50, sinks=True, options=family_options("LlamaForCausalLM"))
    draft = load_config(vl_checkpoint)
    assert family_options(draft.architecture)["fp32_softmax"] == "1"
    opened = HpuBackend(target, policy(""), make_bridge(EmulatedDevice(profile("")), True))
    assert not opened.settings.fp32_softmax and not opened.settings.fused_sdpa
    beside: Any = open_beside(opened, draft)
    assert beside.settings.fp32_softmax and beside.settings.fused_sdpa
    assert beside.hpu_ops.settings == beside.settings


MANY = int(os.environ.get("TRENCADIS_TEST_REQUESTS", "10000"))
SEED = int(os.environ.get("TRENCADIS_TEST_SEED", "11"))
"""Requests of the long run, which may be made in pieces."""

WIDE = {"max_num_seqs": 16, "max_num_batched_tokens": 128, "num_gpu_blocks_override": 60}
"""Flags of the long run: an emulated launch takes as long for one row as for many."""


@pytest.mark.long
@pytest.mark.parametrize("source", ["ngram", "draft_model", "eagle3"])
@pytest.mark.parametrize("device", ["twin", "lazy", "compiled"])
def test_nothing_compiles_in_many_requests(
    device: str, source: str, make: Make, vl_checkpoint: Path, tmp_path: Path
) -> None:
    """Verified, plain, ruled and image rows mixed, drafted by n-grams where a request repeats itself, by a model, or
    by a head.
    """
    flags = {
        "ngram": {"speculative_config": SPECULATION, "spec_always": True}, "draft_model": drafting(vl_checkpoint),
        "eagle3": heading(head_at(tmp_path / "head", weights_of(1))),
    }  # fmt: skip
    begun = time.monotonic()
    engine = make(device, **WIDE, **flags[source])
    before, ready = graphs_of(engine).backend.compilations(), time.monotonic()
    answers_of(engine, SEED, MANY, together=24, lengths=(1, 2, 4, 16))
    took, hits, totals = time.monotonic() - ready, graphs_of(engine).hits, engine.scheduler.totals
    assert graphs_of(engine).backend.compilations() == before and set(hits) <= graphs_of(engine).planned
    check_ledger(engine)
    verified = sum(count for bucket, count in hits.items() if bucket.stage is Stage.VERIFY)
    print(
        f"{device}, {source}: {MANY} requests, {sum(hits.values())} launches, {verified} of them VERIFY, "
        f"{totals.spec_accepted} of {totals.spec_draft_tokens} drafts accepted, 0 compiled; started in "
        f"{ready - begun:.0f} s, answered in {took:.0f} s"
    )


class WithSinks:
    """Operations whose attention has sinks."""

    def __init__(self, ops: Any, device: torch.device) -> None:
        self._ops, self.sinks = ops, torch.linspace(-1.0, 2.0, 6).to(device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def attend(self, *args: Any) -> torch.Tensor:
        found: torch.Tensor = self._ops.attend(*args, sinks=self.sinks)
        return found


def test_sinks_of_rows_of_several_tokens_are_those_of_their_heads() -> None:
    inputs = step_inputs([(9, 4), (1, 1), (30, 2)], np.random.default_rng(1))
    reference = make_cpu(BackendConfig(block_size=BLOCK, options={"ops": "reference", "threads": "1"}))
    found = []
    verify = Bucket(Stage.VERIFY, (4, 16), verify_variant(4))
    for backend, bucket in ((reference, Bucket(Stage.PREFILL, (7, 3))), (gaudi(True, (0,)), verify)):
        layer = AttentionLayer(backend, 0.0)
        layer.ops = WithSinks(layer.ops, backend.device)
        program = backend.program(bucket, layer)
        backend.fill(program, inputs)
        program.run()
        found.append(layer.out.cpu()[1 : len(inputs.tokens) + 1])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-5)
