"""Options of an engine as keyword arguments of ``LLM``, as one value (``EngineArgs``), and as a script's command line.

Keywords are named like flags; values are as in Python or as on the command line.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from dataclasses import field, fields, make_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import BadRequest, StartupError
from trencadis.core.flag_declaration import FlagValue
from trencadis.server.config import resolve_settings
from trencadis.server.config.flag_table_and_lookup import LISTS, Flag, get_flag_table
from trencadis.server.config.vllm_flag_and_env_table import ROWS
from trencadis.server.config.vllm_flag_row_and_value_conversion import convert_flags
from trencadis.server.prompts.media_frontends import MediaRules, make_text_service
from trencadis.server.prompts.prompt_builder import TextService
from trencadis.server.text.chat_template import read_override

log = logging.getLogger("trencadis.llm")

IGNORED_SERVER_FLAGS = frozenset({"disable_log_stats", "disable_uvicorn_access_log", "enable_log_requests"})
"""Flags of the server that callers also pass to vLLM's ``LLM``; they have no effect offline."""
PROMPT_FLAGS = ("allowed_local_media_path", "allowed_media_domains", "chat_template", "chat_template_content_format")
"""Flags of the server about prompts, which apply offline too."""


class OfflineSetup(NamedTuple):
    """Parts from which an offline engine is built; the model is a local folder."""

    config: EngineConfig
    media: MediaRules
    chat_template: str
    content_format: str

    def service(self) -> TextService:
        """Creates the text service: tokenizer, template, media."""
        return make_text_service(
            self.config, self.media, chat_template=self.chat_template, content_format=self.content_format
        )


def build_offline_setup(model: str | Path, given: Mapping[str, FlagValue]) -> OfflineSetup:
    """Builds the setup from the keyword arguments of ``LLM``, ``AsyncLLM`` and ``EngineArgs``.

    Raises:
        StartupError: see ``build_engine_config``; or the model does not exist.
    """
    front = {name: given.get(name) for name in PROMPT_FLAGS}
    config = build_engine_config(
        str(model or ""), {name: value for name, value in given.items() if name not in PROMPT_FLAGS}
    )
    template, form = (str(front[name] or "") for name in ("chat_template", "chat_template_content_format"))
    form = get_flag_table()["chat_template_content_format"].check(form or "auto", "chat_template_content_format")
    folder = str(front["allowed_local_media_path"] or "")
    media = MediaRules(tuple(front["allowed_media_domains"] or ()), folder, any_path=True)
    return OfflineSetup(resolve_local_model(config), media, template, form)


SINGLE_ENGINE_VALUES: Mapping[str, FlagValue] = {"data_parallel_size": 1, "data_parallel_backend": "mp"}
"""Options of a server with several engines, with the values that mean a single engine."""


def check_single_engine(name: str, value: FlagValue) -> None:
    """Raises StartupError if an option of ``SINGLE_ENGINE_VALUES`` requests more than one engine."""
    if value is not None and str(value) != str(SINGLE_ENGINE_VALUES[name]):
        raise StartupError(f"{name}={value} is refused: offline there is one engine; a server runs several (-dp).")


def build_engine_config(model: str, given: Mapping[str, FlagValue]) -> EngineConfig:
    """Builds the configuration of ``model`` with the options ``given``; None stands for an option's default.

    Raises:
        StartupError: an unknown name, a value out of range, or one that is not supported.
    """
    known = _engine_flags()
    values: dict[str, FlagValue] = {}
    vllm_flags: dict[str, FlagValue] = {}
    for name, value in given.items():
        flag = known.get(name)
        if flag is not None:
            if value is not None:
                values[flag.name] = _convert_value(flag, name, value)
        elif name in SINGLE_ENGINE_VALUES:
            check_single_engine(name, value)
        elif name in ROWS:
            vllm_flags[name] = ROWS[name].convert(dict(value) if isinstance(value, Mapping) else value)
        elif name not in IGNORED_SERVER_FLAGS:
            engines = sorted(f.name for f in known.values() if not f.hidden)
            raise StartupError(f"unknown option {name!r}; known: {', '.join(dict.fromkeys(engines))}")
    settled = convert_flags(vllm_flags, ROWS, values)
    for note in settled.notes:
        log.info("%s", note)
    for name in SINGLE_ENGINE_VALUES:
        check_single_engine(name, settled.values.get(name))
    meant = {name: value for name, value in settled.values.items() if get_flag_table()[name].owner == "engine"}
    made = EngineConfig(**{"model": model, **values, **meant})
    resolve_settings.check_numbers(made)
    return made


def resolve_local_model(config: EngineConfig) -> EngineConfig:
    """Returns the configuration with model and tokenizer as local folders; an empty model is the bundled demo."""
    from trencadis.assets import demo_path
    from trencadis.server.config.model_download import find_model_folder, find_tokenizer_folder, get_tokenizer_name

    model = find_model_folder(config) if config.model else demo_path()
    tokenizer = str(find_tokenizer_folder(config)) if get_tokenizer_name(config) else ""
    return replace(config, model=str(model), tokenizer=tokenizer)


def load_chat_template(chat_template: str | Path | None, *, is_literal: bool = False) -> str | None:
    """Returns a chat template as text: a file's content, or the text itself (``is_literal``: never a file's).

    Raises:
        BadRequest: neither a file's name nor the text of a template.
    """
    return str(chat_template) if is_literal and chat_template is not None else read_template(chat_template)


def read_template(given: str | Path | None) -> str | None:
    """Returns the template of a call: a file's content, or the text itself; None for None.

    Raises:
        BadRequest: neither a file's name nor the text of a template.
    """
    if given is None:
        return None
    try:
        return read_override(str(given))
    except StartupError:
        shown = f"{str(given)[:80]!r}: no such file, and no template text"
        raise BadRequest(f"chat_template {shown}.", param="chat_template") from None


def _engine_flags() -> dict[str, Flag]:
    """Returns the engine's flags by name and alias."""
    mine = [f for f in get_flag_table().values() if f.owner == "engine"]
    return {name: f for f in mine for name in (f.name, *f.aliases)}


def _convert_value(flag: Flag, name: str, value: FlagValue) -> FlagValue:
    """Returns the flag's value.

    A torch dtype is converted to its name, a path to a string, a tuple to a list; ``hf_token=True`` means the token
    that the hub's client stores.
    """
    if flag.name == "hf_token" and isinstance(value, bool):
        value = ""
    elif flag.name == "dtype":
        value = str(value).removeprefix("torch.")
    elif isinstance(value, Path):
        value = str(value)
    elif isinstance(value, tuple):
        value = list(value)
    elif isinstance(value, Mapping):
        value = dict(value)
    return flag.convert(value, name)


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
