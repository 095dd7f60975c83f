"""The actor that holds an engine's cards, or none: it runs the process and passes its bytes, of which Ray sees none."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Mapping, Sequence

from trencadis.core.devices import CARD_VARIABLES
from trencadis.core.errors import StartupError
from trencadis.core.executor import rank_messages
from trencadis.core.executor.engine_connection import connect_to_engine
from trencadis.core.executor.rank_fingerprint import RankFingerprint, compute_rank_fingerprint, describe_differences
from trencadis.core.links.socket_relay import Relay
from trencadis.core.process import engine_messages
from trencadis.server.engine.spawn import EngineHandle, spawn_engine


class EngineActor:
    """One bundle of the placement group, or an actor on the node of an engine that asks Ray for cards itself."""

    def __init__(self) -> None:
        self._handle: EngineHandle | None = None
        self._relay: Relay | None = None

    def start(
        self, connect_info: bytes, start: bytes, server_fingerprint: Sequence[str], environ: Mapping[str, str]
    ) -> str:
        """Starts the engine's process and reaches the server; why that cannot be, else empty.

        Args:
            connect_info: a frame of ``core.executor.rank_messages``; ``start``: one of ``engine_messages``.
            server_fingerprint: the server's ``RankFingerprint``, field by field.
            environ: variables of the process.
        """
        target, asked = rank_messages.decode_down(connect_info), engine_messages.decode_down(start)
        assert isinstance(target, rank_messages.ConnectInfo)
        assert isinstance(asked, engine_messages.Start)
        try:
            own_print, server_print = compute_rank_fingerprint(asked.config.model), RankFingerprint(*server_fingerprint)
            if server_print.torch == "none":  # a server without cards needs none
                server_print = dataclasses.replace(server_print, torch=own_print.torch)
            differ = describe_differences(server_print, own_print)
            if differ:
                return f"the engine on {platform.node()} cannot join: {differ}; every node needs the same"
            os.environ.update(environ)
            os.environ.pop("OMP_NUM_THREADS", None)  # Ray sets it to the CPUs of an actor, which are none beside cards
            for name in CARD_VARIABLES:  # Ray hides cards from an actor that takes none; the engine is given one later
                if os.environ.get(name) == "":
                    del os.environ[name]
            self._handle = spawn_engine(asked.config)
        except StartupError as error:
            return f"{platform.node()}: {error}"
        try:
            link = connect_to_engine(target)
        except StartupError as error:
            self._end()
            return (
                f"the engine on {platform.node()} does not reach the server at {target.address}:{target.port}: nodes "
                f"must "
                f"reach all its ports ({error})"
            )
        self._relay = Relay(self._handle.sock, link, lambda why: self._end())
        return ""

    def _end(self) -> None:
        """The process ends by itself once its socket is closed, but not while it holds the interpreter's lock."""
        if self._handle is not None:
            self._handle.kill()
