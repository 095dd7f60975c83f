"""Loads what drafts beside a model on one rank, a smaller model or a head of EAGLE-3, and allocates its tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol, cast

from trencadis.core.checkpoint import model_registry
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.weight_file_reader import open_weights
from trencadis.core.device.backend import Backend, BackendConfig, Body
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.launches.kv_cache_and_state_allocation import kv_cache, sampler_state
from trencadis.core.media_spans import RESERVED_ROWS
from trencadis.core.memory.memory_estimator import row_blocks
from trencadis.core.models import model_loader
from trencadis.core.models.decoder import Decoder
from trencadis.core.models.eagle3 import FROM_TARGET, Eagle3Head, HeadState, StateProjection
from trencadis.core.models.model_and_ops_api import Model, Persistent
from trencadis.core.spec.draft_checkpoint import Drafter, EagleConfig, sizes_of

DraftingModel = Decoder | Eagle3Head
"""A loaded draft model or head."""


class SharedDevice(Protocol):
    """Additional attributes of a backend with planned shapes, on whose device a second model can run."""

    cfg: BackendConfig

    def beside(self, cfg: BackendConfig) -> Backend:
        """Returns a backend for a second model, which shares the device's memory, its order of launches and its count
        of compilations.
        """
        ...


def open_beside(backend: Backend, draft: ModelConfig) -> Backend:
    """Returns a backend for a draft model on the device of the target's ``backend``."""
    shared, text = cast(SharedDevice, backend), draft.text
    full = text.full_heads
    return shared.beside(dataclasses.replace(
        shared.cfg,
        max_blocks_per_row=row_blocks(text, shared.cfg.block_size),
        vocab_size=text.vocab,
        heads=text.heads,
        kv_heads=text.kv_heads,
        head_dim=text.head_dim,
        full_kv_heads=full.kv_heads if full is not None else 0,
        full_head_dim=full.head_dim if full is not None else 0,
        vision_head_dim=0,
        windows=text.windows,
        upto=text.upto,
        recurrent=False,
        sinks=text.sinks,
        options={**(shared.cfg.options or {}), **model_registry.family_options(draft.architecture)},
    ))  # fmt: skip


def load_drafter(config: EngineConfig, drafter: Drafter | None, target: Model) -> DraftingModel | None:
    """Loads the weights of what drafts for ``target``; None: nothing does.

    On devices with planned shapes it gets a backend of its own on the same device.

    Raises:
        StartupError: weights are missing or have another shape, or the target keeps no states for a head; one line.
    """
    if drafter is None:
        return None
    if not isinstance(target, Decoder):
        raise StartupError(f"{sizes_of(drafter).name}: nothing drafts beside {target.config.architecture}")
    backend = target.backend
    own = open_beside(backend, sizes_of(drafter)) if backend.policy.rules else backend
    if isinstance(drafter, EagleConfig):
        return load_head(drafter, own, target)
    return load_draft(config, drafter, own)


def load_head(head: EagleConfig, backend: Backend, target: Decoder) -> Eagle3Head:
    """Loads a head of EAGLE-3, and lets the launches of ``target`` end with its projection of their states."""
    projection = StateProjection(target.ops, target.backend.comm)
    made = Eagle3Head(head.sizes, backend, head.vocab, target.embedding, projection, head.norm_first)
    weights = open_weights(head.path)
    made.load(weights, head.path.name)
    weights.forget()
    target.tap(head.taps, projection)
    return made


def load_draft(config: EngineConfig, draft: ModelConfig, backend: Backend) -> Decoder:
    """Loads the weights of a draft model."""
    own = dataclasses.replace(config, model=str(draft.path), packed_weights_dir="")
    model = Decoder(draft, backend)
    model_loader.load_model(draft, backend, own, model)
    return model


def allocate_draft(
    model: Model, backend: Backend, target: Persistent, blocks: int, block_size: int,
    charge: Callable[[str], object] = lambda row: None,
) -> Persistent:  # fmt: skip
    """Allocates a draft model's tensors: KV of its own in as many blocks, hidden rows, and state that nothing reads.

    Sampled tokens of the target are read from the target's state. ``charge`` is called after each allocation with the
    ledger's row for it.
    """
    text = model.config.text
    kv = kv_cache(model.config, backend, blocks, block_size)
    charge("profile")
    hidden = backend.zeros((len(target.hidden), text.width), backend.dtype)
    charge("hidden")
    arena = backend.zeros((RESERVED_ROWS, text.width), backend.dtype)
    charge("arena")
    state = sampler_state(model.config, backend, 0)._replace(last=target.state.last)
    charge("state")
    return Persistent(kv=kv, hidden=hidden, arena=arena, state=state)


def allocate_head(
    head: Eagle3Head, backend: Backend, target: Persistent, blocks: int, block_size: int,
    charge: Callable[[str], object] = lambda row: None,
) -> HeadState:  # fmt: skip
    """Allocates a head's tensors, and those in which ``target`` leaves what the head reads; ``charge``: as above."""
    rows, width = len(target.hidden), head.config.text.hidden
    (kv,) = kv_cache(head.config, backend, blocks, block_size)
    charge("profile")
    made = HeadState(
        kv, backend.zeros((rows, width), backend.dtype), backend.zeros((FROM_TARGET + 2 * rows, width), backend.dtype)
    )  # fmt: skip
    charge("hidden")
    return made


class HeldDraft:
    """Allocates and binds the tensors of what drafts, and replaces its KV cache.

    Args:
        blocks: of the first KV cache, as many as the target's.
    """

    def __init__(
        self, model: DraftingModel, backend: Backend, target: Persistent, blocks: int, block_size: int,
        charge: Callable[[str], object] = lambda row: None,
    ) -> None:  # fmt: skip
        self.model, self._backend = model, backend
        self._tensors: Persistent | None = None
        args = (backend, target, blocks, block_size, charge)
        if isinstance(model, Eagle3Head):
            model.bind(allocate_head(model, *args), target)
        else:
            self._tensors = allocate_draft(model, *args)
            model.bind(self._tensors)

    def set_kv(self, blocks: int, block_size: int) -> None:
        """Allocates a KV cache in place of the earlier one."""
        found = kv_cache(self.model.config, self._backend, blocks, block_size)
        if isinstance(self.model, Eagle3Head):
            self.model.set_kv(found[0])
        else:
            assert self._tensors is not None
            self._tensors.kv = found
            self.model.bind(self._tensors)


def list_bodies(model: DraftingModel, end: str = "") -> dict[str, Body]:
    """Returns the bodies of the launches of what drafts by their keys, which get ``end``."""
    if isinstance(model, Eagle3Head):
        return {f"text{end}": model.text, f"greedy{end}": model.head}
    return {
        f"text{end}": model.text,
        f"greedy{end}": lambda t: model.head(t, False),
        f"full{end}": lambda t: model.head(t, True),
    }
