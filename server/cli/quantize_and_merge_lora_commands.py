"""``trencadis quantize`` converts a 16-bit checkpoint to 8 or 4 bits; ``trencadis merge-lora`` merges an adapter into
one.
"""

from __future__ import annotations

import asyncio
import json
import re
import resource
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError, TrencadisError
from trencadis.core.json_types import Json, JsonMapping
from trencadis.core.operator_files import expand_path
from trencadis.core.process import torch_detection
from trencadis.core.request import SamplingParams
from trencadis.server.cli.subcommand_flag_parser import CommandOptions, parse_options, print_help_if_asked
from trencadis.server.config import model_download
from trencadis.server.processes import signals_and_logging
from trencadis.server.prompts import media_frontends
from trencadis.server.prompts.prompt_and_chat_messages import Prompt
from trencadis.server.prompts.prompt_builder import TextService

USAGE = """\
usage: trencadis quantize MODEL OUT --to fp8|int8|int4 [--group 32|64|128] [--calibrate FILE]

Writes the checkpoint MODEL (a folder or hub id, 16- or 32-bit safetensors) to the new folder OUT as compressed-tensors
files: the decoder's linear layers, experts among them, in fewer bits, everything else as it is. `trencadis serve OUT`
loads it, as do transformers with that library, and vLLM.

  --to TYPE          fp8 and int8: a scale a row, activations of 8 bits; int4: groups of columns, activations of 16 bits
  --group N          int4: columns that share a scale, 32 (the default), 64 or 128
  --calibrate FILE   prompts as JSON lines, {"messages": [...]} or {"prompt": "..."}, images as in the chat API or as
                     paths beside FILE: each layer's rounding makes up for its errors over them (GPTQ); experts that
                     few of them reach take the nearest codes, and a line says so
  --max-tokens N     of a calibration prompt without images, which is cut there (default 2048)
"""

TYPES = ("fp8", "int8", "int4")
GROUPS = ("32", "64", "128")
VALUED = ("to", "group", "calibrate", "max-tokens")
MAX_LINE = 64 << 20
LONGEST = 2048


def main(words: Sequence[str]) -> int:
    """Runs the ``quantize`` command; returns the exit code."""
    if print_help_if_asked(words, USAGE):
        return 0
    given = parse(words)
    names, values = given.names, given.values
    if len(names) != 2:
        raise StartupError("quantize needs a checkpoint and a new folder: trencadis quantize MODEL OUT --to int4.")
    to, group, longest = check_options(values)
    signals_and_logging.raise_early_stop()
    torch_detection.import_torch()
    # Imported by name, because it imports torch.
    convert = import_module("trencadis.core.quant.writing.convert_checkpoint")
    stored = import_module("trencadis.core.quant.writing.source_checkpoint")
    calibration = import_module("trencadis.core.quant.writing.calibration")
    config = EngineConfig(model=names[0])
    checkpoint = stored.open_checkpoint(model_download.find_model_folder(config))
    recipe = convert.recipe_for(checkpoint, to, group)
    prompts: list[Json] = []
    if "calibrate" in values:
        file = expand_path(values["calibrate"])
        made = asyncio.run(_make_prompts(checkpoint.config.path, read_lines(file), file.parent, longest))
        prompts = [
            calibration.Calibrant(p.make_request(str(i), SamplingParams(), arrival=0.0), p.pixels) for i, p in made
        ]
    say = partial(print, file=sys.stderr, flush=True)
    written = convert.convert(checkpoint, expand_path(names[1]), recipe, prompts, say)
    print(
        f"{names[1]}: {recipe.scheme.label}, {written.bytes_after / 2**30:.2f} GiB of "
        f"{written.bytes_before / 2**30:.2f}; rounding "
        f"moves a weight by {100 * written.error:.2f} %; peak memory {_get_peak_memory() / 2**30:.2f} GiB"
    )
    return 0


def parse(words: Sequence[str]) -> CommandOptions:
    """Parses the words; raises a StartupError that names the first unknown one."""
    return parse_options("quantize", words, VALUED)


class QuantizeOptions(NamedTuple):
    """Checked options: the type of the codes, columns of a group or 0, and the most tokens of a prompt."""

    to: str
    group: int
    longest: int


def check_options(values: Mapping[str, str]) -> QuantizeOptions:
    """Checks the options; raises a StartupError that names the first wrong one."""
    to, group, longest = values.get("to", ""), values.get("group", ""), values.get("max-tokens", str(LONGEST))
    if to not in TYPES:
        raise StartupError(f"--to must be one of {', '.join(TYPES)}{f', not {to!r}' if to else ''}.")
    if group and group not in GROUPS:
        raise StartupError(f"--group must be one of {', '.join(GROUPS)}, not {group!r}.")
    if group and to != "int4":
        raise StartupError(f"--group is for --to int4; {to} has one scale a row.")
    if not longest.isascii() or not longest.isdigit() or not 1 <= int(longest) <= 1 << 20:
        raise StartupError(f"--max-tokens must be a number from 1 to {1 << 20}, not {longest!r}.")
    return QuantizeOptions(to, int(group or 0), int(longest))


def read_lines(path: Path) -> list[JsonMapping]:
    """Returns the objects of a JSON-lines file.

    Raises:
        StartupError: it cannot be read, is empty, or a line is not a prompt; the message has the line's number.
    """
    found: list[JsonMapping] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE), b""), 1):
                if line.strip():
                    found.append(_parse_line(f"{path}:{number}", line))
    except OSError as error:
        raise StartupError(f"--calibrate {path}: {error.strerror}.") from None
    if not found:
        raise StartupError(f"--calibrate {path} holds no prompt.")
    return found


def _parse_line(where: str, line: bytes) -> JsonMapping:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise StartupError(f"{where} is no JSON.") from None
    kinds = {"messages": list, "prompt": str}
    if not isinstance(value, dict) or not any(isinstance(value.get(k), kind) for k, kind in kinds.items()):
        raise StartupError(f'{where} must be {{"messages": [...]}} or {{"prompt": "..."}}.')
    return value


def resolve_part_path(part: Json, folder: Path) -> Json:
    """Returns a content part whose image or video path, if it is one, is relative to ``folder``."""
    kind = str(part.get("type", "")).removesuffix("_url") if isinstance(part, dict) else ""
    if kind not in ("image", "video"):
        return part
    given = part.get(kind, part.get(f"{kind}_url"))
    source = given.get("url") if isinstance(given, dict) else given
    if not isinstance(source, str) or re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*:", source):
        return part
    rest = {key: value for key, value in part.items() if key not in (kind, f"{kind}_url")}
    return {**rest, "type": kind, kind: str(folder / source)}


def _resolve_message_paths(message: Json, folder: Path) -> Json:
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    return {**message, "content": [resolve_part_path(part, folder) for part in message["content"]]}


async def _make_prompts(
    model: Path, lines: Sequence[JsonMapping], folder: Path, longest: int
) -> list[tuple[int, Prompt]]:
    """Converts each line to ids, with its media prepared; ``folder``: base of their paths."""
    config = EngineConfig(model=str(model))
    service = media_frontends.make_text_service(config, media_frontends.MediaRules(any_path=True))
    service.min_output_tokens = 0
    try:
        return [(i, await _make_prompt(service, i, line, folder, longest)) for i, line in enumerate(lines, 1)]
    finally:
        media_frontends.close_frontends(service)


async def _make_prompt(service: TextService, number: int, line: JsonMapping, folder: Path, longest: int) -> Prompt:
    try:
        if "messages" not in line:
            made = await service.make_raw_prompt(line["prompt"], truncate=longest, truncation_side="right")
        else:
            # An answer at the end of a conversation is part of the calibration text.
            messages = [_resolve_message_paths(message, folder) for message in line["messages"]]
            last = messages[-1] if messages else None
            answered = isinstance(last, dict) and last.get("role") == "assistant"
            made = await service.make_chat_prompt(messages, add_generation_prompt=not answered)
        if not made.media:
            made.tokens = made.tokens[:longest]
        return made
    except StartupError:
        raise
    except TrencadisError as error:
        raise StartupError(f"--calibrate: prompt {number}: {error}") from None


def _get_peak_memory() -> int:
    """Returns the peak bytes of memory of this process.

    The kernel's VmHWM is preferred, since a child of vfork has its parent's ``ru_maxrss``.
    """
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        found = None
    return 1024 * (int(found[1]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


MERGE_USAGE = """\
usage: trencadis merge-lora MODEL ADAPTER OUT

Writes the checkpoint MODEL (a folder or hub id, 16- or 32-bit safetensors) to the new folder OUT, with the LoRA
adapter ADAPTER (a folder or hub id with PEFT's adapter_config.json and adapter_model.safetensors) added to its weights:
those of the decoder, of the vision tower and of the layers after it. The sums are computed in float32 and stored in the
checkpoint's type. `trencadis serve OUT` serves it like any other checkpoint; --lora-modules serves several adapters
beside one model without merging.
"""


def merge_lora_main(words: Sequence[str]) -> int:
    """Runs the ``merge-lora`` command; returns the exit code."""
    if print_help_if_asked(words, MERGE_USAGE):
        return 0
    unknown = next((word for word in words if word.startswith("-")), None)
    if unknown is not None:
        raise StartupError(f"merge-lora does not know {unknown}; --help says what it takes.")
    if len(words) != 3:
        raise StartupError("merge-lora needs a checkpoint, an adapter and a new folder: merge-lora MODEL ADAPTER OUT.")
    signals_and_logging.raise_early_stop()
    torch_detection.import_torch()
    merging = import_module("trencadis.core.quant.writing.merge_adapter")  # imports torch
    model = model_download.find_model_folder(EngineConfig(model=words[0]))
    adapter = model_download.find_adapter_folder(EngineConfig(), words[1])
    count = merging.merge_adapter(model, adapter, expand_path(words[2]))
    print(f"{words[2]}: {count} matrices changed")
    return 0
