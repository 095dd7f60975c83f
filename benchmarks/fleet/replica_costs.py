"""A replica's sizes, and what its steps take."""

from __future__ import annotations

from dataclasses import dataclass

from trencadis.server.processes.replica_wait_prediction import StepCosts


@dataclass(frozen=True, slots=True)
class Machine:
    """Seconds of a step, and sizes, of a 7B model on one card.

    Args:
        block: tokens of a KV block; ``blocks``: of them.
        tokens: of one step at most; ``rows``: requests that run at a time.
        arena: rows of the image arena, which are placeholder tokens.
        encoder: VISION slots of a step at most.
    """

    step: float = 8e-3
    token: float = 5e-5
    row: float = 5e-5
    slot: float = 2e-5
    block: int = 128
    blocks: int = 2000
    tokens: int = 2048
    rows: int = 128
    arena: int = 32768
    encoder: int = 16384

    def seconds(self, prompts: int, rows: int, slots: int) -> float:
        """Of a step with so many tokens of prompts, decoding rows and VISION slots."""
        return self.step + self.token * prompts + self.row * rows + self.slot * slots

    def costs(self) -> StepCosts:
        """The same as the router knows them."""
        return StepCosts(self.token, self.slot, self.step, self.row, self.tokens)
