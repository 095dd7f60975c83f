"""``check-model --dummy`` refuses in one line what no family serves: each configuration class of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trencadis.core.checkpoint.model_registry import architectures
from trencadis.server.cli.main import main

NEW = ("gemma4", "gemma3n", "hunyuan_v1_dense", "hunyuan_v1_moe", "qwen3_next", "llama4", "deepseek_v3", "bart", "vit")
"""A share: models of many parts, an encoder and decoder, a tower."""


def refused(folder: Path, capsys: Any, model_type: str) -> str:
    """What the command says of transformers' default configuration of a model type; "": transformers makes none."""
    from transformers.models.auto import configuration_auto, modeling_auto

    library: Any = configuration_auto
    name = next(
        (
            table[model_type]
            for table in (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_MAPPING_NAMES)
            if isinstance(table.get(model_type), str)
        ),
        "NamelessModel",
    )
    try:
        made = library.CONFIG_MAPPING[model_type]()
        text = json.dumps({**made.to_dict(), "architectures": [name]}, default=str)
    except Exception:  # a class without defaults, or one whose library is not installed
        text = json.dumps({"model_type": model_type, "architectures": [name]})
    (folder / "config.json").write_text(text)
    capsys.readouterr()
    code = main(["check-model", str(folder), "--dummy", "--only", "config"])
    said = capsys.readouterr()
    assert "Traceback" not in said.err + said.out, model_type
    if name in architectures():
        return "served"
    assert code == 2 and said.out == "" and said.err.count("\n") == 1, (model_type, said)
    return str(said.err)


@pytest.mark.parametrize("model_type", NEW)
def test_what_no_family_serves_is_refused_in_one_line(tmp_path: Path, capsys: Any, model_type: str) -> None:
    if (said := refused(tmp_path, capsys, model_type)) != "served":
        assert "(architectures); supported: " in said


@pytest.mark.long
def test_no_configuration_class_of_transformers_ends_in_a_traceback(tmp_path: Path, capsys: Any) -> None:
    from transformers import CONFIG_MAPPING

    served = 0
    for model_type in sorted(CONFIG_MAPPING.keys()):
        served += refused(tmp_path, capsys, model_type) == "served"
    print(f"\n{len(CONFIG_MAPPING.keys())} model types, {served} of them served")
    assert served > 10
