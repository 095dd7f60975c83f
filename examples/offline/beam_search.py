"""The best four ways to go on, by log-probability a new token."""

from __future__ import annotations

import sys

from trencadis import LLM, BeamSearchParams


def main(model: str = "") -> list[str]:
    """Prints the beams, the best first, with the sums of their log-probabilities; returns their texts."""
    with LLM(model, max_model_len=1024) as llm:
        (found,) = llm.beam_search(["The picture shows"], BeamSearchParams(beam_width=4, max_tokens=12))
    for beam in found.sequences:
        print(f"{beam.cum_logprob:8.3f}  {beam.text!r}")
    return [beam.text for beam in found.sequences]


if __name__ == "__main__":
    main(*sys.argv[1:])
