"""The part of a model that one pipeline stage holds. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class StageShare:
    """Layers [first, stop) of a decoder on stage ``stage`` of ``stages``.

    The first stage also holds the vision tower, the arena with its output rows and the embedding; the last one also
    holds the final norm, the head and the sampler state.
    """

    first: int
    stop: int
    stage: int = 0
    stages: int = 1

    @cached_property
    def starts(self) -> bool:
        """True on the first stage, where tokens are embedded."""
        return self.stage == 0

    @cached_property
    def ends(self) -> bool:
        """True on the last stage, where tokens are sampled."""
        return self.stage == self.stages - 1

    @property
    def layers(self) -> range:
        """The decoder layers of this stage."""
        return range(self.first, self.stop)

    def holds(self, name: str) -> bool:
        """Returns True if this stage needs a weight, given its canonical name.

        The embedding table counts for the last stage, too, since it may be tied to the head.
        """
        top, _, rest = name.partition(".")
        if top == "layers":
            number = rest.partition(".")[0]
            return not number.isdigit() or int(number) in self.layers
        if top in ("norm", "lm_head", "project_out", "score", "score_dense"):
            return self.ends
        if top == "visual" or top in ("project_in", "embed_positions", "embed_types", "embed_norm"):
            return self.starts
        return self.starts or self.ends
