"""Parses the words of a command line into values by field name."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from trencadis.core.errors import StartupError
from trencadis.core.flag_declaration import FlagValue
from trencadis.server.config import value_parsers
from trencadis.server.config.flag_table_and_lookup import LISTS, Flag, Match, find_flag
from trencadis.server.config.vllm_flag_and_env_table import ROWS
from trencadis.server.config.vllm_flag_row_and_value_conversion import FlagRow, convert_flags

_NUMBER = re.compile(r"-[\d.]")


@dataclass(slots=True)
class ParsedArguments:
    """Parsed command line.

    Args:
        values: values by field of our configurations.
        vllm_flags: values by name of vLLM's flags; ``parse`` converts them to ``values`` and ``notes``.
        help: the topic of ``--help=``, "" for a bare ``--help``, None without it.
    """

    values: dict[str, FlagValue] = field(default_factory=dict)
    vllm_flags: dict[str, FlagValue] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    config: str | None = None
    help: str | None = None


def parse(argv: Sequence[str]) -> ParsedArguments:
    """Parses the words after ``serve``.

    Raises:
        StartupError: one line about the first word that cannot be understood.
    """
    given = ParsedArguments()
    words = deque(argv)
    positional: list[str] = []
    while words:
        word = words.popleft()
        if word in ("-h", "--help"):
            given.help = ""
        elif word == "--":
            positional += words
            break
        elif word.startswith("-") and len(word) > 1:
            _parse_option(given, word, words)
        else:
            positional.append(word)
    if len(positional) > 1:
        raise StartupError(f"serve takes one model, but {len(positional)} were named: {', '.join(positional[:5])}.")
    if positional:
        given.values["model"] = positional[0]
    settled = convert_flags(given.vllm_flags, ROWS, given.values)
    given.values |= settled.values
    given.notes += settled.notes
    return given


def _parse_option(given: ParsedArguments, word: str, words: deque[str]) -> None:
    """Parses one option; removes its values from ``words``."""
    written, sign, attached = word.partition("=")
    value = attached if sign else None
    base, dot, key = written.partition(".")
    if dot:
        base = "-cc" if base == "-O" else base
        _parse_dotted_option(given, find_flag(base), written, key, _take_value(written, value, words))
        return
    if not word.startswith("--") and written[:2] == "-O" and written[2:].isdigit():
        written, value = "-O", written[2:]
    found = find_flag(written)
    if found.name == "help":
        given.help = value or ""
    elif found.name == "config":
        if given.config is not None:
            raise StartupError("only one --config is allowed.")
        given.config = _take_value(written, value, words)
    elif found.flag is None:
        _parse_vllm_flag(given, ROWS[found.name], found, written, value, words)
    else:
        _parse_own_flag(given, found, found.flag, written, value, words)


def _parse_own_flag(
    given: ParsedArguments, found: Match, flag: Flag, written: str, value: str | None, words: deque[str]
) -> None:
    if found.negated:
        if value is not None:
            raise StartupError(f"{written} takes no value.")
        given.values[flag.name] = False
    elif flag.kind == "bool":
        if value is None and words and words[0].lower() in ("true", "false"):
            value = words.popleft()
        given.values[flag.name] = True if value is None else flag.parse(value)
    elif flag.kind in LISTS:
        texts = [value] if value is not None else [_take_value(written, None, words), *_take_values(words)]
        given.values.setdefault(flag.name, []).extend(one for text in texts for one in flag.parse(text))
    elif flag.kind in ("json", "limits"):
        parsed = flag.parse(_take_value(written, value, words))
        given.values[flag.name] = given.values.get(flag.name, {}) | parsed
    elif flag.bare is not None and value is None and not (words and _is_value(words[0])):
        given.values[flag.name] = flag.bare
    else:
        given.values[flag.name] = flag.parse(_take_value(written, value, words))


def _parse_dotted_option(given: ParsedArguments, found: Match, written: str, path: str, text: str) -> None:
    """Parses ``--opt.key value``, ``--opt.a.b value``, and ``--opt.key+ value``, which appends to a list."""
    flag = found.flag or ROWS.get(found.name)
    if flag is None or flag.kind not in ("json", "limits"):
        raise StartupError(f"{written}: --{found.name.replace('_', '-')} takes no keys.")
    into = given.values if found.flag is not None else given.vllm_flags
    *outer, last = path.split(".")
    target = into.setdefault(flag.name, {})
    for key in outer:
        target = target.setdefault(key, {}) if isinstance(target, dict) else None
    if not isinstance(target, dict):
        raise StartupError(f"{written}: {'.'.join((flag.name, *outer))} already has a value.")
    if last.endswith("+"):
        target.setdefault(last[:-1], []).append(value_parsers.parse_json_or_text(text))
    else:
        target[last] = value_parsers.parse_json_or_text(text)
    if flag.kind == "limits":
        into[flag.name] = value_parsers.check_limits(into[flag.name], flag.written)


def _parse_vllm_flag(
    given: ParsedArguments, row: FlagRow, found: Match, written: str, value: str | None, words: deque[str]
) -> None:
    """Parses a flag of vLLM as vLLM does; ``parse`` converts the value."""
    if found.negated:
        if value is not None:
            raise StartupError(f"{written} takes no value.")
        given.vllm_flags[row.name] = False
    elif row.kind == "bool":
        if value is None and words and words[0].lower() in ("true", "false"):
            value = words.popleft()
        given.vllm_flags[row.name] = True if value is None else row.parse(value)
    elif row.kind == "list":
        texts = [value] if value is not None else _take_values(words)
        given.vllm_flags.setdefault(row.name, []).extend(one for text in texts for one in row.parse(text) or ())
    elif row.kind == "json":
        parsed, before = row.parse(_take_value(written, value, words)), given.vllm_flags.get(row.name)
        both = isinstance(parsed, dict) and isinstance(before, dict)
        given.vllm_flags[row.name] = before | parsed if both else parsed
    else:
        given.vllm_flags[row.name] = row.parse(_take_value(written, value, words))


def _is_value(word: str) -> bool:
    return not word.startswith("-") or word == "-" or bool(_NUMBER.match(word))


def _take_value(written: str, value: str | None, words: deque[str]) -> str:
    if value is not None:
        return value
    if not words or not _is_value(words[0]):
        raise StartupError(f"{written} needs a value.")
    return words.popleft()


def _take_values(words: deque[str]) -> list[str]:
    """Removes and returns the words that follow, as long as they are values."""
    taken: list[str] = []
    while words and _is_value(words[0]):
        taken.append(words.popleft())
    return taken
