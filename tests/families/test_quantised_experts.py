"""Quantised experts: every format is its twin on the reference, the CPU, the twin of a card and an emulated Gaudi."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file

from tests.families.text_checkpoints import family_checkpoint
from tests.models.test_shards import Group, ThreadComm
from tests.quant import checkpoints as quantised
from tests.quant.test_loading import on
from trencadis import LLM, SamplingParams
from trencadis.backends.cpu import make_backend
from trencadis.backends.cuda import make_backend as make_cuda
from trencadis.backends.cuda.weights.stacked_experts import StackedCodes
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.device.backend import BackendConfig
from trencadis.core.memory.memory_estimator import MemoryEstimator
from trencadis.core.memory.weight_bytes import weight_notes
from trencadis.core.models.model_loader import load_model
from trencadis.core.quant.quantised_weight_layout_and_bytes import CODES, FLOATS8, ROWS8

pytestmark = pytest.mark.part("quantised")

KINDS: dict[str, Callable[[Path, Path], tuple[Path, Path]]] = {
    "awq": lambda a, b: quantised.checkpoint(a, b, "awq", 4, 32, False),
    "gptq by activation": lambda a, b: quantised.checkpoint(a, b, "gptq", 4, 32, True, True),
    "gptq by one order": lambda a, b: quantised.checkpoint(a, b, "gptq", 4, 32, True, True, apart=False),
    "gptq_v2 of 8 bits": lambda a, b: quantised.checkpoint(a, b, "gptq_v2", 8, 32, False),
    "pack-quantized": lambda a, b: quantised.checkpoint(a, b, "pack-quantized", 4, 32, False),
    "int-quantized": lambda a, b: quantised.checkpoint(a, b, "int-quantized", 8, 0),
    "fp8 in blocks": lambda a, b: quantised.fp8(a, b, "fp8", 16, 16),
    "float-quantized": lambda a, b: quantised.fp8(a, b, "float-quantized", 1),
}
WIDER = {"qwen3_moe": {"moe_intermediate_size": 64}}
Files = Callable[[str, str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """``files(family, kind)``: (the quantised checkpoint, its twin), made once."""
    known: dict[tuple[str, str], tuple[Path, Path]] = {}

    def make(family: str, kind: str) -> tuple[Path, Path]:
        if (family, kind) not in known:
            wider = WIDER.get(family, {})
            source = family_checkpoint(tmp_path_factory.mktemp(family), family=family, form="plain", **wider)
            known[family, kind] = KINDS[kind](source, tmp_path_factory.mktemp("quantised"))
        return known[family, kind]

    return make


CASES = [(family, kind) for family in ("mixtral", "qwen3_moe") for kind in KINDS]
SOME = {("mixtral", "awq"), ("qwen3_moe", "gptq by activation")}
DEVICES = {("hpu", "qwen3_moe", "gptq by activation"), ("cuda", "qwen3_moe", "awq"),
           ("cuda", "mixtral", "gptq by activation")}  # fmt: skip
LONG = [pytest.param(*case, marks=[] if case in SOME else pytest.mark.long) for case in CASES]


@pytest.mark.parametrize(("family", "kind"), LONG)
def test_the_reference_answers_as_the_twin(family: str, kind: str, files: Files) -> None:
    """On one rank and on two, whose shares of an expert end within a group."""
    path, twin = files(family, kind)
    want = on(twin, 1, ops="reference")
    for world in (1, 2):
        got = on(path, world, ops="reference")
        assert (got - want).abs().max() <= 1e-4 * want.abs().max(), f"{world} ranks"


@pytest.mark.parametrize(("family", "kind"), LONG)
def test_the_cpu_answers_as_the_twin_within_8_bits(family: str, kind: str, files: Files) -> None:
    """Integers are multiplied, and two ranks divide each expert. A token near a tie may take another expert."""
    path, twin = files(family, kind)
    want = on(twin, 1)
    for world in (1, 2):
        got = on(path, world)
        away = ((got - want).norm(dim=1) / want.norm(dim=1)).sort().values
        assert away[len(away) // 2] <= (1e-4 if "f" in kind[:2] else 0.06), f"{world} ranks: {away}"
        assert "f" in kind[:2] or away.max() > 1e-5, "integers were multiplied"


@pytest.mark.parametrize(
    ("device", "family", "kind"),
    [
        pytest.param(d, *case, marks=[] if (d, *case) in DEVICES else pytest.mark.long)
        for d in ("cuda", "hpu")
        for case in CASES
    ],
)
def test_devices_with_graphs_have_the_values_of_the_twin(
    device: str, family: str, kind: str, files: Files, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    monkeypatch.setenv("TRENCADIS_CUDA_TWIN", "1")
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path))
    got, want = (prompt_values(str(path), device) for path in files(family, kind))
    away = np.abs(got - want) / want.std()
    rounds = "f" in kind[:2] if device == "hpu" else kind == "int-quantized"  # the activations, to 8 bits
    middle, most = (0.12, 0.6) if rounds else (1e-4, 1e-4)
    assert np.median(away) <= middle and away.max() <= most, (np.median(away), away.max())


def prompt_values(path: str, device: str) -> npt.NDArray[np.float64]:
    """The log-probabilities of the tokens of six prompts, given those before them."""
    llm = LLM(path, device=device, dtype="float32", max_model_len=64, max_num_seqs=3, max_num_batched_tokens=64,
              block_size=16, num_gpu_blocks_override=16, warmup="skip")  # fmt: skip
    prompts: list[Any] = [{"prompt_token_ids": [5 * n + i % 7 for i in range(3, 17 + n)]} for n in range(6)]
    made = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1), use_tqdm=False)
    llm.close()
    return np.array([
        place[token].logprob
        for requested, one in zip(prompts, made, strict=True)
        for token, place in zip(requested["prompt_token_ids"], one.prompt_logprobs or (), strict=True)
        if place is not None
    ])  # fmt: skip


@pytest.mark.parametrize("method", ["int8", *(pytest.param(m, marks=pytest.mark.long) for m in ("int4", "fp8"))])
@pytest.mark.parametrize("family", ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.long)])
def test_experts_are_rounded_as_they_load_and_the_router_is_not(family: str, method: str, files: Files) -> None:
    """The CPU holds what the formula says; where it keeps floats of 16 bits, they are rounded all the same."""
    _, path = files(family, "awq")
    config = load_config(path, method)
    backend = make_backend(BackendConfig(dtype=torch.bfloat16, options={"threads": "1"}))
    model: Any = load_model(config, backend)
    sized = MemoryEstimator(config, 2, quantised=backend.policy.quantised)
    mlp = model.layers[0].mlp
    assert mlp.router.weights[0].out_features == mlp.count and not hasattr(mlp.router.weights[0], "nbytes")
    assert hasattr(mlp.weights.down[0], "nbytes") is (method != "fp8")
    plain: Any = load_model(load_config(path), backend)
    assert (plain.layers[0].mlp.nbytes() > 1.5 * mlp.nbytes()) is (method != "fp8")
    priced = sum(sized.layer(place) for place in range(config.text.layers))
    assert priced == sum(layer.nbytes() for layer in model.layers)


def test_a_router_that_is_stored_quantised_is_read(files: Files, tmp_path: Path) -> None:
    path, _ = files("mixtral", "int-quantized")
    held = load_file(path / "model.safetensors")
    names = [name for name in held if name.endswith("block_sparse_moe.gate.weight")]
    twin = dict(held)
    for name in names:
        m = quantised.made(held.pop(name), 8, 0, True, False)
        held |= quantised.tensors("int-quantized", name.removesuffix(".weight"), m)
        twin[name] = m.values()
    settings = json.loads((path / "config.json").read_text())["quantization_config"]
    ignoring = settings | {"ignore": ["lm_head", "re:.*block_sparse_moe.gate"]}
    coded = quantised.copied(path, tmp_path / "coded", held, settings)
    plain = quantised.copied(path, tmp_path / "plain", twin, ignoring)
    assert names and torch.equal(on(coded, 1), on(plain, 1))
    assert load_config(plain).quant.scheme("layers.0.mlp.gate") is None  # type: ignore[union-attr]
    assert load_config(plain).quant.scheme("layers.0.mlp.experts.0.gate_proj") is not None  # type: ignore[union-attr]


def twin_of_a_card(rank: int = 0, ranks: int = 1, dtype: torch.dtype = torch.float32) -> Any:
    backend: Any = make_cuda(BackendConfig(dtype=dtype, options={"policy": "twin"}))
    if ranks > 1:
        backend.comm = ThreadComm(Group(ranks), rank, ranks)
    return backend


def assert_ranks_share_codes(path: Path, dtype: torch.dtype = torch.float32) -> None:
    """Asserts that CUDA keeps a checkpoint's experts as codes, as many bytes as planned, and that the parts of two
    ranks add up to the whole.
    """
    config = load_config(path)
    x, parts = torch.randn(9, config.text.hidden, generator=torch.Generator().manual_seed(1)).to(dtype), []
    for rank, ranks in ((0, 1), (0, 2), (1, 2)):
        model: Any = load_model(config, twin_of_a_card(rank, ranks, dtype))
        mlp = model.layers[0].mlp
        assert isinstance(mlp.weights.gate_up, StackedCodes) and isinstance(mlp.weights.down, StackedCodes)
        paper = MemoryEstimator(config, dtype.itemsize, ranks, quantised=CODES)
        held = [layer.nbytes() for layer in model.layers]
        biases = config.text.out_bias * config.text.hidden * dtype.itemsize if rank else 0  # the first rank's alone
        assert held == [paper.layer(place) - biases for place in range(config.text.layers)], (rank, ranks)
        parts.append(mlp._run_experts(x, x).float())
    near = 3e-2 if mlp.weights.down.rounds else 1e-4
    assert (parts[1] + parts[2] - parts[0]).abs().max() <= near * parts[0].abs().max()


TAKEN = ("awq", "gptq by one order")
APART = "gptq by activation"
"""Gates and ups have different orders of their columns, so that these become values of the engine's dtype."""


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[] if k in TAKEN else pytest.mark.long) for k in KINDS if k != APART]
)
def test_a_card_keeps_the_codes_of_every_format(kind: str, files: Files) -> None:
    assert_ranks_share_codes(files("qwen3_moe", kind)[0])


@pytest.mark.parametrize("method", ["int4", *(pytest.param(m, marks=pytest.mark.long) for m in ("int8", "fp8"))])
def test_a_card_keeps_codes_of_experts_that_are_rounded_as_they_load(method: str, files: Files) -> None:
    config = load_config(files("qwen3_moe", "awq")[1], method)
    backend = twin_of_a_card(dtype=torch.bfloat16)
    before = backend.memory.free()
    model: Any = load_model(config, backend)
    assert all(isinstance(layer.mlp.weights.down, StackedCodes) for layer in model.layers)
    paper = MemoryEstimator(config, 2, quantised=CODES)
    assert sum(layer.nbytes() for layer in model.layers) == sum(map(paper.layer, range(config.text.layers)))
    assert before - backend.memory.free() >= sum(layer.nbytes() for layer in model.layers)


def test_a_line_says_where_experts_take_16_bits(files: Files) -> None:
    config = load_config(files("qwen3_moe", "awq")[0])
    said = "weights: experts become 16-bit values as they load; the CPU keeps int8 and int4, CUDA all"
    assert said in weight_notes(config, 2, FLOATS8)
    assert not any("experts become" in line for form in (CODES, ROWS8, "") for line in weight_notes(config, 2, form))
    small, large = (MemoryEstimator(config, 2, quantised=form).layer(0) for form in (CODES, FLOATS8))
    assert small < 0.6 * large
