"""Quantised weights on the twin of a card and on an emulated Gaudi: bytes, products, answers, recipes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.test_shards import Group, ThreadComm
from tests.quant import checkpoints as made
from tests.traffic.requests import Traffic
from trencadis import LLM, SamplingParams
from trencadis.assets import demo_path
from trencadis.backends.cpu import make_backend as make_cpu
from trencadis.backends.cuda import make_backend as make_cuda
from trencadis.backends.cuda.weights.quantised_weight import QuantisedWeight
from trencadis.backends.hpu import hpu_quantised_linear as floats8
from trencadis.backends.hpu.backend import HpuBackend
from trencadis.backends.hpu.emulator.card_profiles_and_op_support import profile
from trencadis.backends.hpu.emulator.emulated_bridge import make_bridge
from trencadis.backends.hpu.emulator.emulated_device import EmulatedDevice
from trencadis.backends.hpu.hpu_quantised_linear import Floats8Weight
from trencadis.backends.hpu.shape_policy import policy
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.pooling_config_reader import load_model_config
from trencadis.core.device.backend import BackendConfig
from trencadis.core.engine.engine_builder import create_engine
from trencadis.core.engine_config import EngineConfig
from trencadis.core.kv_cache_format import RESERVED_BLOCKS
from trencadis.core.memory.memory_estimator import MemoryEstimator
from trencadis.core.models.model_loader import load_model
from trencadis.core.quant.online_quant import quantise
from trencadis.core.quant.quantised_tensor import QTensor
from trencadis.core.quant.quantised_weight_layout_and_bytes import Scheme
from trencadis.server.plan.plan_command import make_plan

E4M3 = torch.float8_e4m3fn


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def away(y: Tensor, want: Tensor) -> float:
    """Largest error of a row, as a share of its norm."""
    return float(((y.float() - want).norm(dim=1) / want.norm(dim=1)).max())


def gaudi(name: str = "gaudi2", lazy: bool = True, dtype: torch.dtype = torch.bfloat16) -> Any:
    return HpuBackend(BackendConfig(dtype=dtype), policy(""), make_bridge(EmulatedDevice(profile(name)), lazy))


def values_of(config: Any, policy: Any) -> int:
    """Bytes of weights on paper, without tables: columns in groups keep their width, and so do the tower's tables."""
    paper = MemoryEstimator(config, 2, quantised=policy.quantised, unit=policy.aligned).weights()
    return paper - int(config.vision.tables(config.alignment_unit(policy.aligned)))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("method", ["int8", "int4", "fp8"])
def test_the_ledger_prices_weights_of_devices_to_the_byte(
    method: str, tied: bool, checkpoint: Callable[..., Path]
) -> None:
    path = checkpoint("qwen2_5_vl", tie_word_embeddings=tied)
    model, plain = load_config(path, method), load_config(path)
    for backend in (make_cuda(BackendConfig(dtype=torch.bfloat16, options={"policy": "twin"})), gaudi()):
        built: list[Any] = [load_model(one, backend) for one in (plain, model)]
        paper = [values_of(one, backend.policy) for one in (plain, model)]
        held = [one.nbytes() for one in built]
        table = model.text.vocab * model.text.hidden * 2 if tied else 0  # of 16 bits: held once, counted twice
        assert held[1] - held[0] + table == paper[1] - paper[0], backend.name
        kept = built[1].layers[0].mlp.down.weights[0]
        codes = QuantisedWeight if backend.name == "cuda" else Floats8Weight
        assert isinstance(kept, codes) == (backend.name == "cuda" or method == "fp8")


@pytest.mark.parametrize(
    ("kind", "bits", "group", "symmetric", "ordered"),
    [("gptq", 4, 32, True, False), ("awq", 4, 32, False, False), ("pack-quantized", 8, 32, False, False),
     ("int-quantized", 8, 0, True, False)],
)  # fmt: skip
def test_the_ledger_prices_checkpoints_of_devices(
    kind: str, bits: int, group: int, symmetric: bool, ordered: bool, vl_checkpoint: Path, tmp_path: Path
) -> None:
    path, _ = made.checkpoint(vl_checkpoint, tmp_path, kind, bits, group, symmetric, ordered)
    plain, model = load_config(vl_checkpoint), load_config(path)
    backend = make_cuda(BackendConfig(dtype=torch.bfloat16, options={"policy": "twin"}))
    before = backend.memory.free()
    held = [load_model(one, backend).nbytes() for one in (plain, model)]
    paper = [values_of(one, backend.policy) for one in (plain, model)]
    assert held[1] - held[0] == paper[1] - paper[0] < 0
    assert backend.memory.free() < before


@pytest.mark.parametrize("ordered", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("device", ["cpu", "cuda", "hpu"])
def test_shares_of_ranks_are_priced(device: str, ordered: bool, vl_checkpoint: Path, tmp_path: Path) -> None:
    """GPTQ over two ranks: the first has what the ledger says; by activations both do, whatever columns a share has."""
    path, _ = made.checkpoint(vl_checkpoint, tmp_path, "gptq", 4, 32, True, ordered, apart=False)
    plain, model = load_config(vl_checkpoint), load_config(path)
    for rank in (0, 1) if ordered else (0,):  # one group of its own is one scale a row
        options = BackendConfig(dtype=torch.bfloat16, options={"policy": "twin"} if device == "cuda" else {})
        backend: Any = gaudi() if device == "hpu" else (make_cuda if device == "cuda" else make_cpu)(options)
        backend.comm = ThreadComm(Group(2), rank, 2)
        built: list[Any] = [load_model(one, backend) for one in (plain, model)]
        form, unit = backend.policy.quantised, backend.policy.aligned
        for one, config in zip(built, (plain, model), strict=True):
            sized = MemoryEstimator(config, 2, 2, quantised=form, unit=unit)
            held = sum(layer.nbytes() for layer in one.layers)
            assert held == sum(sized.layer(place) for place in range(config.text.layers)), f"rank {rank}"


# Gaudi


@pytest.mark.parametrize(("name", "limit"), [("gaudi2", 240.0), ("gaudi3", 448.0)])
def test_codes_of_a_file_lie_within_the_range_of_the_card(name: str, limit: float) -> None:
    """Every finite code; halved ones keep their values but for the 16 whose last bit is lost."""
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3)
    codes = codes[torch.isfinite(codes.float())]
    q = QTensor(Scheme(8, "float"), codes[None], torch.full((1, 1), 0.5), None, len(codes), None, torch.bfloat16)
    w = floats8.floats8_weight(q, None, limit, torch.device("cpu"))
    assert w.codes.float().abs().max() <= limit
    wrong = int((w.codes.float() * w.scale[:, None] != q.dequantised()).sum())
    assert wrong == (16 if limit == 240 else 0)


@pytest.mark.parametrize("name", ["gaudi2", "gaudi3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_of_floats_on_a_gaudi(name: str, dtype: torch.dtype) -> None:
    backend = gaudi(name, dtype=dtype)
    q = quantise(normal(40, 96), Scheme(8, "float", activations="token"), dtype)
    bias, x = normal(40, seed=1).to(dtype), normal(7, 96, seed=2).to(dtype)
    x[3] *= 1000
    w = backend.ops.pack_quantised(q, bias.to(backend.device))
    assert isinstance(w, Floats8Weight)
    y = backend.ops.linear(x.to(backend.device), w).cpu()
    assert away(y, x.float() @ q.dequantised().t() + bias.float()) <= 4e-2
    alone = backend.ops.linear(x[2:3].to(backend.device), w).cpu()
    torch.testing.assert_close(alone[0], y[2], rtol=1e-2, atol=1e-5)
    wide = q.scale.repeat(1, 3) * torch.tensor([1.0, 0.7, 1.4])
    blocks = dataclasses.replace(q, scale=wide, group=32, scheme=Scheme(8, "float", group=32))
    again = backend.ops.linear(x.to(backend.device), backend.ops.pack_quantised(blocks, None)).cpu()
    assert away(again, x.float() @ blocks.dequantised().t()) <= 5e-2


def test_the_emulated_card_keeps_the_published_rules() -> None:
    """What lies beyond 240 is lost on a Gaudi 2; scales broadcast; both matrices are floats of 8 bits."""
    second, third = gaudi("gaudi2"), gaudi("gaudi3")
    for backend, lost in ((second, True), (third, False)):
        one = torch.ones(1).to(backend.device)
        x = torch.tensor([[1.0, 300.0]]).to(backend.device)
        codes = backend.bridge.cast_to_fp8_v2(x, one)
        back = backend.bridge.cast_from_fp8(codes, torch.float32, one).cpu()
        assert bool(back[0, 1].isnan()) == lost and back[0, 0] == 1
        with pytest.raises(RuntimeError, match="does not fit"):
            backend.bridge.fp8_gemm_v2(codes, codes, torch.bfloat16, one, torch.ones(3).to(backend.device), None)
        with pytest.raises(RuntimeError, match="8-bit floats"):
            backend.bridge.fp8_gemm_v2(x, codes, torch.bfloat16, one, one, None)
        with pytest.raises(RuntimeError, match="bfloat16 or float32"):
            backend.bridge.fp8_gemm_v2(codes, codes, torch.float16, one, one, None)


def test_a_plugin_without_the_product_dequantises() -> None:
    bridge = dataclasses.replace(make_bridge(EmulatedDevice(profile(""))), fp8_gemm_v2=None)
    backend = HpuBackend(BackendConfig(dtype=torch.bfloat16), policy(""), bridge)
    q = quantise(normal(8, 32), Scheme(8, "float"), torch.bfloat16)
    assert not isinstance(backend.ops.pack_quantised(q), Floats8Weight)


# Engines

LENGTH = 64
FLAGS: dict[str, Any] = {
    "max_model_len": LENGTH, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 12,
    "encoder_cache_images": 2, "mm_processor_kwargs": {"min_pixels": 56 * 56, "max_pixels": 112 * 112},
}  # fmt: skip
DEVICES: dict[str, dict[str, Any]] = {
    "cuda": {"device": "cuda", "policy": "twin", "dtype": "bfloat16", "block_size": 16},
    "hpu": {"device": "hpu", "dtype": "bfloat16", "block_size": 16},
}


SMALL = {"max_num_seqs": 2, "max_num_batched_tokens": 32}


def no_compilations(device: str, method: str, count: int, path: Path, **more: Any) -> None:
    """Warm-up, then mixed requests, without one more compilation, and without a byte that the ledger lacks."""
    flags = {**FLAGS, **DEVICES[device], **more}
    config = EngineConfig(model=str(path), quantization=method, **flags)
    engine = create_engine(config)
    try:
        graphs: Any = engine.executor._rank.graphs  # type: ignore[attr-defined]
        before, rows = graphs.backend.compilations(), books(engine, config)
        run = Traffic(engine, 1, count, flags["max_model_len"], engine.info().vocab_size, most=8)
        run.run()
        assert run.tokens and graphs.backend.compilations() == before
        assert books(engine, config) == rows
    finally:
        engine.close()


def books(engine: Any, config: EngineConfig) -> dict[str, int]:
    """The ledger of a device, which sums to its memory; ``plan`` has the bytes of its weights and of its cache."""
    memory, captures = engine.executor._rank.graphs.backend.memory, engine._watch.captures
    captures.observe()
    rows, model = dict(captures.ledger.rows()), load_model_config(config)
    assert sum(rows.values()) == memory.total() and memory.free() == rows["margin"] + rows["graph reserve unused"]
    planned = make_plan(config, model, memory.total())
    if config.device == "hpu":  # the twin keeps books of what its ops pack, not of tables and norms
        assert rows["weights"] == dict(planned.ledger.rows())["weights"]
    blocks = engine.info().num_blocks + RESERVED_BLOCKS
    assert rows["KV cache"] == blocks * planned.estimator.block_bytes(planned.limits.block_size)
    return rows


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path))
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    monkeypatch.setenv("VLLM_MULTIMODAL_BUCKETS", "64,128,256")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("device", ["cuda", "hpu"])
def test_nothing_compiles_after_warm_up(device: str, vl_checkpoint: Path) -> None:
    no_compilations(device, "fp8", 8, vl_checkpoint, kv_cache_dtype="fp8", **SMALL)


@pytest.mark.long
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("device", ["cuda", "hpu"])
@pytest.mark.parametrize(
    ("method", "cache", "count"),
    [("fp8", "fp8", 10_000), ("fp8", "auto", 1000), ("int8", "int8", 1000), ("int4", "auto", 1000)],
)
def test_nothing_compiles_after_warm_up_long(
    device: str, method: str, cache: str, count: int, vl_checkpoint: Path
) -> None:
    count = min(count, int(os.environ.get("TRENCADIS_TEST_REQUESTS", count)))
    no_compilations(device, method, count, vl_checkpoint, kv_cache_dtype=cache)


@pytest.mark.long
@pytest.mark.parametrize("method", ["int8", "int4"])
def test_the_twin_answers_as_the_cpu(method: str) -> None:
    """Log-probabilities of the demo model beside those of the CPU, which rounds activations as well."""
    found, ways = [], list[dict[str, Any]]([{"device": "cuda", "policy": "twin"}, {"device": "cpu"}])
    for more in ways:
        llm = LLM(
            str(demo_path()), dtype="float32", quantization=method, max_model_len=512, max_num_seqs=2,
            mm_processor_kwargs={"max_pixels": 50_176}, **more,
        )  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=4, logprobs=1, ignore_eos=True)
        out = llm.chat([{"role": "user", "content": "What is 2 + 3?"}], params)[0].outputs[0]
        found.append(out.logprobs[0].logprob)  # type: ignore[index]
        llm.close()
    assert abs(found[0] - found[1]) < 0.1
