"""``trencadis check-model`` with pictures, on the families that are built in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vision import forms
from tests.vision.tiled import COMPARED
from trencadis.server.cli.main import main

WRITERS: dict[str, Callable[[Path], Path]] = {
    "llava": forms.llava, "gemma3": forms.gemma3, "qwen3_vl": forms.qwen3_vl,
    **{name: COMPARED[name].write for name in COMPARED if name != "phi3_v"},
}  # fmt: skip
SOME = "weights,ledger,pictures,padding.serving"


def checked(capsys: Any, path: Path, only: str) -> dict[str, dict[str, Any]]:
    capsys.readouterr()
    main(["check-model", str(path), "--json", "--only", only])
    return {one["name"]: one for one in json.loads(capsys.readouterr().out)["results"]}


FAMILIES = [name if name == "llava_next" else pytest.param(name, marks=pytest.mark.long) for name in WRITERS]


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_of_a_built_in_family_pass(family: str, tmp_path: Path, capsys: Any) -> None:
    results = checked(capsys, WRITERS[family](tmp_path / family), SOME if family != "llava_next" else "pictures")
    print({name: one["reason"] or one.get("figure") for name, one in results.items()})
    assert {"pictures.rows", "pictures.logits"} <= results.keys()
    assert {one["status"] for one in results.values()} == {"pass"}, results


def test_a_folder_without_a_processor_has_no_pictures(tmp_path: Path, capsys: Any) -> None:
    path = forms.llava(tmp_path / "llava")
    (path / "preprocessor_config.json").unlink()
    results = checked(capsys, path, "pictures.rows")
    assert results["pictures.rows"]["status"] == "skip"
    assert "no picture can be made" in results["pictures.rows"]["reason"]
