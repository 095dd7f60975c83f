"""Paths and names that no system takes: one line at the start, and a 400 or 404 while the server runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.fakes import checkpoints
from tests.fakes.adapters import adapter_of
from tests.fakes.command_line import from_command_line
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.engine.engine_builder import trial_folder
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import BadRequest, NotFound, StartupError
from trencadis.core.lora.adapter_files import resolve_folder
from trencadis.core.spec.draft_checkpoint import load_draft_config
from trencadis.server.config.model_download import find_adapter_folder, find_model_folder, resolve
from trencadis.server.prompts.adapter_registry import AdapterRegistry, change_adapters
from trencadis.server.prompts.media_frontends import MediaRules

ODD = {
    "a part of 5,000 letters": "x" * 5000,
    "5,000 letters in a folder": "/tmp/" + "x" * 5000 + "/y",
    "a zero byte": "/tmp/a\0b",
    "the home of nobody": "~no-such-user-here/x",
    "a zero byte in a name of the hub": "owner/a\0b",
}
READERS: dict[str, Callable[[str], object]] = {
    "--model": lambda path: find_model_folder(EngineConfig(model=path)),
    "--tokenizer": lambda path: resolve(path),
    "--lora-modules": lambda path: find_adapter_folder(EngineConfig(), path),
    "a folder of an adapter": resolve_folder,
    "--allowed-local-media-path": lambda path: MediaRules(folder=path).make_loader(1.0),
    "--spec-model": lambda path: load_draft_config(EngineConfig(), path, None, "--spec-model"),  # type: ignore[arg-type]
    "--packed-weights-dir": lambda path: trial_folder(EngineConfig(packed_weights_dir=path)),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("flag", READERS)
def test_a_path_that_cannot_be_is_one_line(flag: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(StartupError) as caught:
        READERS[flag](ODD[kind])
    assert "\n" not in str(caught.value) and "\0" not in str(caught.value)


def test_a_folder_that_may_not_be_searched_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests often run as root, who may search every folder."""

    def refuse(path: object, **more: object) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.stat", refuse)
    for flag, read in READERS.items():
        with pytest.raises(StartupError, match="Permission denied"):
            read("/root/secret/model")
        assert flag


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> tuple[AdapterRegistry, str]:
    folder = tmp_path_factory.mktemp("base")
    base = checkpoints.llama(folder / "llama")
    adapter = adapter_of(base, folder / "adapters" / "a")
    config = EngineConfig(enable_lora=True, max_loras=2)
    fetch = lambda name: find_adapter_folder(config, name)  # noqa: E731
    return AdapterRegistry(load_config(base), config, ("base",), fetch, str(adapter.parent)), str(adapter)


def load(registry: AdapterRegistry, name: str, path: str, parent: str = "") -> None:
    asyncio.run(change_adapters(registry, {"name": name, "path": path, "parent": parent, "replace": False}))


@pytest.mark.parametrize("kind", ODD)
def test_an_adapter_of_such_a_path_is_an_error_of_the_client(
    kind: str, registry: tuple[AdapterRegistry, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises((BadRequest, NotFound)):
        load(registry[0], "a", ODD[kind])


NAMES = {
    "a line break": "a\nERROR forged", "codes of a terminal": "\x1b[2J", "a zero byte": "a\0b", "a C1 code": "a\x9b2J",
    "a line separator": "a\u2028b", "300 letters": "x" * 300, "blanks alone": "  ",
}  # fmt: skip


@pytest.mark.parametrize("kind", NAMES)
def test_names_are_short_and_one_line(kind: str, registry: tuple[AdapterRegistry, str]) -> None:
    """They stand in logs, metrics and answers."""
    adapters, folder = registry
    with pytest.raises(BadRequest, match="name"):
        load(adapters, NAMES[kind], folder)
    with pytest.raises(BadRequest, match="name"):
        load(adapters, "fine", folder, NAMES[kind])
    with pytest.raises(StartupError, match="name"):
        adapters.add(NAMES[kind], folder)
    with pytest.raises(StartupError, match="--served-model-name"):
        from_command_line(["--served-model-name", "fine", NAMES[kind]], {})


@pytest.mark.parametrize("name", ["a", "owner/name", "über-größe", "模型", "a b", '{x="1"}', "x" * 256])
def test_other_names_are_taken(name: str, registry: tuple[AdapterRegistry, str]) -> None:
    adapters, folder = registry
    load(adapters, name, folder)
    assert adapters.find(name) is not None
    adapters.remove(name)
    assert from_command_line(["--served-model-name", name], {}).server.served_model_name == [name]
