"""Parameters of a pooling request. No web framework."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trencadis.core.checkpoint.pooling_description import ALL, CLASSIFY, TOKEN_TASKS, Pooling
from trencadis.core.errors import BadRequest
from trencadis.core.json_types import Json

UNSUPPORTED = ("requires_token_ids", "returned_token_ids", "step_tag_id", "extra_kwargs", "late_interaction_params")
"""vLLM's fields that would change the result and are not implemented."""


@dataclass(slots=True)
class PoolingParams:
    """How to pool; None stands for the engine's default.

    Args:
        truncate_prompt_tokens: keeps the prompt's last tokens; -1: as many as the model takes.
        dimensions: size of the embedding, of a Matryoshka checkpoint: it is cut, then normalised.
        normalize: embeddings: length 1.
        use_activation: classes: probabilities, not scores; embeddings: the same as ``normalize``.
        task: ``embed`` or ``classify``, or ``token_embed`` or ``token_classify`` for values of every token; the engine
            does one of the first two, and the token task of the same kind.

    The last five are vLLM's and are not built.

    Raises:
        BadRequest: a value is of the wrong kind, or asks for something that is not built; ``param`` names it.
    """

    truncate_prompt_tokens: int | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    task: str | None = None
    requires_token_ids: Json = None
    returned_token_ids: Json = None
    step_tag_id: Json = None
    extra_kwargs: Json = None
    late_interaction_params: Json = None

    def __post_init__(self) -> None:
        for name in UNSUPPORTED:
            if getattr(self, name) not in (None, False, [], {}):
                raise BadRequest(f"PoolingParams.{name} is not supported.", param=name)
        cut = self.truncate_prompt_tokens
        if cut is not None and cut != -1 and cut < 1:
            raise BadRequest("truncate_prompt_tokens must be -1 or at least 1.", param="truncate_prompt_tokens")

    def clone(self) -> PoolingParams:
        """A copy."""
        return replace(self)

    @property
    def activates(self) -> bool | None:
        """True if values are normalised or made probabilities; None: the engine's default."""
        return self.normalize if self.use_activation is None else self.use_activation

    def wants_token_values(self, pooling: Pooling) -> bool:
        """Returns True if every token of a prompt is to have values."""
        return pooling.kind == ALL or self.task in TOKEN_TASKS.values()

    def check(self, pooling: Pooling, width: int) -> None:
        """Checks the request against the engine; ``width``: values of a whole embedding.

        Raises:
            BadRequest: it asks for another task, or for a size that the checkpoint was not trained for.
        """
        does = pooling.task
        if self.task == "plugin":
            raise BadRequest("No IOProcessor plugin installed.", param="task")
        if self.task is not None and self.task not in pooling.tasks:
            known = " and ".join(map(repr, pooling.tasks))
            line = f"Unsupported task: {self.task[:40]!r} needs another server; this one does {known} (--convert)."
            raise BadRequest(line, param="task")
        size = self.dimensions
        if size is None:
            return
        if does == CLASSIFY:
            raise BadRequest("dimensions is for embeddings, and this server classifies.", param="dimensions")
        if pooling.dimensions is None:
            raise BadRequest("dimensions is for Matryoshka checkpoints, and this is none.", param="dimensions")
        if pooling.dimensions and size not in pooling.dimensions:
            known = ", ".join(map(str, pooling.dimensions[:16]))
            raise BadRequest(f"dimensions={size} is not one of this model's sizes: {known}.", param="dimensions")
        if not 1 <= size <= width:
            raise BadRequest(f"dimensions must be between 1 and {width}, got {size}.", param="dimensions")
