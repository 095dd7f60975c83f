"""The backend under test: its constructor, its checkpoint, and the CPU reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from trencadis.backends.conformance.check_result import CheckFailed
from trencadis.backends.cpu import make_backend
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.model_registry import family_options
from trencadis.core.device import backend as seam
from trencadis.core.device.backend import Backend, BackendConfig
from trencadis.core.errors import StartupError

Make = Callable[[BackendConfig], Backend]


@dataclass
class CheckTarget:
    """One backend and the checkpoint that it is checked with.

    Args:
        name: value of ``--device``.
        make: ``make_backend`` of the backend's package.
        policy: name of the backend's policy; "": its serving policy.
        quick: test fewer shapes of each stage.
        index: number of the card.
    """

    name: str
    make: Make
    checkpoint: Path
    dtype: torch.dtype = torch.float32
    policy: str = ""
    quick: bool = False
    seed: int = 0
    index: int = 0
    shared: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def model(self) -> ModelConfig:
        """Configuration of the checkpoint."""
        return load_config(self.checkpoint)

    def backend(self, **options: str) -> Backend:
        """Makes a new instance, configured as an engine configures it at start-up."""
        return self.make(self._config({"policy": self.policy, **options}, self.dtype))

    def policy_of(self, field: str) -> bool:
        """Returns a switch of the device's policy, as it is before a model is known."""
        return bool(getattr(self.make(self._config({"policy": self.policy}, self.dtype)).policy, field))

    def reference(self, upto: bool = False) -> Backend:
        """Returns the CPU backend with reference ops, in float32."""
        return make_backend(replace(self._config({"ops": "reference", "policy": ""}, torch.float32), upto=upto))

    def backend_with(self, windows: tuple[int, ...] = (0,), upto: bool = False, sinks: bool = False) -> Backend:
        """Makes a backend for a model whose layers have these windows, or (``upto``) whose tokens see keys after
        their own position, or have ``sinks``.
        """
        made = self._config({"policy": self.policy}, self.dtype)
        return self.make(replace(made, windows=windows, upto=upto, sinks=sinks))

    @cached_property
    def block_size(self) -> int:
        """Smallest block size of the device, so that few tokens fill many blocks."""
        probe = self.make(self._config({"policy": self.policy}, self.dtype, 0))
        sizes = probe.policy.block_sizes
        if not sizes:
            raise CheckFailed("policy.block_sizes is empty")
        return min(sizes)

    def _config(self, options: Mapping[str, str], dtype: torch.dtype, block_size: int | None = None) -> BackendConfig:
        t, v = self.model.text, self.model.vision
        full = t.full_heads
        return BackendConfig(
            dtype=dtype, block_size=(block_size if block_size is not None else self.block_size) or 16,
            max_tokens=400, max_rows=16, max_blocks_per_row=256, index=self.index,
            vocab_size=t.vocab, heads=t.heads, kv_heads=t.kv_heads, upto=t.upto,
            recurrent=t.recurrent is not None, head_dim=t.head_dim, vision_head_dim=v.head_dim if v else 0,
            full_kv_heads=full.kv_heads if full else 0, full_head_dim=full.head_dim if full else 0,
            options={"threads": "1", **family_options(self.model.architecture), **options},
        )  # fmt: skip


def make_target(
    name: str, checkpoint: Path, *, dtype: str = "auto", policy: str = "", quick: bool = False
) -> CheckTarget:
    """Returns the target for ``--device NAME``. dtype ``auto`` is float32 if the backend supports it, ``serve`` what it
    serves a checkpoint of bfloat16 in.

    Raises:
        StartupError: there is no such backend, or it lacks ``pick_dtype`` or ``pick_policy``.
    """
    make = seam.load(name)
    package = import_module(make.__module__)
    for needed in ("pick_dtype", "pick_policy"):
        if not callable(getattr(package, needed, None)):
            raise StartupError(f"the module of {name}'s make_backend, {make.__module__}, lacks {needed}")
    package.pick_policy(policy)
    return CheckTarget(name, make, checkpoint, _dtype(package, dtype), policy, quick)


def _dtype(package: ModuleType, asked: str) -> torch.dtype:
    """Resolves a dtype; ``auto``: float32 if supported, else the device's default; ``serve``: what ``serve`` takes."""
    if asked == "serve":
        chosen: torch.dtype = package.pick_dtype("auto", "bfloat16")
        return chosen
    try:
        found: torch.dtype = package.pick_dtype("float32" if asked == "auto" else asked, "bfloat16")
    except StartupError:
        if asked != "auto":
            raise
        found = package.pick_dtype("auto", "bfloat16")
    return found
