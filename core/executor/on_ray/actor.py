"""The actor that holds a rank's card and runs its process; it never sees a Step."""

from __future__ import annotations

import os

from trencadis.core.devices import CARD_VARIABLES
from trencadis.core.executor import frames
from trencadis.core.executor.dial import Followers


class RankActor:
    """One bundle of the placement group."""

    def __init__(self) -> None:
        self._ranks: Followers | None = None

    def cards(self) -> dict[str, str]:
        """What this actor may see."""
        return {name: os.environ[name] for name in CARD_VARIABLES if os.environ.get(name)}

    def start(self, dial: bytes) -> None:
        """Starts the rank's process, which ends with this actor."""
        told = frames.decode_down(dial)
        assert isinstance(told, frames.Dial)
        self._ranks = Followers([told])
