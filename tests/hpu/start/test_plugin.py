"""Which mode an installed plug-in is run in, by published versions, and the line where it cannot be used."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from trencadis.backends.hpu.start import bridge_loader, gaudi_card_and_plugin_detection, gaudi_mode_and_env
from trencadis.backends.hpu.start.gaudi_card_and_plugin_detection import Stack
from trencadis.core.errors import StartupError

OWN = {
    "2.5.1a0+git6fc067b": "1.19.0.561",
    "2.6.0+git1234567": "1.20.0.543",
    "2.6.0+hpu_1.20.0-543.git4952fce": "1.20.0.543",
    "2.6.0+hpu.1.20.0.543.git4952fce": "1.20.0.543",
    "2.6.0+hpu-1.21.2-76.gitabf798b": "1.21.2.76",
    "2.6.0+hpu_1.21.2-76.gitabf798b": "1.21.2.76",
    "2.6.0+hpu.git99dbd97": "1.21.0.555",
    "2.7.1+HPU_1.22.0-740.git1a2b3c4": "1.22.0.740",
    "2.9.0+hpu_1.23.1-25.git8598e6d": "1.23.1.25",
}
"""Gaudi's builds of torch, and a plug-in of the same release."""

STOCK = ("2.13.0+cpu", "2.9.0+cu128", "2.9.0", "2.9.0+xpu", "2.13.0a0+cpu.git4f32d03", "2.9.0+rocm6.4")


def mode(plugin: str | None, torch: str, **env: str) -> str:
    """What PT_HPU_LAZY_MODE is set to."""
    found = Stack(plugin, torch, torch.partition("+")[0], True)
    return "1" if gaudi_mode_and_env.pick_mode(env, found)[0] else "0"


@pytest.mark.parametrize("torch", OWN)
def test_gaudis_torch_runs_lazy_where_the_plug_in_offers_it(torch: str) -> None:
    assert mode(OWN[torch], torch) == "1"
    assert mode("1.24.0.1", torch) == "0", "later ones run it where it is asked for"
    assert mode("1.24.0.1", torch, PT_HPU_LAZY_MODE="1") == "1"
    assert mode("2.0.0", torch) == "0"
    for name, value in (("PT_HPU_LAZY_MODE", "0"), ("VLLM_BRIDGE_MODE", "eager")):
        if torch.startswith("2.9"):
            assert mode(OWN[torch], torch, **{name: value}) == "0"
        else:
            with pytest.raises(StartupError, match=r"needs torch 2\.9 or newer, and torch .* is here: unset it"):
                mode(OWN[torch], torch, **{name: value})


@pytest.mark.parametrize("torch", STOCK)
def test_other_torches_have_no_lazy_mode(torch: str) -> None:
    assert mode("1.23.1.25", torch) == "0"
    with pytest.raises(StartupError, match=r"upstream one: unset it .* container .*/1.23.1/.*/pytorch-installer-2.9.0"):
        mode("1.23.1.25", torch, PT_HPU_LAZY_MODE="1")


@pytest.mark.parametrize("plugin", ["", "unknown", "0+local", "git8598e6d"])
def test_a_plug_in_whose_release_cannot_be_read_runs_eagerly(plugin: str) -> None:
    assert mode(plugin, "2.9.0+hpu_1.23.1-25.git8598e6d") == "0"


@pytest.mark.parametrize("value", ["true", "2", "lazy", " 1"])
def test_a_mode_that_the_plug_in_would_misread_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of its files read any text but 0 as lazy, another one reads a number."""
    for name in ("open_real", "import_module"):
        monkeypatch.setattr(bridge_loader, name, lambda *args: pytest.fail("refused before anything is imported"))
    monkeypatch.setitem(sys.modules, "trencadis.backends.hpu.emulator.emulated_bridge", None)
    for choice in ("real", "emulated"):
        monkeypatch.setattr(gaudi_mode_and_env, "choose", lambda *args, c=choice: c)
        with pytest.raises(StartupError, match=r"PT_HPU_LAZY_MODE=.*: 0 or 1"):
            bridge_loader.open_bridge(environ={"PT_HPU_LAZY_MODE": value})


BROKEN: dict[str, Exception] = {
    "another torch": AssertionError("Compile-time PyTorch 2.9 differs from run-time 2.13.0+cpu.\nmore\nlines"),
    "a stock torch without a local version": AttributeError("'NoneType' object has no attribute 'startswith'"),
    "half of a plug-in": ModuleNotFoundError("No module named 'habana_frameworks.torch.core'"),
    "a package beside it": ModuleNotFoundError("No module named 'symengine'"),
    "an old C library": OSError("/lib/libc.so.6: version `GLIBC_2.38' not found (required by libhabana.so)"),
    "a lazy stock torch": AssertionError("Stock PyTorch version 2.13.0+cpu is not supported in Lazy mode."),
    "a circle of imports": ImportError("cannot import name 'core' from partially initialized module"),
    "symbols of another torch": ImportError("libhabana_pytorch_plugin.so: undefined symbol: _ZN2at4"),
    "a library that is not there": OSError("libhabana_pytorch_plugin.so: cannot open shared object file"),
    "a library registered twice": RuntimeError("Only a single TORCH_LIBRARY can be used"),
    "nothing said": AssertionError(),
}


@pytest.mark.parametrize("lazy", ["0", "1"])
@pytest.mark.parametrize("what", BROKEN)
def test_a_mismatched_plug_in_is_one_line_that_says_what_to_do(
    what: str, lazy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> Any:
        raise BROKEN[what]

    monkeypatch.setattr(bridge_loader, "import_module", broken)
    versions(monkeypatch, "1.23.1.25", "2.13.0+cpu")
    with pytest.raises(StartupError) as raised:
        bridge_loader.open_real({"PT_HPU_LAZY_MODE": lazy})
    text = str(raised.value)
    assert "\n" not in text and type(BROKEN[what]).__name__ in text, text
    assert "habana-torch-plugin 1.23.1.25" in text and "torch 2.13.0+cpu" in text and "of one Gaudi release" in text
    assert "/1.23.1/ubuntu24.04/habanalabs/pytorch-installer-2.9.0" in text
    meant = [meaning for part, meaning in gaudi_mode_and_env.CAUSES if part in str(BROKEN[what])][:1]
    assert all(meaning in text for meaning in meant) and (meant or what == "nothing said")
    assert raised.value.__cause__ is None and "TRENCADIS_HPU_EMULATOR=1" in text


@pytest.mark.parametrize("lacks", ["mark_step", "wrap_in_hpu_graph", "synchronize", "mem_get_info"])
def test_a_plug_in_without_a_symbol_is_one_line_too(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin(monkeypatch, lacks=lacks)
    versions(monkeypatch, "1.16.0", "2.6.0+git1234")
    with pytest.raises(StartupError, match=f"AttributeError.*{lacks}.*of one Gaudi release"):
        bridge_loader.open_real({"PT_HPU_LAZY_MODE": "1"})


@pytest.mark.parametrize("fails", ["is_available", "device_count", "set_device", "get_device_name"])
def test_a_card_that_cannot_be_opened_is_one_line(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(*args: object) -> None:
        raise RuntimeError("synStatus=26 [Generic failure] Device acquire failed.\nbacktrace")

    failing: dict[str, Any] = {fails: taken}
    plugin(monkeypatch, **failing)
    with pytest.raises(StartupError, match=r"card 0 .*Device acquire failed.*hl-smi") as raised:
        bridge_loader.open_real({"PT_HPU_LAZY_MODE": "1"}, named=True)
    assert "\n" not in str(raised.value)


def plugin(monkeypatch: pytest.MonkeyPatch, lacks: str = "", **other: Any) -> None:
    """Every module of the plug-in at once, as far as opening a card needs it."""
    parts: dict[str, Any] = dict.fromkeys(
        ("mark_step", "wrap_in_hpu_graph", "synchronize", "mem_get_info", "get_device_name", "set_device",
         "metric_localcontext"), lambda *args: None,
    )  # fmt: skip
    parts |= {"is_lazy": lambda: True, "is_available": lambda: True, "device_count": lambda: 8, **other}
    made = SimpleNamespace(**{name: part for name, part in parts.items() if name != lacks})
    monkeypatch.setattr(bridge_loader, "import_module", lambda name: made)


def versions(monkeypatch: pytest.MonkeyPatch, plugin: str, torch: str) -> None:
    monkeypatch.setattr(gaudi_card_and_plugin_detection, "find_stack", lambda: Stack(plugin, torch, None, True))
