"""``--cpu-offload-gb`` on the twin of a card: answers, the order of copies and layers, the ledger, what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.oracles.happens_before import races
from trencadis.backends.cuda.host_layers import HostLayers
from trencadis.backends.cuda.protocol import Stream
from trencadis.backends.cuda.twin import device
from trencadis.backends.cuda.twin.device import TwinCall, TwinRuntime
from trencadis.core.checkpoint.pooler_config import load_model
from trencadis.core.config import EngineConfig
from trencadis.core.engine import Engine
from trencadis.core.errors import StartupError
from trencadis.core.memory.host_weights import moved
from trencadis.core.request import Request, SamplingParams
from trencadis.core.startup.build import create_engine
from trencadis.server.plan.command import plan_for

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
    sized = plan_for(config, load_model(config), 8 << 30).sized
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
    planned = plan_for(config, load_model(config), 8 << 30)
    paper = dict(planned.ledger.rows())
    kept = dict(plan_for(replace(config, cpu_offload_gb=0.0), load_model(config), 8 << 30).ledger.rows())
    found = moved(config, planned.sized)
    assert found.layers == int(layers) and found.bytes == int(layers) * planned.sized.layer(0)
    assert rows["copies of host memory"] == paper["copies of host memory"] == 2 * found.buffer
    assert kept["weights"] - paper["weights"] == found.bytes
    assert sum(rows.values()) == runtime.memory.total() and rows["weights"] <= paper["weights"]
    line = f"host memory: weights of the last {int(layers)} of {LAYERS} layers"
    assert any(note.startswith(line) for note in (*engine.info().notes,)) and any(
        n.startswith(line) for n in planned.notes
    )
    assert tokens(engine, 12) == want and runtime.compilations() == before
    assert (runtime.counts["weights"] > launched) is bool(flags.get("enforce_eager"))  # graphs hold their copies


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[TwinCall]:
    """The calls of every runtime from now on."""
    calls: list[TwinCall] = []
    monkeypatch.setattr(device, "TwinRuntime", lambda: TwinRuntime(record=calls))
    return calls


def test_copies_and_layers_are_ordered_by_events(recorded: list[TwinCall], model: Path) -> None:
    tokens(started(model, cpu_offload_gb=size_of(model, 5), max_num_batched_tokens=32, max_num_seqs=2), 4)
    brought = [call for call in recorded if call.kind == "weights"]
    assert len(brought) > 100 and len({call.writes[0][0] for call in brought}) == 2
    assert sum(call.kind == "read" for call in recorded) > 5 * len(brought)
    assert races(recorded) == []


def without(lane: Stream, events: Callable[[Any], list[Any]]) -> Callable[..., Any]:
    """A runtime's ``wait`` that leaves these events of the copies out."""
    plain = TwinRuntime.wait

    def wait(self: Any, stream: Stream, event: Any) -> None:
        if not (stream is lane and any(event is one for one in events(self))):
            plain(self, stream, event)

    return wait


MISTAKES = {
    "a layer does not wait for its copy": (Stream.PROGRAMS, "_arrived"),
    "a buffer is overwritten while a layer reads it": (Stream.WEIGHTS, "_used"),
    "a launch's first copies do not wait for the launch before": (Stream.WEIGHTS, "_begun"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_found(
    name: str, recorded: list[TwinCall], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane, attribute = MISTAKES[name]
    layers: list[HostLayers] = []
    plain = HostLayers.__init__

    def noted(self: HostLayers, *args: Any) -> None:
        plain(self, *args)
        layers.append(self)

    def events(_: Any) -> list[Any]:
        held = [getattr(one, attribute) for one in layers]
        return [event for one in held for event in (one if isinstance(one, list) else [one])]

    monkeypatch.setattr(HostLayers, "__init__", noted)
    monkeypatch.setattr(TwinRuntime, "wait", without(lane, events))
    flags = {"max_num_batched_tokens": 16, "max_num_seqs": 1, "warmup": "skip"}
    tokens(started(model, cpu_offload_gb=size_of(model, 4), **flags), 1)
    assert any("weights" in line for line in races(recorded))


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
