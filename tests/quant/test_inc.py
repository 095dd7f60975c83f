"""``--quantization inc``: scales of weights and activations from neural-compressor's files, on an emulated Gaudi."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trencadis.backends.hpu.backend import HpuBackend
from trencadis.backends.hpu.emulator.card_profiles_and_op_support import profile
from trencadis.backends.hpu.emulator.emulated_bridge import make_bridge
from trencadis.backends.hpu.emulator.emulated_device import EmulatedDevice
from trencadis.backends.hpu.hpu_quantised_linear import Floats8Weight
from trencadis.backends.hpu.shape_policy import policy
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.inc_config import given_scales
from trencadis.core.device.backend import BackendConfig
from trencadis.core.errors import StartupError
from trencadis.core.memory.memory_estimator import MemoryEstimator
from trencadis.core.memory.weight_bytes import weight_notes
from trencadis.core.models.model_loader import load_model
from trencadis.core.quant.quantised_weight_layout_and_bytes import CODES, FLOATS8

NODES: dict[str, Any] = {
    "language_model.model.layers.0.self_attn.qkv_proj": {"inputs": [0.0625], "params": {"weight": 0.00390625}},
    "language_model.model.layers.0.mlp.down_proj": {"inputs": [[0.25]], "params": {"weight": [[0.001], [0.002]]}},
    "language_model.lm_head": {"inputs": [0.5], "params": {"weight": 0.00390625}},
    "visual.blocks.0.attn.qkv": {"inputs": [1.0], "params": {"weight": 1.0}},
}


def written(folder: Path, files: dict[str, Any], **settings: Any) -> str:
    """``QUANT_CONFIG`` of a folder with these scale files."""
    for name, nodes in files.items():
        held = {"GlobalRank": None, "LocalRank": None, "Mode": "Scale", "Nodes": nodes}
        (folder / f"inc_hooks_maxabs{name}.json").write_text(json.dumps(held))
    path = folder / "quant.json"
    base = {"mode": "QUANTIZE", "observer": "maxabs", "scale_method": "maxabs_hw", "dump_stats_path": f"{folder}/inc"}
    path.write_text(json.dumps(base | settings))
    return str(path)


def test_scales_reach_the_modules_that_vllm_fuses(tmp_path: Path) -> None:
    found = given_scales(written(tmp_path, {"_MAXABS_HW": NODES}))
    assert found["layers.0.self_attn.q_proj"] == found["layers.0.self_attn.v_proj"] == (0.0625, 0.00390625)
    assert found["layers.0.mlp.down_proj"] == (0.25, None), "scales of channels are found as weights load"
    assert sorted(found) == ["layers.0.mlp.down_proj", *(f"layers.0.self_attn.{x}_proj" for x in "kqv"), "lm_head"]


def test_lists_of_names_choose_modules(tmp_path: Path) -> None:
    path = written(tmp_path, {"_MAXABS_HW": NODES}, blocklist={"types": [], "names": ["lm_head"]})
    assert "lm_head" not in given_scales(path)
    path = written(tmp_path, {"_MAXABS_HW": NODES}, allowlist={"types": [], "names": ["down_proj"]})
    assert list(given_scales(path)) == ["layers.0.mlp.down_proj"]


def test_what_was_measured_becomes_powers_of_two(tmp_path: Path) -> None:
    """100 over a quarter of 240 is 1.67; 0.5 over a half of it 0.0042."""
    nodes = {"model.layers.1.mlp.down_proj": {"inputs": [[[100.0]]], "params": {"weight": [[0.5]]}}}
    assert given_scales(written(tmp_path, {"": nodes})) == {"layers.1.mlp.down_proj": (2.0, 2.0**-7)}


def test_files_of_ranks_count_together(tmp_path: Path) -> None:
    other = {"model.layers.0.mlp.down_proj": {"inputs": [0.5], "params": {"weight": 0.25}}}
    mine = {"model.layers.0.mlp.down_proj": {"inputs": [0.25], "params": {"weight": 0.5}}}
    path = written(tmp_path, {"_MAXABS_HW_0_2": mine, "_MAXABS_HW_1_2": other})
    assert given_scales(path) == {"layers.0.mlp.down_proj": (0.5, 0.5)}


@pytest.mark.parametrize(
    ("files", "settings", "part"),
    [
        ({}, {}, "is there"),
        ({"_MAXABS_HW_0_2": NODES}, {}, "is there"),
        ({"_MAXABS_HW": NODES}, {"mode": "MEASURE"}, "Measuring is not built"),
        ({"_MAXABS_HW": NODES}, {"scale_method": "unit_scale"}, "has no files"),
        ({"_MAXABS_HW": NODES}, {"fp8_config": "E5M2"}, "fp8_config is E5M2"),
        ({"_MAXABS_HW": {"visual.x": {}}}, {}, "hold no scales"),
        ({"_MAXABS_HW": {"lm_head": {"inputs": [0.0]}}}, {}, "scale of 0"),
        ({"_MAXABS_HW": {"lm_head": {"inputs": []}}}, {}, "no scale of its input"),
        ({"_MAXABS_HW": {"lm_head": {"inputs": [1.0], "params": {"weight": -1}}}}, {}, "scale of -1"),
        ({"_MAXABS_HW": 3}, {}, "Nodes is missing"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(
    files: dict[str, Any], settings: dict[str, Any], part: str, tmp_path: Path
) -> None:
    with pytest.raises(StartupError, match=part) as refused:
        given_scales(written(tmp_path, files, **settings))
    assert "\n" not in str(refused.value)


def test_the_flag_and_the_variable_belong_together(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = checkpoint("qwen2")
    with pytest.raises(StartupError, match="files that QUANT_CONFIG names"):
        load_config(path, "inc")
    monkeypatch.setenv("QUANT_CONFIG", str(tmp_path / "none.json"))
    with pytest.raises(StartupError, match="there is no such file"):
        load_config(path, "inc")
    with pytest.raises(StartupError, match="add the flag or unset it"):
        load_config(path)


@pytest.mark.parametrize("tied", [False, True])
def test_products_and_ledger_follow_the_file(
    tied: bool, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Named modules alone are floats of 8 bits, with the file's scales; larger activations take the largest code."""
    monkeypatch.setenv("QUANT_CONFIG", written(tmp_path, {"_MAXABS_HW": NODES}))
    path = checkpoint("qwen2", tie_word_embeddings=tied)
    model = load_config(path, "inc")
    monkeypatch.delenv("QUANT_CONFIG")
    plain = load_config(path)
    backend = HpuBackend(
        BackendConfig(dtype=torch.bfloat16), policy(""), make_bridge(EmulatedDevice(profile("gaudi2")))
    )
    built: list[Any] = [load_model(one, backend) for one in (plain, model)]
    held = [one.nbytes() for one in built]
    paper = [
        MemoryEstimator(one, 2, quantised=backend.policy.quantised, unit=backend.policy.aligned).weights()
        for one in (plain, model)
    ]
    table = model.text.vocab * model.text.hidden * 2 if tied else 0
    assert held[1] - held[0] + table == paper[1] - paper[0]
    layer = built[1].layers[0]
    w = layer.attention.qkv.weights[0]
    assert isinstance(w, Floats8Weight) and w.activation is not None
    assert not isinstance(layer.mlp.gate_up.weights[0], Floats8Weight)
    x = torch.randn(5, w.in_features, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[2, 3] = 1000.0
    codes = (x.float().clamp(-15, 15) / 0.0625).to(torch.float8_e4m3fn).float() * 0.0625
    want = codes @ (w.codes.cpu().float() * w.scale.cpu()[:, None]).t()
    got = backend.ops.linear(x.to(backend.device), w).cpu().float()
    bias = 0 if w.bias is None else w.bias.cpu().float()
    torch.testing.assert_close(got, want + bias, rtol=2e-2, atol=2e-2)


def test_other_devices_refuse_it(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("QUANT_CONFIG", written(tmp_path, {"_MAXABS_HW": NODES}))
    model = load_config(checkpoint("qwen2"), "inc")
    assert "QUANT_CONFIG's files" in weight_notes(model, 2, FLOATS8)[0]
    with pytest.raises(StartupError, match="is for fp8 on Gaudi"):
        weight_notes(model, 2, CODES)
