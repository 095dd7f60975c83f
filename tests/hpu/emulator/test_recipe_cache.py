"""Recipes on disk: a second start compiles nothing; damage, a read-only folder and a full disk cost a line each."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import trencadis.backends.hpu.emulator.emulated_recipe_cache as recipe_cache
from trencadis.backends.hpu.emulator.card_profiles_and_op_support import profile
from trencadis.backends.hpu.emulator.device_tensor import DEVICE
from trencadis.backends.hpu.emulator.emulated_bridge import bridge
from trencadis.backends.hpu.emulator.emulated_device import EmulatedDevice
from trencadis.backends.hpu.emulator.emulated_recipe_cache import OP_BYTES, RecipeCacheConfig, SavedRecipes
from trencadis.core.errors import StartupError

pytestmark = pytest.mark.part("gaudi")


def double(x: Tensor) -> Tensor:
    return x * 2


class Double(torch.nn.Module):
    """``double`` as a module."""

    def forward(self, x: Tensor) -> Tensor:
        return double(x)


def start(folder: Path, size: int = 0, clear: bool = False, shapes: tuple[int, ...] = (3, 4, 5)) -> EmulatedDevice:
    """A card that runs one recipe of each size."""
    device = EmulatedDevice(profile(""))
    device.clock.saved = SavedRecipes(RecipeCacheConfig(folder, clear, size), "1")
    for n in shapes:
        device.clock.run_recipe(("double", n), 1)
    return device


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    with caplog.at_level(logging.WARNING, "trencadis.engine"):
        yield (lines := _Lines(caplog))  # type: ignore[misc]
    assert all("\n" not in line for line in lines)


class _Lines(list[str]):
    """The lines logged so far."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        super().__init__()
        self.caplog = caplog

    def __iter__(self) -> Iterator[str]:
        return iter([r.getMessage() for r in self.caplog.records])

    def __len__(self) -> int:
        return len(self.caplog.records)


def test_a_second_start_compiles_nothing(tmp_path: Path, said: list[str]) -> None:
    folder = tmp_path / "deep" / "recipes"
    assert start(folder).clock.compiles == 3
    again = start(folder)
    assert again.clock.compiles == 0 and again.clock.seconds == 0 and again.clock.saved.hits == 3  # type: ignore[union-attr]
    assert start(folder, shapes=(3, 9)).clock.compiles == 1
    assert start(folder, clear=True).clock.compiles == 3
    assert not len(said)


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff\x00", b'{"ops": 7, "sum": "x"}', None])
def test_a_damaged_recipe_is_compiled_again_and_replaced(damage: bytes | None, tmp_path: Path, said: list[str]) -> None:
    start(tmp_path)
    victim = min(tmp_path.iterdir())
    if damage is None:
        other = max(tmp_path.iterdir())
        victim.write_bytes(other.read_bytes())
    else:
        victim.write_bytes(damage)
    assert start(tmp_path).clock.compiles == 1
    assert len(said) == 1 and str(victim) in next(iter(said))
    assert start(tmp_path).clock.compiles == 0


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_folder_that_takes_nothing_costs_one_line(
    number: int, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path, shapes=(3,))

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", refuse)
        assert start(tmp_path).clock.compiles == 2, "what was kept is used"
    (line,) = said
    assert os.strerror(number) in line and str(tmp_path) in line and recipe_cache.VARIABLE in line
    assert [p.suffix for p in tmp_path.iterdir()] == [".emulated"], "no half of a file is left"


def test_a_folder_that_cannot_be_made_costs_one_line(tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "file").write_text("x")
    assert start(tmp_path / "file" / "recipes").clock.compiles == 3
    assert len(said) == 1


def test_the_oldest_recipes_leave_a_full_folder(tmp_path: Path) -> None:
    device = start(tmp_path, size=1, shapes=tuple(range(1, 301)))
    assert device.clock.compiles == 300
    assert len(list(tmp_path.iterdir())) == (1 << 20) // OP_BYTES
    assert start(tmp_path, size=1, shapes=(300,)).clock.compiles == 0
    assert start(tmp_path, size=1, shapes=(1,)).clock.compiles == 1


def test_other_releases_and_cards_have_recipes_of_their_own(tmp_path: Path) -> None:
    saved = {v: SavedRecipes(RecipeCacheConfig(tmp_path), v) for v in ("1.19.0 Gaudi 2", "1.19.0 Gaudi 3")}
    saved["1.19.0 Gaudi 2"].keep("key", 3)
    assert [s.has("key") for s in saved.values()] == [True, False]


def test_the_variable(tmp_path: Path) -> None:
    def read(text: str) -> RecipeCacheConfig:
        return recipe_cache.read({recipe_cache.VARIABLE: text})

    assert read("") == RecipeCacheConfig(None) and read(",true,7").folder is None
    assert read("/a b/c,True,1024") == RecipeCacheConfig(Path("/a b/c"), True, 1024)
    assert read("/x,false,8192,false") == RecipeCacheConfig(Path("/x"), False, 8192)
    assert read("/x") == RecipeCacheConfig(Path("/x"))
    for wrong in ("/x,maybe,3", "/x,true,many", "/x,false,-1"):
        with pytest.raises(StartupError, match="FOLDER,DELETE,MEGABYTES"):
            read(wrong)


@pytest.mark.parametrize("lazy", ["0", "1"])
def test_both_modes_keep_what_they_compile(lazy: str, tmp_path: Path) -> None:
    for compiled in (1, 0):
        card = bridge({recipe_cache.VARIABLE: f"{tmp_path},false,1", "PT_HPU_LAZY_MODE": lazy})
        x = torch.ones(2).to(DEVICE)
        with card.metric_localcontext("graph_compilation") as metric:
            out = card.compile(double)(x) if lazy == "0" else card.wrap_in_hpu_graph(Double()).forward(x)
            assert out.cpu().tolist() == [2.0, 2.0]
        assert card.compilations(metric) == compiled
