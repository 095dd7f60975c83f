"""The actor that holds an engine's cards, or none: it runs the process and relays its bytes, which do not pass through
Ray.
"""

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
    """Actor in one bundle of the placement group, or on the node of an engine that requests cards from Ray itself."""

    def __init__(self) -> None:
        self._handle: EngineHandle | None = None
        self._relay: Relay | None = None

    def start(
        self, connect_info: bytes, start: bytes, server_fingerprint: Sequence[str], environ: Mapping[str, str]
    ) -> str:
        """Starts the engine's process and connects to the server; returns the error, else an empty string.

        Args:
            connect_info: an encoded ``ConnectInfo`` frame; ``start``: an encoded ``Start`` frame.
            server_fingerprint: the server's ``RankFingerprint``, field by field.
            environ: variables of the process.
        """
        target, asked = rank_messages.decode_down(connect_info), engine_messages.decode_down(start)
        assert isinstance(target, rank_messages.ConnectInfo)
        assert isinstance(asked, engine_messages.Start)
        try:
            own_print, server_print = compute_rank_fingerprint(asked.config.model), RankFingerprint(*server_fingerprint)
            if server_print.torch == "none":  # a server without cards needs no torch
                server_print = dataclasses.replace(server_print, torch=own_print.torch)
            differ = describe_differences(server_print, own_print)
            if differ:
                return f"the engine on {platform.node()} cannot join: {differ}; every node needs the same"
            os.environ.update(environ)
            # Ray sets it to the CPUs of an actor, which are none for actors with cards
            os.environ.pop("OMP_NUM_THREADS", None)
            for name in CARD_VARIABLES:  # Ray hides cards from an actor without cards, but the engine gets one later
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
        """Kills the engine process, which would end by itself once its socket is closed, but not while it holds the
        GIL.
        """
        if self._handle is not None:
            self._handle.kill()
