"""Reasons of flags and variables that say what no served model has are held against the registry of families."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from tests.fakes.command_line import from_command_line
from tests.families.text_checkpoints import CLASSES, FORMS
from trencadis.core import envs
from trencadis.core.checkpoint import model_registry
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_config import TextConfig
from trencadis.core.checkpoint.pooling_config_reader import load_model_config
from trencadis.core.engine_config import EngineConfig
from trencadis.server.config.vllm_flag_and_env_table import EVERY, ROWS, read_variables
from trencadis.server.config.vllm_flag_row_and_value_conversion import ABSENT

MODEL_TYPES = {"mixtral": "mixtral", "qwen3_moe": "qwen3_moe", "mistral": "mistral", "gemma3": "gemma3_text"}
NAMES = {
    "n-gram embeddings": ("gram",),
    "hyper-connections": ("hyper",), "diffusion": ("diffusion",),
    "late interaction": ("late_",),
}  # fmt: skip
"""How a field of a decoder's description would be called if a family had the part."""
CLAIM = re.compile(r"\bno (served )?model\b|no model that is served|which no model")


def describe(tmp_path: Path, family: str, **changes: object) -> TextConfig:
    """The decoder of a family's first form that has what is asked about."""
    form = next(iter(FORMS[family].values()))
    raw = {"architectures": [CLASSES[family][1]], "model_type": MODEL_TYPES[family], "torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps({**raw, **form, **changes}))
    return load_config(tmp_path).text


def test_models_with_experts_and_windows_are_served(tmp_path: Path) -> None:
    """So no reason may say otherwise: two did, from before these families."""
    assert describe(tmp_path, "qwen3_moe").experts is not None
    assert describe(tmp_path, "gemma3").window == 8
    said = [row.why for row in EVERY] + [env.meaning for env in (*envs.TABLE, *read_variables().values())]
    for why in said:
        assert not CLAIM.search(why) or not re.search(r"expert|window|hybrid", why), why
        assert "all layers attend to all" not in why and "server has one engine" not in why, why


def test_every_claim_about_models_names_a_part_that_no_family_has() -> None:
    known = {field.name for field in fields(TextConfig)}
    assert set(NAMES) == set(ABSENT)
    for row in EVERY:
        assert bool(CLAIM.search(row.why)) == bool(row.absent), row.name
        assert row.absent in ("", *ABSENT), row.name
    for part, words in NAMES.items():
        assert not [name for name in known if any(word in name for word in words)], part
    families = {model_registry.family_of(name).name for name in model_registry.architectures()}
    assert not [name for name in families if re.search(r"mamba|diffusion|colbert|rwkv", name, re.IGNORECASE)]


def test_variables_of_experts_and_windows_have_reasons_that_hold() -> None:
    for env in (*envs.TABLE, *read_variables().values()):
        if CLAIM.search(env.meaning) and "SHARED_EXPERT" not in env.name:  # experts of all tokens: no family has them
            assert not re.search(r"MOE|EXPERT|WINDOW|_EP_|DEEPEP|SLIDE", env.name), env.name


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_without_windows_the_length_is_what_layers_see(tmp_path: Path, family: str) -> None:
    describe(tmp_path, family, sliding_window=24)
    plain = load_model_config(EngineConfig(str(tmp_path))).text
    assert plain.window == 24 and plain.max_positions > 24
    capped = load_model_config(EngineConfig(str(tmp_path), disable_sliding_window=True)).text
    assert capped.max_positions == 24
    assert capped.window == (24 if capped.full_layers else 0), "a window of the whole length hides nothing"
    assert from_command_line(["--disable-sliding-window"], {}).engine.disable_sliding_window
    assert "disable_sliding_window" not in ROWS


def test_without_windows_other_models_keep_their_length(tmp_path: Path) -> None:
    text = describe(tmp_path, "mixtral")
    assert (
        load_model_config(EngineConfig(str(tmp_path), disable_sliding_window=True)).text.max_positions
        == text.max_positions
    )
