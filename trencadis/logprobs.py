"""Log-probabilities, single or many as flat lists (``SamplingParams.flat_logprobs``), which need few objects for
any number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token; ``rank`` 1 is the most likely."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class FlatLogprobs(Sequence[Any]):
    """A sequence of ``{token id: log-probability}``, one per position; a position without any is empty.

    The ids of position ``i``, the token itself first, are ``token_ids[start_indices[i]:end_indices[i]]``; ``logprobs``,
    ``ranks`` and ``decoded_tokens`` have the same indices. Positions are only appended.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    def append(self, position: Mapping[int, Logprob] | None) -> None:
        """Adds a position; None adds an empty one."""
        self.start_indices.append(len(self.token_ids))
        for token, one in (position or {}).items():
            self.token_ids.append(token)
            self.logprobs.append(one.logprob)
            self.ranks.append(one.rank)
            self.decoded_tokens.append(one.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def extend(self, positions: Iterable[Mapping[int, Logprob] | None]) -> None:
        """Adds positions in order."""
        for place in positions:
            self.append(place)

    def copy(self) -> FlatLogprobs:
        """Returns the same positions in new lists."""
        return self[:]

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            made = FlatLogprobs()
            made.extend(self[i] for i in range(*index.indices(len(self))))
            return made
        at = range(self.start_indices[index], self.end_indices[index])
        return {self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i]) for i in at}

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))
