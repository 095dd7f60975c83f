"""Answers of the pooling routes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trencadis.core.json_types import JsonObject
from trencadis.server.protocol.base_request import Strict, Usage


class EmbeddingItem(Strict):
    """One embedding: numbers, or little-endian float32 in base64."""

    index: int
    object: Literal["embedding"] = "embedding"
    embedding: list[float] | str


class EmbeddingResponse(Strict):
    """``/v1/embeddings``."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[EmbeddingItem]
    usage: Usage


class PoolingItem(Strict):
    """What one prompt gave."""

    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float] | list[list[float]] | str


class PoolingResponse(Strict):
    """``/pooling``."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[PoolingItem]
    usage: Usage


class ClassItem(Strict):
    """The probability of each class, and the name of the likeliest."""

    index: int
    label: str | None = None
    probs: list[float]
    num_classes: int


class ClassifyResponse(Strict):
    """``/classify``."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ClassItem]
    usage: Usage


class ScoreItem(Strict):
    """The score of one pair."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreResponse(Strict):
    """``/score``."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ScoreItem]
    usage: Usage


class RankedDocument(Strict):
    """A document as the request gave it."""

    text: str | None = Field(default=None, exclude_if=lambda v: v is None)
    multi_modal: list[JsonObject] | None = Field(default=None, exclude_if=lambda v: v is None)


class RankedItem(Strict):
    """One document, by its index in the request, and how well it fits."""

    index: int
    document: RankedDocument | None = Field(default=None, exclude_if=lambda v: v is None)
    relevance_score: float


class RerankResponse(Strict):
    """``/rerank``: the best document first."""

    id: str
    model: str
    usage: Usage
    results: list[RankedItem]
