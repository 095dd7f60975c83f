"""Quantised weights in an engine: the same tokens alone and in company, the ledger, bad input."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.harness.reporting import environment
from tests.oracles.transformers_model import conversation
from tests.quant import checkpoints as quantised
from trencadis import LLM, SamplingParams
from trencadis.assets import demo_path
from trencadis.backends.cpu import make_backend
from trencadis.backends.cpu.int8_linear import IntegerWeight
from trencadis.backends.cpu.native.quantised_weight_panels import PanelWeight
from trencadis.backends.cpu.shape_policy import policy
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.device.backend import BackendConfig
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.memory.memory_estimator import MemoryEstimator
from trencadis.core.models.model_loader import load_model
from trencadis.core.quant.quantised_weight_layout_and_bytes import PANELS, ROWS8
from trencadis.server.cli.main import main

LENGTH = 8
BASE: dict[str, Any] = {
    "kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 32, "mm_processor_kwargs": {"max_pixels": 50_176},
    "max_model_len": 2048,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, logprobs=2, ignore_eos=True)
VARIANTS: dict[str, dict[str, Any]] = {
    "among 16": {},
    "chunks of 50, depth 1, no prefix cache": {
        "max_num_batched_tokens": 50, "async_depth": 1, "enable_prefix_caching": False,
    },
    "preempted": {"num_gpu_blocks_override": 40, "max_model_len": 480, "kv_cache_memory_bytes": None},
    "padded, depth 0": {"policy": "padded", "async_depth": 0},
}  # fmt: skip
TIE = 1e-3
"""Two best logits closer than this may change places: attention sums in another order in another batch."""


def chats(count: int) -> list[list[dict[str, Any]]]:
    return [conversation(np.random.default_rng(seed), high=200)[0] for seed in range(count)]


def answers(outputs: Any) -> list[tuple[list[int], list[float]]]:
    """Tokens, and how far the best of each lies above the second."""
    found = []
    for out in (o.outputs[0] for o in outputs):
        gaps = [x.top_logprobs[0] - x.top_logprobs[1] for x in out.logprobs or []]
        found.append((list(out.token_ids), gaps))
    return found


def flags(method: str) -> dict[str, Any]:
    """``--quantization``, or after ``kv`` the type of the KV cache."""
    kind, _, cache = method.partition(" ")
    return {"kv_cache_dtype": cache} if kind == "kv" else {"quantization": method}


@functools.cache
def alone(method: str, dtype: str, count: int, model: str = "") -> list[tuple[list[int], list[float]]]:
    llm = LLM(model or str(demo_path()), **BASE, dtype=dtype, **flags(method))
    found = [answers(llm.chat([chat], GREEDY))[0] for chat in chats(count)]
    llm.close()
    return found


def compare(method: str, dtype: str, name: str, count: int, model: str = "") -> int:
    """Answers in company equal those alone; returns how many differ at a tie. ``model``: the demo, or a folder."""
    want = alone(method, dtype, count, model)
    llm = LLM(model or str(demo_path()), **{**BASE, **VARIANTS[name], **flags(method)}, dtype=dtype)
    ties = 0
    for start in range(0, count, 16):
        got = answers(llm.chat(chats(count)[start : start + 16], GREEDY))
        for (tokens, _), (expected, gaps) in zip(got, want[start : start + 16], strict=True):
            if tokens != expected:
                first = next(i for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b)
                assert gaps[first] < (TIE if dtype == "float32" else 0.1), f"{name}: token {first}"
                ties += 1
    llm.close()
    return ties


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("int8", "chunks of 50, depth 1, no prefix cache"),
        ("int4", "preempted"),
        ("fp8", "padded, depth 0"),
        ("kv int8", "chunks of 50, depth 1, no prefix cache"),
        ("kv fp8", "preempted"),
    ],
)
def test_the_same_tokens_in_company(method: str, name: str) -> None:
    assert compare(method, "float32", name, 6) <= 1


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("method", ["int8", "int4", "fp8", "kv int8", "kv fp8"])
def test_the_same_tokens_in_company_long(method: str, name: str, dtype: str) -> None:
    count = 96
    print(f"{method}, {dtype}, {name}: {compare(method, dtype, name, count)} of {count} answers differ, at ties")


@pytest.mark.long
@pytest.mark.parametrize("to", ["int8", "int4", "fp8"])
def test_the_same_tokens_of_what_quantize_writes_long(to: str, tmp_path: Path) -> None:
    out, count = str(tmp_path / "out"), 32
    assert main(["quantize", str(demo_path()), out, "--to", to]) == 0
    for name in VARIANTS:
        print(f"{to} file, {name}: {compare('', 'float32', name, count, out)} of {count} answers differ, at ties")


@pytest.mark.parametrize("method", ["int8", pytest.param("kv int8", marks=pytest.mark.long)])
def test_batch_invariance_is_kept(method: str) -> None:
    """Bits of the log-probabilities, alone and among others, in chunks."""
    found = []
    for company, tokens in ((1, 2048), (3, 50)):
        llm = LLM(str(demo_path()), **BASE, **flags(method), batch_invariant=True, max_num_batched_tokens=tokens)
        requested = chats(3)
        outs = [o for i in range(0, 3, company) for o in llm.chat(requested[i : i + company], GREEDY)]
        found.append([[(x.logprob, *x.top_logprobs) for x in o.outputs[0].logprobs or []] for o in outs])
        llm.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["gptq", "int-quantized"])
def test_a_checkpoint_answers_as_its_twin(kind: str, vl_checkpoint: Path, tmp_path: Path) -> None:
    """Log-probabilities of a checkpoint whose weights are integers lie beside those of its twin."""
    bits, group = (8, 0) if kind == "int-quantized" else (4, 32)
    path, twin = quantised.checkpoint(vl_checkpoint, tmp_path, kind, bits, group)
    prompt = [{"role": "user", "content": "w1 w2 w3"}]
    found = []
    for folder in (path, twin):
        llm = LLM(str(folder), **BASE, dtype="float32")
        out = llm.chat([prompt], SamplingParams(temperature=0, max_tokens=4, logprobs=1, ignore_eos=True))[0].outputs[0]
        found.append(out.logprobs[0].logprob)  # type: ignore[index]
        llm.close()
    assert abs(found[0] - found[1]) < 0.1


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("method", ["int8", "int4", "fp8", ""])
def test_the_ledger_prices_weights_to_the_byte(method: str, tied: bool, checkpoint: Callable[..., Path]) -> None:
    # 100 fills neither panels of 16 rows, fused to 200, nor steps of 8 columns, nor groups of 32.
    model = load_config(checkpoint("qwen2_5_vl", tie_word_embeddings=tied, intermediate_size=100), method)
    for dtype in (torch.float32, torch.bfloat16):
        backend = make_backend(BackendConfig(dtype=dtype, options={"threads": "1"}))
        built: Any = load_model(model, backend)
        frequencies = MemoryEstimator(model, 0).weights()
        paper = MemoryEstimator(model, dtype.itemsize, quantised=backend.policy.quantised, unit=backend.policy.aligned)
        # Frequencies are counted on paper and no layer's: 12 bytes each, and the tower's colours.
        t, v = model.text, model.vision
        assert v is not None and frequencies >= 0
        extra = 12 * (t.head_dim // 2) + v.tables(backend.policy.aligned)
        table = t.vocab * t.hidden * dtype.itemsize if tied and method == "" else 0  # held once, counted twice
        assert paper.weights() == built.nbytes() - table + extra
        kept = isinstance(built.layers[0].mlp.down.weights[0], IntegerWeight | PanelWeight)
        assert kept == (method.startswith("int")) == (paper.quantised in (ROWS8, PANELS) and method.startswith("int"))


@pytest.mark.parametrize("kind", ["awq", "gptq", "pack-quantized", "int-quantized"])
def test_the_ledger_prices_checkpoints(kind: str, vl_checkpoint: Path, tmp_path: Path) -> None:
    bits, group = (8, 0) if kind == "int-quantized" else (4, 32)
    path, _ = quantised.checkpoint(vl_checkpoint, tmp_path, kind, bits, group, kind != "awq")
    plain, model = load_config(vl_checkpoint), load_config(path)
    backend = make_backend(BackendConfig(dtype=torch.bfloat16, options={"threads": "1"}))
    held = [load_model(one, backend).nbytes() for one in (plain, model)]
    paper = [
        MemoryEstimator(one, 2, quantised=backend.policy.quantised, unit=backend.policy.aligned).weights()
        for one in (plain, model)
    ]
    assert held[1] - held[0] == paper[1] - paper[0] < 0


BROKEN: list[tuple[str, dict[str, Any], Callable[[dict[str, torch.Tensor]], None], str]] = []


def broken(kind: str, part: str, **options: Any) -> Callable[[Callable[[Any], Any]], None]:
    """Registers a way to break the tensors of a checkpoint, and what the line must say."""

    def register(change: Callable[[Any], Any]) -> None:
        BROKEN.append((kind, options, change, part))

    return register


UP = "model.layers.1.mlp.up_proj"
FLOATS = {"fp8": {"rows": 32, "columns": 32}, "float-quantized": {"rows": 1}}
GPTQ, PACKED = {"bits": 4, "group": 32}, {"bits": 4, "group": 32, "symmetric": False}


def put(suffix: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], None]:
    """Replaces a tensor of one weight."""

    def change(t: dict[str, torch.Tensor]) -> None:
        t[f"{UP}.{suffix}"] = value(t[f"{UP}.{suffix}"])

    return change


def drop(suffix: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(t: dict[str, torch.Tensor]) -> None:
        del t[f"{UP}.{suffix}"]

    return change


def set_first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(t: torch.Tensor) -> torch.Tensor:
        t = t.clone()
        t.view(-1)[0] = value
        return t

    return change


for kind, options, suffix in (
    ("gptq", GPTQ, "scales"), ("awq", PACKED, "scales"), ("pack-quantized", PACKED, "weight_scale"),
    ("int-quantized", {"bits": 8, "group": 0}, "weight_scale"), ("fp8", FLOATS["fp8"], "weight_scale_inv"),
    ("float-quantized", FLOATS["float-quantized"], "weight_scale"),
):  # fmt: skip
    for value, said in ((0.0, "scale of 0"), (-1.0, "scale of -1"), (float("nan"), "scale of nan")):
        broken(kind, said, **options)(put(suffix, set_first(value)))
    broken(kind, "has shape", **options)(put(suffix, lambda t: t[:-1].contiguous()))
for kind, suffix in (("gptq", "qweight"), ("awq", "qzeros"), ("gptq", "qzeros"), ("pack-quantized", "weight_packed")):
    options = GPTQ if kind == "gptq" else PACKED
    broken(kind, "has shape", **options)(put(suffix, lambda t: t[:, :-1].contiguous()))
    broken(kind, "torch.int64", **options)(put(suffix, lambda t: t.long()))
broken("gptq", "lacks", **GPTQ)(drop("qzeros"))
broken("gptq", "lacks", **GPTQ)(drop("scales"))
broken("gptq", "lacks the weight", **GPTQ)(drop("qweight"))
broken("gptq", "has group 9", **GPTQ)(put("g_idx", set_first(9)))
broken("gptq", "has group -2", **GPTQ)(put("g_idx", set_first(-2)))
broken("pack-quantized", ".weight_shape", **PACKED)(put("weight_shape", lambda t: t + 1))
broken("int-quantized", "without scales", bits=8, group=0)(drop("weight_scale"))
broken("int-quantized", "torch.uint8", bits=8, group=0)(put("weight", lambda t: t.view(torch.uint8)))
for kind, options in FLOATS.items():
    broken(kind, "torch.int8", **options)(put("weight", lambda t: t.view(torch.int8)))


@pytest.fixture(scope="module")
def whole(vl_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``whole(kind, **options)``: an unbroken checkpoint, made once."""
    known: dict[str, Path] = {}

    def make(kind: str, **options: Any) -> Path:
        key = f"{kind} {options}"
        if key not in known:
            make_one = quantised.fp8 if kind.startswith("f") else quantised.checkpoint
            known[key] = make_one(vl_checkpoint, tmp_path_factory.mktemp("whole"), kind, **options)[0]
        return known[key]

    return make


def broken_copy(number: int, whole: Callable[..., Path], out: Path) -> Path:
    """The checkpoint of ``BROKEN[number]``."""
    kind, options, change, _ = BROKEN[number]
    source = whole(kind, **options)
    stored = load_file(str(source / "model.safetensors"))
    change(stored)
    settings = json.loads((source / "config.json").read_text())["quantization_config"]
    return quantised.copied(source, out, stored, settings)


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(BROKEN)))
def test_serving_a_broken_checkpoint_ends_with_2_and_one_line_long(
    number: int, whole: Callable[..., Path], tmp_path: Path
) -> None:
    """In a process of its own, whose engine is another: what the terminal shows is one line of ours."""
    path = broken_copy(number, whole, tmp_path / "broken")
    words = [sys.executable, "-P", "-m", "trencadis.server", str(path), "--device", "cpu", "--port", "0"]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=300)
    said = [line for line in done.stderr.splitlines() if line.startswith("trencadis: ")]
    assert done.returncode == 2 and "Traceback" not in done.stdout + done.stderr, done.stderr[-2000:]
    assert len(said) == 1 and BROKEN[number][3] in said[0] and "layers.1.mlp.up_proj" in said[0], said


@pytest.mark.parametrize("number", range(len(BROKEN)))
def test_broken_checkpoints_are_refused_in_one_line(number: int, whole: Callable[..., Path], tmp_path: Path) -> None:
    part = BROKEN[number][3]
    path = broken_copy(number, whole, tmp_path / "broken")
    with pytest.raises(StartupError) as refused:
        load_model(load_config(path), make_backend(BackendConfig(options={"threads": "1"})))
    line = str(refused.value)
    assert part in line and "\n" not in line and "layers.1.mlp.up_proj" in line, line


def test_there_are_thirty_of_them() -> None:
    assert len(BROKEN) >= 30


def test_groups_that_do_not_divide_are_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """96 columns, groups of 128: named with the sizes that would."""
    source = checkpoint("qwen2")
    path, _ = quantised.checkpoint(source, tmp_path, "gptq", 4, 32)
    settings = json.loads((path / "config.json").read_text())
    settings["quantization_config"]["group_size"] = 128
    (path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(StartupError, match="64 columns, which groups of 128 do not divide; 32, 64 would"):
        load_model(load_config(path), make_backend(BackendConfig(options={"threads": "1"})))


def test_packed_weights_without_a_config_are_named(whole: Callable[..., Path], tmp_path: Path) -> None:
    source = whole("gptq", **GPTQ)
    path = quantised.copied(source, tmp_path / "bare", load_file(str(source / "model.safetensors")), None)
    with pytest.raises(StartupError, match=r"has \.qweight: config.json has no quantization_config that fits"):
        load_model(load_config(path), make_backend(BackendConfig(options={"threads": "1"})))


def test_online_weights_that_are_not_finite_are_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = checkpoint("qwen2")
    stored = load_file(str(source / "model.safetensors"))
    stored["model.layers.0.mlp.up_proj.weight"][0, 0] = float("inf")
    path = quantised.copied(source, tmp_path / "broken", stored, None)
    with pytest.raises(StartupError, match="up_proj holds values that are not finite"):
        load_model(load_config(path, "int8"), make_backend(BackendConfig(options={"threads": "1"})))


@pytest.mark.parametrize(
    ("held", "requested", "part"),
    [
        ("", "awq", "holds 16- or 32-bit weights, no awq ones; --quantization fp8, int8 or int4"),
        ("gptq", "awq", "holds gptq weights; leave the flag out"),
        ("gptq", "int8", "holds gptq weights; leave the flag out"),
        ("pack-quantized", "gptq", "holds compressed-tensors weights"),
    ],
)
def test_the_flag_must_fit_the_checkpoint(
    held: str, requested: str, part: str, vl_checkpoint: Path, whole: Callable[..., Path]
) -> None:
    path = whole(held, **(GPTQ if held == "gptq" else PACKED)) if held else vl_checkpoint
    with pytest.raises(StartupError, match=part):
        LLM(str(path), quantization=requested)


def test_the_flag_may_name_what_the_checkpoint_holds(whole: Callable[..., Path]) -> None:
    assert load_config(whole("gptq", **GPTQ), "gptq") == load_config(whole("gptq", **GPTQ))


def test_a_gptq_file_is_known_by_its_safetensors(whole: Callable[..., Path], tmp_path: Path) -> None:
    """Several files with an index, as large checkpoints have."""
    stored = load_file(str(whole("gptq", **GPTQ) / "model.safetensors"))
    path = quantised.copied(whole("gptq", **GPTQ), tmp_path / "split", stored, None)
    settings = json.loads((whole("gptq", **GPTQ) / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings))
    names = sorted(stored)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, chosen in parts.items():
        save_file({n: stored[n] for n in chosen}, str(path / file))
    (path / "model.safetensors").unlink()
    index = {"weight_map": {n: file for file, chosen in parts.items() for n in chosen}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    built: Any = load_model(load_config(path), make_backend(BackendConfig(options={"threads": "1"})), EngineConfig())
    assert isinstance(built.layers[0].attention.qkv.weights[0], IntegerWeight | PanelWeight)


def test_plan_prices_the_scheme(vl_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``plan --quantization``: the weights' row is the ledger's, and a line says what becomes of them."""
    found = {}
    for method in ("none", "int8", "int4", "fp8"):
        words = ["plan", str(vl_checkpoint), "--memory", "2GiB", "--device", "cpu", "--json", "--quantization", method]
        assert main(words) == 0
        report = json.loads(capsys.readouterr().out)
        rows = {row["name"]: row["bytes"] for row in report["ledger"]}
        found[method] = rows["weights"]
        model = load_config(vl_checkpoint, "" if method == "none" else method)
        assert rows["weights"] == MemoryEstimator(model, 4, quantised=policy("").quantised).weights()
        assert any(note.startswith("weights: ") for note in report["notes"]) == (method != "none")
    own = policy("").quantised == PANELS
    assert found["int4"] < found["int8"] if own else found["int4"] == found["int8"]
    assert found["int8"] < found["fp8"] == found["none"]


@pytest.mark.parametrize("command", ["serve", "plan"])
def test_a_flag_that_does_not_fit_ends_with_2_and_one_line(
    command: str, vl_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--memory", "2GiB"] if command == "plan" else ["--port", "0"]
    assert main([command, str(vl_checkpoint), "--quantization", "awq", "--device", "cpu", *more]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("trencadis: --quantization awq:") and "Traceback" not in "".join(said), said
