"""Chats in compile mode give the CPU's tokens, compile nothing after warm-up, and nothing at a second start."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from tests.fakes.checkpoints import write_tokenizer
from tests.hpu.compiled.test_planned_functions import FAMILIES
from tests.hpu.conftest import run_in_pieces
from tests.oracles.transformers_model import conversation
from trencadis import LLM, SamplingParams
from trencadis.assets import demo_path
from trencadis.backends.hpu.backend import HpuBackend
from trencadis.backends.hpu.emulator.card_profiles_and_op_support import profile
from trencadis.backends.hpu.emulator.device_tensor import DEVICE
from trencadis.backends.hpu.emulator.emulated_bridge import EmulatedRuntime, make_bridge
from trencadis.backends.hpu.emulator.emulated_device import EmulatedDevice
from trencadis.backends.hpu.hpu_settings import HpuSettings, settings
from trencadis.backends.hpu.shape_policy import policy
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.device.backend import BackendConfig
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.server.plan.plan_command import make_plan

pytestmark = pytest.mark.part("gaudi")

FLAGS: dict[str, Any] = dict(
    mm_processor_kwargs={"min_pixels": 56 * 56, "max_pixels": 112 * 112}, max_model_len=64, max_num_seqs=1,
    max_num_batched_tokens=64, block_size=64, dtype="float32",
)  # fmt: skip
PARAMS = [
    SamplingParams(temperature=0, max_tokens=6),
    SamplingParams(temperature=0.7, seed=5, top_p=0.9, max_tokens=6, logprobs=2, frequency_penalty=0.3),
]


def graphs() -> int:
    """What Dynamo has compiled so far, by its own count."""
    return counters["stats"]["unique_graphs"]


def card() -> EmulatedDevice:
    assert EmulatedRuntime.device is not None
    return EmulatedRuntime.device


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    for name, value in {
        "TRENCADIS_HPU_EMULATOR": "1", "PT_HPU_LAZY_MODE": "0", "TRENCADIS_CACHE": str(tmp_path),
        "VLLM_MULTIMODAL_BUCKETS": "256",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    made: list[LLM] = []

    def start(model: Path | None = None, **flags: Any) -> LLM:
        made.append(LLM(str(model or demo_path()), device="hpu", **{**FLAGS, **flags}))
        return made[-1]

    yield start
    for llm in made:
        llm.close()


def make_conversations(count: int, high: int = 112, seed: int = 0) -> list[Any]:
    """Conversations with and without images."""
    return [conversation(np.random.default_rng(seed + i), high=high)[0] for i in range(count)]


def answers(llm: LLM, requested: list[Any]) -> list[Any]:
    return [o.outputs[0].token_ids for p in PARAMS for o in llm.chat(requested, p, use_tqdm=False)]


def on_the_cpu(requested: list[Any], **flags: Any) -> list[Any]:
    llm = LLM(str(demo_path()), **{**FLAGS, **flags})
    found = answers(llm, requested)
    llm.close()
    return found


def test_chats_give_the_cpus_tokens_and_compile_nothing_after_warmup(compiled: Any) -> None:
    requested = make_conversations(4)
    llm = compiled()
    info, rank = llm.engine.info(), llm.engine.executor._rank
    regions = rank.backend.hpu_ops.regions.known
    warm, flavours = graphs(), card().clock.flavours
    assert answers(llm, requested) == on_the_cpu(requested)
    assert graphs() == warm and rank.graphs.recompiles == 0, "Dynamo's own count and ours"
    assert llm.engine.stats().graphs.graph_breaks == 0, "each part is one graph"
    assert card().clock.flavours == flavours, "no inputs at offsets that warm-up had not"
    kinds = {kind[0] for (_, kind), _ in regions}
    assert {
        "DecoderLayer",
        "ViTBlock",
        "DecoderEntry",
        "DecoderExit",
        "Qwen2VLPatchEmbed",
        "Qwen2VLPatchMerger",
        "SamplingHead",
    } <= kinds
    texts = [b for b in rank.plan.buckets if b.stage.name in ("FRESH", "CONTEXT", "DECODE")]
    assert sum(kind[0] in ("DecoderLayer", "LayerGroup") for (_, kind), _ in regions) == len(texts), (
        "one trace a layer shape, for all layers"
    )
    assert not card().clock.lines, "nothing falls back"
    assert info.graphs.advice == [
        "graphs: none in compile mode (PT_HPU_LAZY_MODE=0); no memory is reserved for them and planned buckets run "
        "compiled."
    ]
    assert dict(info.graphs.ledger)["graph reserve unused"] == 0 and not any(
        p.budget for p in info.graphs.pools.values()
    )


@pytest.mark.long
def test_more_than_twenty_log_probabilities_compile_nothing_after_warmup(
    compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where ``max_logprobs`` allows more, the launches that report them are planned and warmed too."""
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR_KIND", "meta")
    llm = compiled(max_logprobs=50)
    rank, clock = llm.engine.executor._rank, card().clock
    warm = (graphs(), clock.compiles, clock.flavours)
    for count in (21, 45):
        params = SamplingParams(temperature=0, max_tokens=2, logprobs=count, prompt_logprobs=count)
        (found,) = llm.generate([{"prompt_token_ids": [*range(5, 25)]}], params, use_tqdm=False)
        assert len(found.outputs[0].logprobs or ()) == 2 and len(found.prompt_logprobs or ()) == 20
    assert (graphs(), clock.compiles, clock.flavours) == warm and rank.graphs.recompiles == 0
    assert not clock.lines, "nothing falls back"


def test_a_skipped_warmup_says_what_it_costs(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR_KIND", "meta")
    llm = compiled(warmup="skip")
    (line,) = [n for n in llm.engine.info().notes if "warm-up is skipped" in n]
    made = llm.engine.executor._rank.plan
    config = EngineConfig(model=str(demo_path()), device="hpu", **FLAGS)
    planned = make_plan(config, load_config(demo_path()), 96 << 30)
    assert planned.plan.buckets == made.buckets and planned.ledger.memory_split.graphs == 0
    assert "graphs: none in compile mode (PT_HPU_LAZY_MODE=0); VLLM_GRAPH_RESERVED_MEM counts 0 there." in planned.notes
    shapes = len(made.buckets)
    assert f"first launch of each of {shapes} shapes waits for the compiler" in line


class Part:
    """A part with a weight of its own."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_layers_of_one_shape_share_a_trace_and_full_warmup_ends_compiling() -> None:
    device = EmulatedDevice(profile(""))
    backend = HpuBackend(
        BackendConfig(), policy("", lazy=False), make_bridge(device, False), HpuSettings(full_warmup=True)
    )
    before, ops = graphs(), backend.hpu_ops
    parts = [Part(torch.full((4,), float(i)).to(DEVICE)) for i in range(28)]
    x = torch.ones(3, 4).to(DEVICE)
    try:
        assert [ops.layer(p, x).cpu()[0, 0].item() for p in parts] == list(range(28))
        assert graphs() == before + 1
        backend.warmed()
        assert [ops.layer(p, x).cpu()[0, 0].item() for p in parts] == list(range(28)), "each by its own weight"
        (known,) = ops.regions.known.values()  # type: ignore[union-attr]
        with pytest.raises(RuntimeError, match="recompil"):
            known(parts[0], torch.ones(5, 4).to(DEVICE))
    finally:
        torch.compiler.set_stance("default", skip_guard_eval_unsafe=False)
    assert graphs() == before + 1


def test_a_torch_that_cannot_skip_guards_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = EmulatedDevice(profile(""))
    backend = HpuBackend(
        BackendConfig(), policy("", lazy=False), make_bridge(device, False), HpuSettings(full_warmup=True)
    )
    monkeypatch.setattr(torch.compiler, "set_stance", lambda stance: None)
    with caplog.at_level("WARNING", "trencadis.engine"):
        backend.warmed()
    (record,) = caplog.records
    assert "VLLM_FULL_WARMUP has no effect" in record.getMessage() and torch.__version__ in record.getMessage()


def test_variables_of_compile_mode() -> None:
    assert settings({}) == HpuSettings(fp32_softmax=True, graph_breaks=True)
    off = {"VLLM_T_COMPILE_REGIONAL_COMPILATION": "0", "VLLM_T_COMPILE_FULLGRAPH": "false", "VLLM_FULL_WARMUP": "1"}
    found = settings(off)
    assert (found.regional, found.fullgraph, found.full_warmup) == (False, False, True)
    assert not settings({"VLLM_REGIONAL_COMPILATION": "false"}).regional
    for layers in ("x", "0", "-1"):
        with pytest.raises(StartupError, match=f"VLLM_CONFIG_HIDDEN_LAYERS='{layers}' is not a whole number above 0"):
            settings({"VLLM_CONFIG_HIDDEN_LAYERS": layers})
    with pytest.raises(StartupError, match="every bucket has one shape"):
        settings({"VLLM_T_COMPILE_DYNAMIC_SHAPES": "true"})


def test_a_host_read_in_a_region_is_refused_with_the_line_of_code() -> None:
    def reads(x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x

    device = EmulatedDevice(profile(""))
    run = make_bridge(device, False).compile(reads)
    with pytest.raises(RuntimeError, match=r"(?s)branching.*test_compile_serving\.py"):
        run(torch.ones(3).to(DEVICE))
    with pytest.raises(RuntimeError, match="host tensor"):
        make_bridge(device, False).compile(lambda x, y: x + y)(torch.ones(3).to(DEVICE), torch.ones(3))


@pytest.mark.long
def test_300_chats_and_a_second_start(compiled: Any) -> None:
    flags: dict[str, Any] = dict(max_model_len=512, max_num_seqs=4, max_num_batched_tokens=256)
    requested, begun = make_conversations(150), time.perf_counter()
    wanted = on_the_cpu(requested, **flags)
    for start in (1, 2):
        llm = compiled(**flags)
        warm, compiles = graphs(), card().clock.compiles
        assert answers(llm, requested) == wanted, "300 answers, every second one sampled"
        assert graphs() == warm and card().clock.compiles == compiles and not llm.engine.stats().graphs.graph_breaks
        assert (compiles == 0) == (start == 2), "a second start compiles nothing"
        buckets = len(llm.engine.executor._rank.plan.buckets)
        print(f"start {start}: {buckets} buckets, {compiles} recipes compiled, {warm} graphs of Dynamo")
        llm.close()
    print(f"{time.perf_counter() - begun:.0f} s")


@pytest.mark.long
def test_two_ranks_give_the_cpus_tokens(compiled: Any) -> None:
    """Collectives are operations of the layers' graphs."""
    requested = make_conversations(4)
    assert answers(compiled(tensor_parallel_size=2), requested) == on_the_cpu(requested)


FORMS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "graphs": ({"PT_HPU_LAZY_MODE": "1"}, {}),
    "graphs, fp8 cache": ({"PT_HPU_LAZY_MODE": "1"}, {"kv_cache_dtype": "fp8"}),
    "compiled": ({}, {}),
    "compiled, int8 cache": ({}, {"kv_cache_dtype": "int8"}),
    "compiled, attention block by block": (
        {"TRENCADIS_HPU_DECODE_FUSEDSDPA": "1", "TRENCADIS_HPU_DECODE_LAYERS": "1"}, {"dtype": "bfloat16"},
    ),
    "compiled as a whole": ({"VLLM_T_COMPILE_REGIONAL_COMPILATION": "0"}, {}),
}  # fmt: skip
"""Variables and flags of six forms of serving."""


def serve_random(llm: LLM, count: int, seed: int, images: bool = True) -> None:
    """Prompts of random tokens, greedy, drawn, penalised and biased, and chats about ``images``."""
    rng = np.random.default_rng(seed)
    for start in range(0, count, 100):
        size = min(100, count - start)
        params = [
            SamplingParams(
                max_tokens=int(rng.integers(1, 4)), temperature=float(rng.choice([0, 0.8])), seed=1, ignore_eos=True,
                frequency_penalty=float(rng.choice([0, 0.5])), logit_bias={7: 1.0} if rng.random() < 0.2 else None,
                logprobs=2 if rng.random() < 0.1 else None,
            )
            for _ in range(size)
        ]  # fmt: skip
        shown = size // 10 if images else 0
        prompts = [
            {"prompt_token_ids": rng.integers(5, 250, rng.integers(1, 200)).tolist()} for _ in range(size - shown)
        ]
        found = llm.generate(prompts, params[shown:], use_tqdm=False)
        if shown:
            found += llm.chat(make_conversations(shown, seed=seed + start), params[:shown], use_tqdm=False)
        assert all(o.outputs[0].token_ids for o in found)


def check_form(
    name: str, count: int, compiled: Any, monkeypatch: pytest.MonkeyPatch, kind: str, family: Path | None = None
) -> None:
    """After warm-up nothing is compiled, no executable is made, and nothing falls back.

    Args:
        family: folder of a text model with weights that are made up; None: the demo.
    """
    variables, flags = FORMS[name]
    if family is not None:
        flags = {"model": family, "load_format": "dummy", "mm_processor_kwargs": {}, "dtype": "bfloat16", **flags}
    for variable, value in {**variables, "TRENCADIS_HPU_EMULATOR_KIND": kind}.items():
        monkeypatch.setenv(variable, value)
    llm = compiled(**{"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 256, **flags})
    clock, rank = card().clock, llm.engine.executor._rank
    before = (clock.compiles, clock.flavours, graphs())

    def serve(done: int) -> int:
        serve_random(llm, min(100, count - done), 3 + done, family is None)
        assert (clock.compiles, clock.flavours, graphs()) == before, name
        assert rank.graphs.recompiles == 0 and not clock.lines and rank.backend.graph_breaks() == 0
        return min(100, count - done)

    label = f"{name}, {family.name}" if family is not None else name
    run_in_pieces(f"{count} requests, {kind}, {label}", count, serve)
    print(f"{before[0]} recipes and {before[1]} executables before and after")


def test_random_requests_make_no_executable(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check_form("compiled", 20, compiled, monkeypatch, "meta")


def make_family(folder: Path, name: str) -> Path:
    """Writes config.json and the tokenizer of a small model of a family."""
    path = folder / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(FAMILIES[name]))
    write_tokenizer(path)
    return path


def test_random_requests_to_layers_of_two_kinds_make_no_executable(
    compiled: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check_form("compiled", 20, compiled, monkeypatch, "meta", make_family(tmp_path, "gemma3"))


@pytest.mark.long
@pytest.mark.parametrize("name", ["graphs", "compiled", "compiled as a whole"])
@pytest.mark.parametrize("family", ["qwen3-moe", "gemma3", "recurrent"])
def test_10000_random_requests_to_each_family(
    family: str, name: str, compiled: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Norms of q and k with experts, windows, and states: layers of other kinds than the demo's."""
    check_form(name, 10_000, compiled, monkeypatch, "meta", make_family(tmp_path, family))


@pytest.mark.long
@pytest.mark.parametrize("name", FORMS)
def test_10000_random_requests_on_each_form(name: str, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card without values, whose executables are those of one with values."""
    check_form(name, 10_000, compiled, monkeypatch, "meta")


@pytest.mark.long
@pytest.mark.parametrize("name", FORMS)
def test_300_random_requests_with_values_on_each_form(
    name: str, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_form(name, 300, compiled, monkeypatch, "compute")
