"""Quantised checkpoints of families that see: what their ignore lists name, the official layouts, and ``quantize``."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.fakes.hand_driven_model import HandDrivenModel
from tests.oracles.transformers_model import conversation
from tests.quant import checkpoints as quantised
from tests.vision.vision_checkpoints import gemma3, llava, qwen3_vl
from trencadis import LLM
from trencadis.backends.cpu.ops import CpuOps
from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.core.buckets import Stage
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.model_registry import family_of, import_object
from trencadis.core.media_spans import MediaSpan
from trencadis.core.quant.writing.calibration import Calibrant, Calibration
from trencadis.core.quant.writing.source_checkpoint import open_checkpoint
from trencadis.core.request import Request, SamplingParams
from trencadis.core.step import Encode
from trencadis.server.cli.main import main

FAMILIES = ("qwen2_vl", "llava", "qwen3_vl", "gemma3")
TOWERS = {
    "qwen2_vl": ["visual"], "qwen3_vl": ["visual"], "llava": ["vision_tower", "multi_modal_projector"],
    "gemma3": ["vision_tower", "multi_modal_projector"],
}  # fmt: skip
"""What files call the tower, as lists of modules that stay in 16 bits name it."""

MODULES = {
    "qwen2_vl": ("visual.blocks.0.mlp.fc1", "model.visual.blocks.0.mlp.fc1", "visual.merger.mlp.0"),
    "qwen3_vl": ("model.visual.blocks.0.mlp.linear_fc1", "model.visual.deepstack_merger_list.1.linear_fc2"),
    "llava": (
        "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj", "multi_modal_projector.linear_1",
        "model.vision_tower.vision_model.encoder.layers.0.mlp.fc2", "model.multi_modal_projector.linear_2",
    ),
    "gemma3": ("vision_tower.vision_model.encoder.layers.1.self_attn.out_proj",),
}  # fmt: skip
"""Names that published lists have, each alone."""

OURS = {
    "visual.blocks.0.mlp.fc1": "visual.blocks.0.mlp.up_proj",
    "model.visual.blocks.0.mlp.fc1": "visual.blocks.0.mlp.up_proj",
    "model.visual.blocks.0.mlp.linear_fc1": "visual.blocks.0.mlp.up_proj",
    "model.visual.deepstack_merger_list.1.linear_fc2": "visual.deepstack_merger_list.1.linear_fc2",
    "visual.merger.mlp.0": "visual.merger.mlp.0",
    "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj": "visual.blocks.0.self_attn.q_proj",
    "model.vision_tower.vision_model.encoder.layers.0.mlp.fc2": "visual.blocks.0.mlp.down_proj",
    "multi_modal_projector.linear_1": "visual.projector.linear_1",
    "model.multi_modal_projector.linear_2": "visual.projector.linear_2",
    "vision_tower.vision_model.encoder.layers.1.self_attn.out_proj": "visual.blocks.1.self_attn.out_proj",
}

ROUNDED = 0.3
"""What activations of 8 bits may cost a log-probability; Gemma-3's random checkpoint takes most of it."""


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made = {"llava": llava, "qwen3_vl": qwen3_vl, "gemma3": gemma3}

    @cache
    def write(kind: str) -> Path:
        return made[kind](tmp_path_factory.mktemp(kind)) if kind in made else checkpoint(kind)

    return write


def config_with(source: Path, target: Path, ignore: list[str]) -> ModelConfig:
    """``source``'s configuration with compressed-tensors weights, those of ``ignore`` left out."""
    held = json.loads((source / "config.json").read_text())
    held["quantization_config"] = {**quantised.config("int-quantized", 8, 0, True, False), "ignore": ignore}
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text(json.dumps(held))
    return load_config(target)


@pytest.mark.parametrize("kind", FAMILIES)
def test_lists_name_modules_as_their_files_do(kind: str, folder: Any, tmp_path: Path) -> None:
    """One name takes out one module; a pattern of the tower takes out all of it, and nothing of the decoder."""
    source = folder(kind)
    whole = config_with(source, tmp_path / "whole", ["lm_head"])
    assert whole.quant is not None and whole.vision is not None
    matrices = [m.name for m in whole.vision.matrices(1)]
    assert all(whole.quant.scheme(name) is not None for name in matrices)
    for name in MODULES[kind]:
        one = config_with(source, tmp_path / "one", ["lm_head", name]).quant
        assert one is not None and [m for m in matrices if one.scheme(m) is None] == [OURS[name]]
    patterns = [f"re:{'.*' if tower == 'visual' else ''}{tower}.*" for tower in TOWERS[kind]]
    for ignore in (patterns, [f"re:model.{p[3:].removeprefix('.*')}" for p in patterns]):
        quant = config_with(source, tmp_path / "tower", ignore).quant
        assert quant is not None and all(quant.scheme(m) is None for m in matrices)
        assert quant.scheme("layers.0.mlp.up_proj") is not None


def decoders(name: str, tensor: torch.Tensor) -> bool:
    inside = not any(tower in name for towers in TOWERS.values() for tower in towers)
    return inside and tensor.ndim == 2 and ".layers." in name and name.endswith("_proj.weight")


def first_logprobs(path: Path, **flags: Any) -> list[float]:
    """Of the first token after a few chats with images."""
    llm = LLM(
        str(path), dtype="float32", max_model_len=1024, max_num_seqs=2, max_num_batched_tokens=256,
        kv_cache_memory_bytes=16 << 20, **flags,
    )  # fmt: skip
    try:
        conversations = [conversation(np.random.default_rng(seed), low=32, high=200)[0] for seed in (5, 6, 7)]
        found = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=1, logprobs=1), use_tqdm=False)
        assert sum(one.num_image_tokens > 0 for one in found) >= 2
        return [one.outputs[0].logprobs[0].logprob for one in found]  # type: ignore[index]
    finally:
        llm.close()


def answers_as_its_twin(kind: str, form: str, source: Path, out: Path, patch: Any) -> None:
    patch.setattr(quantised, "linear", decoders)
    bits, group = (8, 0) if form == "int-quantized" else (4, 32)
    path, twin = quantised.checkpoint(source, out, form, bits, group, symmetric=form != "awq")
    held = json.loads((path / "config.json").read_text())
    if form == "awq":
        held["quantization_config"]["modules_to_not_convert"] = TOWERS[kind]
    else:
        held["quantization_config"]["ignore"] = ["re:.*lm_head", *(f"re:.*{tower}.*" for tower in TOWERS[kind])]
    (path / "config.json").write_text(json.dumps(held))
    expected = first_logprobs(twin)
    for ours, reference in zip(first_logprobs(path), expected, strict=True):
        assert abs(ours - reference) < ROUNDED
    with patch.context() as opened_codes:
        opened_codes.setattr(CpuOps, "pack_quantised", ReferenceOps.pack_quantised)
        assert first_logprobs(path) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("kind", "form"), [("qwen2_vl", "awq")])
def test_a_checkpoint_answers_as_its_twin(kind: str, form: str, folder: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """A share: the official layout of Qwen2-VL's AWQ checkpoints."""
    answers_as_its_twin(kind, form, folder(kind), tmp_path, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("form", ["awq", "gptq", "pack-quantized", "int-quantized"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_every_form_answers_as_its_twin(kind: str, form: str, folder: Any, tmp_path: Path, monkeypatch: Any) -> None:
    answers_as_its_twin(kind, form, folder(kind), tmp_path, monkeypatch)


@pytest.mark.parametrize(("kind", "grid", "values", "count"), [
    ("qwen3_vl", (1, 6, 10), 1536, 15), ("gemma3", (1, 8, 8), 588, 4),
])  # fmt: skip
def test_calibration_sees_parts_of_rows_and_images_that_see_themselves(
    kind: str, grid: tuple[int, int, int], values: int, count: int, folder: Any
) -> None:
    """The activations behind the last layer, normed and multiplied by the head, are the logits of one launch."""
    rng, made = np.random.default_rng(5), open_checkpoint(folder(kind))
    pixels = rng.integers(0, 256, (grid[1] * grid[2], values), dtype=np.uint8)
    tokens = rng.integers(0, 300, 40).tolist()
    span = MediaSpan(4, count, "d", grid, 64)
    side, placed = family_of(made.config.architecture).vision, None
    assert side is not None and made.config.vision is not None
    if side.positions:
        placed = import_object(side.positions)(40, [span], made.config.vision, [])[0]
    reported = None if placed is None else placed.astype("<i4").tobytes()
    request = Request("0", tokens, SamplingParams(), spans=[span], positions=reported)
    ours = Calibration(made.config, made, [Calibrant(request, [pixels])])
    for number in range(made.config.text.layers):
        ours.advance(number, {})
    harness, mine = HandDrivenModel(folder(kind)), np.arange(2, 2 + count, dtype=np.int32)
    harness.run(Stage.VISION, harness.model.vision, harness.model.pack([Encode("d", grid, 64, pixels, mine)], 64), 64)
    rows, upto = np.zeros(40, np.int32), np.arange(40, dtype=np.int32)
    rows[4 : 4 + count] = mine
    if made.config.text.bidirectional_images:
        upto[4 : 4 + count] = 4 + count - 1
    want = harness.prefill(tokens, 41, placed, rows, upto)
    with torch.inference_mode():
        got = harness.model.lm_head(harness.model.leave.norm(*ours._states[0])[0])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def written(kind: str, to: str, folder: Any, out: Path) -> None:
    source = folder(kind)
    assert main(["quantize", str(source), str(out), "--to", to]) == 0
    before, after = (load_file(p / "model.safetensors") for p in (source, out))
    linear = {name for name, tensor in before.items() if decoders(name, tensor)}
    assert len(linear) == 7 * len(open_checkpoint(source).layers)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if name not in linear)
    quant = load_config(out).quant
    vision = load_config(out).vision
    assert quant is not None and vision is not None and all(quant.scheme(m.name) is None for m in vision.matrices(1))
    assert all(quant.scheme(f"layers.0.{part}") is not None for part in ("mlp.down_proj", "self_attn.q_proj"))
    limit = {"fp8": 0.6, "int8": ROUNDED, "int4": 1.5}[to]
    for one, two in zip(first_logprobs(source), first_logprobs(out), strict=True):
        assert abs(one - two) < limit


@pytest.mark.parametrize(("kind", "to"), [("qwen3_vl", "int8")])
def test_quantize_writes_what_is_served(kind: str, to: str, folder: Any, tmp_path: Path) -> None:
    written(kind, to, folder, tmp_path / "out")


@pytest.mark.long
@pytest.mark.parametrize("to", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_quantize_writes_every_family(kind: str, to: str, folder: Any, tmp_path: Path) -> None:
    written(kind, to, folder, tmp_path / "out")
