"""``trencadis check-model`` with images, on the families that are built in."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.vision import vision_checkpoints
from tests.vision.cross_attention import mllama_oracle
from tests.vision.tiled_families import COMPARED
from trencadis.backends.conformance.check_model import compared_images
from trencadis.core import cross_attention_inputs
from trencadis.server.cli.main import main

WRITERS: dict[str, Callable[[Path], Path]] = {
    "llava": vision_checkpoints.llava, "gemma3": vision_checkpoints.gemma3, "qwen3_vl": vision_checkpoints.qwen3_vl,
    "glm4v": vision_checkpoints.glm4v, "glm46v": partial(vision_checkpoints.glm4v, name="Glm46V"),
    "glm_ocr": partial(vision_checkpoints.glm4v, name="GlmOcr"),
    "mllama": partial(mllama_oracle.write, **mllama_oracle.FORMS["three tiles of 64 patches, llama3"]),
    **{name: COMPARED[name].write for name in COMPARED if name != "phi3_v"},
}  # fmt: skip
SOME = "weights,ledger,pictures,padding.serving"


def checked(capsys: Any, path: Path, only: str) -> dict[str, dict[str, Any]]:
    capsys.readouterr()
    main(["check-model", str(path), "--json", "--only", only])
    return {one["name"]: one for one in json.loads(capsys.readouterr().out)["results"]}


SHARE = ("glm4v", "llava_next", "mllama")
FAMILIES = [name if name in SHARE else pytest.param(name, marks=pytest.mark.long) for name in WRITERS]


@pytest.mark.parametrize("family", FAMILIES)
def test_images_of_a_built_in_family_pass(family: str, tmp_path: Path, capsys: Any) -> None:
    results = checked(capsys, WRITERS[family](tmp_path / family), SOME if family not in SHARE else "pictures")
    print({name: one["reason"] or one.get("figure") for name, one in results.items()})
    assert {"pictures.rows", "pictures.logits"} <= results.keys()
    assert {one["status"] for one in results.values()} == {"pass"}, results


def test_a_folder_without_a_processor_has_no_images(tmp_path: Path, capsys: Any) -> None:
    path = vision_checkpoints.llava(tmp_path / "llava")
    (path / "preprocessor_config.json").unlink()
    results = checked(capsys, path, "pictures.rows")
    assert results["pictures.rows"]["status"] == "skip"
    assert "no image can be made" in results["pictures.rows"]["reason"]


def test_what_tokens_see_too_much_of_an_image_is_found(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles that the image leaves empty, in a model whose layers attend to images."""

    def changed_spans(spans: Any, *rest: Any) -> Any:
        return cross_attention_inputs.compute_cross_attention(
            [dataclasses.replace(span, cross_attention_rows=span.arena_rows) for span in spans], *rest
        )

    monkeypatch.setattr(compared_images, "compute_cross_attention", changed_spans)
    results = checked(capsys, WRITERS["mllama"](tmp_path / "mllama"), "pictures")
    assert results["pictures.rows"]["status"] == "pass" and results["pictures.logits"]["status"] == "fail"
