"""Texts that a checkpoint puts before an input of a given kind, such as ``query: ``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trencadis.core.checkpoint.json_fields import read_json
from trencadis.core.errors import BadRequest


def read_input_prompts(path: Path) -> Mapping[str, str]:
    """The texts by ``input_type``: ``task_instructions`` of config.json, else ``prompts`` of sentence-transformers.

    Raises:
        StartupError: a file is not JSON.
    """
    for name, key in (("config.json", "task_instructions"), ("config_sentence_transformers.json", "prompts")):
        found = (read_json(path / name) or {}).get(key)
        if isinstance(found, dict) and found:
            return {str(k): v for k, v in found.items() if isinstance(v, str)}
    return {}


def get_input_prompt(known: Mapping[str, str], kind: str | None) -> str:
    """The text for ``kind``; "" for None.

    Raises:
        BadRequest: the checkpoint has none of that kind.
    """
    if kind is None:
        return ""
    if kind not in known:
        names = ", ".join(sorted(known))[:120]
        line = f"one of {names} is needed" if known else "this model has no texts for kinds of inputs; leave it out"
        raise BadRequest(f"Unsupported input_type {kind[:40]!r}; {line}.", param="input_type")
    return known[kind]
