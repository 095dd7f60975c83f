"""Intel Gaudi (HPU), or an emulation of one where no Gaudi is present.

Torch-free to import, because the planner reads ``policy`` without a device; the device's half is imported when a
backend is made.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from trencadis.backends.hpu.shape_policy import policy as pick_policy
from trencadis.core.errors import StartupError

if TYPE_CHECKING:
    import torch

    from trencadis.core.device.backend import Backend, BackendConfig

__all__ = ["cards", "describe", "listing", "make_backend", "pick_dtype", "pick_policy", "probes", "usable"]

ALIASES = {"float": "float32", "half": "float16"}
TAKEN = ("bfloat16", "float32")
"""The dtypes that models are served in."""

log = logging.getLogger("trencadis.engine")


def make_backend(cfg: BackendConfig) -> Backend:
    """Builds the HPU backend for ``core.device.backend.load("hpu")``."""
    from trencadis.backends.hpu.backend import HpuBackend

    return HpuBackend(cfg, pick_policy((cfg.options or {}).get("policy", "")))


def pick_dtype(asked: str, stored: str) -> torch.dtype:
    """Returns the dtype for ``asked`` (``--dtype``): ``auto`` is bfloat16, whatever the checkpoint stores.

    float16 becomes bfloat16 too, with a line, as in vLLM's plugin: cards have it, for a part of the operations that
    bodies need, and its range is too small for the activations of these models.

    Raises:
        StartupError: a dtype that is no such name.
    """
    import torch

    name = "bfloat16" if asked == "auto" else ALIASES.get(asked, asked)
    if name == "float16":
        log.warning("hpu: --dtype %s: bfloat16 is used instead, which takes as much memory and is as fast", asked)
        name = "bfloat16"
    if name not in TAKEN:
        raise StartupError(f"--dtype {asked} is not supported on hpu; use {' or '.join(TAKEN)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def describe(index: int = 0) -> list[tuple[str, str]]:
    """Returns what this process would run on, as rows of ``trencadis check-hpu``; imports nothing of the device.

    Raises:
        StartupError: one line about a stack, a mode or a card that cannot be used.
    """
    from trencadis.backends.hpu.start import gaudi_mode_and_env

    return gaudi_mode_and_env.find_capability(os.environ, index).rows()


def probes(index: int = 0) -> Iterator[tuple[str, Callable[[], str]]]:
    """Opens the card; yields (name, function to run) for each line of ``trencadis check-hpu`` that needs it.

    Raises:
        StartupError: the card cannot be opened.
    """
    from trencadis.backends.hpu.start import bridge_loader
    from trencadis.backends.hpu.start import check_hpu_card as module

    bridge = bridge_loader.open_bridge(index, hccl=True)
    free, total = bridge.mem_get_info()
    yield "card", lambda: f"{bridge.device_name()}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    yield from module.probes(bridge)


def cards(policy: str, environ: Mapping[str, str]) -> tuple[int, str] | None:
    """Returns how many cards a process may use, and the same in words. Reads files only.

    None if the card is emulated, or if there are cards that cannot be opened.

    Raises:
        StartupError: ``HABANA_VISIBLE_MODULES`` cannot be read.
    """
    from trencadis.backends.hpu.start import gaudi_card_and_plugin_detection, gaudi_mode_and_env

    here = gaudi_card_and_plugin_detection.find_machine(environ)
    try:
        if (
            gaudi_mode_and_env.choose(environ, here, gaudi_card_and_plugin_detection.find_stack())
            == gaudi_mode_and_env.EMULATED
        ):
            return None
    except StartupError:
        return None if here.cards else (0, "there is none here")
    return gaudi_card_and_plugin_detection.usable(environ, here)


def listing() -> list[str]:
    """Returns one line for each card that this process may use."""
    from trencadis.backends.hpu.start import gaudi_card_and_plugin_detection

    here = gaudi_card_and_plugin_detection.find_machine(os.environ)
    named = gaudi_card_and_plugin_detection.visible(os.environ, here)
    ids = named if named is not None else here.modules
    return [f"hpu:{i}    Gaudi, {f'module {ids[i]}' if i < len(ids) else 'module unknown'}"
            for i in range(len(named) if named is not None else here.nodes)]  # fmt: skip


def usable() -> str:
    """Returns why no Gaudi of this machine can serve; an empty string if one can."""
    from trencadis.backends.hpu.start import gaudi_card_and_plugin_detection, gaudi_mode_and_env

    if not gaudi_card_and_plugin_detection.find_machine(os.environ).cards:
        return "there is none; --device hpu emulates one"
    try:
        gaudi_mode_and_env.find_capability(os.environ)
    except StartupError as error:
        return str(error)
    return ""
