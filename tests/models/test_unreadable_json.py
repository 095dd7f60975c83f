"""A JSON file that is there and cannot be used is named as such, and not called missing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from trencadis.assets import demo_path
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.multimodal.qwen2_vl.image_budget import image_needs
from trencadis.multimodal.qwen2_vl.processor import Qwen2VLImageProcessor
from trencadis.server.prompts.generation_config import SamplingDefaults
from trencadis.server.prompts.text_service import TextService
from trencadis.server.text.checkpoint_tokenizer import Tokenizer

FILES = (
    "config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "video_preprocessor_config.json",
)  # fmt: skip
DAMAGE = {
    "cut": b'{"a": 1, "b"', "no text": b"\xff\xfe\x00", "empty": b"", "a list": b"[1, 2]", "a word": b'"text"',
    "deep": b'{"a": ' + b"[" * 100_000,
}  # fmt: skip


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    target = tmp_path / "copy"
    shutil.copytree(demo_path(), target, ignore=shutil.ignore_patterns("*.safetensors"))
    return target


def read(path: Path) -> None:
    """All that a start reads beside the weights."""
    config = load_config(path)
    Qwen2VLImageProcessor.from_checkpoint(path, {})
    TextService.load(config, EngineConfig(model=str(path)))


@pytest.mark.parametrize("file", FILES)
def test_damage_is_named(copied: Path, file: str) -> None:
    for kind, data in DAMAGE.items():
        (copied / file).write_bytes(data)
        with pytest.raises(StartupError) as caught:
            read(copied)
        text = str(caught.value)
        assert file in text and "\n" not in text, f"{kind}: {text}"
        assert "no valid JSON" in text or "no JSON object" in text, f"{kind}: {text}"


@pytest.mark.parametrize(
    ("file", "value"),
    [
        ("tokenizer.json", {}), ("tokenizer.json", {"added_tokens": 5}), ("tokenizer.json", {"model": {"type": "?"}}),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "y"}}}),
    ],
)  # fmt: skip
def test_a_garbled_tokenizer_is_no_traceback(copied: Path, file: str, value: object) -> None:
    (copied / file).write_text(json.dumps(value))
    with pytest.raises(StartupError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_checkpoint(copied)


def test_a_folder_without_the_optional_files_is_read(copied: Path) -> None:
    for file in ("generation_config.json", "tokenizer_config.json"):
        (copied / file).unlink()
    read(copied)
    (copied / "preprocessor_config.json").unlink()
    assert image_needs(copied, {}).slots > 0


def test_a_chosen_generation_config_must_be_there(copied: Path) -> None:
    with pytest.raises(StartupError, match="there is no"):
        SamplingDefaults.read(copied, str(copied / "elsewhere"))


def test_a_template_that_is_no_text_is_named(copied: Path) -> None:
    (copied / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(StartupError, match=r"chat_template\.jinja cannot be read"):
        read(copied)
    (copied / "chat_template.jinja").unlink()
    for damage, part in ((b"{", "no valid JSON"), (b'{"chat_template": [1]}', "names and templates")):
        (copied / "chat_template.json").write_bytes(damage)
        with pytest.raises(StartupError, match=part):
            read(copied)
