"""``--cpu-offload-gb`` on the twin of a card: answers, the order of copies and layers, the ledger, what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracles.happens_before import races
from trencadis.backends.cuda.cpu_offloaded_layers import HostLayers
from trencadis.backends.cuda.cpu_twin import twin_runtime
from trencadis.backends.cuda.cpu_twin.cuda_rules import CaptureError
from trencadis.backends.cuda.cpu_twin.twin_runtime import TwinCall, TwinRuntime
from trencadis.backends.cuda.runtime_protocol import Stream
from trencadis.core.checkpoint.pooling_config_reader import load_model_config
from trencadis.core.engine.engine import Engine
from trencadis.core.engine.engine_builder import create_engine
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.memory.host_memory_offload import plan_offload
from trencadis.core.request import Request, SamplingParams
from trencadis.server.plan.plan_command import make_plan

pytestmark = pytest.mark.part("quantised")

LENGTH = 64
FLAGS: dict[str, Any] = {
    "device": "cuda", "policy": "twin", "dtype": "float32", "max_model_len": LENGTH, "max_num_seqs": 4,
    "max_num_batched_tokens": 64, "block_size": 16, "num_gpu_blocks_override": 12,
}  # fmt: skip
LAYERS = 6


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen2", num_hidden_layers=LAYERS)


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path))


def size_of(path: Path, layers: float, **flags: Any) -> float:
    """GiB that so many layers take."""
    config = EngineConfig(model=str(path), **{**FLAGS, **flags})
    sized = make_plan(config, load_model_config(config), 8 << 30).estimator
    return layers * sized.layer(LAYERS - 1) / 2**30


def started(path: Path, **flags: Any) -> Engine:
    return create_engine(EngineConfig(model=str(path), **{**FLAGS, **flags}))


def tokens(engine: Engine, count: int) -> list[tuple[str, list[int]]]:
    """What a few prompts are answered, some of them together."""
    rng, found = random.Random(2), dict[str, list[int]]()
    vocab = engine.info().vocab_size
    for number in range(count):
        prompt = [rng.randrange(1, vocab) for _ in range(rng.randint(1, 40))]
        engine.add(Request(f"r{number}", prompt, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)))
        for _ in range(rng.choice([0, 2])):
            take(engine, found)
    while not engine.idle():
        take(engine, found)
    engine.close()
    return sorted(found.items())


def take(engine: Engine, found: dict[str, list[int]]) -> None:
    for delta in engine.step():
        assert delta.finish != "error", delta.message
        found.setdefault(delta.id, []).extend(delta.tokens)


@pytest.mark.parametrize(
    ("layers", "flags"),
    [
        (3.5, {}),
        pytest.param(4.0, {"quantization": "int4", "dtype": "bfloat16"}, marks=pytest.mark.long),
        pytest.param(LAYERS, {"enforce_eager": True}, marks=pytest.mark.long),
        pytest.param(5.5, {"kv_cache_dtype": "int8", "tensor_parallel_size": 1}, marks=pytest.mark.long),
        pytest.param(LAYERS, {"quantization": "int8", "dtype": "bfloat16"}, marks=pytest.mark.long),
    ],
)
def test_answers_and_the_plan_are_those_of_a_device_that_holds_all(
    layers: float, flags: dict[str, Any], model: Path
) -> None:
    """By graphs and without; rows of the ledger to the byte, where the twin keeps books of weights."""
    held = {name: value for name, value in flags.items() if name in ("quantization", "dtype", "kv_cache_dtype")}
    size = size_of(model, layers, **held)
    want = tokens(started(model, **flags), 12)
    engine = started(model, cpu_offload_gb=size, **flags)
    captures: Any = engine._watch.captures  # type: ignore[union-attr]
    rows, runtime = dict(captures.ledger.rows()), captures.graphs.backend.runtime
    before, launched = runtime.compilations(), runtime.counts["weights"]
    config = EngineConfig(model=str(model), cpu_offload_gb=size, **{**FLAGS, **flags})
    planned = make_plan(config, load_model_config(config), 8 << 30)
    paper = dict(planned.ledger.rows())
    kept = dict(make_plan(replace(config, cpu_offload_gb=0.0), load_model_config(config), 8 << 30).ledger.rows())
    found = plan_offload(config, planned.estimator)
    assert found.layers == int(layers) and found.bytes == int(layers) * planned.estimator.layer(0)
    assert rows["copies of host memory"] == paper["copies of host memory"] == 2 * found.buffer
    assert kept["weights"] - paper["weights"] == found.bytes
    assert sum(rows.values()) == runtime.memory.total() and rows["weights"] <= paper["weights"]
    line = f"host memory: weights of the last {int(layers)} of {LAYERS} layers"
    assert any(note.startswith(line) for note in (*engine.info().notes,)) and any(
        n.startswith(line) for n in planned.notes
    )
    assert tokens(engine, 12) == want and runtime.compilations() == before
    assert (runtime.counts["weights"] > launched) is bool(flags.get("enforce_eager"))  # graphs hold their copies


class ToyLayer:
    """Two matrices, one of them seen through a view, and what it must give."""

    def __init__(self, number: int) -> None:
        self.weights = [torch.full((8, 8), float(number)), torch.arange(32.0).view(4, 8)[:, :4] + number]
        self.kv = torch.zeros(4)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weights[0].sum() + (self.weights[1] * 2).sum()


def schedule(seed: int) -> tuple[list[str], list[TwinCall]]:
    """What is wrong with random launches, captures and replays of six layers, four of them in host memory."""
    rng, calls = random.Random(seed), list[TwinCall]()
    runtime = TwinRuntime(record=calls)
    layers = [ToyLayer(n) for n in range(LAYERS)]
    want = float(sum(t.sum() * (1 + i) for layer in layers for i, t in enumerate(layer.weights)))
    host = HostLayers(runtime, 4, 4096)
    host.make()
    for place, layer in enumerate(layers):
        with host.loading(layer, place, LAYERS):
            pass

    def body(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = host.run(layer, x)
        return x

    inputs, wrong, graphs = torch.zeros(1), list[str](), list[Any]()
    runtime.launch("text", body, inputs, inputs)
    for _ in range(8):
        if graphs and rng.random() < 0.5:
            graph = rng.choice(graphs)
            runtime.replay(graph)
            found = graph.out
        elif rng.random() < 0.4:
            try:
                graphs.append(runtime.capture("text", "text", body, inputs, inputs))
            except CaptureError as error:
                wrong.append(str(error))
            continue
        else:
            found = runtime.launch("text", body, inputs, inputs)
        wrong += [] if float(found) == want else [f"{float(found)} is not {want}"]
    return wrong + [line for line in races(calls) if "weights" in line], calls


def test_copies_and_layers_are_ordered_by_events() -> None:
    for seed in range(20):
        wrong, calls = schedule(seed)
        assert wrong == [] and len({c.writes[0][0] for c in calls if c.kind == "weights"}) == 2
        assert sum(c.kind == "read" for c in calls) >= 2 * sum(c.kind == "weights" for c in calls)


@pytest.mark.long
def test_copies_and_layers_of_an_engine_are_ordered_by_events(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[TwinCall] = []
    monkeypatch.setattr(twin_runtime, "TwinRuntime", lambda **named: TwinRuntime(record=recorded, **named))
    tokens(started(model, cpu_offload_gb=size_of(model, 5)), 6)
    assert sum(call.kind == "weights" for call in recorded) > 100 and races(recorded) == []


MISTAKES = {
    "a layer does not wait for its copy": (Stream.PROGRAMS, "_arrived"),
    "a buffer is overwritten while a layer reads it": (Stream.WEIGHTS, "_used"),
    "a launch's first copies do not wait for the launch before": (Stream.WEIGHTS, "_begun"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lane, attribute = MISTAKES[name]
    made: list[Any] = []
    plain, wait = HostLayers.__init__, TwinRuntime.wait

    def noted(self: HostLayers, *args: Any) -> None:
        plain(self, *args)
        held = getattr(self, attribute)
        made.extend(held if isinstance(held, list) else [held])

    def hasty(self: Any, stream: Stream, event: Any) -> None:
        if not (stream is lane and any(event is one for one in made)):
            wait(self, stream, event)

    monkeypatch.setattr(HostLayers, "__init__", noted)
    monkeypatch.setattr(TwinRuntime, "wait", hasty)
    assert any(schedule(seed)[0] for seed in range(5))


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ({"device": "cpu", "policy": ""}, "weights lie in host memory already"),
        ({"device": "hpu", "policy": "", "block_size": 128}, "launches of hpu hold no copies from host memory"),
        ({"cpu_offload_gb": 2.0**19}, "of host memory are free"),
        (
            {"cpu_offload_gb": 2.0**-30},
            "holds 0 layers, and the device keeps room for 2: --cpu-offload-gb 0.01 holds three",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    flags: dict[str, Any], part: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    with pytest.raises(StartupError) as refused:
        started(model, **{"cpu_offload_gb": 1.0, **flags})
    line = str(refused.value)
    assert line.startswith("--cpu-offload-gb ") and part in line and "\n" not in line, line
