"""``EngineArgs``: all options of an engine as one value, and as options of a script's command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import field, fields, make_dataclass
from typing import TYPE_CHECKING, Any, Self

from trencadis.core.config import EngineConfig
from trencadis.core.flag_options import FlagValue
from trencadis.llm_kwargs import PROMPT_FLAGS, SINGLE_ENGINE_VALUES, build_offline_setup
from trencadis.server.config.flags import LISTS, get_flag_table
from trencadis.server.config.vllm_flag_table import ROWS


class _BaseArgs:
    """Options by name; None stands for an option's default, strings are parsed as on the command line."""

    def options(self) -> dict[str, FlagValue]:
        """Returns the options that were given, without the model."""
        every = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in every.items() if name != "model" and value is not None}

    def create_engine_config(self) -> EngineConfig:
        """Returns the configuration of the engine.

        Raises:
            StartupError: one line that names the invalid or unsupported option.
        """
        return build_offline_setup(self.model, self.options()).config  # type: ignore[attr-defined]

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Adds ``--name`` (also spelled ``--its_name`` with underscores) for every option."""
        group = parser.add_argument_group(cls.__name__)
        for one in fields(cls):  # type: ignore[arg-type]
            flag = get_flag_table().get(one.name) or ROWS.get(one.name)
            written = dict.fromkeys(("--" + one.name.replace("_", "-"), "--" + one.name))
            more: dict[str, Any] = {"type": str}
            if flag is not None and flag.kind == "bool":
                more = {"action": argparse.BooleanOptionalAction}
            elif flag is not None and flag.kind in LISTS:
                more = {"nargs": "+"}
            group.add_argument(*written, dest=one.name, default=None, help=_help_text(one.name), **more)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Returns the options found in a script's parsed arguments."""
        return cls(**{f.name: getattr(args, f.name) for f in fields(cls) if hasattr(args, f.name)})  # type: ignore[arg-type]


def _help_text(name: str) -> str:
    flag = get_flag_table().get(name)
    if flag is not None:
        return flag.help.replace("%", "%%")
    row = ROWS.get(name)
    return "" if row is None else f"{row.verdict}: {row.why}".replace("%", "%%")


def _option_names() -> list[str]:
    """Returns the names of all options: ``model``, the engine's, those about prompts, and vLLM's that are accepted
    or refused.
    """
    own = [f.name for f in get_flag_table().values() if f.owner == "engine" and not f.hidden]
    served = [name for name in PROMPT_FLAGS if name.startswith("allowed")]
    return list(dict.fromkeys(("model", *own, *served, "disable_log_stats", *SINGLE_ENGINE_VALUES, *ROWS)))


def _make_args_class(name: str, doc: str, *more: str) -> type:
    made = [(one, Any, field(default="" if one == "model" else None)) for one in (*_option_names(), *more)]
    return make_dataclass(
        name, made, bases=(_BaseArgs,), namespace={"__doc__": doc, "__module__": __name__}, repr=False
    )


if TYPE_CHECKING:

    class EngineArgs(_BaseArgs):
        """Options of an engine."""

        model: str

        def __init__(self, model: str = "", **options: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

    class AsyncEngineArgs(EngineArgs):
        """Options of an engine that serves many requests concurrently."""

else:
    EngineArgs = _make_args_class("EngineArgs", "Options of an engine, as ``LLM`` takes them.")
    AsyncEngineArgs = _make_args_class("AsyncEngineArgs", "Options of ``AsyncLLM``.", "enable_log_requests")


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An argument parser that accepts ``--some_name`` for ``--some-name``."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parses arguments as ``argparse``, after replacing underscores in option names."""
        import sys

        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([_to_dashes(word) for word in words], namespace)


def _to_dashes(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, sign, value = word.partition("=")
    return name.replace("_", "-") + sign + value
