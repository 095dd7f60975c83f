"""A JSON file that is there and cannot be used is named as such, and not called missing."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from trencadis.assets import demo_path
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.weight_file_reader import read_file
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.multimodal.qwen2_vl.processor import Qwen2VLImageProcessor
from trencadis.multimodal.qwen2_vl.smart_resize import image_needs
from trencadis.server.prompts.prompt_builder import TextService
from trencadis.server.prompts.sampling_params import SamplingDefaults
from trencadis.server.text import checkpoint_tokenizer
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


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"])
def test_a_start_waits_for_no_fifo(name: str, copied: Path) -> None:
    (copied / name).unlink(missing_ok=True)
    os.mkfifo(copied / name)
    with pytest.raises(StartupError, match=f"{name} is not a regular file"):
        load_config(copied)


def test_a_name_of_a_checkpoint_forges_no_line(copied: Path) -> None:
    value = json.loads((copied / "config.json").read_text())
    value["architectures"] = ["A\nERROR 01-01 00:00:00 [server] forged\x1b[2J\u2028"]
    (copied / "config.json").write_text(json.dumps(value))
    with pytest.raises(StartupError) as refused:
        load_config(copied)
    assert "A ERROR 01-01" in str(refused.value) and len(str(refused.value).splitlines()) == 1
    assert "\x1b" not in str(refused.value)


def test_a_name_of_a_megabyte_is_refused_at_once(copied: Path) -> None:
    value = json.loads((copied / "config.json").read_text())
    value["architectures"] = ["A" * 1_000_000]
    (copied / "config.json").write_text(json.dumps(value))
    begun = time.monotonic()
    with pytest.raises(StartupError) as refused:
        load_config(copied)
    assert len(str(refused.value)) < 10_000 and time.monotonic() - begun < 10


HEADERS = {
    "an infinite shape": {"dtype": "F32", "shape": [float("inf"), 2], "data_offsets": [0, 4]},
    "a shape beyond all numbers": {"dtype": "F32", "shape": [0, 2**70], "data_offsets": [0, 0]},
    "no number": {"dtype": "F32", "shape": [float("nan")], "data_offsets": [0, 4]},
    "offsets that are no numbers": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]},
    "a type that is a list": {"dtype": [], "shape": [1], "data_offsets": [0, 4]},
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_was_not_written_for_a_tensor(name: str, tmp_path: Path) -> None:
    header = json.dumps({"weight\nERROR forged": HEADERS[name]}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 16)
    with pytest.raises(StartupError) as refused:
        list(read_file(file, []))
    assert "is not a readable safetensors file" in str(refused.value) and len(str(refused.value).splitlines()) == 1


def test_a_header_of_brackets_is_refused(tmp_path: Path) -> None:
    header = b'{"a":' * 100_000
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(StartupError, match="is not a readable safetensors file"):
        list(read_file(file, []))


def test_a_tokenizer_whose_library_panics_is_unreadable(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """As the library's, which derives from BaseException."""

    def panic(spec: object) -> None:
        raise PanicException("called `Option::unwrap()` on a `None` value")

    monkeypatch.setattr(checkpoint_tokenizer, "_load_tokenizer", panic)
    with pytest.raises(StartupError, match=r"tokenizer\.json cannot be read: called"):
        Tokenizer.from_checkpoint(copied)
