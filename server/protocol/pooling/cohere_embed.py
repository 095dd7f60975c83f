"""``/v2/embed``: Cohere's embeddings of texts, of images, or of both together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from trencadis.core.errors import BadRequest
from trencadis.server.pooling.pooling_params import PoolingParams
from trencadis.server.protocol.base_request import FieldContext, Int, Strict, Texts
from trencadis.server.protocol.field_types import Text
from trencadis.server.protocol.pooling.pooling_requests import PoolingRequest

EmbeddingType = Literal["float", "binary", "ubinary", "base64"]


class CohereEmbedRequest(PoolingRequest):
    """One of ``texts``, ``images`` and ``inputs``; ``truncate`` says which end of a long one is cut."""

    input_type: Text | None = None
    texts: Texts | None = None
    images: Texts | None = None
    inputs: list[Any] | None = None
    output_dimension: Int | None = None
    embedding_types: Annotated[list[EmbeddingType], Field(max_length=4)] | None = None
    truncate: Literal["NONE", "START", "END"] = "END"
    max_tokens: Int | None = None

    def check(self) -> None:
        """See PoolingRequest."""
        super().check()
        given = [name for name in ("texts", "images", "inputs") if getattr(self, name)]
        if len(given) != 1:
            raise BadRequest("Give one of texts, images and inputs, and do not leave it empty.", param="texts")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise BadRequest("max_tokens must be at least 1.", param="max_tokens")
        if any(not text for text in self.texts or []):
            raise BadRequest("texts must not hold an empty text.", param="texts")

    def list_unused_fields(self, context: FieldContext) -> Iterator[str]:
        """See Body."""
        yield from super().list_unused_fields(context)
        if self.truncate_prompt_tokens is not None:
            yield "truncate_prompt_tokens"
        if not self.texts and not self.add_special_tokens:
            yield "add_special_tokens"

    def make_params(self) -> PoolingParams:
        """See PoolingRequest."""
        made = super().make_params()
        made.dimensions, made.truncate_prompt_tokens = self.output_dimension, None
        return made

    @property
    def count(self) -> int:
        """Inputs of the request."""
        return len(self.texts or self.images or self.inputs or [])

    @property
    def types(self) -> list[EmbeddingType]:
        """The forms in which each embedding is answered, without repetition."""
        return list(dict.fromkeys(self.embedding_types or ["float"]))

    @property
    def truncation(self) -> tuple[int | None, str]:
        """Tokens that are kept (-1: as many as the model takes; None: all), and the side that is cut."""
        if self.truncate == "NONE":
            return None, "right"
        return -1 if self.max_tokens is None else self.max_tokens, "left" if self.truncate == "START" else "right"


class CohereEmbeddings(Strict):
    """The embeddings in each form that was asked for."""

    float: list[list[float]] | None = None
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None
    base64: list[str] | None = None


class CohereEmbedResponse(Strict):
    """``/v2/embed``."""

    id: str
    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"
    embeddings: CohereEmbeddings
    texts: list[str] | None = None
    meta: dict[str, Any]
