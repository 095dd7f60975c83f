"""What chat and completion requests share: sampling fields, refused and ignored fields, usage, the error envelope."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from trencadis.core.errors import BadRequest, TrencadisError
from trencadis.server.protocol.fields import Object, Text

Int = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]

LATER = {
    "structured_outputs": "structured outputs are not supported yet",
    "guided_json": "structured outputs are not supported yet",
    "guided_regex": "structured outputs are not supported yet",
    "guided_choice": "structured outputs are not supported yet",
    "guided_grammar": "structured outputs are not supported yet",
    "use_beam_search": "beam search is not supported yet",
    "best_of": "best_of was removed; use n",
    "prompt_embeds": "prompt_embeds is not supported",
    "audio": "audio is not supported",
    "bad_words": "bad_words is not supported yet",
    "allowed_token_ids": "allowed_token_ids is not supported yet",
    "logprob_token_ids": "logprob_token_ids is not supported yet",
    "thinking_token_budget": "thinking_token_budget is not supported yet",
    "repetition_detection": "repetition_detection is not supported yet",
    "media_io_kwargs": "media_io_kwargs in a request is not allowed",
    "functions": "functions is gone; use tools",
}
"""Fields that would change the answer and that this server cannot honour yet."""


class Strict(BaseModel):
    """Base of the parts of a response."""

    model_config = ConfigDict(protected_namespaces=())


class StreamOptions(BaseModel):
    """``stream_options``."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class MediaRequest(BaseModel):
    """Fields of every endpoint that takes media."""

    cache_salt: Text | None = None
    mm_processor_kwargs: Object | None = None
    return_image_sizes: bool = False

    def check_salt(self) -> None:
        """Raises BadRequest where the salt is one that keys could confuse."""
        salt = self.cache_salt
        if salt is not None and (not 0 < len(salt) <= 128 or any(c in salt for c in "@/\\\0")):
            raise BadRequest(
                "cache_salt must have 1 to 128 characters, none of them @ / \\ or NUL.", param="cache_salt"
            )


class GenerateRequest(MediaRequest):
    """Fields of every generating endpoint. Unknown ones are kept, so that they can be named as ignored."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())
    harmless: ClassVar[frozenset[str]] = frozenset({"user", "metadata", "store", "safety_identifier"})

    model: Text | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    n: Int | None = None
    stop: Text | list[Text] | None = None
    stop_token_ids: list[Int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Int | None = None
    seed: Int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[Text, float] | None = None
    prompt_logprobs: Int | None = None
    skip_special_tokens: bool = True
    truncate_prompt_tokens: Int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    priority: Int = 0
    request_id: Text | None = None
    return_token_ids: bool | None = None

    def ignored(self) -> list[str]:
        """Names of the unknown fields that were given and have no effect."""
        return sorted(k for k, v in (self.model_extra or {}).items() if v is not None and k not in self.harmless)

    def check(self) -> None:
        """Refuses fields that this server would have to disobey, and contradictions.

        Raises:
            BadRequest: names the field.
        """
        for name, value in (self.model_extra or {}).items():
            if name in LATER and value not in (None, False, [], {}):
                raise BadRequest(f"{LATER[name]}.", param=name)
        if self.stream_options is not None and not self.stream:
            raise BadRequest("Stream options can only be defined when `stream=True`.", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise BadRequest("`prompt_logprobs` are not available when `stream=True`.", param="prompt_logprobs")
        self.check_salt()
        if self.request_id is not None and len(self.request_id) > 128:
            raise BadRequest("request_id must have at most 128 characters.", param="request_id")


class ImageDetails(Strict):
    """One image of a prompt as the model saw it (boxes in an answer refer to this size)."""

    width: int
    height: int
    grid: list[int]
    tokens: int
    original_width: int
    original_height: int


class VideoDetails(Strict):
    """One video of a prompt as the model saw it: the numbers of the frames that were taken, and their rate."""

    width: int
    height: int
    grid: list[int]
    tokens: int
    fps: float
    frames: list[int]
    total_frames: int


class PromptTokensDetails(Strict):
    """What the prompt's tokens were."""

    cached_tokens: int = 0
    image_tokens: int = 0
    video_tokens: int = Field(default=0, exclude_if=lambda v: not v)
    images: list[ImageDetails] | None = Field(default=None, exclude_if=lambda v: v is None)
    videos: list[VideoDetails] | None = Field(default=None, exclude_if=lambda v: v is None)


class Usage(Strict):
    """Tokens of a request, all choices together."""

    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None


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
    def of(cls, error: TrencadisError) -> ErrorResponse:
        """The envelope of a typed error."""
        return cls(error=ErrorInfo(message=error.message, type=error.type, param=error.param, code=error.status))


def refuse_unknown_shape(value: Any, name: str) -> None:
    """Raises BadRequest where a JSON value that must be an object or absent is something else."""
    if value is not None and not isinstance(value, dict):
        raise BadRequest(f"{name} must be an object.", param=name)
