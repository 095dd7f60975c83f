"""``trencadis quantize`` of models with gated DeltaNet: what is written, what calibration sees, how it is served."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.hand_driven_model import HandDrivenModel
from tests.families.text_checkpoints import FORMS, family_checkpoint
from tests.quant.test_writing import written
from tests.quant.written.test_experts import prompts
from trencadis import LLM, SamplingParams
from trencadis.backends.cpu import make_backend
from trencadis.core.checkpoint.checkpoint_weight_source import CheckpointSource
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_registry import family_of
from trencadis.core.checkpoint.weight_file_reader import open_weights
from trencadis.core.device.backend import BackendConfig
from trencadis.core.errors import StartupError
from trencadis.core.quant.writing.calibration import Calibration
from trencadis.core.quant.writing.convert_checkpoint import convert, recipe_for
from trencadis.core.quant.writing.source_checkpoint import open_checkpoint

pytestmark = pytest.mark.part("quantised")

WIDER = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5", {}), "qwen3_5_moe": ("qwen3_5_moe", WIDER), "qwen3_next": ("qwen3_next", WIDER),
}  # fmt: skip
KEPT = {
    "qwen3_5": {"linear_attn.in_proj_a", "linear_attn.in_proj_b"},
    "qwen3_5_moe": {"linear_attn.in_proj_a", "linear_attn.in_proj_b", "mlp.gate", "mlp.shared_expert_gate"},
    "qwen3_next": {"linear_attn.in_proj_ba", "mlp.gate", "mlp.shared_expert_gate"},
}
ids: list[int] = np.random.default_rng(5).integers(5, 300, 80).tolist()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``source(name)``: a checkpoint in 32 bits, with a weight of the draft layer."""

    def make(name: str) -> Path:
        family, wider = SOURCES[name]
        path = family_checkpoint(
            tmp_path_factory.mktemp("model"), family=family, form=next(iter(FORMS[family])), **wider
        )
        held = load_file(path / "model.safetensors") | {"mtp.fc.weight": torch.ones(4, 4)}
        save_file(held, path / "model.safetensors", metadata={"format": "pt"})
        return path

    return cache(make)


def values(path: Path, modules: list[tuple[str, torch.Size]]) -> dict[str, torch.Tensor]:
    """What our reader finds for each quantised module, float32."""
    config, backend = load_config(path), make_backend(BackendConfig(options={"threads": "1"}))
    held, found = CheckpointSource(open_weights(path), family_of(config.architecture).names, backend, config), {}
    for module, (rows, columns) in modules:
        q = held.take_quantised(module, (rows, columns), 0, 0, rows)
        assert q is not None, f"{module} is kept in 16 bits"
        found[module] = q.dequantised()
    return found


def dequantised(plain: Path, path: Path, out: Path) -> Path:
    """The checkpoint ``plain`` with the values that our reader finds in ``path`` for each quantised matrix."""
    checkpoint = open_checkpoint(plain)
    tensors = {name: tensor.clone() for name, tensor in checkpoint}
    held = values(path, [(one.module, tensors[stored].shape) for stored, one in checkpoint.linear.items()])
    tensors |= {stored: held[one.module] for stored, one in checkpoint.linear.items()}
    out.mkdir()
    for file in plain.iterdir():
        if file.suffix != ".safetensors":
            (out / file.name).write_bytes(file.read_bytes())
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.parametrize("to", ["int4", pytest.param("int8", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "name", ["qwen3_5", *(pytest.param(one, marks=pytest.mark.long) for one in ("qwen3_5_moe", "qwen3_next"))]
)
def test_a_stored_checkpoint_is_served(name: str, to: str, source: Callable[[str], Path], tmp_path: Path) -> None:
    """Its logits are those of the values that it holds; small matrices and the draft layer stay as they were."""
    plain = source(name)
    path = written(plain, tmp_path / "out", to, *(["--group", "32"] if to == "int4" else []))
    ignored = json.loads((path / "config.json").read_text())["quantization_config"]["ignore"]
    ends = {one.removeprefix("re:.*").removesuffix("$").replace("\\", "") for one in ignored if one.startswith("re:.*")}
    assert ends == KEPT[name] and any("mtp" in one for one in ignored)
    stored, before = load_file(path / "model.safetensors"), load_file(plain / "model.safetensors")
    for key in [key for key in stored if "conv1d" in key or "in_proj_a" in key or "in_proj_b" in key or "mtp" in key]:
        assert torch.equal(stored[key], before[key])
    quantised = {key for key in stored if key.endswith(("weight_scale",)) and "linear_attn" in key}
    assert len(quantised) == 3 * (2 if name == "qwen3_next" else 3)
    found, wanted = (
        HandDrivenModel(one, "padded", "reference").prefill(ids, 64)
        for one in (path, dequantised(plain, path, tmp_path / "values"))
    )
    assert (found - wanted).abs().max() <= (1e-4 if to == "int4" else 0.05) * wanted.abs().max()


@pytest.mark.parametrize("worlds", [(1,), pytest.param((1, 2), marks=pytest.mark.long)])
def test_a_server_answers_from_a_stored_checkpoint(
    worlds: tuple[int, ...], source: Callable[[str], Path], tmp_path: Path
) -> None:
    """With a prefix of the cache, and on two ranks, which divide codes by heads."""
    path = written(source("qwen3_5"), tmp_path / "out", "int4", "--group", "32")
    found = []
    for ranks in worlds:
        llm = LLM(str(path), dtype="float32", max_model_len=384, max_num_seqs=4, tensor_parallel_size=ranks)
        try:
            params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
            made = [llm.generate([[*ids, *ids[:60]]], params, use_tqdm=False)[0] for _ in range(2)]
            found += [one.outputs[0].token_ids for one in made]
            assert [one.num_cached_tokens for one in made] == [0, 128]
        finally:
            llm.close()
    assert found[1:] == found[:-1]


@pytest.mark.parametrize(
    "name", ["qwen3_5", *(pytest.param(one, marks=pytest.mark.long) for one in ("qwen3_5_moe", "qwen3_next"))]
)
def test_calibration_reaches_recurrent_layers(name: str, source: Callable[[str], Path], tmp_path: Path) -> None:
    """Codes that make up for errors leave smaller ones in the layer's outputs than the nearest codes do."""
    checkpoint, some = open_checkpoint(source(name)), prompts(12, 64)
    for out, given in (("near", []), ("fit", some)):
        convert(checkpoint, tmp_path / out, recipe_for(checkpoint, "int4", 32), given, threads=1)
    mixing = [one for one in checkpoint.layers[0] if "linear_attn" in one.module]
    inputs = Calibration(checkpoint.config, checkpoint, some, 1).grams(0, [one.module for one in mixing])
    assert len(mixing) == (2 if name == "qwen3_next" else 3)
    errors = []
    for out in ("near", "fit"):
        held = values(tmp_path / out, [(one.module, checkpoint.tensors[one.stored].shape) for one in mixing])
        away = [(held[one.module] - checkpoint.tensors[one.stored].float(), one.module) for one in mixing]
        errors.append([float(((part @ inputs[module].sums) * part).sum()) for part, module in away])
    assert all(fit < 0.9 * near for near, fit in zip(*errors, strict=True)), errors


@pytest.mark.parametrize("family", ["lfm2", "granite_hybrid"])
def test_other_recurrent_layers_are_refused_in_one_line(family: str, tmp_path: Path) -> None:
    path = family_checkpoint(tmp_path, family=family, form=next(iter(FORMS[family])))
    with pytest.raises(StartupError, match="gated DeltaNet") as found:
        open_checkpoint(path)
    assert "\n" not in str(found.value)
