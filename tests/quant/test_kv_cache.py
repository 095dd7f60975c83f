"""The 8-bit KV cache: its codes, attention over them on the CPU, key biases, prices, what is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.quant import checkpoints as quantised
from tests.quant.coded_caches import BIASES, TABLE, filled, score_error
from tests.traffic.ragged_rows import ragged_inputs
from trencadis import LLM, SamplingParams
from trencadis.backends.cpu import make_backend
from trencadis.backends.cpu.batch_invariant import InvariantOps
from trencadis.backends.cpu.ops import CpuOps
from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.core import kv_cache_format as forms
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.device.backend import BackendConfig, LayerKV
from trencadis.core.errors import StartupError
from trencadis.core.kv_cache_format import RESERVED_BLOCKS, parse_kv_format
from trencadis.core.launches.kv_cache_and_state_allocation import kv_cache
from trencadis.core.memory import cache_plan
from trencadis.core.memory.memory_estimator import MemoryEstimator
from trencadis.core.models import kv_cache_quantisation
from trencadis.core.models.model_loader import load_model
from trencadis.server.cli.main import main

BLOCK, GROUPS, HEADS, D = 16, 2, 6, 32
ROWS = ((0, 21), (37, 1), (5, 18), (64, 1), (3, 1))
SMALL: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 16 << 20, "max_num_seqs": 8}


def ready(kind: str, kept: int, dtype: torch.dtype = torch.float32) -> tuple[Any, LayerKV, list[torch.Tensor]]:
    """A launch's inputs, a cache with tokens in it, and q, k, v."""
    inputs = ragged_inputs(ROWS, BLOCK, np.random.default_rng(1), shared=True)
    backend = make_backend(BackendConfig(block_size=BLOCK, options={"policy": "padded", "threads": "1"}))
    n = len(inputs.tokens)
    program: Any = backend.program(Bucket(Stage.PREFILL, (-(-n // 16) * 16, 8)), print)
    backend.fill(program, inputs)
    generator = torch.Generator().manual_seed(5)
    cache = filled(kind, int(inputs.blocks.max()) + 2, BLOCK, GROUPS, D, kept, dtype, generator)
    size = len(program.inputs.tokens)
    qkv = [torch.randn(size, heads, D, generator=generator).to(dtype) for heads in (HEADS, GROUPS, GROUPS)]
    return program.inputs, cache, qkv


def attended(ops: ReferenceOps, x: Any, cache: LayerKV, qkv: list[torch.Tensor], sink: float) -> torch.Tensor:
    """Rotary, store and attention; what may not be read has scales and kept values ``sink``."""
    own = LayerKV(*(t.clone() if t is not None else None for t in cache))  # type: ignore[arg-type]
    for t in own[2:5]:
        if t is not None:
            t[0], t[1] = 0, sink
    rotary = ops.rotary(x.positions, torch.linspace(1, 0.01, D // 2), torch.arange(D // 2) % 3)
    q, k, v = (t.clone() for t in qkv)
    q, k, v = ops.rope_store(q, k, v, rotary, own, x.attn)
    out = ops.attend(q, k, v, own, ops.prepare_attn(x.attn, HEADS, own), D**-0.5)
    return out[: sum(tokens for _, tokens in ROWS)]


@pytest.mark.parametrize("kept", [0, 8])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_fast_attention_is_the_reference_and_reads_no_padding(kind: str, kept: int) -> None:
    x, cache, qkv = ready(kind, kept)
    want = attended(ReferenceOps(), x, cache, qkv, 0.0)
    for ops in (CpuOps(), InvariantOps()):
        got = attended(ops, x, cache, qkv, 0.0)
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)  # a key beside a boundary has another code
        assert float((got - want).abs().mean()) < 1e-5
        assert torch.equal(attended(ops, x, cache, qkv, float("nan")), got)


@pytest.mark.parametrize("static", [None, (0.05, 0.02)])
@pytest.mark.parametrize("kept", [0, 8])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_what_is_stored_is_the_nearest_code(kind: str, kept: int, static: tuple[float, float] | None) -> None:
    generator = torch.Generator().manual_seed(0)
    cache = filled(kind, 2, 8, 3, D, kept, torch.bfloat16, generator)
    if static is not None:
        cache = cache._replace(static=torch.tensor(static))
    k, v = (torch.randn(16, 3, D, generator=generator).bfloat16() for _ in range(2))
    k[3], v[4] = 0, 0
    kv_cache_quantisation.store(k, v, cache, torch.arange(16))
    found = kv_cache_quantisation.read_slots(cache, slice(0, 16), torch.float32)
    for x, got, scale, codes in zip((k, v), found, (cache.k_scale, cache.v_scale), (cache.k, cache.v), strict=True):
        assert scale is not None and bool((scale > 0).all()) and got.isfinite().all()
        step = scale.float().reshape(16, 3, 1)
        bound = step / 2 if kind == "int8" else torch.maximum(x.float().abs() / 16, step * 2**-10)
        top = forms.TOPS[kind] * step
        held = (x.float().clamp(-top, top) - got).abs() <= bound * 1.001 + 1e-7
        if kept and codes is cache.k:
            held.scatter_(2, cache.pairs.long().expand(16, -1, -1), True)  # type: ignore[union-attr]
        assert bool(held.all())
        if static is None:  # the largest value of a head has the largest code
            assert bool(
                (kv_cache_quantisation.values(codes).abs().amax(-1).flatten()[:6] > forms.TOPS[kind] * 0.96).all()
            )
    if kept:
        place = cache.pairs.long().expand(16, -1, -1)  # type: ignore[union-attr]
        assert torch.equal(found[0].gather(2, place), k.float().gather(2, place))
        assert not kv_cache_quantisation.values(cache.k).view(16, 3, D).gather(2, place).any()


def test_every_code_of_fp8_has_its_value() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    found = kv_cache_quantisation.values(codes)
    finite = found.isfinite() & (found.abs() <= forms.TOPS["fp8"])
    again = kv_cache_quantisation.encode(found[finite], codes)
    assert torch.equal(again, codes[finite]) and int(finite.sum()) == 2 * 0x78


def test_pairs_are_those_of_the_largest_bias() -> None:
    bias = torch.full((2, 16), 0.1)
    bias[0, 3], bias[0, 8 + 5], bias[1, 0] = -300.0, 7.0, 2.0
    bias[1, 8 + 7] = -1.0
    assert kv_cache_quantisation.pairs_of(bias, 4).tolist() == [[3, 5, 11, 13], [0, 7, 8, 15]]


@pytest.mark.parametrize("cache", TABLE)
def test_scores_err_as_the_page_says(cache: str) -> None:
    found = [score_error(cache, bias) for bias in BIASES]
    assert all(0 < got < 2 * said for got, said in zip(found, TABLE[cache], strict=True)), found
    if cache == "int8":
        assert found[2] > 20 * score_error("int8 and 4 pairs", BIASES[2]), "what the pairs are for"


def planted(source: Path, out: Path, bias: float) -> Path:
    """A checkpoint with one large value in the bias of each KV head's keys; other keys are about 1, queries 4."""
    stored = load_file(str(source / "model.safetensors"))
    for name, t in stored.items():
        if name.endswith("k_proj.bias"):
            t.view(-1, 128)[:, 50] = bias
        elif name.endswith(("k_proj.weight", "q_proj.weight")):
            t *= 0.4 if "k_proj" in name else 1.6
        elif "embed_tokens" in name:
            t *= 30  # else attention alone decides, and two ids are seldom far apart
    return quantised.copied(source, out, stored, None)


def best_tokens(path: Path, prompts: list[list[int]], cache: str) -> list[int]:
    """The likeliest token at each place of the prompts."""
    llm = LLM(str(path), **SMALL, kv_cache_dtype=cache, max_model_len=512)
    params = SamplingParams(max_tokens=1, prompt_logprobs=1, temperature=0)
    found = []
    for out in llm.generate([{"prompt_token_ids": p} for p in prompts], params):
        found += [next(t for t, one in place.items() if one.rank == 1) for place in (out.prompt_logprobs or [])[1:]]
    llm.close()
    return found


def test_large_key_biases_spoil_no_answer(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And they would, if no pair stayed in 16 bits."""
    shape = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
    path = planted(checkpoint("qwen2", **shape), tmp_path / "planted", 300.0)
    rng = np.random.default_rng(0)
    vocab = load_config(path).text.vocab
    prompts = [rng.integers(0, vocab - 20, 252).tolist() for _ in range(4)]
    want = best_tokens(path, prompts, "auto")
    assert len(want) >= 1000

    def agreement() -> float:
        return float(np.mean([a == b for a, b in zip(want, best_tokens(path, prompts, "int8"), strict=True)]))

    with_pairs = agreement()
    monkeypatch.setattr(forms, "KEPT_PAIRS", 0)
    without = agreement()
    print(f"agreement {with_pairs:.3f}, without pairs {without:.3f}")
    assert with_pairs >= 0.95 > without


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "llama"])
def test_a_block_has_the_bytes_of_its_tensors(kind: str, checkpoint: Callable[..., Path]) -> None:
    """The ledger's price, the CPU's plan and the tensors; the weights' row has what stands beside the cache."""
    config = load_config(checkpoint(kind))
    for requested in ("auto", "int8", "fp8"):
        text = dataclasses.replace(
            config.text, kv=parse_kv_format(requested, config.text.head_dim, config.text.qkv_bias)
        )
        model = dataclasses.replace(config, text=text)
        for dtype in (torch.float32, torch.bfloat16):
            backend = make_backend(BackendConfig(dtype=dtype, options={"threads": "1"}))
            made = kv_cache(model, backend, 5, 16)
            held = sum(t.nbytes for layer in made for t in layer if t is not None)
            size = dtype.itemsize
            assert held == (5 + RESERVED_BLOCKS) * MemoryEstimator(model, size).block_bytes(16)
            assert held == (5 + RESERVED_BLOCKS) * cache_plan.block_bytes(text, 16, size)
            plain, coded = (load_model(m, backend).nbytes() for m in (config, model))
            assert coded - plain == MemoryEstimator(model, size).weights() - MemoryEstimator(config, size).weights()


SIZES_7B = {
    "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "intermediate_size": 18944, "vocab_size": 152064, "max_position_embeddings": 32768,
}  # fmt: skip


def sized_7b(source: Path, out: Path) -> Path:
    """The files of a small checkpoint with the decoder's sizes of a 7B in config.json; its weights are not read."""
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors"))
    settings = json.loads((out / "config.json").read_text())
    place = settings.get("text_config", settings)
    for one in (settings, place):
        one.update({name: value for name, value in SIZES_7B.items() if name in one})
        one.pop("head_dim", None)
        one.pop("layer_types", None)
    if place.get("rope_scaling"):
        place["rope_scaling"]["mrope_section"] = [16, 24, 24]
    for rope in (settings.get("rope_parameters"), place.get("rope_parameters")):
        if rope and "mrope_section" in rope:
            rope["mrope_section"] = [16, 24, 24]
    if "vision_config" in settings:
        settings["vision_config"]["out_hidden_size"] = SIZES_7B["hidden_size"]
    (out / "config.json").write_text(json.dumps(settings))
    return out


@pytest.mark.parametrize(("kind", "least"), [("qwen2_5_vl", 1.85), ("llama", 1.95)])
def test_the_cache_holds_more_blocks(
    kind: str, least: float, checkpoint: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Heads of 128, ``plan`` of a 7B: with key biases and without."""
    path = sized_7b(checkpoint(kind), tmp_path / "large")
    found = {name: blocks_planned(path, name, capsys) for name in ("auto", "int8", "fp8")}
    assert found["int8"] == found["fp8"] and found["int8"] / found["auto"] >= least, found
    assert blocks_planned(path, "fp8", capsys, "hpu") / blocks_planned(path, "auto", capsys, "hpu") >= least


def blocks_planned(path: Path, cache: str, capsys: pytest.CaptureFixture[str], device: str = "cuda") -> int:
    words = ["plan", str(path), "--memory", "80GiB", "--device", device, "--kv-cache-dtype", cache, "--json"]
    assert main([*words, "--dtype", "bfloat16"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert any(note.startswith("KV cache:") for note in report["notes"]) == (cache != "auto"), report["notes"]
    return int(report["kv_blocks"])


def test_aliases_say_what_they_mean() -> None:
    for requested, name, said in (
        ("fp8_e4m3", "fp8", ""), ("fp8_e5m2", "fp8", "e4m3"), ("fp8_inc", "fp8", "no file of measurements"),
        ("int8_per_token_head", "int8", ""),
    ):  # fmt: skip
        form = parse_kv_format(requested, 128, True)
        assert form is not None and form.name == name and form.kept == 8
        lines = forms.kv_notes(form)
        assert len(lines) == (2 if said else 1) and said in lines[-1]


def scaled(source: Path, out: Path, value: float | None, scheme: dict[str, Any] | None = None) -> Path:
    """A checkpoint with KV scales, as compressed-tensors writes them."""
    stored = load_file(str(source / "model.safetensors"))
    for i in range(2 if value is not None else 0):
        for kind in "kv":
            stored[f"model.layers.{i}.self_attn.{kind}_scale"] = torch.tensor([value])
    path = quantised.copied(source, out, stored, None)
    if scheme is not None:
        settings = json.loads((path / "config.json").read_text())
        settings["quantization_config"] = scheme
        (path / "config.json").write_text(json.dumps(settings))
    return path


STATIC = {**SMALL, "kv_cache_dtype": "fp8", "kv_cache_scales": "checkpoint"}


def test_a_checkpoints_scales_are_used_on_request(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = checkpoint("qwen2")
    prompt = {"prompt_token_ids": [5, 9, 23, 7, 11, 40]}
    found = []
    for value, more in ((0.01, {}), (0.01, {"kv_cache_scales": "dynamic"}), (300.0, {})):
        path = scaled(source, tmp_path / f"{value} {len(more)}", value)
        llm = LLM(str(path), **{**STATIC, **more})
        out = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1, logprobs=1))[0]
        found.append(next(iter(out.outputs[0].logprobs[0].values())).logprob)  # type: ignore[index]
        llm.close()
    close, dynamic, coarse = found
    assert abs(close - dynamic) < 0.1 and close != dynamic
    assert abs(coarse - dynamic) > abs(close - dynamic), "a scale of 300 leaves nothing of values of 1"


@pytest.mark.parametrize(
    ("value", "more", "part"),
    [
        (None, {}, "has no scales for the KV cache (layers.0.self_attn.k_scale); leave out"),
        (0.0, {}, "holds 0, where one positive scale is used"),
        (-1.0, {}, "holds -1"),
        (float("nan"), {}, "holds nan"),
        (1.0, {"kv_cache_dtype": "auto"}, "add --kv-cache-dtype fp8 or int8"),
        (1.0, {"kv_cache_dtype": "int8"}, "has scales for fp8; --kv-cache-dtype fp8 fits"),
    ],
)
def test_bad_scales_are_refused_in_one_line(
    value: float | None, more: dict[str, Any], part: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    path = scaled(checkpoint("qwen2"), tmp_path / "bad", value)
    with pytest.raises(StartupError) as refused:
        LLM(str(path), **{**STATIC, **more})
    assert part in str(refused.value) and "\n" not in str(refused.value)


def test_a_device_without_such_a_cache_says_who_has_it(checkpoint: Callable[..., Path]) -> None:
    from trencadis.backends.cpu.shape_policy import SERVING
    from trencadis.core.engine.startup_checks import check_kv_format

    config = load_config(checkpoint("qwen2"))
    text = dataclasses.replace(config.text, kv=parse_kv_format("int8", 16, True))
    bare, some = (dataclasses.replace(SERVING, kv_codes=codes) for codes in ({}, {"fp8": "uint8"}))
    for policy, said in ((bare, "no such KV cache; --device cpu has it"), (some, "it has fp8; --device cpu has it")):
        with pytest.raises(StartupError, match=said):
            check_kv_format("other", dataclasses.replace(config, text=text), policy)
