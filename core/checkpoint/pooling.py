"""What a pooling engine makes of a prompt, in place of an answer. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

LAST, MEAN, FIRST = "last", "mean", "first"
"""Which of a prompt's hidden rows are taken: the last token's, the mean of all, the first token's (CLS)."""

EMBED, CLASSIFY = "embed", "classify"
"""What comes out: a vector, or the scores of classes."""

SOFTMAX, SIGMOID, IDENTITY = "softmax", "sigmoid", "identity"


@dataclass(frozen=True)
class Pooling:
    """How an engine pools; ``None`` in its place: it generates.

    Args:
        normalize: embeddings have length 1, unless a request says otherwise.
        classes: rows of the class head; 0 with ``embed``.
        label_tokens: ids whose rows of the output head are the class head; empty: the checkpoint has one of its own.
        activation: from scores to probabilities, unless a request says otherwise.
        labels: names of the classes, as many as there are.
        bias: subtracted from scores before the activation (``logit_bias`` of ``--pooler-config``).
        dimensions: sizes to which an embedding may be cut; empty: any (a Matryoshka checkpoint); None: none.
        default_dimensions: the size where a request names none; 0: all.
    """

    task: str = EMBED
    kind: str = LAST
    normalize: bool = True
    classes: int = 0
    label_tokens: tuple[int, ...] = ()
    activation: str = SOFTMAX
    labels: tuple[str, ...] = ()
    bias: float = 0.0
    dimensions: tuple[int, ...] | None = None
    default_dimensions: int = 0

    @property
    def scores(self) -> bool:
        """Whether a text pair gets one score from the class head: it has one class, or those of label tokens."""
        return self.task == CLASSIFY and (self.classes == 1 or bool(self.label_tokens))
