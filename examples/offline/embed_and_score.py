"""Embeddings of texts, and how well documents answer a query: by a checkpoint that embeds."""

from __future__ import annotations

import sys

from trencadis import LLM

DOCUMENTS = ["A red circle on white.", "The recipe needs two eggs.", "Circles and squares in many colours."]


def main(model: str = "") -> tuple[int, list[float]]:
    """Prints the documents by their score; returns the width of an embedding and the scores."""
    with LLM(model, runner="pooling", max_model_len=512) as llm:
        (embedded,) = llm.embed("Which picture has a circle?")
        scores = [o.outputs.score for o in llm.score("Which picture has a circle?", DOCUMENTS)]
    for score, text in sorted(zip(scores, DOCUMENTS, strict=True), reverse=True):
        print(f"{score:.4f}  {text}")
    return len(embedded.outputs.embedding), scores


if __name__ == "__main__":
    main(*sys.argv[1:])
