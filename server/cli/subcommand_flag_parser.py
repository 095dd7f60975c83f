"""Parser for the small commands: positional words, flags without a value and flags with one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from trencadis.core.errors import StartupError


@dataclass(slots=True)
class CommandOptions:
    """The parsed words of a command.

    Args:
        names: positional words.
        flags: names of the given flags that take no value, without dashes.
        values: values of the other given flags, by name without dashes.
    """

    names: list[str] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)
    values: dict[str, str] = field(default_factory=dict)


def parse_options(
    command: str,
    words: Sequence[str],
    valued: Collection[str],
    flags: Collection[str] = (),
    most_names: int | None = None,
) -> CommandOptions:
    """Parses ``words``; a flag may be written with underscores, and its value follows it or a ``=``.

    Args:
        command: named in error messages.
        valued: names of the flags that take a value; ``flags``: of those that take none.
        most_names: most positional words; None: any number.

    Raises:
        StartupError: one line about the first word that is unknown, or that lacks its value.
    """
    options, queue = CommandOptions(), list(words)
    while queue:
        word = queue.pop(0)
        written, sign, value = word.partition("=")
        name = written.removeprefix("--").replace("_", "-")
        if not word.startswith("-") and (most_names is None or len(options.names) < most_names):
            options.names.append(word)
        elif word.startswith("--") and name in flags and not sign:
            options.flags.add(name)
        elif not word.startswith("--") or name not in valued:
            raise StartupError(f"{command} does not know {word}; --help says what it takes.")
        elif not sign and not queue:
            raise StartupError(f"--{name} needs a value.")
        else:
            options.values[name] = value if sign else queue.pop(0)
    return options


def print_help_if_asked(words: Sequence[str], usage: str) -> bool:
    """Prints ``usage`` if the words ask for help; returns True if they do."""
    asked = any(word in ("-h", "--help") for word in words)
    if asked:
        print(usage, end="")
    return asked
