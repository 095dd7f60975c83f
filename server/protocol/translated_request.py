"""The base of requests of other APIs than chat completions, which are translated to a chat request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from trencadis.core.errors import BadRequest
from trencadis.server.protocol.base_request import FieldContext, GenerateRequest
from trencadis.server.protocol.field_types import Object, Text

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

    def get_shared_fields(self) -> dict[str, Any]:
        """Returns the set fields that mean the same in a chat request."""
        names = {*GenerateRequest.model_fields, "chat_template", "chat_template_kwargs"}.difference(UNSHOWN)
        return {n: v for n in self.model_fields_set & names if (v := getattr(self, n)) is not None}
