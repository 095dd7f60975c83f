"""How a pooling engine turns a prompt into vectors or scores. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

LAST, MEAN, FIRST, ALL = "last", "mean", "first", "all"
"""Which of a prompt's hidden states are pooled: the last token's, the mean of all, the first token's (CLS), all of
them.
"""

EMBED, CLASSIFY = "embed", "classify"
"""The result: an embedding, or the scores of classes."""

TOKEN_TASKS = {EMBED: "token_embed", CLASSIFY: "token_classify"}
"""vLLM's names for the same tasks with one result per token."""

SOFTMAX, SIGMOID, IDENTITY = "softmax", "sigmoid", "identity"


@dataclass(frozen=True)
class Pooling:
    """How an engine pools. Engines that generate have None instead.

    Args:
        kind: the rows that a request takes; one that asks for a token task takes every row.
        normalize: embeddings have length 1, unless a request says otherwise.
        classes: rows of the class head; 0 with ``embed``.
        inner: activation behind a linear of hidden x hidden before the class head; "": there is none.
        biased: whether the head's linears have biases.
        label_tokens: ids whose rows of the output head are the class head; empty: the checkpoint has one of its own.
        activation: from scores to probabilities, unless a request says otherwise.
        labels: names of the classes, as many as there are.
        bias, sigma: subtracted from scores before the activation, and what they are divided by then (``logit_mean`` and
            ``logit_sigma`` of ``--pooler-config``).
        dimensions: sizes to which an embedding may be cut; empty: any (a Matryoshka checkpoint); None: none.
        default_dimensions: the size where a request names none; 0: all.
        step_tag: of every token's values, those of this id alone are answered; -1: all.
        longest: tokens of a text that is embedded, if that is not the model's length: fewer, or with ``chunked`` more.
        chunked: whether a text that is longer than the model's length is embedded in parts, whose vectors are averaged.
    """

    task: str = EMBED
    kind: str = LAST
    normalize: bool = True
    classes: int = 0
    inner: str = ""
    biased: bool = False
    label_tokens: tuple[int, ...] = ()
    activation: str = SOFTMAX
    labels: tuple[str, ...] = ()
    bias: float = 0.0
    sigma: float = 1.0
    dimensions: tuple[int, ...] | None = None
    default_dimensions: int = 0
    step_tag: int = -1
    longest: int = 0
    chunked: bool = False

    @property
    def scores(self) -> bool:
        """True if the class head gives one score per text pair: it has one class or uses label tokens."""
        return self.task == CLASSIFY and self.kind != ALL and (self.classes == 1 or bool(self.label_tokens))

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that requests may name, the default first."""
        each = TOKEN_TASKS[self.task]
        return (each,) if self.kind == ALL else (self.task, each)

    @property
    def line(self) -> str:
        """One line for the log that describes the pooling."""
        rows = {LAST: "the last token", MEAN: "the mean of all tokens", FIRST: "the first token", ALL: "every token"}
        taken = rows[self.kind] + (f" with id {self.step_tag}" if self.step_tag >= 0 else "")
        if self.task == EMBED:
            length = "length 1" if self.normalize else "not normalised"
            size = f", cut to {self.default_dimensions}" if self.default_dimensions else ""
            sizes = (
                "" if self.dimensions is None else f", sizes {', '.join(map(str, self.dimensions)) or 'of any kind'}"
            )
            return f"{self.tasks[0]}: {taken}, {length}{size}{sizes}"
        head = f"linear, {self.inner}, linear" if self.inner else "linear"
        head = f"the head's rows of {', '.join(map(repr, self.labels))}" if self.label_tokens else head
        return f"{self.tasks[0]}: {taken}, {head}, {self.classes} classes, {self.activation}"
