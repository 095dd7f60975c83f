"""The actor that holds a rank's card and runs its process; it never sees a Step."""

from __future__ import annotations

import os

from trencadis.core.devices import CARD_VARIABLES
from trencadis.core.executor import rank_messages
from trencadis.core.executor.engine_connection import HeadlessRanks


class RankActor:
    """One bundle of the placement group."""

    def __init__(self) -> None:
        self._ranks: HeadlessRanks | None = None

    def cards(self) -> dict[str, str]:
        """What this actor may see."""
        return {name: os.environ[name] for name in CARD_VARIABLES if os.environ.get(name)}

    def start(self, target: bytes) -> None:
        """Starts the rank's process, which ends with this actor."""
        told = rank_messages.decode_down(target)
        assert isinstance(told, rank_messages.ConnectInfo)
        self._ranks = HeadlessRanks([told])
