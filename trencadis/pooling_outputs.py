"""What offline pooling calls answer with, named as vLLM names them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


@dataclass(slots=True)
class PoolingOutput:
    """``data``: float32 [width]: an embedding or probabilities (a numpy array); [tokens, width] of a token task."""

    data: NDArray[np.float32]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PoolingOutput) and np.array_equal(self.data, other.data)


@dataclass(slots=True)
class EmbeddingOutput:
    """One embedding."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Its length."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """The probability of each class, in the order of the checkpoint's labels."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """How many there are."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """How well a pair fits."""

    score: float


@dataclass(slots=True)
class PoolingRequestOutput(Generic[T]):
    """What one prompt gave; ``outputs`` is one of the classes above."""

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True

    @classmethod
    def like(cls, other: PoolingRequestOutput[Any], outputs: T) -> Self:
        """``outputs`` for the prompt of ``other``."""
        return cls(other.request_id, outputs, other.prompt_token_ids, other.num_cached_tokens, other.finished)


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """Of ``embed``."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """Of ``classify``."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """Of ``score``."""
