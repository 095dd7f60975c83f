"""The Ray actor that reserves a rank's card and runs its process; it takes no part in Steps."""

from __future__ import annotations

import os

from trencadis.core.devices import CARD_VARIABLES
from trencadis.core.executor import rank_messages
from trencadis.core.executor.engine_connection import HeadlessRanks


class RankActor:
    """Holds one bundle of the placement group."""

    def __init__(self) -> None:
        self._ranks: HeadlessRanks | None = None

    def cards(self) -> dict[str, str]:
        """Returns the variables that list the cards which this actor may use."""
        return {name: os.environ[name] for name in CARD_VARIABLES if os.environ.get(name)}

    def start(self, target: bytes) -> None:
        """Starts the rank's process, which ends together with this actor."""
        told = rank_messages.decode_down(target)
        assert isinstance(told, rank_messages.ConnectInfo)
        self._ranks = HeadlessRanks([told])
