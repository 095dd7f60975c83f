"""The LoRA adapters that requests may name: read and checked when they are registered."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import BadRequest, FilesNotFound, NotFound, StartupError
from trencadis.core.json_types import JsonObject
from trencadis.core.lora.adapter_files import check_tower, read_adapter, resolve_folder
from trencadis.core.operator_files import check_name, expand_path
from trencadis.core.request import AdapterRef

FetchAdapter = Callable[[str], Path]

MEDIA_KINDS = ("image", "video")
"""Kinds of media that ``--default-mm-loras`` may name."""


MOST_ADAPTERS = 65536
"""Most adapters of a server, so that clients who load them without end do not use up its memory."""


class UnknownAdapter(StartupError):
    """Raised if an adapter that is to be unloaded is not registered."""


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter that requests may name.

    Args:
        root: folder or hub id, as given; ``parent``: the name of the base model; ``created``: seconds since 1970.
    """

    ref: AdapterRef
    root: str
    parent: str
    created: int


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """An adapter of ``--lora-modules``, as the operator wrote it."""

    name: str
    path: str
    parent: str = ""


class AdapterRegistry:
    """The adapters of one server by name.

    Args:
        model: the base model, which every adapter must fit.
        names: names of the base model, which adapters may not have.
        fetch: returns the folder of an adapter by its path or hub id.
        allowed: folder that adapters loaded at run time must be in; empty: only hub ids can be loaded then.
    """

    def __init__(
        self, model: ModelConfig, engine: EngineConfig, names: Sequence[str], fetch: FetchAdapter, allowed: str = ""
    ) -> None:
        self._model, self._engine, self._names, self._allowed = model, engine, tuple(names), allowed
        self._fetch = fetch
        self.served: dict[str, ServedAdapter] = {}
        self.defaults: dict[str, AdapterRef] = {}
        """Kind of media -> the adapter of requests to the base model that have media of this kind alone."""

    def find(self, name: str | None) -> AdapterRef | None:
        """Returns the adapter of a model name; None: it names the base model."""
        served = self.served.get(name or "")
        return None if served is None else served.ref

    def find_default(self, kinds: set[str]) -> AdapterRef | None:
        """Returns the adapter of a request to the base model by the kinds of its media; None: it has none."""
        found = [self.defaults[kind] for kind in sorted(kinds) if kind in self.defaults]
        return found[0] if len(found) == 1 else None

    def check(self, name: str, replace: bool = False) -> None:
        """Checks that an adapter may be registered as ``name``.

        Raises:
            StartupError: the name is empty or taken, or there are too many adapters; one line.
        """
        if not name:
            raise StartupError("an adapter needs a name, which requests give as their model")
        check_name(name, "the adapter")
        if name in self._names:
            raise StartupError(f"{name[:60]} is the name of the base model; give the adapter another one")
        if name in self.served:
            if not replace:
                raise StartupError(f"the adapter {name[:60]} has already been loaded; unload it, or set load_inplace")
        elif len(self.served) >= MOST_ADAPTERS:
            raise StartupError(f"{MOST_ADAPTERS} adapters have been loaded, the most that a server has; unload one")

    def read(self, name: str, path: str, parent: str = "", runtime: bool = False) -> ServedAdapter:
        """Reads an adapter, without registering it; takes long, and may run in a thread.

        Args:
            path: a folder, or a hub id; ``runtime``: a folder must be inside the allowed one.

        Raises:
            StartupError: it cannot be read or does not fit; one line.
        """
        if parent:
            check_name(parent, "the adapter's base model")
        folder = self._find_folder(path, runtime)
        adapter = read_adapter(folder, self._model)
        if adapter.rank > self._engine.max_lora_rank:
            raise StartupError(f"{path[:80]} has rank {adapter.rank}; --max-lora-rank {adapter.rank} would admit it")
        check_tower(adapter, self._model)
        ref = AdapterRef(adapter.digest, str(folder), name, adapter.in_tower)
        return ServedAdapter(ref, path, parent or self._names[0], int(time.time()))

    def _find_folder(self, path: str, runtime: bool) -> Path:
        if not path:
            raise StartupError("an adapter needs a path: a folder, or a hub id")
        local = expand_path(path)
        if runtime and (local.exists() or local.is_absolute() or path.startswith((".", "~"))):
            if not self._allowed:
                raise StartupError("folders of adapters can be loaded with --allowed-lora-path FOLDER alone")
            return resolve_folder(path, Path(self._allowed))
        return self._fetch(path)

    def put(self, made: ServedAdapter) -> None:
        """Registers an adapter that was read; requests in flight keep the adapter that they began with."""
        self.served[made.ref.name] = made

    def add(self, name: str, path: str, parent: str = "", replace: bool = False) -> ServedAdapter:
        """Reads and registers an adapter; raises StartupError as ``check`` and ``read`` do."""
        self.check(name, replace)
        made = self.read(name, path, parent)
        self.put(made)
        return made

    def remove(self, name: str) -> None:
        """Unregisters an adapter; running requests finish with it.

        Raises:
            UnknownAdapter: there is none of this name.
        """
        if name not in self.served:
            raise UnknownAdapter(f"there is no adapter {name[:60]}")
        del self.served[name]

    def set_defaults(self, given: Mapping[str, str]) -> None:
        """Reads the adapters of ``--default-mm-loras``.

        Raises:
            StartupError: a kind is unknown, or an adapter cannot be read.
        """
        for kind, path in given.items():
            if kind not in MEDIA_KINDS:
                raise StartupError(f"--default-mm-loras: {kind[:40]!r} is none of {', '.join(MEDIA_KINDS)}")
            if not isinstance(path, str):
                raise StartupError(f"--default-mm-loras: the value of {kind!r} must be a folder or hub id")
            self.defaults[kind] = self.read(f"default-{kind}", path).ref


def parse_modules(words: Sequence[str]) -> list[NamedAdapter]:
    """Reads ``--lora-modules``: NAME=PATH, or JSON with name, path and base_model_name.

    Raises:
        StartupError: a word has another form, or two have one name.
    """
    found: dict[str, NamedAdapter] = {}
    for word in words:
        if word.lstrip().startswith("{"):
            one = _parse_json_module(word)
        else:
            name, sign, path = word.partition("=")
            if not (sign and name and path):
                raise StartupError(f"--lora-modules {word[:80]}: write NAME=PATH, or JSON with name and path.")
            one = NamedAdapter(name, path)
        if found.setdefault(one.name, one) is not one:
            raise StartupError(f"--lora-modules gives two adapters the name {one.name[:60]}; each needs its own.")
    return [*found.values()]


def _parse_json_module(word: str) -> NamedAdapter:
    try:
        given = json.loads(word)
    except (ValueError, RecursionError):
        raise StartupError(f"--lora-modules {word[:80]} is no JSON.") from None
    known = {"name", "path", "base_model_name"}
    texts = {key: given.get(key) or "" for key in known}
    if not given.get("name") or not given.get("path") or set(given) - known:
        raise StartupError(f"--lora-modules {word[:80]}: its keys are name, path and base_model_name.")
    if any(not isinstance(text, str) for text in texts.values()):
        raise StartupError(f"--lora-modules {word[:80]}: its values must be texts.")
    return NamedAdapter(texts["name"], texts["path"], texts["base_model_name"])


async def change_adapters(registry: AdapterRegistry, change: JsonObject) -> None:
    """Loads the adapter with ``path``, or unloads the one without.

    Raises:
        BadRequest: it cannot be loaded.
        NotFound: there are no files of it, or it cannot be unloaded because it is not loaded.
    """
    name = change["name"]
    try:
        if "path" not in change:
            registry.remove(name)
            return
        registry.check(name, change["replace"])
        registry.put(await asyncio.to_thread(registry.read, name, change["path"], change["parent"], True))
    except UnknownAdapter as error:
        raise NotFound(f"{str(error)[:1].upper()}{str(error)[1:]}.", param="lora_name") from None
    except FilesNotFound as error:
        raise NotFound(f"The adapter cannot be loaded: {error}", param="lora_path") from None
    except StartupError as error:
        raise BadRequest(f"The adapter cannot be loaded: {error}", param="lora_path") from None
