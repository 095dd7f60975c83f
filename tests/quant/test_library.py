"""The compressed-tensors library as the oracle of its format, and transformers as a reader of what ``quantize`` writes.

Both need the library, which ``pip install -e '.[oracle]'`` brings; without it these tests are skipped.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.families.test_quantised_experts import WIDER
from tests.families.text_checkpoints import family_checkpoint
from tests.quant.test_writing import TYPES, written
from tests.quant.written.test_experts import values
from trencadis.backends.cpu import make_backend
from trencadis.core.checkpoint import quantised_tensor_readers as ours
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.checkpoint.quant_config import read_quantisation
from trencadis.core.checkpoint.quantised_tensor_readers import RawWeight
from trencadis.core.checkpoint.weight_file_reader import open_weights
from trencadis.core.device.backend import BackendConfig
from trencadis.core.models.model_loader import load_model
from trencadis.core.quant.online_quant import quantise
from trencadis.core.quant.writing.calibration import Calibrant, Calibration
from trencadis.core.quant.writing.quantisation_recipe import Recipe
from trencadis.core.quant.writing.source_checkpoint import open_checkpoint
from trencadis.core.request import Request, SamplingParams

pytestmark = pytest.mark.long

SHAPE = (96, 256)
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "float, a matrix": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "float, a row": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "float, a block": (
        "float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 64]},
    ),
    "int8, a matrix": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}),
    "int8, a row": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8, a row, zero points": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    **{
        f"packed {bits} bits, groups of {group}, symmetric {symmetric}": (
            "pack-quantized",
            {"num_bits": bits, "strategy": "group", "group_size": group, "symmetric": symmetric},
        )
        for bits in (4, 8) for group in (32, 64, 128) for symmetric in (True, False)
    },
    **{
        f"packed {bits} bits, a row, symmetric {symmetric}": (
            "pack-quantized", {"num_bits": bits, "strategy": "channel", "symmetric": symmetric},
        )
        for bits in (4, 8) for symmetric in (True, False)
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def library() -> Any:
    """The library."""
    return pytest.importorskip(
        "compressed_tensors", reason="compressed-tensors is not installed: pip install -e '.[oracle]'"
    )


def part_of(name: str) -> Any:
    """A module of the library, which need not be installed."""
    return importlib.import_module(f"compressed_tensors.{name}")


def compressor(form: str) -> Any:
    return part_of("compressors").BaseCompressor.get_value_from_registry(form)


def scheme_of(settings: dict[str, Any]) -> Any:
    q = part_of("quantization")
    return q.QuantizationScheme(targets=["Linear"], weights=q.QuantizationArgs(**settings))


def reader(stored: dict[str, torch.Tensor], form: str, settings: dict[str, Any]) -> torch.Tensor:
    """What our reader makes of stored tensors: float32."""
    groups = {"group_0": {"targets": ["Linear"], "weights": settings, "input_activations": None}}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
    quant = read_quantisation(JsonFields({"quantization_config": config}, Path("config.json")))
    scheme = quant.scheme("layers.0.mlp.up_proj")
    assert scheme is not None
    return ours.read_compressed_tensors(
        RawWeight("test", "up_proj", SHAPE, scheme, stored.get, torch.float32)
    ).dequantised()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SCHEMES)
def test_files_of_the_library_decode_as_it_decodes_them(name: str, dtype: torch.dtype, library: Any) -> None:
    """Bit for bit, in float32: the library multiplies in the type of its scales, so they are made wide first."""
    form, settings = SCHEMES[name]
    scheme = scheme_of(settings)
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)) * 0.05
    group = settings.get("group_size", SHAPE[1])
    if settings["strategy"] == "tensor":
        parts = weight.reshape(1, 1, -1)
    elif settings["strategy"] == "block":
        parts = weight.view(3, 32, 4, 64).transpose(1, 2).flatten(2)
    else:
        parts = weight.view(SHAPE[0], -1, group)
    scale, zero = part_of("quantization.utils").calculate_qparams(
        parts.amin(-1).clamp_max(0), parts.amax(-1).clamp_min(0), scheme.weights
    )
    scale = scale.to(dtype).float()
    if settings["strategy"] == "tensor":
        scale, zero = scale.view(1), zero.view(1)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    stored = compressor(form).compress(dict(state), scheme)
    want = compressor(form).decompress(dict(stored), scheme)["weight"]
    stored["weight_scale"] = stored["weight_scale"].to(dtype)
    got = reader(stored, form, settings)
    assert want.dtype == torch.float32 and torch.equal(got, want)
    assert float((got - weight).norm() / weight.norm()) < 0.2


@pytest.mark.parametrize("to", [*TYPES, "int4 in groups of 128"])
def test_the_library_decodes_what_we_write_as_we_do(to: str, library: Any) -> None:
    recipe = Recipe(to.split()[0], 128 if "128" in to else 0, torch.float32)
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(2)) * 0.05
    q = quantise(weight, recipe.scheme, torch.float32, search=recipe.search)
    stored = {name.removeprefix("up."): tensor for name, tensor in recipe.tensors("up", q).items()}
    config = recipe.config([])
    scheme = part_of("quantization").QuantizationScheme(**config["config_groups"]["group_0"])
    want = compressor(config["format"]).decompress(stored, scheme)["weight"]
    assert torch.equal(q.dequantised(), want)


@pytest.mark.parametrize("to", TYPES)
def test_transformers_computes_the_same_logits_of_what_we_write(
    to: str, library: Any, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Weights are equal bit for bit; logits to 1e-2, with activations as they are and, printed, as the file asks."""
    import transformers

    path = written(checkpoint("qwen2_5_vl"), tmp_path / "out", to)
    reference = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    ids = torch.randint(5, 300, (1, 40), generator=torch.Generator().manual_seed(0))
    model: Any = load_model(load_config(path), make_backend(BackendConfig(options={"ops": "reference"})))
    found = []
    with torch.inference_mode():
        found.append(reference(input_ids=ids).logits[0])
        for module in reference.modules():
            scheme = getattr(module, "quantization_scheme", None)
            if scheme is not None:
                scheme.input_activations = None
        found.append(reference(input_ids=ids).logits[0])
    layers = reference.model.language_model.layers
    for layer, own in zip(layers, model.layers, strict=True):
        want = torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight])
        assert torch.equal(want, own.mlp.gate_up.weights[0].weight)
        assert torch.equal(layer.self_attn.o_proj.weight, own.attention.out.weights[0].weight)
    got = logits_of(path, ids)
    largest = float(got.abs().max())
    away = [float((one - got).abs().max()) / largest for one in found]
    print(f"{to}: logits differ by {away[1]:.1e} of the largest, {away[0]:.1e} with activations as the file asks")
    assert away[1] < 1e-2 and away[0] < {"fp8": 0.2, "int8": 0.1, "int4": 1e-2}[to]


@pytest.mark.parametrize("to", TYPES)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_the_library_and_transformers_read_experts_as_we_do(family: str, to: str, library: Any, tmp_path: Path) -> None:
    """Bit for bit, each expert; transformers, which knows no experts of int8 in this format, to equal logits."""
    import transformers

    source = family_checkpoint(tmp_path / "source", family=family, form="plain", **WIDER.get(family, {}))
    path = written(source, tmp_path / "out", to)
    stored, want = load_file(path / "model.safetensors"), values(path)
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    scheme = part_of("quantization").QuantizationScheme(**config["config_groups"]["group_0"])
    places = [place for some in open_checkpoint(source).layers.values() for place in some]
    for place in places:
        parts = {n.removeprefix(f"{place.base}."): t for n, t in stored.items() if n.startswith(f"{place.base}.")}
        found = compressor(config["format"]).decompress(parts, scheme)["weight"]
        assert torch.equal(found, want[place.module]), place.module
    if to == "int8":
        return
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for module in reference.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            module.quantization_scheme.input_activations = None
    for number, layer in enumerate(reference.model.layers):
        at, held = f"layers.{number}.mlp.experts", layer.mlp.experts
        for i, (gate_up, down) in enumerate(zip(held.gate_up_proj, held.down_proj, strict=True)):
            assert torch.equal(gate_up, torch.cat([want[f"{at}.{i}.{part}_proj"] for part in ("gate", "up")]))
            assert torch.equal(down, want[f"{at}.{i}.down_proj"])
    ids = torch.randint(5, 300, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        found = reference(input_ids=ids).logits[0]
    got = logits_of(path, ids)
    away = float((found - got).abs().max() / got.abs().max())
    print(f"{family}, {to}: logits differ by {away:.1e} of the largest")
    assert away < 1e-2


def logits_of(path: Path, ids: torch.Tensor) -> torch.Tensor:
    """[n, V]: what our reference computes of a prompt."""
    config = load_config(path)
    model: Any = load_model(config, make_backend(BackendConfig(options={"ops": "reference"})))
    request = Request("0", ids[0].tolist(), SamplingParams())
    calibration = Calibration(config, open_weights(path), [Calibrant(request, [])])
    for number in range(config.text.layers):
        calibration.advance(number, {})
    with torch.inference_mode():
        return model.lm_head(model.leave.norm(*calibration._states[0])[0])
