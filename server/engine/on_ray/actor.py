"""The actor that holds an engine's cards, or none: it runs the process and passes its bytes, of which Ray sees none."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Mapping, Sequence

from trencadis.core.devices import CARD_VARIABLES
from trencadis.core.errors import StartupError
from trencadis.core.executor import frames
from trencadis.core.executor.dial import dialled
from trencadis.core.executor.facts import Facts, differences, facts_of
from trencadis.core.links.relay import Relay
from trencadis.core.process import wire
from trencadis.server.engine.spawn import EngineHandle, spawn


class EngineActor:
    """One bundle of the placement group, or a place on the node of an engine that asks Ray for cards itself."""

    def __init__(self) -> None:
        self._handle: EngineHandle | None = None
        self._relay: Relay | None = None

    def start(self, dial: bytes, start: bytes, ours: Sequence[str], environ: Mapping[str, str]) -> str:
        """Starts the engine's process and reaches the server; why that cannot be, else empty.

        Args:
            dial: a frame of ``core.executor.frames``; ``start``: one of ``core.process.wire``.
            ours: the server's ``Facts``, in their order.
            environ: variables of the process.
        """
        told, asked = frames.decode_down(dial), wire.decode_down(start)
        assert isinstance(told, frames.Dial)
        assert isinstance(asked, wire.Start)
        try:
            mine, theirs = facts_of(asked.config.model), Facts(*ours)
            if theirs.torch == "none":  # a server without cards needs none
                theirs = dataclasses.replace(theirs, torch=mine.torch)
            differ = differences(theirs, mine)
            if differ:
                return f"the engine on {platform.node()} cannot join: {differ}; every node needs the same"
            os.environ.update(environ)
            os.environ.pop("OMP_NUM_THREADS", None)  # Ray sets it to the CPUs of an actor, which are none beside cards
            for name in CARD_VARIABLES:  # Ray hides cards from an actor that takes none; the engine is given one later
                if os.environ.get(name) == "":
                    del os.environ[name]
            self._handle = spawn(asked.config)
        except StartupError as error:
            return f"{platform.node()}: {error}"
        try:
            link = dialled(told)
        except StartupError as error:
            self._end()
            return (
                f"the engine on {platform.node()} does not reach the server at {told.address}:{told.port}: nodes must "
                f"reach all its ports ({error})"
            )
        self._relay = Relay(self._handle.sock, link, lambda why: self._end())
        return ""

    def _end(self) -> None:
        """The process ends by itself once its socket is closed, but not while it holds the interpreter's lock."""
        if self._handle is not None:
            self._handle.kill()
