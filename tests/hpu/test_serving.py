"""Chats on the emulated card give the CPU's tokens, with and without graphs, and compile nothing after warm-up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.harness.held_out_accuracy import BASE, LONGEST, ask
from tests.hpu.conftest import COUNTS, run_in_pieces
from tests.oracles.transformers_model import conversation
from trencadis import LLM, SamplingParams
from trencadis.assets import demo_path
from trencadis.backends.hpu.emulator.emulated_bridge import EmulatedRuntime
from trencadis.core.device.backend import ProgramState

LIMITS = {"min_pixels": 56 * 56, "max_pixels": 300 * 300}
FLAGS: dict[str, Any] = dict(
    mm_processor_kwargs=LIMITS, max_model_len=512, max_num_seqs=4, max_num_batched_tokens=256, block_size=64
)
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(temperature=0.7, seed=5, top_p=0.9, max_tokens=12, logprobs=2),
]


def make_conversations() -> list[Any]:
    return [conversation(np.random.default_rng(seed), high=250)[0] for seed in range(5)]


def answers(llm: LLM) -> list[Any]:
    requested = make_conversations()
    return [o.outputs[0].token_ids for params in PARAMS for o in llm.chat(requested, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def wanted() -> list[Any]:
    llm = LLM(str(demo_path()), dtype="float32", **FLAGS)
    found = answers(llm)
    llm.close()
    return found


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    monkeypatch.setenv("VLLM_MULTIMODAL_BUCKETS", "256,576")
    monkeypatch.setenv("VLLM_DECODE_BLOCK_BUCKET_MIN", "16")
    made: list[LLM] = []

    def start(**flags: Any) -> LLM:
        made.append(LLM(str(demo_path()), device="hpu", **{**FLAGS, **flags}))
        return made[-1]

    yield start
    for llm in made:
        llm.close()


def test_without_warmup(wanted: list[Any], emulated: Any) -> None:
    llm = emulated(dtype="float32", warmup="skip")
    assert llm.engine.info().device == "hpu (emulated)"
    assert answers(llm) == wanted
    zero = llm.engine.executor._rank.model.persistent
    assert not zero.kv[0].k.cpu()[:64].any() and not zero.arena.cpu()[0].any(), "ZERO was written"


def warm(runner: Any) -> None:
    """Start-up has compiled and captured every planned bucket."""
    assert all(runner.graphs.state(bucket) is ProgramState.CAPTURED for bucket in runner.plan.buckets)


def test_with_every_bucket_captured(wanted: list[Any], emulated: Any) -> None:
    llm = emulated(dtype="float32", async_depth=1)
    runner = llm.engine.executor._rank
    warm(runner)
    bridge, clock = runner.backend.bridge, EmulatedRuntime.device.clock  # type: ignore[union-attr]
    between = clock.between
    with bridge.metric_localcontext("graph_compilation") as metric:
        assert answers(llm) == wanted
    assert bridge.compilations(metric) == 0, "a shape was not planned"
    assert clock.between == between, "something ran between the launches"


def test_compiled_buckets_run_without_graphs(wanted: list[Any], emulated: Any) -> None:
    """Memory decides what is captured, never what is compiled."""
    llm = emulated(dtype="float32", enforce_eager=True)
    runner = llm.engine.executor._rank
    assert all(runner.graphs.state(bucket) is ProgramState.COMPILED for bucket in runner.plan.buckets)
    bridge = runner.backend.bridge
    with bridge.metric_localcontext("graph_compilation") as metric:
        assert answers(llm) == wanted
    assert bridge.compilations(metric) == 0


def test_bfloat16_gives_the_cpus_tokens_in_bfloat16(emulated: Any) -> None:
    with LLM(str(demo_path()), dtype="bfloat16", **FLAGS) as llm:
        wanted = [o.outputs[0].token_ids for o in llm.chat(make_conversations(), PARAMS[0], use_tqdm=False)]
    llm = emulated(warmup="skip")
    assert llm.engine.info().dtype == "bfloat16"
    found = [o.outputs[0].token_ids for o in llm.chat(make_conversations(), PARAMS[0], use_tqdm=False)]
    assert found == wanted and all(wanted)


QUESTIONS = 2000


@pytest.mark.long
@pytest.mark.part("gaudi")
@pytest.mark.parametrize("lazy", ["1", "0"])
def test_held_out_questions_lose_no_more_than_a_fifth_of_a_point(
    lazy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The demo's, in bfloat16, beside the CPU's own answers; with ``TRENCADIS_TEST_COUNTS`` 64 at a time."""
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    monkeypatch.setenv("PT_HPU_LAZY_MODE", lazy)
    lost: list[float] = []
    questions = ask(QUESTIONS)
    ways: dict[str, dict[str, Any]] = {"cpu": {}, f"hpu {lazy}": {"device": "hpu", "warmup": "skip"}}
    for name, options in ways.items():
        kept = Path(os.environ.get(COUNTS) or tmp_path, f"right-{name}")
        with LLM(str(demo_path()), **BASE, **options) as llm:

            def answer(done: int, llm: LLM = llm, kept: Path = kept) -> int:
                part = questions[done : done + 64]
                params = SamplingParams(temperature=0, max_tokens=LONGEST)
                outs = llm.chat([chat for chat, _ in part], params, use_tqdm=False)
                right = ["01"[out.outputs[0].text == wanted] for out, (_, wanted) in zip(outs, part, strict=True)]
                kept.write_text((kept.read_text()[:done] if done else "") + "".join(right))
                return len(part)

            run_in_pieces(f"{QUESTIONS} questions, {name}", QUESTIONS, answer)
        assert len(kept.read_text()) == QUESTIONS
        lost.append(100 * kept.read_text().count("0") / QUESTIONS)
    print(f"lazy {lazy}: {100 - lost[1]:.2f} % exact, {lost[1] - lost[0]:.2f} points lost")
    assert lost[1] - lost[0] <= 0.2


@pytest.mark.part("gaudi")
def test_graphs_without_a_tensor_cache(wanted: list[Any], emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens from graphs that keep their outputs alone; the ledger prices them as they are."""
    monkeypatch.setenv("PT_HPUGRAPH_DISABLE_TENSOR_CACHE", "1")
    llm = emulated(dtype="float32", warmup="skip")
    runner = llm.engine.executor._rank
    assert not runner.plan.policy.graph_memory.cached
    assert answers(llm) == wanted
    for bucket in runner.graphs.list_captured():
        program = runner.graphs.program(bucket)
        assert program.bytes - program.static.bytes < 64 << 10, bucket
