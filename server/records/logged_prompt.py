"""Renders a prompt for the log, if the operator asks for contents."""

from __future__ import annotations

from trencadis.server.prompts.prompt import Prompt
from trencadis.server.text.checkpoint_tokenizer import Tokenizer


def render_prompt(prompt: Prompt, tokenizer: Tokenizer, most: int | None) -> str:
    """Returns the text of a prompt, special tokens included, with one placeholder for each image or video.

    Args:
        most: most characters of the result; None: all.
    """
    kept: list[int] = []
    at = 0
    spans = () if prompt.expanded is None else prompt.expanded.spans
    for run in sorted(run for span in spans for run in span.list_runs()):
        # Consecutive runs belong to one image.
        beside = 0 < at == run.offset and prompt.tokens[at] == prompt.tokens[at - 1]
        kept += prompt.tokens[at : run.offset + (not beside)]
        at = run.offset + run.length
    # A token has at least one character, except pieces of a character: these make the text shorter than ``most``.
    kept = (kept + prompt.tokens[at:])[:most]
    return tokenizer.decode(kept, skip_special_tokens=False)[:most]
