"""Turns keyword arguments of ``LLM`` into a configuration.

Keywords are named like flags; values are as in Python or as on the command line.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from trencadis.core.config import EngineConfig
from trencadis.core.errors import BadRequest, StartupError
from trencadis.core.flag_options import FlagValue
from trencadis.server.config import resolve_settings
from trencadis.server.config.flags import Flag, get_flag_table
from trencadis.server.config.vllm_flag_row import convert_flags
from trencadis.server.config.vllm_flag_table import ROWS
from trencadis.server.prompts.text_service import TextService
from trencadis.server.prompts.text_service_builder import MediaRules, make_text_service
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
    from trencadis.server.config.hub import find_model_folder, find_tokenizer_folder, get_tokenizer_name

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
