"""Settings of the HTTP side: the server's configuration, and the served model."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

from trencadis import __version__
from trencadis.core.config import EngineConfig
from trencadis.core.memory.host_memory import limited_budget
from trencadis.server.admission import Bounds
from trencadis.server.config.config import ServerConfig
from trencadis.server.front.shared_process_state import SharedProcessState

PIXEL_BYTES = 6
"""Bytes of a resized pixel in this process (``Bounds``)."""
PIXEL_SHARE = 1 / 3
"""Largest share of the memory of this machine or container for pixels of requests, unless a flag bounds them."""
BODY_SHARE = 1 / 12
"""Largest share for bodies of requests."""


@dataclass(frozen=True)
class HttpSettings:
    """The server's flags as ``config``, and settings that come from elsewhere.

    Args:
        model_root: the model as the user named it; its name in the API where ``--served-model-name`` gives none.
        device: as asked for; /metrics and the log name it until the engine is up.
        max_running: requests that run at a time, which the bound of the queue does not count.
        priorities: whether the scheduler heeds them.
        engine: the engine's flags, without secrets.
        shared: what this process has as one of several that answer.
    """

    config: ServerConfig = field(default_factory=ServerConfig)
    model_root: str = ""
    device: str = ""
    max_running: int = 0
    priorities: bool = False
    engine: EngineConfig = field(default_factory=EngineConfig)
    shared: SharedProcessState | None = None

    @cached_property
    def served_names(self) -> tuple[str, ...]:
        """The names that requests may use."""
        return tuple(self.config.served_model_name) or (self.model_root or "model",)

    @cached_property
    def name(self) -> str:
        """The first name, which metrics and answers carry."""
        return self.served_names[0]

    @property
    def bounds(self) -> Bounds:
        """The limits of what may be inside the server at a time."""
        config, usual = self.config, Bounds()
        waiting = config.max_num_queued_reqs
        return Bounds(
            usual.requests if waiting is None else waiting + self.max_running,
            config.max_num_queued_tokens or usual.tokens,
            config.max_num_queued_pixels or limited_budget(usual.pixels * PIXEL_BYTES, PIXEL_SHARE) // PIXEL_BYTES,
            limited_budget(config.max_queued_body_bytes, BODY_SHARE),
        )

    @cached_property
    def fingerprint(self) -> str | None:
        """The ``system_fingerprint``, in the form that ``--fingerprint-mode`` sets."""
        mode, ranks = self.config.fingerprint_mode, self.engine.tensor_parallel_size
        if mode in ("custom", "none"):
            return (self.config.fingerprint_value or None) if mode == "custom" else None
        what = "|".join((__version__, *self.served_names, self.model_root))
        shared = f"-tp{ranks}" if mode == "full" and ranks > 1 else ""
        return f"trencadis-{__version__}{shared}-{hashlib.sha256(what.encode()).hexdigest()[:8]}"
