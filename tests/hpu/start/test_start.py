"""What a start on a Gaudi decides before torch is imported: mode, variables, cards, recipe folder, or one line."""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.stubs.gaudi_container import PUBLISHED, put_cards
from trencadis.backends.hpu.start import gaudi_card_and_plugin_detection, gaudi_mode_and_env, hpu_process_setup
from trencadis.backends.hpu.start.gaudi_card_and_plugin_detection import Stack
from trencadis.core import devices
from trencadis.core.errors import StartupError
from trencadis.core.process import torch_detection
from trencadis.core.process import torch_detection as process
from trencadis.core.process.torch_detection import TorchBuild

pytestmark = pytest.mark.part("gaudi")

LAZY_UNSET = ("2.5.1a0", "2.6.0+hpu", "2.7.1+hpu", "2.9.0+hpu")
"""Torches over which nothing said means lazy mode: Gaudi's own up to release 1.23."""
OWN = (*LAZY_UNSET, "2.11.0a0+git")
"""Those over which lazy mode can be asked for."""
OTHER = {"2.7": "1.23.1.25", "": "1.22.0.740"}
"""A plug-in of another release: 1.22's was built for torch 2.7."""


def settled(
    monkeypatch: pytest.MonkeyPatch, root: Path, torch: str | None, plugin: str | None, built: str | None = None,
    cards: int = 1, env: Mapping[str, str] | None = None,
) -> tuple[dict[str, str], devices.DeviceEnv]:  # fmt: skip
    """A process that settles for ``--device hpu`` in a container with these versions."""
    if not root.exists():
        put_cards(root, cards, driver=(plugin or "1.24.2.0").rpartition(".")[0] if cards else "")
    built = built or (torch or "").partition("+")[0] or None
    monkeypatch.setattr(torch_detection, "find_torch", lambda: TorchBuild(torch) if torch else None)
    monkeypatch.setattr(
        gaudi_card_and_plugin_detection,
        "find_stack",
        lambda: Stack(plugin, torch, built if plugin else None, plugin is not None),
    )
    environ = {
        gaudi_card_and_plugin_detection.ROOT: str(root),
        hpu_process_setup.CACHE: str(root / "cache"),
        **(env or {}),
    }
    return environ, process.prepare_device_env("hpu", environ)


def expected(torch: str, requested: str, plugin: str) -> str:
    """``1`` or ``0`` for the mode, else a part of the line."""
    if torch.startswith("2.5"):
        return "older than 2.6"
    if plugin == "missing":
        return "its PyTorch plug-in is not installed"
    if plugin == "mismatched":
        return "was built for torch"
    if requested == "1" and not torch.startswith(OWN):
        return "needs Gaudi's own build of torch"
    if requested == "0" and torch.startswith(("2.6", "2.7")):
        return "needs torch 2.9 or newer"
    return requested or ("1" if torch.startswith(LAZY_UNSET) else "0")


def test_every_published_stack_is_the_right_choice_or_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ten versions x lazy, eager or nothing asked x torch's autoload on or off x plug-in there, missing, of another."""
    put_cards(tmp_path / "machine", 1)
    cases = list(itertools.product(PUBLISHED, ("1", "0", ""), ("", "0"), ("present", "missing", "mismatched")))
    assert len(cases) == 180
    chosen: dict[str, int] = {}
    for torch, requested, autoload, plugin in cases:
        env = {k: v for k, v in ((gaudi_mode_and_env.MODE, requested), (torch_detection.AUTOLOAD, autoload)) if v}
        version = {
            "present": PUBLISHED[torch],
            "missing": None,
            "mismatched": OTHER["2.7" if torch[:3] == "2.7" else ""],
        }
        built = {"mismatched": "2.9.0" if torch[:3] == "2.7" else "2.7.1"}.get(plugin)
        want, case = expected(torch, requested, plugin), f"{torch} {requested} {plugin}"
        try:
            environ, _ = settled(monkeypatch, tmp_path / "machine", torch, version[plugin], built, env=env)
        except StartupError as error:
            assert want in str(error) and "\n" not in str(error), case
        else:
            assert environ[gaudi_mode_and_env.MODE] == want, case
            assert environ[torch_detection.AUTOLOAD] == "0", case
        chosen[want] = chosen.get(want, 0) + 1
    assert chosen["1"] == 18 and chosen["0"] == 22, chosen


def test_what_the_user_set_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine = {gaudi_mode_and_env.MODE: "0", torch_detection.AUTOLOAD: "1", gaudi_mode_and_env.FUSER_THREADS: "0",
            hpu_process_setup.CONFIG: f"{tmp_path},false,9"}  # fmt: skip
    environ, _ = settled(monkeypatch, tmp_path / "m", "2.9.0+hpu_1.23.1-25.git8598e6d", "1.23.1.25", env=mine)
    assert {name: environ[name] for name in mine} == mine


def test_settling_again_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The server settles for the engine, which settles for itself and hands its environment to the ranks."""
    environ, first = settled(monkeypatch, tmp_path / "m", "2.13.0+cpu", "1.24.2.31", cards=4)
    again = hpu_process_setup.settle(environ, 0, 0, 1)
    assert first.variables[gaudi_mode_and_env.INPUT_REUSE] == "0" and not set(again.variables) - {
        hpu_process_setup.CONFIG
    }
    assert again.variables[hpu_process_setup.CONFIG] == environ[hpu_process_setup.CONFIG]
    rank = hpu_process_setup.settle(environ, 0, 2, 4).variables
    assert rank[hpu_process_setup.CONFIG].partition(",")[0].endswith("/rank2"), "each rank has a folder of its own"


def test_the_banner_says_stack_mode_cards_and_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = {gaudi_card_and_plugin_detection.GIVEN: "all"}
    _, found = settled(monkeypatch, tmp_path / "m", "2.13.0+cpu", "1.24.2.31", cards=8, env=given)
    first, second = found.lines
    for part in ("habana-torch-plugin 1.24.2.31", "torch 2.13.0+cpu", "compile mode", "8 cards", "driver 1.24.2",
                 "HABANA_VISIBLE_DEVICES=all", "8 cards (modules 0-7)"):  # fmt: skip
        assert part in first
    assert "HPU graphs" in second
    _, found = settled(monkeypatch, tmp_path / "m23", "2.9.0+hpu_1.23.1-25.git8598e6d", "1.23.1.25")
    assert len(found.lines) == 1 and "lazy mode (graphs exist in lazy mode alone)" in found.lines[0]
    here, old = (
        gaudi_card_and_plugin_detection.Machine(1, 1, (0,), "1.22.0-f6a8"),
        Stack("1.24.2.31", "2.13.0+cpu", "2.13.0", True),
    )
    assert "a driver of its release: 1.22.0-f6a8 is loaded" in gaudi_mode_and_env.missing(False, old, here)[1]


BAD: dict[str, tuple[Any, dict[str, str], str]] = {
    "no plug-in": ((None, None), {}, r"install habana-torch-plugin==1\.24\.2\.\* beside torch 2\.13\.0\+cpu, or start"),
    "metadata alone": (("1.24.2.31", False), {}, "half installed"),
    "module alone": ((None, True), {}, "half installed"),
    "two modes": (("1.24.2.31", True), {"PT_HPU_LAZY_MODE": "0", "VLLM_BRIDGE_MODE": "lazy"}, "two modes at once"),
    "no such mode": (("1.24.2.31", True), {"VLLM_BRIDGE_MODE": "graph"}, "lazy or eager"),
    "misread mode": (("1.24.2.31", True), {"PT_HPU_LAZY_MODE": "true"}, "0 or 1"),
    "input reuse": (("1.24.2.31", True), {"PT_HPU_ENABLE_SYNAPSE_INPUT_REUSE": "1"}, "scratch memory"),
    "one card of three": (
        ("1.24.2.31", True),
        {"HABANA_VISIBLE_MODULES": "7"},
        "there is no module 7; this machine has 0",
    ),
    "words": (("1.24.2.31", True), {"HABANA_VISIBLE_MODULES": "all"}, "module ids with commas"),
    "twice": (("1.24.2.31", True), {"HABANA_VISIBLE_MODULES": "0,0"}, "each card once"),
    "empty": (("1.24.2.31", True), {"HABANA_VISIBLE_MODULES": ""}, "module ids with commas"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_line_that_says_what_to_do(what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (plugin, module), env, says = BAD[what]
    put_cards(tmp_path, 1)
    monkeypatch.setattr(torch_detection, "find_torch", lambda: TorchBuild("2.13.0+cpu"))
    monkeypatch.setattr(
        gaudi_card_and_plugin_detection, "find_stack", lambda: Stack(plugin, "2.13.0+cpu", "2.13.0", bool(module))
    )
    with pytest.raises(StartupError, match=says) as raised:
        folders = {gaudi_card_and_plugin_detection.ROOT: str(tmp_path), hpu_process_setup.CACHE: str(tmp_path / "c")}
        process.prepare_device_env("hpu", {**folders, **env})
    assert "\n" not in str(raised.value)


def test_lazy_mode_refuses_what_would_break_collectives() -> None:
    for value in ("1", "false"):
        gaudi_mode_and_env.refuse({gaudi_mode_and_env.TENSOR_CACHE_OFF: value}, lazy=True)
    with pytest.raises(StartupError, match="hold collectives"):
        gaudi_mode_and_env.refuse({gaudi_mode_and_env.LAZY_COLLECTIVES: "false"}, lazy=True, world=2)
    gaudi_mode_and_env.refuse(
        {gaudi_mode_and_env.LAZY_COLLECTIVES: "false", gaudi_mode_and_env.TENSOR_CACHE_OFF: "1"}, lazy=False, world=2
    )


def test_the_emulator_is_never_a_silent_substitute(tmp_path: Path) -> None:
    """A plug-in without a card, a driver without its device files, a card without a driver: each is an error."""
    installed, nothing = Stack("1.24.2.31", "2.13.0+cpu", "2.13.0", True), Stack(None, "2.13.0+cpu")
    bare, carded, undriven = tmp_path / "bare", tmp_path / "carded", tmp_path / "undriven"
    put_cards(bare, 0, driver="")
    put_cards(carded, 2, nodes=0)
    put_cards(undriven, 2, nodes=0, driver="")
    switch = gaudi_mode_and_env.SWITCH
    for root, found, says in (
        (bare, installed, "no Gaudi is present and habana-torch-plugin 1.24.2.31 is installed: .*--runtime=habana"),
        (carded, installed, "a Gaudi is present and its device files are not in /dev: .*--runtime=habana"),
        (undriven, installed, "a Gaudi is present and its driver is not loaded: .*modprobe habanalabs"),
        (carded, nothing, "a Gaudi is present and its device files"),
    ):
        here = gaudi_card_and_plugin_detection.find_machine({gaudi_card_and_plugin_detection.ROOT: str(root)})
        with pytest.raises(StartupError, match=says) as raised:
            gaudi_mode_and_env.choose({}, here, found)
        assert f"{switch}=1 emulates a card instead" in str(raised.value)
        assert gaudi_mode_and_env.choose({switch: "1"}, here, found) == gaudi_mode_and_env.EMULATED
    without_cards = gaudi_card_and_plugin_detection.find_machine({gaudi_card_and_plugin_detection.ROOT: str(bare)})
    assert gaudi_mode_and_env.choose({}, without_cards, nothing) == gaudi_mode_and_env.EMULATED
    with pytest.raises(StartupError, match="forbids the emulator"):
        gaudi_mode_and_env.choose({switch: "0"}, without_cards, nothing)
    with pytest.raises(StartupError, match="neither true"):
        gaudi_mode_and_env.choose({switch: "maybe"}, gaudi_card_and_plugin_detection.Machine(), nothing)


def test_visible_modules_are_honoured(tmp_path: Path) -> None:
    """``--device hpu:1`` is the second of them; the plug-in is told the modules where it could not number them."""
    put_cards(tmp_path, 4)
    here = gaudi_card_and_plugin_detection.find_machine({gaudi_card_and_plugin_detection.ROOT: str(tmp_path)})
    assert here == gaudi_card_and_plugin_detection.Machine(4, 4, (0, 1, 2, 3), "1.24.1")
    named = {gaudi_card_and_plugin_detection.VISIBLE: "3,1"}
    assert gaudi_card_and_plugin_detection.visible(named, here) == (3, 1)
    gaudi_card_and_plugin_detection.check_index(named, here, 1, 2)
    with pytest.raises(StartupError, match="HABANA_VISIBLE_MODULES=3,1 names 2"):
        gaudi_card_and_plugin_detection.check_index(named, here, 0, 3)
    with pytest.raises(StartupError, match=r"card 2 is asked for and .* names 2, from 0"):
        gaudi_card_and_plugin_detection.check_index(named, here, 2, 1)
    with pytest.raises(StartupError, match="needs 5 cards and there are 4"):
        gaudi_card_and_plugin_detection.check_index({}, here, 0, 5)
    assert gaudi_card_and_plugin_detection.variables({}, here, 0, 2) == {
        gaudi_card_and_plugin_detection.VISIBLE: "0,1,2,3"
    }
    assert gaudi_card_and_plugin_detection.variables({}, here, 3, 1) == {
        gaudi_card_and_plugin_detection.VISIBLE: "0,1,2,3"
    }
    assert (
        gaudi_card_and_plugin_detection.variables({}, here, 0, 1)
        == gaudi_card_and_plugin_detection.variables(named, here, 0, 2)
        == {}
    )


def test_a_container_with_some_of_the_hosts_cards(tmp_path: Path) -> None:
    """The kernel shows it all eight, with their modules; two have device files."""
    put_cards(tmp_path, 8)
    for number in (0, 1, 2, 3, 4, 7):
        (tmp_path / f"dev/accel/accel{number}").unlink()
    here = gaudi_card_and_plugin_detection.find_machine({gaudi_card_and_plugin_detection.ROOT: str(tmp_path)})
    assert here == gaudi_card_and_plugin_detection.Machine(8, 2, (5, 6), "1.24.1")
    assert gaudi_card_and_plugin_detection.describe({}, here) == "8 cards, 2 of them here (modules 5-6), driver 1.24.1"
    assert gaudi_card_and_plugin_detection.variables({}, here, 0, 2) == {gaudi_card_and_plugin_detection.VISIBLE: "5,6"}
    assert gaudi_card_and_plugin_detection.visible({gaudi_card_and_plugin_detection.VISIBLE: "0,1"}, here) == (0, 1), (
        "its numbers may be its own"
    )
    with pytest.raises(StartupError, match="needs 4 cards and there are 2"):
        gaudi_card_and_plugin_detection.check_index({}, here, 0, 4)


def test_a_plug_in_that_is_already_in_decides_the_mode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A script that imports torch before trencadis has let it in; what was not asked for is adopted, and said."""
    own = ("2.9.0+hpu_1.23.1-25.git8598e6d", "1.23.1.25")
    eager = SimpleNamespace(is_lazy=lambda: False)
    monkeypatch.setitem(sys.modules, "habana_frameworks.torch.utils.internal", eager)
    environ, found = settled(monkeypatch, tmp_path / "m", *own)
    assert environ[gaudi_mode_and_env.MODE] == "0" and "imported before Trencadis could ask" in found.lines[0]
    with pytest.raises(StartupError, match="asks for lazy mode and the plug-in runs in eager mode"):
        settled(monkeypatch, tmp_path / "m", *own, env={gaudi_mode_and_env.MODE: "1"})


def test_the_mode_is_known_ahead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The planner asks before anything is settled."""
    put_cards(tmp_path, 1)
    for torch, plugin in PUBLISHED.items():
        monkeypatch.setattr(
            gaudi_card_and_plugin_detection, "find_stack", lambda t=torch, p=plugin: Stack(p, t, None, True)
        )
        assert gaudi_mode_and_env.will_be_lazy(
            {gaudi_card_and_plugin_detection.ROOT: str(tmp_path)}
        ) is torch.startswith(LAZY_UNSET)
        assert gaudi_mode_and_env.will_be_lazy({gaudi_card_and_plugin_detection.ROOT: str(tmp_path / "none")})
        assert not gaudi_mode_and_env.will_be_lazy({gaudi_mode_and_env.MODE: "0"})


# The folder of recipes


def test_recipes_are_kept_apart_by_stack_and_rank(tmp_path: Path) -> None:
    env = {hpu_process_setup.CACHE: str(tmp_path)}
    values = {
        hpu_process_setup.settle_recipe_cache(env, name, rank).value
        for name in ("1.24.1-torch-2.11", "1.24.2-torch-2.13")
        for rank in (0, 1)
    }
    assert len(values) == 4 and all(re.fullmatch(rf"{tmp_path}/recipes/.*/rank[01],false,\d+", v) for v in values)


def test_unfinished_recipes_are_removed_and_others_stay(tmp_path: Path) -> None:
    """A disk that was full or a kill leaves an empty file, or a recipe without its other half."""
    env = {hpu_process_setup.CACHE: str(tmp_path)}
    folder = Path(hpu_process_setup.settle_recipe_cache(env, "s").value.partition(",")[0])
    for name, text in (("1.recipe", "r"), ("1.metadata", "m"), ("2.recipe", "r"), ("3.recipe", ""), ("3.metadata", ""),
                       ("4.metadata", "m"), ("notes.txt", "")):  # fmt: skip
        (folder / name).write_text(text)
    found = hpu_process_setup.settle_recipe_cache(env, "s")
    assert found.value and found.lines == (f"3 files of unfinished recipes were removed from {folder}",)
    assert {p.name for p in folder.iterdir()} == {"1.recipe", "1.metadata", "4.metadata", "notes.txt"}


def failing(number: int) -> Any:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", [30, 28, 13])
def test_a_folder_that_cannot_be_written_costs_time_and_no_start(
    number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Read-only, full, not ours: one line, no variable, and the plug-in never meets it."""
    monkeypatch.setattr("tempfile.NamedTemporaryFile", failing(number))
    found = hpu_process_setup.settle_recipe_cache({hpu_process_setup.CACHE: str(tmp_path)}, "s")
    (line,) = found.lines
    assert not found.variables and os.strerror(number) in line and "TRENCADIS_CACHE" in line and "\n" not in line
    kept = hpu_process_setup.settle_recipe_cache({hpu_process_setup.CONFIG: f"{tmp_path},false,100"}, "s")
    assert "recipes in it are used, new ones are not kept" in kept.lines[0] and not kept.variables


def test_a_disk_that_is_nearly_full_keeps_no_recipes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100 << 20))
    found = hpu_process_setup.settle_recipe_cache({hpu_process_setup.CACHE: str(tmp_path)}, "s")
    assert not found.variables and "100 MiB left" in found.lines[0]
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=4000 << 20))
    assert hpu_process_setup.settle_recipe_cache({hpu_process_setup.CACHE: str(tmp_path)}, "s").value.endswith(
        ",false,2000"
    )


@pytest.mark.parametrize("value", ["/x,maybe,3", "/x,false,many", "/x,false,1,false,2"])
def test_a_recipe_setting_that_the_plug_in_would_end_for_is_refused(value: str) -> None:
    with pytest.raises(StartupError, match="whether to empty it first"):
        hpu_process_setup.settle_recipe_cache({hpu_process_setup.CONFIG: value}, "s")


def test_a_recipe_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in ("file", "file/below"):
        with pytest.raises(StartupError, match=r"is no folder|cannot be made"):
            hpu_process_setup.settle_recipe_cache({hpu_process_setup.CONFIG: f"{tmp_path / folder},false,9"}, "s")
    assert (
        hpu_process_setup.settle_recipe_cache({hpu_process_setup.CONFIG: f"{tmp_path / 'new' / 'one'},false,9000"}, "s")
        == hpu_process_setup.RecipeCache()
    )
    assert (tmp_path / "new" / "one").is_dir()
    for text in ("", ",false,9"):
        found = hpu_process_setup.settle_recipe_cache({hpu_process_setup.CONFIG: text}, "s")
        assert "every start compiles again" in found.lines[0] and found.removed == (hpu_process_setup.CONFIG,)


# torch


def test_a_torch_that_is_missing_or_too_old_is_one_line() -> None:
    for build, says in (
        (None, r"pip install 'trencadis\[cpu\]'"),
        (TorchBuild("2.5.1a0+git6fc067b"), "older than 2.6"),
    ):
        with pytest.raises(StartupError, match=says):
            torch_detection.check_version(build)
    assert torch_detection.check_version(TorchBuild("2.6.0+hpu_1.20.0-543.git4952fce")) == ""
    assert "newer than 2.13" in torch_detection.check_version(TorchBuild("2.14.0"))


def test_the_version_is_read_from_the_files_that_python_would_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('imported')")
    (tmp_path / "torch" / "version.py").write_text("cuda = None\n__version__ = '2.9.0+hpu_1.23.1-25.git8598e6d'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch")
    found = torch_detection.find_torch()
    assert found == TorchBuild("2.9.0+hpu_1.23.1-25.git8598e6d", str(tmp_path / "torch")) and found.numbers == (2, 9)


def test_the_containers_that_are_named() -> None:
    base = "vault.habana.ai/gaudi-docker"
    for plugin, lazy, name in (
        ("1.24.1.482", False, "1.24.1/ubuntu24.04/habanalabs/pytorch-upstream-installer-2.11.0"),
        ("1.24.1.482", True, "1.24.1/ubuntu24.04/habanalabs/pytorch-installer-2.11.0"),
        ("1.23.1.25", False, "1.23.1/ubuntu24.04/habanalabs/pytorch-installer-2.9.0"),
        (None, False, "1.24.2/ubuntu24.04/habanalabs/pytorch-upstream-installer-2.13.0"),
        ("git123", False, "1.24.2/ubuntu24.04/habanalabs/pytorch-upstream-installer-2.13.0"),
    ):
        assert gaudi_card_and_plugin_detection.image(plugin, lazy) == f"{base}/{name}"


def test_other_devices_keep_plug_ins_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken plug-in of a card that is not asked for must not end a start on another device."""
    for device in ("cpu", "auto", "cuda"):
        environ: dict[str, str] = {}
        process.prepare_device_env(device, environ)
        assert environ == {torch_detection.AUTOLOAD: "0"}
    monkeypatch.setattr(devices, "entry_points", lambda group: [])
    environ = {torch_detection.AUTOLOAD: "1"}
    process.prepare_device_env("cpu", environ)
    assert environ == {torch_detection.AUTOLOAD: "1"}


def test_an_emulated_process_says_so_and_keeps_the_plug_in_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environ, found = settled(monkeypatch, tmp_path / "m", "2.13.0+cpu", None, cards=0)
    assert environ[gaudi_mode_and_env.MODE] == "1" and environ[torch_detection.AUTOLOAD] == "0"
    assert found.lines == ("hpu: emulated, lazy mode (graphs exist in lazy mode alone)",)
    assert not gaudi_mode_and_env.find_capability(environ).real
