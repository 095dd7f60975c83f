"""Outputs of offline pooling calls, named as in vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


@dataclass(slots=True)
class PoolingOutput:
    """``data``: float32 [width], an embedding or probabilities (a numpy array); [tokens, width] for a token task."""

    data: NDArray[np.float32]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PoolingOutput) and np.array_equal(self.data, other.data)


@dataclass(slots=True)
class EmbeddingOutput:
    """An embedding."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Length of the embedding."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """Probability of each class, in the order of the checkpoint's labels."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """Relevance score of a pair."""

    score: float


@dataclass(slots=True)
class PoolingRequestOutput(Generic[T]):
    """Output for one prompt; ``outputs`` is one of the classes above."""

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True

    @classmethod
    def like(cls, other: PoolingRequestOutput[Any], outputs: T) -> Self:
        """Returns ``outputs`` as the output for the prompt of ``other``."""
        return cls(other.request_id, outputs, other.prompt_token_ids, other.num_cached_tokens, other.finished)


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """Output of ``embed`` for one prompt."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """Output of ``classify`` for one prompt."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """Output of ``score`` for one pair."""
