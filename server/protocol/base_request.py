"""The shared parts of chat and completion requests: sampling fields, refused and ignored fields, usage, error
envelope.

The base of requests of other APIs than chat completions, which are translated to a chat request.

Keeps the names of a request's unknown fields, but not their values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from trencadis.core.errors import BadRequest, TrencadisError
from trencadis.core.json_types import Json, JsonObject
from trencadis.server.protocol.beam_search_fields import check_beams, list_unused_beam_fields
from trencadis.server.protocol.json_body_limits import find_fault

T = TypeVar("T")


def _check_json_value(value: T) -> T:
    found = find_fault(value)
    if found is not None:
        raise PydanticCustomError("json_value", "{fault}", {"fault": f"The value holds {found[1]}"})
    return value


Text = Annotated[str, AfterValidator(_check_json_value)]
Object = Annotated[JsonObject, AfterValidator(_check_json_value)]
Objects = Annotated[list[JsonObject], AfterValidator(_check_json_value)]

EMPTY: tuple[Json, ...] = (None, False, [], {})
"""Values of a field that a client does not use."""


class NamesOnly(BaseModel):
    """Base of requests. The value of an unknown field is True (or empty): values would live as long as the answer."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _drop_values(cls, data: Json) -> Json:
        if not isinstance(data, dict):
            return data
        return {k: v if k in cls.model_fields or v in EMPTY else True for k, v in data.items()}


Int = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Ints = Annotated[list[Int], Field(fail_fast=True)]
"""Reports only the first wrong item, not each of a hundred thousand."""
Texts = Annotated[list[Text], Field(fail_fast=True)]

LATER = {
    "prompt_embeds": "prompt_embeds is not supported: it would be a pickle, which can run code",
    "typical_p": "typical_p is not supported; top_p and min_p cut improbable tokens",
    "audio": "audio is not supported; this server answers with text",
    "media_io_kwargs": "media_io_kwargs in a request is not allowed",
    "functions": "functions is gone; use tools",
}
"""Fields that would change the answer and that this server does not support."""
GUIDED_FIELDS = (
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_whitespace_pattern", "structural_tag"
)  # fmt: skip
"""Names of structured outputs before vLLM gathered them in one field, and the field of a structural tag."""
HARMLESS = frozenset({"user", "metadata", "store", "safety_identifier", "prompt_cache_key"})
"""Unknown fields that do not affect the answer: reported as ignored, never refused."""


@dataclass(frozen=True, slots=True)
class FieldContext:
    """Properties of this server that decide whether certain fields have an effect.

    Args:
        mentions: returns True if the text of the chat template contains the name of a variable.
        priorities: the scheduler uses priorities.
        reasoning: reasoning in answers is separated from content.
        embeds: the server pools to embeddings.
    """

    mentions: Callable[[str], bool] = lambda name: True
    priorities: bool = False
    reasoning: bool = False
    embeds: bool = False


class Strict(BaseModel):
    """Base of the parts of a response."""

    model_config = ConfigDict(protected_namespaces=())


class StreamOptions(BaseModel):
    """``stream_options``."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class StreamUsage(NamedTuple):
    """Where a stream sends its usage: in an event after the last choice (``final``), in every event (``running``)."""

    final: bool
    running: bool


def resolve_stream_usage(options: StreamOptions | None, forced: bool) -> StreamUsage:
    """Where a stream sends its usage.

    Args:
        options: what the request says; ``continuous_usage_stats`` has an effect only beside ``include_usage``.
        forced: True with ``--enable-force-include-usage``, which puts it into every event.
    """
    if forced:
        return StreamUsage(True, True)
    final = bool(options and options.include_usage)
    return StreamUsage(final, final and bool(options and options.continuous_usage_stats))


class Body(NamesOnly):
    """A request; keeps the names of unknown fields, to report them as ignored."""

    model: Text | None = None

    def list_unused_fields(self, context: FieldContext) -> Iterator[str]:
        """Yields names of declared fields that are set but have no effect, on this server or because of other
        fields.
        """
        return iter(())

    def list_ignored_fields(self, context: FieldContext) -> list[str]:
        """Returns the names of all fields that are set but have no effect, including unknown ones."""
        unknown = (k for k, v in (self.model_extra or {}).items() if v is not None and k not in LATER)
        return sorted({*unknown, *self.list_unused_fields(context)})


def split_raw_prompts(value: str | Sequence[Json] | None) -> list[str | list[int]]:
    """Returns one entry per prompt of a field that takes a text, ids, or a list of either."""
    if isinstance(value, str):
        return [value]
    items = list(value or [])
    return [items] if items and isinstance(items[0], int) else items


class MediaRequest(Body):
    """Fields of every endpoint that takes media."""

    cache_salt: Text | None = None
    mm_processor_kwargs: Object | None = None
    return_image_sizes: bool = False

    def check_salt(self) -> None:
        """Raises BadRequest for a salt that could make cache keys ambiguous."""
        salt = self.cache_salt
        if salt is not None and (not 0 < len(salt) <= 128 or any(c in salt for c in "@/\\\0")):
            raise BadRequest(
                "cache_salt must have 1 to 128 characters, none of them @ / \\ or NUL.", param="cache_salt"
            )


class GenerateRequest(MediaRequest):
    """Fields of every generating endpoint."""

    plain: ClassVar[frozenset[str]] = frozenset({
        "model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "stop", "stop_token_ids", "ignore_eos",
        "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "stream",
    })  # fmt: skip
    """Sampling fields that contradict no other field, always have an effect, and change only a sampling parameter."""
    bulky: ClassVar[tuple[str, ...]] = (
        "mm_processor_kwargs", "stop", "stop_token_ids", "logit_bias", "logprob_token_ids", "response_format",
        "structured_outputs", "allowed_token_ids", "bad_words", *GUIDED_FIELDS
    )  # fmt: skip
    """Large fields that are not read after the request goes to the engine."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    n: Int | None = None
    stop: Text | Texts | None = None
    stop_token_ids: Ints | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Int | None = None
    seed: Int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[Text, float] | None = None
    allowed_token_ids: Ints | None = None
    bad_words: Texts | None = None
    thinking_token_budget: Int | None = None
    repetition_detection: Object | None = None
    use_beam_search: bool = False
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    best_of: Int | None = None
    logprob_token_ids: Ints | None = None
    skip_reading_prefix_cache: bool | None = None
    prompt_logprobs: Int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: Int | None = None
    truncation_side: Literal["left", "right"] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stream_interval: Int | None = None
    priority: Int = 0
    request_id: Text | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: Object | None = None
    structured_outputs: Object | None = None
    guided_json: Text | Object | None = None
    guided_regex: Text | None = None
    guided_choice: Texts | None = None
    guided_grammar: Text | None = None
    guided_whitespace_pattern: Text | None = None
    guided_decoding_backend: Text | None = None
    structural_tag: Text | Object | None = None

    def list_unused_fields(self, context: FieldContext) -> Iterator[str]:
        """See Body."""
        if self.priority and not context.priorities:
            yield "priority"
        if self.stream_interval is not None and not self.stream:
            yield "stream_interval"
        if self.guided_decoding_backend:
            yield "guided_decoding_backend"
        if self.guided_whitespace_pattern and not (self.guided_json or self.response_format or self.structured_outputs):
            yield "guided_whitespace_pattern"
        if self.truncation_side and self.truncate_prompt_tokens is None:
            yield "truncation_side"
        if self.return_tokens_as_token_ids and not self.shows_tokens:
            yield "return_tokens_as_token_ids"
        if not self.spaces_between_special_tokens:
            yield "spaces_between_special_tokens"  # special tokens are shown unchanged, without blanks around them
        yield from list_unused_beam_fields(self)
        extra = None if self.stream_options is None else self.stream_options.model_extra
        yield from (f"stream_options.{name}" for name, value in (extra or {}).items() if value is not None)

    @property
    def is_plain(self) -> bool:
        """True if all fields that are sent are ``plain``: then ``check`` refuses nothing and none is
        ``list_ignored_fields``.
        """
        return self.model_fields_set <= self.plain

    @property
    def shows_tokens(self) -> bool:
        """True if the answer lists the texts of its tokens."""
        return False

    @property
    def guided(self) -> JsonObject:
        """The older fields of structured outputs that are set."""
        return {name: value for name in GUIDED_FIELDS if (value := getattr(self, name)) is not None}

    def drop_bulky_fields(self) -> None:
        """Drops large fields that are no longer needed; the answer may take minutes."""
        for name in self.model_fields_set.intersection(self.bulky):
            setattr(self, name, None)

    def check(self) -> None:
        """Checks for unsupported fields and contradictions.

        Raises:
            BadRequest: a field is unsupported or contradicts another; the message names it.
        """
        for name, value in (self.model_extra or {}).items():
            if name in LATER and value not in EMPTY:
                raise BadRequest(f"{LATER[name]}.", param=name)
        if self.stream_options is not None and not self.stream:
            raise BadRequest("Stream options can only be defined when `stream=True`.", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise BadRequest("`prompt_logprobs` are not available when `stream=True`.", param="prompt_logprobs")
        if self.stream_interval is not None and self.stream_interval < 1:
            raise BadRequest(
                f"stream_interval must be at least 1, got {self.stream_interval}.", param="stream_interval"
            )
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise BadRequest(f"best_of must equal n ({self.n or 1}): all answers are returned.", param="best_of")
        if self.logprob_token_ids is not None and not self.shows_tokens:
            raise BadRequest("logprob_token_ids needs logprobs.", param="logprob_token_ids")
        check_beams(self)
        self.check_salt()
        if self.request_id is not None and len(self.request_id) > 128:
            raise BadRequest("request_id must have at most 128 characters.", param="request_id")


class ImageDetails(Strict):
    """One image of a prompt as the model sees it (boxes in an answer refer to this size)."""

    width: int
    height: int
    grid: list[int]
    tokens: int
    original_width: int
    original_height: int


class VideoDetails(Strict):
    """One video of a prompt as the model sees it: the indices of the sampled frames, and their rate."""

    width: int
    height: int
    grid: list[int]
    tokens: int
    fps: float
    frames: list[int]
    total_frames: int


class PromptTokensDetails(Strict):
    """Kinds of the prompt's tokens."""

    cached_tokens: int = 0
    image_tokens: int = 0
    video_tokens: int = Field(default=0, exclude_if=lambda v: not v)
    multimodal_tokens: dict[str, int] | None = Field(default=None, exclude_if=lambda v: v is None)
    images: list[ImageDetails] | None = Field(default=None, exclude_if=lambda v: v is None)
    videos: list[VideoDetails] | None = Field(default=None, exclude_if=lambda v: v is None)


class CompletionTokensDetails(Strict):
    """Kinds of the answers' tokens."""

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int | None = Field(default=None, exclude_if=lambda v: v is None)
    rejected_prediction_tokens: int | None = Field(default=None, exclude_if=lambda v: v is None)


class Usage(Strict):
    """Tokens of a request, all choices together."""

    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = Field(default=None, exclude_if=lambda v: v is None)


ANTHROPIC_PATHS = ("/v1/messages",)
"""Paths of the API whose errors have Anthropic's form, and of what lies below them."""


def is_anthropic_path(path: str) -> bool:
    """Returns True if ``path`` belongs to this API, so that its errors have Anthropic's form."""
    return path in ANTHROPIC_PATHS or path.startswith(tuple(f"{p}/" for p in ANTHROPIC_PATHS))


class ErrorInfo(Strict):
    """The inside of the error envelope."""

    message: str
    type: str
    param: str | None = None
    code: int


class ErrorResponse(Strict):
    """The error envelope that OpenAI's clients parse."""

    error: ErrorInfo

    @classmethod
    def from_error(cls, error: TrencadisError) -> ErrorResponse:
        """Makes the envelope of a typed error."""
        return cls(error=ErrorInfo(message=error.message, type=error.type, param=error.param, code=error.status))


UNSHOWN = ("n", "prompt_logprobs", "return_token_ids", "return_image_sizes", "stream_options")
"""Fields of generating requests that have no place in these APIs' answers."""


class TranslatedRequest(GenerateRequest):
    """The fields of every generating endpoint that its own API lacks may be sent beside that API's."""

    bulky: ClassVar[tuple[str, ...]] = (*GenerateRequest.bulky, "chat_template", "chat_template_kwargs")

    chat_template: Text | None = None
    chat_template_kwargs: Object | None = None

    def check(self) -> None:
        """See GenerateRequest. The chat request that this one becomes checks the rest."""
        super().check()
        if self.n not in (None, 1):
            raise BadRequest(f"n must be 1 here, got {self.n}; chat completions take more.", param="n")

    def list_unused_fields(self, context: FieldContext) -> Iterator[str]:
        """See Body; fields that the chat request reports are left out."""
        yield from (name for name in UNSHOWN[1:4] if getattr(self, name))
        extra = None if self.stream_options is None else self.stream_options.model_extra
        yield from (f"stream_options.{name}" for name, value in (extra or {}).items() if value)

    def get_shared_fields(self) -> JsonObject:
        """Returns the set fields that mean the same in a chat request."""
        names = {*GenerateRequest.model_fields, "chat_template", "chat_template_kwargs"}.difference(UNSHOWN)
        return {n: v for n in self.model_fields_set & names if (v := getattr(self, n)) is not None}
