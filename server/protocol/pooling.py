"""Requests and answers of the pooling routes.

Fields are vLLM's, and OpenAI's, Jina's and Cohere's if they have such a route. ``/v2/embed``: Cohere's embeddings of
texts, of images, or of both together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from trencadis.core.errors import BadRequest
from trencadis.core.json_types import JsonObject
from trencadis.server.protocol.base_request import (
    FieldContext,
    Int,
    Ints,
    MediaRequest,
    Object,
    Strict,
    Text,
    Texts,
    Usage,
    split_raw_prompts,
)
from trencadis.server.protocol.chat_completions import list_unread_variables
from trencadis.server.protocol.pooler_output import ByteOrder, ValueFormat
from trencadis.server.protocol.pooling_params import PoolingParams

SAMPLING = frozenset({
    "temperature", "top_p", "top_k", "min_p", "n", "best_of", "max_tokens", "max_completion_tokens", "min_tokens",
    "stop", "stop_token_ids", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "logprobs", "top_logprobs", "prompt_logprobs", "echo", "suffix", "stream", "stream_options", "tools", "tool_choice",
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "use_beam_search", "length_penalty",
    "allowed_token_ids", "bad_words", "reasoning_effort",
})  # fmt: skip
"""Fields of generating requests, which are mistakes in pooling requests."""


MAX_DESCRIBED = 256
"""Most inputs whose answer a header describes: clients read headers of some 64 KiB."""


class PoolingRequest(MediaRequest):
    """Fields of every pooling route."""

    truncate_prompt_tokens: Int | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: Int = 0
    request_id: Text | None = None
    add_special_tokens: bool = True
    normalize: bool | None = None
    use_activation: bool | None = None
    activation: bool | None = None
    softmax: bool | None = None
    chat_template: Text | None = None
    chat_template_kwargs: Object | None = None

    def check(self) -> None:
        """Checks for fields of generating requests and contradictions.

        Raises:
            BadRequest: there is one; the message names the field.
        """
        for name, value in (self.model_extra or {}).items():
            if name in SAMPLING and value is not None and value is not False:
                raise BadRequest(f"{name} is for requests that generate; this one pools.", param=name)
        self.check_salt()
        if self.request_id is not None and len(self.request_id) > 128:
            raise BadRequest("request_id must have at most 128 characters.", param="request_id")

    def list_unused_fields(self, context: FieldContext) -> Iterator[str]:
        """See Body."""
        if self.priority and not context.priorities:
            yield "priority"
        if self.truncation_side and self.truncate_prompt_tokens is None:
            yield "truncation_side"
        if self.return_image_sizes:
            yield "return_image_sizes"

    def make_params(self) -> PoolingParams:
        """Makes the pooling parameters of the request."""
        asked = (self.use_activation, self.activation, self.softmax)
        return PoolingParams(
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            normalize=self.normalize,
            use_activation=next((a for a in asked if a is not None), None),
        )


class PromptedRequest(PoolingRequest):
    """One prompt or several as text or ids, or a conversation, which may have images."""

    input: Text | Ints | Texts | Annotated[list[Ints], Field(fail_fast=True)] | None = None
    messages: list[Any] | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    dimensions: Int | None = None

    def check(self) -> None:
        """See PoolingRequest."""
        super().check()
        if (self.input is None) == (self.messages is None):
            raise BadRequest("Give either input or messages.", param="input")

    def list_unused_fields(self, context: FieldContext) -> Iterator[str]:
        """See Body. Template options have no effect on raw prompts."""
        yield from super().list_unused_fields(context)
        if self.messages is not None:
            yield from list_unread_variables(context, self.chat_template_kwargs)
            return
        for name in ("mm_processor_kwargs", "chat_template", "chat_template_kwargs", "add_generation_prompt",
                     "continue_final_message"):  # fmt: skip
            if getattr(self, name):
                yield name

    def make_params(self) -> PoolingParams:
        """See PoolingRequest."""
        made = super().make_params()
        made.dimensions = self.dimensions
        return made

    def list_prompts(self) -> list[str | list[int]]:
        """Returns one entry per raw prompt; none if there are messages.

        Raises:
            BadRequest: there is none, or one of them is empty.
        """
        found = split_raw_prompts(self.input)
        if self.messages is None and (not found or any(len(p) == 0 for p in found)):
            raise BadRequest("input must not be empty.", param="input")
        return found


class EmbeddingRequest(PromptedRequest):
    """``/v1/embeddings``."""

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] = "float"
    embed_dtype: ValueFormat | None = None
    endianness: ByteOrder | None = None

    def check(self) -> None:
        """See PoolingRequest."""
        super().check()
        if self.encoding_format == "bytes" and self.messages is None and len(self.list_prompts()) > MAX_DESCRIBED:
            raise BadRequest(
                f"encoding_format 'bytes' describes at most {MAX_DESCRIBED} inputs in its header; send fewer, or ask "
                "for 'bytes_only'.", param="encoding_format",
            )  # fmt: skip

    def list_unused_fields(self, context: FieldContext) -> Iterator[str]:
        """See Body. JSON numbers have no format."""
        yield from super().list_unused_fields(context)
        if self.encoding_format == "float":
            if self.embed_dtype not in (None, "float32"):
                yield "embed_dtype"
            if self.endianness == "big":
                yield "endianness"

    @property
    def as_bytes(self) -> bool:
        """Whether the body of the answer is bytes."""
        return self.encoding_format in ("bytes", "bytes_only")

    @property
    def value_format(self) -> tuple[ValueFormat, ByteOrder]:
        """The format of values that are sent as bytes."""
        return self.embed_dtype or "float32", self.endianness or "native"


class PoolRequest(EmbeddingRequest):
    """``/pooling``."""

    task: Text | None = None

    def make_params(self) -> PoolingParams:
        """See PoolingRequest."""
        made = super().make_params()
        made.task = self.task
        return made


class ClassifyRequest(PromptedRequest):
    """``/classify``."""


SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""Names of the two sides of a score request."""


class PairRequest(PoolingRequest):
    """What scores and rerankings share."""

    instruction: Text | None = None

    def list_unused_fields(self, context: FieldContext) -> Iterator[str]:
        """See Body. A pair in one prompt is cut at its end, and a cosine needs no activation."""
        yield from super().list_unused_fields(context)
        if not context.embeds and self.truncation_side == "left" and self.truncate_prompt_tokens is not None:
            yield "truncation_side"
        for name in ("use_activation", "activation", "softmax") if context.embeds else ():
            if getattr(self, name) is not None:
                yield name
        if not self.add_special_tokens:
            yield "add_special_tokens"
        yield from list_unread_variables(context, self.chat_template_kwargs)


class ScoreRequest(PairRequest):
    """``/score``: one text or several against one or several; vLLM has three pairs of names for them."""

    text_1: Any = None
    text_2: Any = None
    queries: Any = None
    documents: Any = None
    items: Any = None
    data_1: Any = None
    data_2: Any = None

    def get_sides(self) -> tuple[list[Any], list[Any]]:
        """Returns queries and documents.

        Raises:
            BadRequest: one of them is missing or empty, or their numbers do not fit.
        """
        given = [pair for pair in SIDES if any(getattr(self, name) is not None for name in pair)] or [SIDES[0]]
        left, right = next((p for p in given if None not in (getattr(self, p[0]), getattr(self, p[1]))), given[0])
        a, b = getattr(self, left), getattr(self, right)
        if a is None or b is None:
            missing = left if a is None else right
            raise BadRequest(f"{missing} is required.", param=missing)
        queries, documents = (x if isinstance(x, list) else [x] for x in (a, b))
        if not queries or not documents or len(queries) not in (1, len(documents)):
            raise BadRequest(f"{len(queries)} texts came with {len(documents)} others.", param=left)
        return queries * (len(documents) // len(queries)), documents


class RerankRequest(PairRequest):
    """``/rerank``: a query and documents to sort by it."""

    query: Any = None
    documents: list[Any] | None = None
    top_n: Int = 0
    max_tokens_per_doc: Int = 0
    return_documents: bool = True

    def check(self) -> None:
        """See PoolingRequest."""
        super().check()
        for name, value in (("query", self.query), ("documents", self.documents)):
            if not value:
                raise BadRequest(f"{name} is required.", param=name)
        for name, count in (("top_n", self.top_n), ("max_tokens_per_doc", self.max_tokens_per_doc)):
            if count < 0:
                raise BadRequest(f"{name} must be a non-negative integer.", param=name)


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
