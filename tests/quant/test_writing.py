"""``trencadis quantize``: what is written, that it is written alike twice, that it loads, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.test_shards import GRID, Group, logits
from trencadis.backends.cpu import make_backend
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.device.backend import BackendConfig
from trencadis.core.media_spans import MediaSpan
from trencadis.core.models.model_loader import load_model
from trencadis.core.quant.online_quant import ScaleSearch, codes_of, quantise, scales_of
from trencadis.core.quant.quantised_weight_layout_and_bytes import Scheme
from trencadis.core.quant.writing.calibration import Calibrant, Calibration
from trencadis.core.quant.writing.gptq_rounding import LayerInputs, round_compensated
from trencadis.core.quant.writing.quantisation_recipe import CLIPS
from trencadis.core.quant.writing.source_checkpoint import open_checkpoint
from trencadis.core.request import Request, SamplingParams
from trencadis.multimodal.patch_packing import count_slots
from trencadis.server.cli.main import main

TYPES = ("fp8", "int8", "int4")
TEXTS = ["w1 w2 w3 w4", "w5 w6 w7 w8 w9", "w3 w1 w4 w1 w5 w9 w2 w6"]


def folder(path: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(f.relative_to(path)): f.read_bytes() for f in sorted(path.rglob("*")) if f.is_file()}


def texts() -> list[Calibrant]:
    """Prompts of random ids."""
    rng = np.random.default_rng(3)
    return [Calibrant(Request(str(n), rng.integers(5, 300, n).tolist(), SamplingParams()), []) for n in (24, 32)]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration file: conversations, one with an image, and a raw prompt."""
    from PIL import Image

    place = tmp_path_factory.mktemp("calibration")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (56, 84, 3), dtype=np.uint8)).save(place / "a.png")
    image = {"type": "image_url", "image_url": {"url": "a.png"}}
    chats: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": [image, {"type": "text", "text": TEXTS[0]}]}]},
        {"messages": [{"role": "user", "content": TEXTS[1]}, {"role": "assistant", "content": TEXTS[2]}]},
        {"prompt": " ".join(TEXTS)},
    ]
    (place / "lines.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return place / "lines.jsonl"


@pytest.fixture(scope="module")
def source(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two files with an index, and with files beside its weights that must come along or stay."""
    made = shutil.copytree(checkpoint("qwen2_5_vl"), tmp_path_factory.mktemp("source") / "model")
    stored = load_file(str(made / "model.safetensors"))
    names = sorted(stored)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, chosen in parts.items():
        save_file({n: stored[n].to(torch.bfloat16) for n in chosen}, str(made / file))
    (made / "model.safetensors").unlink()
    weight_map = {n: file for file, chosen in parts.items() for n in chosen}
    (made / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (made / "more").mkdir()
    for name in ("README.md", "more/config.json", "pytorch_model.bin", "more/weights.pt", ".hidden"):
        (made / name).write_text(name)
    return made


def written(source: Path, out: Path, to: str, *more: str) -> Path:
    assert main(["quantize", str(source), str(out), "--to", to, *more]) == 0
    return out


@pytest.mark.parametrize("to", TYPES)
def test_files_are_equal_twice_and_the_rest_is_carried_over(to: str, source: Path, tmp_path: Path) -> None:
    found = [folder(written(source, tmp_path / name, to)) for name in ("a", "b")]
    assert found[0] == found[1]
    kept = {n for n in folder(source) if not n.endswith((".bin", ".pt", ".safetensors", ".hidden"))}
    rewritten = {"config.json", "model.safetensors.index.json"}
    assert {n for n in found[0] if not n.endswith(".safetensors")} == kept
    assert all(found[0][n] == folder(source)[n] for n in kept - rewritten)
    held = {n: f for f in ("1", "2") for n in load_file(str(tmp_path / f"a/model-0000{f}-of-00002.safetensors"))}
    index = json.loads(found[0]["model.safetensors.index.json"])["weight_map"]
    assert index == {n: f"model-0000{f}-of-00002.safetensors" for n, f in held.items()}


@pytest.mark.parametrize("to", TYPES)
def test_what_is_written_is_what_it_came_from_but_rounded(to: str, source: Path, tmp_path: Path) -> None:
    """Values of our reader lie within a step of the weights; everything else is bit for bit what it was."""
    out = written(source, tmp_path / "out", to)
    config = load_config(out)
    assert config.quant is not None and config.quant.schemes[0].label.startswith(to)
    models: list[Any] = [
        load_model(load_config(path), make_backend(BackendConfig(options={"ops": "reference"})))
        for path in (source, out)
    ]
    for before, after in zip(*(m.layers for m in models), strict=True):
        for part in ("qkv", "out"):
            a, b = (getattr(layer.attention, part).weights[0].weight for layer in (before, after))
            limit = {"fp8": 0.035, "int8": 0.008, "int4": 0.12}[to]
            assert 0 < (a - b).norm() / a.norm() < limit
    one, two = (models[i].embedding.table for i in (0, 1))
    assert torch.equal(one, two)
    one, two = (models[i].tower.patch.weights[0].weight for i in (0, 1))
    assert torch.equal(one, two)


def test_calibration_sees_what_the_model_computes(
    checkpoint: Callable[..., Path], oracle: Callable[[Path], Any]
) -> None:
    """Sums of products of every linear's inputs are those that hooks in transformers' model find."""
    path = checkpoint("qwen2_5_vl")
    held = open_checkpoint(path)
    prompts = texts()
    ours = Calibration(held.config, held, prompts)
    reference, hooks = dict[str, torch.Tensor](), []
    layers = oracle(path).model.language_model.layers
    for name, module in layers.named_modules():
        if name.endswith("_proj"):

            def note(_: Any, args: Any, name: str = name) -> None:
                x = args[0].flatten(0, -2)
                reference[f"layers.{name}"] = reference.get(f"layers.{name}", 0) + x.t() @ x

            hooks.append(module.register_forward_pre_hook(note))
    with torch.inference_mode():
        for prompt in prompts:
            oracle(path)(input_ids=torch.tensor([prompt.request.tokens]))
    for hook in hooks:
        hook.remove()
    seen = 0
    for number in range(len(layers)):
        for name, gram in ours.grams(number, [place.module for place in held.layers[number]]).items():
            most = 1e-3 * float(reference[name].abs().max())
            torch.testing.assert_close(gram.sums, reference[name], rtol=1e-3, atol=most)
            assert gram.rows == 24 + 32
            seen += 1
        ours.advance(number, {})
    assert seen == len(reference) == 14


def test_calibration_with_images_computes_what_the_engine_computes(checkpoint: Callable[..., Path]) -> None:
    """The activations behind the last layer, normed and multiplied by the head, are the logits of one launch."""
    path = checkpoint("qwen2_5_vl")
    held = open_checkpoint(path)
    rng = np.random.default_rng(5)  # as tests.models.test_shards draws its prompt
    pixels, tokens = rng.integers(0, 256, (60, 1176), dtype=np.uint8), rng.integers(0, 300, 40)
    span = MediaSpan(4, 15, "d", GRID, count_slots(GRID))
    request = Request("0", tokens.tolist(), SamplingParams(), spans=[span])
    ours = Calibration(held.config, held, [Calibrant(request, [pixels])])
    for number in range(held.config.text.layers):
        ours.advance(number, {})
    model: Any = load_model(held.config, make_backend(BackendConfig(options={"threads": "1"})))
    with torch.inference_mode():
        got = model.lm_head(model.leave.norm(*ours._states[0])[0])
    want = logits(path, 0, 1, Group(1))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("group", [0, 32, 64])
def test_compensation_leaves_less_of_the_outputs_error(group: int) -> None:
    """Inputs that go together: the error of the outputs is under 0.6 of what the nearest codes leave."""
    generator = torch.Generator().manual_seed(group)
    mixed = torch.randn(512, 24, generator=generator) @ torch.randn(24, 128, generator=generator)
    x = mixed + 0.3 * torch.randn(512, 128, generator=generator)
    x[:, 5] = 0  # an input that never occurs keeps the nearest codes
    weight = torch.randn(64, 128, generator=generator)
    scheme, search = Scheme(4, group=group), ScaleSearch(CLIPS)
    plain = quantise(weight, scheme, torch.float32, search=search)
    ours = round_compensated(weight, LayerInputs.of(x.t() @ x), scheme, torch.float32, search, "a weight")
    errors = [float(((q.dequantised() - weight) @ x.t()).norm()) for q in (plain, ours)]
    assert errors[1] < 0.6 * errors[0], errors
    assert torch.equal(ours.data[:, 5], codes_of(weight[:, 5], ours.scale[:, 0], scheme))


def test_a_gram_without_a_factor_falls_back_to_the_nearest_codes() -> None:
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    for gram in (torch.zeros(32, 32), torch.full((32, 32), float("nan"))):
        q = round_compensated(
            weight, LayerInputs.of(gram), Scheme(4, group=32), torch.float32, ScaleSearch(), "a weight"
        )
        assert torch.equal(q.data, quantise(weight, Scheme(4, group=32), torch.float32, search=ScaleSearch()).data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scales_leave_the_least_error_that_was_tried(dtype: torch.dtype) -> None:
    weight = torch.randn(16, 96, generator=torch.Generator().manual_seed(2)) ** 3
    weight[3, 32:64] = 0
    scheme = Scheme(4, group=32)
    chosen = quantise(weight, scheme, torch.float32, search=ScaleSearch(CLIPS, dtype))
    assert torch.equal(chosen.scale, chosen.scale.to(dtype).float()) and bool((chosen.scale > 0).all())
    best = (chosen.dequantised() - weight).square().view(16, 3, 32).sum(-1)
    for clip in CLIPS:
        tried = quantise(weight, scheme, torch.float32, search=ScaleSearch((clip,), dtype)).dequantised()
        assert bool((best <= (tried - weight).square().view(16, 3, 32).sum(-1) + 1e-6).all())
    heavy = torch.ones(96)
    heavy[:4] = 1e4
    assert not torch.equal(scales_of(weight, scheme, ScaleSearch(CLIPS), heavy), chosen.scale)


def test_calibrated_files_are_equal_twice(source: Path, lines: Path, tmp_path: Path) -> None:
    """From the command line, with an image: equal files, other codes than without, and scales that are finite."""
    found = [written(source, tmp_path / n, "int4", "--group", "32", "--calibrate", str(lines)) for n in ("a", "b")]
    plain = written(source, tmp_path / "plain", "int4")
    assert folder(found[0]) == folder(found[1])
    differ = [n for n, data in folder(found[0]).items() if data != folder(plain)[n]]
    assert differ and all(n.endswith(".safetensors") for n in differ)


REFUSED: list[tuple[list[str], str]] = [
    (["{model}"], "needs a checkpoint and a new folder"),
    (["{model}", "{out}"], "--to must be one of fp8, int8, int4"),
    (["{model}", "{out}", "--to", "int3"], "not 'int3'"),
    (["{model}", "{out}", "--to", "int8", "--group", "64"], "--group is for --to int4"),
    (["{model}", "{out}", "--to", "int4", "--group", "48"], "--group must be one of 32, 64, 128"),
    (["{model}", "{out}", "--to", "int4", "--group", "128"], "does not divide the 96 columns"),
    (["{model}", "{out}", "--to"], "--to needs a value"),
    (["{model}", "{out}", "--too", "int4"], "does not know --too"),
    (["{model}", "{model}", "--to", "int4"], "holds something already"),
    (["{out}", "{out}", "--to", "int4"], "There is no model folder"),
    (["{model}", "{out}", "--to", "int4", "--max-tokens", "0"], "--max-tokens must be"),
    (["{model}", "{out}", "--to", "int4", "--calibrate", "{out}/no"], "No such file"),
    (["{model}", "{out}", "--to", "int4", "--calibrate", "{empty}"], "holds no prompt"),
    (["{model}", "{out}", "--to", "int4", "--calibrate", "{bad}"], "bad.jsonl:2 is no JSON"),
    (["{model}", "{out}", "--to", "int4", "--calibrate", "{other}"], "other.jsonl:1 must be"),
    (["{model}", "{out}", "--to", "int4", "--calibrate", "{picture}"], "--calibrate: prompt 1: "),
    (["{done}", "{out}", "--to", "int4"], "holds compressed-tensors weights already"),
    (["{infinite}", "{out}", "--to", "int4"], "values that are not finite"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_cannot_be_written_ends_with_2_and_one_line(
    number: int, checkpoint: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, part = REFUSED[number]
    model = checkpoint("qwen2_5_vl")
    texts = {
        "empty": "\n", "bad": '{"prompt": "w1"}\n{', "other": '{"text": 1}',
        "picture": json.dumps({"messages": [{"role": "user", "content": [{"type": "image", "image": "/no.png"}]}]}),
    }  # fmt: skip
    places = {"model": model, "out": tmp_path / "out"}
    for name, text in texts.items():
        places[name] = tmp_path / f"{name}.jsonl"
        places[name].write_text(text)
    if "{done}" in words:
        places["done"] = written(model, tmp_path / "done", "int4")
    if "{infinite}" in words:
        places["infinite"] = shutil.copytree(model, tmp_path / "infinite")
        stored = load_file(str(model / "model.safetensors"))
        next(t for n, t in stored.items() if n.endswith("layers.1.mlp.up_proj.weight"))[0, 0] = float("inf")
        save_file(stored, str(places["infinite"] / "model.safetensors"))
    capsys.readouterr()
    before = {p.name for p in tmp_path.iterdir()}
    assert main(["quantize", *(w.format(**places) for w in words)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert part in said[-1] and said[-1].startswith("trencadis: ") and "Traceback" not in "".join(said), said
    assert {p.name for p in tmp_path.iterdir()} == before, "something was left behind"
