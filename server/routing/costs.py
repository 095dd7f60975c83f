"""What a replica's steps cost, in seconds, learned from the launches that its engine reports."""

from __future__ import annotations

from dataclasses import dataclass

RECENT = 0.05
"""Weight of a new launch in a mean."""


@dataclass(slots=True)
class StepCosts:
    """Seconds of one replica: of a prompt's token, of a VISION slot, of a step, and what each decoding row adds to it.

    The values at the start stand for a 7B model on one card; only their proportions matter until launches are known,
    because all replicas start with the same.

    Args:
        chunk: prompt tokens of one step at most.
    """

    token: float = 5e-5
    slot: float = 2e-5
    step: float = 8e-3
    row: float = 5e-5
    chunk: int = 2048

    def prefilled(self, tokens: int, seconds: float) -> None:
        """A launch computed ``tokens`` tokens of prompts."""
        if tokens > 0 and seconds > 0:
            self.token += RECENT * (seconds / tokens - self.token)

    def encoded(self, slots: int, seconds: float) -> None:
        """A launch encoded pictures of ``slots`` slots."""
        if slots > 0 and seconds > 0:
            self.slot += RECENT * (seconds / slots - self.slot)

    def decoded(self, rows: int, seconds: float) -> None:
        """A launch computed one token of ``rows`` rows each; what a row adds is a small part of it."""
        if rows > 0 and seconds > 0:
            self.step += RECENT * (max(seconds - rows * self.row, 0.0) - self.step)
            self.row += RECENT * (min(self.row, seconds / rows) - self.row)
