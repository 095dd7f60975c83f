"""Shared parts of the benchmarks of an engine in this process: flags, the engine's options, the JSON file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trencadis.core.errors import StartupError
from trencadis.core.flag_options import FlagValue
from trencadis.core.json_types import JsonObject
from trencadis.server.bench.bench_flags import OneLineParser
from trencadis.server.config import argv
from trencadis.server.config.flags import get_flag_table

if TYPE_CHECKING:
    from trencadis import LLM

PERCENTS = (10, 25, 50, 75, 90, 99)
PROMPTS = ("allowed_local_media_path", "allowed_media_domains", "chat_template", "chat_template_content_format")
"""Flags of the server that an engine in this process accepts too."""


def parse_engine_args(
    parser: OneLineParser, words: Sequence[str], **defaults: FlagValue
) -> tuple[argparse.Namespace, dict[str, FlagValue]]:
    """Parses the command line into the benchmark's own arguments and the options of the engine.

    Args:
        defaults: options of the engine that the command line may override.

    Raises:
        StartupError: a flag is unknown, or only for a server.
    """
    args, rest = parser.parse_known_args(list(words))
    given = argv.parse(rest)
    if given.config is not None:
        raise StartupError("--config is a file for a server; name the engine's flags themselves.")
    for name in given.values:
        if get_flag_table()[name].owner != "engine" and name not in PROMPTS:
            raise StartupError(f"--{name.replace('_', '-')} is a server's; this benchmark has none.")
    return args, {**defaults, **given.values}


def make_engine(options: dict[str, FlagValue]) -> LLM:
    """Makes an engine in this process; imports torch."""
    from trencadis import LLM

    chosen = dict(options)
    return LLM(chosen.pop("model", ""), **chosen)


def check_lengths(llm: LLM, longest: int, what: str) -> None:
    """Raises StartupError if requests of ``longest`` tokens do not fit the engine."""
    most = llm.service.max_model_len
    if longest > most:
        raise StartupError(f"{what} need {longest} tokens, but --max-model-len is {most}.")


def compute_percentiles(values: Sequence[float]) -> dict[int, float]:
    """Returns the reported percentiles of ``values``."""
    return {p: float(np.percentile(values, p)) for p in PERCENTS}


def save(name: str | None, made: JsonObject) -> None:
    """Writes ``--output-json``, if it is given.

    Raises:
        StartupError: it cannot be written.
    """
    if name:
        try:
            Path(name).expanduser().write_text(json.dumps(made, indent=4) + "\n")
        except OSError as error:
            raise StartupError(f"{name}: {error.strerror}.") from None
