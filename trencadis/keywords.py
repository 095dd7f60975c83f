"""Keyword arguments of ``LLM`` as configuration: named like flags; values as in Python or as on the command line."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from trencadis.core.config import EngineConfig
from trencadis.core.errors import BadRequest, StartupError
from trencadis.server.config import bounds
from trencadis.server.config.flags import Flag, table
from trencadis.server.config.foreign.row import settle
from trencadis.server.config.foreign.table import ROWS
from trencadis.server.prompts.frontends import MediaRules, text_service
from trencadis.server.prompts.service import TextService
from trencadis.server.text.template import read_override

log = logging.getLogger("trencadis.llm")

SERVERS = frozenset({"disable_log_stats", "disable_uvicorn_access_log", "enable_log_requests"})
"""Flags of the server that callers of other engines pass here too; offline they mean nothing."""
FRONT = ("allowed_local_media_path", "allowed_media_domains", "chat_template", "chat_template_content_format")
"""Flags of the server about prompts, which offline callers need too."""


class OfflineSetup(NamedTuple):
    """What an offline engine is made of; the model is a local folder."""

    config: EngineConfig
    media: MediaRules
    chat_template: str
    content_format: str

    def service(self) -> TextService:
        """The text service: tokenizer, template, media."""
        return text_service(
            self.config, self.media, chat_template=self.chat_template, content_format=self.content_format
        )


def setup(model: str | Path, given: Mapping[str, Any]) -> OfflineSetup:
    """Reads the keyword arguments of ``LLM``, ``AsyncLLM`` and ``EngineArgs``.

    Raises:
        StartupError: see ``engine_config``; or there is no such model.
    """
    front = {name: given.get(name) for name in FRONT}
    config = engine_config(str(model or ""), {name: value for name, value in given.items() if name not in FRONT})
    template, form = (str(front[name] or "") for name in ("chat_template", "chat_template_content_format"))
    form = table()["chat_template_content_format"].check(form or "auto", "chat_template_content_format")
    folder = str(front["allowed_local_media_path"] or "")
    media = MediaRules(tuple(front["allowed_media_domains"] or ()), folder, any_path=True)
    return OfflineSetup(local_model(config), media, template, form)


ONE_ENGINE: Mapping[str, Any] = {"data_parallel_size": 1, "data_parallel_backend": "mp"}
"""Options of a server with several engines, and the values that one engine has anyway."""


def alone(name: str, value: Any) -> None:
    """Raises StartupError if an option of ``ONE_ENGINE`` asks for more than one engine."""
    if value is not None and str(value) != str(ONE_ENGINE[name]):
        raise StartupError(f"{name}={value} is refused: offline there is one engine; a server runs several (-dp).")


def engine_config(model: str, given: Mapping[str, Any]) -> EngineConfig:
    """The configuration of ``model`` with the options ``given``; None stands for an option's default.

    Raises:
        StartupError: an unknown name, a value out of range, or one that asks for what is not built.
    """
    known = _flags()
    values: dict[str, Any] = {}
    foreign: dict[str, Any] = {}
    for name, value in given.items():
        flag = known.get(name)
        if flag is not None:
            if value is not None:
                values[flag.name] = _value(flag, name, value)
        elif name in ONE_ENGINE:
            alone(name, value)
        elif name in ROWS:
            foreign[name] = ROWS[name].convert(dict(value) if isinstance(value, Mapping) else value)
        elif name not in SERVERS:
            engines = sorted(f.name for f in known.values() if not f.hidden)
            raise StartupError(f"unknown option {name!r}; known: {', '.join(dict.fromkeys(engines))}")
    settled = settle(foreign, ROWS, values)
    for note in settled.notes:
        log.info("%s", note)
    for name in ONE_ENGINE:
        alone(name, settled.values.get(name))
    meant = {name: value for name, value in settled.values.items() if table()[name].owner == "engine"}
    made = EngineConfig(**{"model": model, **values, **meant})
    bounds.check(made)
    return made


def local_model(config: EngineConfig) -> EngineConfig:
    """The same configuration with model and tokenizer as local folders; no model is the bundled demo."""
    from trencadis.assets import demo_path
    from trencadis.server.config.hub import model_folder, tokenizer_folder, tokenizer_name

    model = model_folder(config) if config.model else demo_path()
    tokenizer = str(tokenizer_folder(config)) if tokenizer_name(config) else ""
    return replace(config, model=str(model), tokenizer=tokenizer)


def load_chat_template(chat_template: str | Path | None, *, is_literal: bool = False) -> str | None:
    """A chat template as text: a file's, or the text itself (``is_literal``: never a file's).

    Raises:
        BadRequest: neither a file's name nor the text of a template.
    """
    return str(chat_template) if is_literal and chat_template is not None else template_text(chat_template)


def template_text(given: str | Path | None) -> str | None:
    """The template of a call: a file's text, or the text itself.

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


def _flags() -> dict[str, Flag]:
    """The engine's flags, by name and alias."""
    mine = [f for f in table().values() if f.owner == "engine"]
    return {name: f for f in mine for name in (f.name, *f.aliases)}


def _value(flag: Flag, name: str, value: Any) -> Any:
    """The flag's value. A torch dtype counts as its name, a path as text, a tuple as a list, ``hf_token=True`` as the
    token that the hub keeps."""
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
