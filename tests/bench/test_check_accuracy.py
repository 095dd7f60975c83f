"""``check-accuracy``: what makes an answer right, intervals, planted errors on the demo, and files of a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.vision import vision_checkpoints
from tests.vision.extra_families.minicpmv import minicpmv
from trencadis.assets import demo_path
from trencadis.core.models.rotary_embedding import TextRotary
from trencadis.server.bench.accuracy_statistics import paired_difference, wilson_interval
from trencadis.server.bench.drawn_accuracy_items import Box, ItemMaker
from trencadis.server.cli.main import main

KINDS = "number,colour,count,compare"
SOME = ("--sizes", "168,224", "--device", "cpu", "--kinds", KINDS)


def item(kind: str) -> Any:
    return ItemMaker(0, (224,), ("en", "de")).make([kind], 3)[2]


def test_items_follow_from_the_seed() -> None:
    maker = ItemMaker(3, (112, 224), ("en",))
    one, two = (maker.make(maker.kinds, 48) for _ in range(2))
    assert [(i.name, i.scenes, i.question) for i in one] == [(i.name, i.scenes, i.question) for i in two]
    assert {i.kind for i in one} == set(maker.kinds) and {i.size for i in one} == {112, 224}
    other = ItemMaker(4, (112, 224), ("en",)).make(maker.kinds, 48)
    assert sum(a.scenes == b.scenes for a, b in zip(one, other, strict=True)) < 6


def test_right_answers_are_told_from_wrong_ones() -> None:
    number = item("number")
    truth = number.scenes[0].text
    assert number.accepts(f"It is {truth}.") and not number.accepts(f"{truth}1") and not number.accepts("")
    colour = item("colour")
    own, other = (shape.colour for shape in colour.scenes[0].shapes)
    assert colour.accepts(own.title()) and not colour.accepts(other) and not colour.accepts(f"{own} or {other}")
    box = item("box")
    place = box.scenes[0].shapes[0].box
    assert box.accepts(f'```json\n{{"bbox_2d": {list(place)}}}\n```')
    width, height = box.scenes[0].width, box.scenes[0].height
    thousandths = [1000 * v // s for v, s in zip(place, (width, height) * 2, strict=True)]
    assert box.accepts(str(thousandths)) and not box.accepts("[0, 0, 1, 1]") and not box.accepts("no box")
    point = item("point")
    left, top, right, bottom = point.scenes[0].shapes[0].box
    assert point.accepts(f'{{"point_2d": [{(left + right) // 2}, {(top + bottom) // 2}]}}')
    assert not point.accepts(f"[{left - 20}, {top}]")


def test_boxes_and_intervals() -> None:
    assert Box(0, 0, 10, 10).overlap((0, 0, 10, 10)) == 1 and Box(0, 0, 10, 10).overlap((10, 0, 20, 10)) == 0
    assert Box(0, 0, 10, 10).overlap((5, 0, 15, 10)) == pytest.approx(1 / 3)
    share, low, high = wilson_interval(8, 10)
    assert share == 0.8 and low == pytest.approx(0.490, abs=1e-3) and high == pytest.approx(0.943, abs=1e-3)
    assert wilson_interval(0, 0) == (0.0, 0.0, 1.0)
    ours, theirs = {str(i): i > 9 for i in range(40)}, {str(i): True for i in range(40)}
    found = paired_difference(ours, theirs)
    assert (found.worse, found.better, found.is_below) == (10, 0, True) and found.chance == pytest.approx(2 / 2**10)
    assert not paired_difference(theirs, ours).is_below and paired_difference(ours, ours).chance == 1


def run(capsys: Any, *words: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["check-accuracy", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def demo_with(folder: Path, change: Callable[[dict[str, Any]], None], **config: Any) -> Path:
    """The demo with changed weights or keys."""
    source = demo_path()
    shutil.copytree(source, folder)
    held = load_file(folder / "model.safetensors")
    change(held)
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, **config}))
    return folder


def zero_a_norm(held: dict[str, Any]) -> None:
    name = next(n for n in held if n.endswith("layers.2.input_layernorm.weight"))
    held[name] = held[name] * 0


def test_a_planted_error_lies_below_the_baseline_and_the_same_model_does_not(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "run.json"
    words = (*SOME, "--items", "64", "--reference", "none")
    code, report = run(capsys, *words, "--save", str(file))
    assert code == 0 and report["rows"][-1]["kind"] == "all" and report["rows"][-1]["items"] == 64
    share = next(v for v in report["rows"][-1].values() if isinstance(v, dict))
    assert share["share"] > 0.4, "the demo answers many of them"
    code, again = run(capsys, *words, "--baseline", str(file))
    assert code == 0 and again["verdicts"] == [f"within chance of {json.loads(file.read_text())['label']}: 0 items "
                                               "only it has right, 0 only this engine (p = 1)"]  # fmt: skip
    broken = demo_with(tmp_path / "broken", zero_a_norm)
    code, worse = run(capsys, str(broken), *words, "--baseline", str(file))
    assert code == 1 and worse["verdicts"][0].startswith("below ") and not worse["passed"]


FAMILIES: dict[str, Callable[[Path], Path]] = {
    "gemma4": vision_checkpoints.gemma4, "glm4v": vision_checkpoints.glm4v, "minicpmv": minicpmv,
}  # fmt: skip
"""Families of 2026 whose image processor transformers opens with Pillow."""


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_answers_as_transformers(family: str, tmp_path: Path, capsys: Any) -> None:
    """A random model has nothing right; each of its answers is transformers' word for word."""
    words = (str(FAMILIES[family](tmp_path / family)), "--sizes", "96", "--device", "cpu", "--dtype", "float32")
    file = tmp_path / "run.json"
    code, report = run(capsys, *words, "--kinds", "number,compare", "--items", "4", "--save", str(file))
    assert code == 0 and report["verdicts"][0].startswith("within chance of transformers: 0 items"), report
    assert report["rows"][-1]["items"] == 4 and len(set(json.loads(file.read_text())["answers"].values())) > 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--items", "0"], "--items 0: it must be a whole number"),
        (["--kinds", "smell"], "--kinds smell: there are number"),
        (["--sizes", "9"], "--sizes 9: it must be"),
        (["--reference", "vllm"], "--reference vllm: it must be"),
        (["--baseline", "/nowhere/x.json"], "there is no such file"),
        (["--fast"], "check-accuracy does not know --fast"),
        (["--seed"], "--seed needs a value"),
    ],
)
def test_bad_words_are_one_line(capsys: Any, words: list[str], said: str) -> None:
    assert main(["check-accuracy", *words]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


@pytest.mark.long
def test_the_demo_scores_as_in_transformers(capsys: Any) -> None:
    code, report = run(capsys, "--sizes", "168,224", "--device", "cpu", "--items", "160", "--dtype", "float32")
    print(report)
    assert code == 0 and report["passed"] and len(report["verdicts"]) == 1


@pytest.mark.long
@pytest.mark.parametrize("mistake", ["rotary", "off by one", "resolution", "norm"])
def test_planted_errors_lie_below_transformers(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    """Rows and columns of positions exchanged, each frequency in the place of the next, half the resolution, a norm of
    zeros: in this engine alone.
    """
    words = ("--sizes", "168,224", "--device", "cpu", "--items", "120", "--kinds", KINDS, "--dtype", "float32")
    file = tmp_path / "run.json"
    assert run(capsys, *words, "--reference", "none", "--save", str(file))[0] == 0
    was = TextRotary.__call__
    if mistake == "rotary":

        def exchanged(self: TextRotary, ops: Any, positions: Any) -> Any:
            return was(self, ops, positions[[0, 2, 1]])

        monkeypatch.setattr(TextRotary, "__call__", exchanged)
    if mistake == "off by one":

        def rolled(self: TextRotary, ops: Any, positions: Any) -> Any:
            made = was(self, ops, positions)
            return made._replace(cos=made.cos.roll(1, -1), sin=made.sin.roll(1, -1))

        monkeypatch.setattr(TextRotary, "__call__", rolled)
    model = ""
    if mistake == "resolution":
        model = str(demo_with(tmp_path / "demo", lambda held: None))
        settings = json.loads((Path(model) / "preprocessor_config.json").read_text())
        half = {"min_pixels": 28 * 28 * 4, "max_pixels": 28 * 28 * 6}
        (Path(model) / "preprocessor_config.json").write_text(json.dumps({**settings, **half}))
    elif mistake == "norm":
        model = str(demo_with(tmp_path / "demo", zero_a_norm))
    code, report = run(capsys, *([model] if model else []), *words, "--reference", "none", "--baseline", str(file))
    print(report["verdicts"])
    assert code == 1
