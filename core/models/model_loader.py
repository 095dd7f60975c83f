"""Creates the model of a checkpoint on a backend, and loads its weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.model_registry import family_of, import_object
from trencadis.core.device.backend import Backend
from trencadis.core.engine_config import EngineConfig
from trencadis.core.models.model_and_ops_api import Model

log = logging.getLogger("trencadis.engine")


def make_model(config: ModelConfig, backend: Backend) -> Model:
    """Creates the model of a checkpoint, without weights.

    Raises:
        StartupError: the architecture is not supported.
    """
    made: Callable[[ModelConfig, Backend], Model] = import_object(family_of(config.architecture).make)
    return made(config, backend)


def load_model(
    config: ModelConfig, backend: Backend, cfg: EngineConfig | None = None, made: Model | None = None
) -> Model:
    """Loads and packs the model of a checkpoint; with ``cfg.load_format`` "dummy" the weights are random.

    ``made``: the model, without weights; None: that of the architecture.

    Raises:
        StartupError: the architecture is not supported, or weights are missing, unreadable or have wrong shapes.
    """
    from trencadis.core.checkpoint.weight_file_reader import open_weights
    from trencadis.core.checkpoint.weight_source_interface import KeepingOps  # torch

    model = made or make_model(config, backend)
    cfg = cfg or EngineConfig()
    begun = time.perf_counter()
    keeping = backend.ops if isinstance(backend.ops, KeepingOps) else None
    mapped = keeping is not None and keeping.keeps()
    if cfg.packed_weights_dir and keeping is None:
        log.info("--packed-weights-dir has no effect: the %s backend packs no weights", backend.name)
    weights = open_weights(config.path, load_format=cfg.load_format, seed=cfg.seed, populate=not mapped)
    model.load(weights)
    kept = 0 if keeping is None else keeping.finish_loading()
    weights.forget()
    if weights.nbytes and backend.comm.rank == 0:
        _log_loading(weights.nbytes, kept, time.perf_counter() - begun)
    return model


def _log_loading(stored: int, kept: int, seconds: float) -> None:
    """Logs the loading speed: bytes of the checkpoint, or of weights that an earlier start had packed."""
    size, how = (kept / 1e9, "packed before, mapped") if kept else (stored / 1e9, "read and packed")
    log.info("weights: %.2f GB %s in %.2f s, %.2f GB/s", size, how, seconds, size / max(seconds, 1e-9))
