"""``trencadis quantize`` of models with experts: what is written, what calibration sees, and that it is served."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.families.test_quantised_experts import prompt_values
from tests.families.text_checkpoints import family_checkpoint
from tests.quant import checkpoints as quantised
from tests.quant.test_loading import on
from tests.quant.test_writing import TYPES, folder, written
from trencadis.backends.cpu import make_backend
from trencadis.core.checkpoint.checkpoint_weight_source import CheckpointSource
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_registry import family_of
from trencadis.core.checkpoint.weight_file_reader import open_weights
from trencadis.core.device.backend import BackendConfig
from trencadis.core.quant.online_quant import quantise as nearest
from trencadis.core.quant.writing import gptq_rounding
from trencadis.core.quant.writing.calibration import Calibrant, Calibration
from trencadis.core.quant.writing.convert_checkpoint import convert, recipe_for
from trencadis.core.quant.writing.source_checkpoint import EXPERTS, open_checkpoint
from trencadis.core.request import Request, SamplingParams

pytestmark = pytest.mark.part("quantised")

FORMS = {
    "mixtral": ("mixtral", "plain", {}),
    "mixtral, stacked": ("mixtral", "names of transformers 5, wide heads", {"intermediate_size": 64}),
    "qwen3_moe": ("qwen3_moe", "plain", {"moe_intermediate_size": 64}),
    "qwen3_moe, some layers dense": (
        "qwen3_moe", "shares as they are, every second layer", {"moe_intermediate_size": 64},
    ),
}  # fmt: skip
Source = Callable[[str], Path]
SOME = {("mixtral", "int4"), ("qwen3_moe, some layers dense", "fp8")}
CASES = [pytest.param(form, to, marks=[] if (form, to) in SOME else pytest.mark.long) for form in FORMS for to in TYPES]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """``source(form)``: a checkpoint in 32 bits, made once."""
    known: dict[str, Path] = {}

    def make(form: str) -> Path:
        if form not in known:
            family, kind, wider = FORMS[form]
            known[form] = family_checkpoint(tmp_path_factory.mktemp("model"), family=family, form=kind, **wider)
        return known[form]

    return make


def prompts(count: int, length: int = 32) -> list[Calibrant]:
    """Random ids."""
    rng = np.random.default_rng(count)
    drawn = (rng.integers(5, 300, length).tolist() for _ in range(count))
    return [Calibrant(Request(str(i), ids, SamplingParams()), []) for i, ids in enumerate(drawn)]


def values(path: Path) -> dict[str, torch.Tensor]:
    """Canonical name of each linear of the decoder -> what our reader makes of it, float32."""
    config, backend = load_config(path), make_backend(BackendConfig(options={"threads": "1"}))
    held = CheckpointSource(open_weights(path), family_of(config.architecture).names, backend, config)
    found = {}
    for name in dict.fromkeys(n.rpartition(".")[0] for n in held.tensors if "_proj." in n):
        stated = held.tensors.get(f"{name}.weight_shape")
        rows, columns = held.tensors[f"{name}.weight"].shape if stated is None else stated.tolist()
        q = held.take_quantised(name, (rows, columns), 0, 0, rows)
        assert q is not None, f"{name} is kept in 16 bits"
        found[name] = q.dequantised()
    return found


@pytest.mark.parametrize(("form", "to"), CASES)
def test_every_expert_is_written_and_the_router_is_kept(form: str, to: str, source: Source, tmp_path: Path) -> None:
    """Codes are those of the best clipping, bit for bit; all else is what it was, and files are equal twice."""
    out = written(source(form), tmp_path / "out", to)
    assert folder(out) == folder(written(source(form), tmp_path / "again", to))
    held, found, config = open_checkpoint(source(form)), values(out), load_config(out)
    recipe = recipe_for(held, to)
    places = [place for some in held.layers.values() for place in some]
    assert set(found) == {place.module for place in places} and any(EXPERTS in place.module for place in places)
    for place in places:
        weight = held.tensors[place.stored]
        want = nearest(weight, recipe.scheme, torch.float32, search=recipe.search).dequantised()
        assert torch.equal(found[place.module], want), place.module
    after = load_file(out / "model.safetensors")
    kept = {name for name in after if ".gate.weight" in name or "norm" in name}
    assert sum(".gate." in name for name in kept) == sum(
        any(EXPERTS in p.module for p in some) for some in held.layers.values()
    )
    assert all(torch.equal(after[name], held.tensors[name]) for name in kept)
    assert config.quant is not None and config.quant.scheme("layers.1.mlp.gate") is None
    assert config.quant.scheme("layers.1.mlp.experts.0.gate_proj") == recipe.scheme
    ends = ("w1", "w2", "w3") if form.startswith("mixtral") else ("gate_proj", "up_proj", "down_proj")
    names = {name for name in after if EXPERTS in name}
    assert {name.split(EXPERTS)[1].split(".")[1] for name in names} == set(ends), "as files of the hub have them"


def twin(source: Path, out: Path, path: Path) -> Path:
    """A copy of ``source`` in 32 bits that holds what the codes of ``path`` stand for."""
    found, stored = values(path), dict[str, torch.Tensor]()
    modules = {place.stored: place.module for some in open_checkpoint(source).layers.values() for place in some}
    for name, tensor in open_checkpoint(source).tensors.items():
        stored[name] = found[modules[name]] if name in modules else tensor
    return quantised.copied(source, out, stored, None)


@pytest.mark.parametrize(("form", "to"), CASES)
def test_what_is_written_answers_as_its_twin(form: str, to: str, source: Source, tmp_path: Path) -> None:
    """The reference, on one rank and on two."""
    out = written(source(form), tmp_path / "out", to)
    want = on(twin(source(form), tmp_path / "twin", out), 1, ops="reference")
    for world in (1, 2):
        got = on(out, world, ops="reference")
        assert (got - want).abs().max() <= 1e-4 * want.abs().max(), f"{world} ranks"


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", "cuda", "hpu"])
@pytest.mark.parametrize("to", TYPES)
@pytest.mark.parametrize("form", ["mixtral", "qwen3_moe"])
def test_every_device_serves_what_is_written(
    form: str, to: str, device: str, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    monkeypatch.setenv("TRENCADIS_CUDA_TWIN", "1")
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path / "cache"))
    out = written(source(form), tmp_path / "out", to)
    got, want = (prompt_values(str(path), device) for path in (out, twin(source(form), tmp_path / "twin", out)))
    away = abs(got - want) / want.std()
    print(f"{form}, {to}, {device}: away by {away.max():.1e} of the values' spread at most")
    assert sorted(away)[len(away) // 2] <= 0.12 and away.max() <= 0.6


def test_calibration_sees_the_inputs_of_each_expert(source: Source) -> None:
    """Sums of products are those of transformers' model, whose router says which tokens an expert gets."""
    import transformers

    path = source("mixtral")
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    held, some, seen = open_checkpoint(path), prompts(2), dict[int, list[torch.Tensor]]()
    for number, layer in enumerate(reference.model.layers):
        layer.mlp.register_forward_pre_hook(
            lambda _, args, number=number: seen.setdefault(number, []).append(args[0].flatten(0, -2))
        )
    with torch.inference_mode():
        for prompt in some:
            reference(input_ids=torch.tensor([prompt.request.tokens]))
    ours = Calibration(held.config, held, some, threads=1)
    for number, layer in enumerate(reference.model.layers):
        grams = ours.grams(number, [place.module for place in held.layers[number]])
        x, rows = torch.cat(seen[number]), 0
        chosen = (x @ layer.mlp.gate.weight.t()).topk(2).indices
        for i in range(4):
            mine = x[(chosen == i).any(1)]
            gate, up = (mine @ layer.mlp.experts.gate_up_proj[i].t()).chunk(2, 1)
            inner = torch.nn.functional.silu(gate) * up
            for part, want in (("gate_proj", mine), ("up_proj", mine), ("down_proj", inner)):
                gram = grams[f"layers.{number}.mlp.experts.{i}.{part}"]
                assert gram.rows == len(mine)
                torch.testing.assert_close(gram.sums, want.t() @ want, rtol=1e-3, atol=1e-3)
            rows += len(mine)
        assert rows == 2 * len(x)
        ours.advance(number, {})


@pytest.mark.parametrize("to", ["int4", *(pytest.param(to, marks=pytest.mark.long) for to in ("fp8", "int8"))])
def test_seldom_experts_take_the_nearest_codes_and_a_line_says_so(
    to: str, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with as many inputs as columns make up for their errors; passes over fewer sums change no code."""
    held = open_checkpoint(source("qwen3_moe"))
    recipe, few, lines = recipe_for(held, to), prompts(5), list[str]()
    convert(held, tmp_path / "whole", recipe, few, lines.append, threads=1)
    monkeypatch.setattr(gptq_rounding, "SUMS", 1)
    convert(held, tmp_path / "parts", recipe, few, threads=1)
    assert folder(tmp_path / "whole") == folder(tmp_path / "parts")
    found, calibration, seldom = values(tmp_path / "whole"), Calibration(held.config, held, few, threads=1), 0
    grams = calibration.grams(0, [place.module for place in held.layers[0]])
    for place in held.layers[0]:
        gram, weight = grams.get(place.module), held.tensors[place.stored]
        rare = EXPERTS in place.module and (gram is None or gram.rows < 64)
        plain = nearest(weight, recipe.scheme, torch.float32, search=recipe.search).dequantised()
        assert torch.equal(found[place.module], plain) is rare, place.module
        seldom += rare
    said = next(line for line in lines if "experts' matrices" in line)
    assert f"layer 1: {seldom} of its 24 experts' matrices saw fewer inputs" in said
    assert 3 <= seldom <= 21, "both kinds occur"


def test_a_layer_without_an_expert_is_refused(source: Source, tmp_path: Path) -> None:
    stored = load_file(source("mixtral") / "model.safetensors")
    stored.pop("model.layers.1.block_sparse_moe.experts.2.w1.weight")
    path = quantised.copied(source("mixtral"), tmp_path / "short", stored, None)
    assert json.loads((path / "config.json").read_text())["num_local_experts"] == 4
    with pytest.raises(Exception, match="has 15 linear weights in layer 1 of its decoder, not 16"):
        open_checkpoint(path)
