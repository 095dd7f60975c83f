"""Joins flags, file, environment and defaults into the two configurations, and records the source of each value.

Every number of a configuration is checked against the bounds of its option. The start-up dump lists every value that
differs from its default, and its source. Keys of the command line are hidden from ``ps``.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from trencadis.core import envs
from trencadis.core.devices import likely
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.flag_declaration import Bound, FlagValue, options
from trencadis.core.json_types import JsonMapping
from trencadis.core.operator_files import check_name, read_regular_text
from trencadis.core.request import REASONING_EFFORTS
from trencadis.core.shapes import bucket_options as bucket_env
from trencadis.core.spec.spec_config import list_ignored_keys, requested_speculation
from trencadis.server.config import command_line_parser as command_line
from trencadis.server.config.flag_table_and_lookup import (
    WHOLE,
    Flag,
    find_flag,
    get_flag_table,
    get_flag_variables,
)
from trencadis.server.config.server_config import ServerConfig
from trencadis.server.config.value_parsers import check_allowed_hosts
from trencadis.server.config.vllm_flag_and_env_table import ROWS, find_variable
from trencadis.server.config.vllm_flag_row_and_value_conversion import convert_flags

VARIABLE = "environment "
"""Prefix of the source of a value from the environment; the variable's name follows."""


def check_numbers(config: EngineConfig | ServerConfig, sources: Mapping[str, str] | None = None) -> None:
    """Checks every number of ``config``. ``sources``: as in ``Settings``.

    Raises:
        StartupError: a number is out of bounds; the message names the flag or variable, the value and the rule.
    """
    flags = get_flag_table()
    for each, option in options(config):
        if option.bound is not None:
            _check(flags[each.name], option.bound, getattr(config, each.name), (sources or {}).get(each.name, ""))


def _check(flag: Flag, bound: Bound, value: FlagValue, source: str) -> None:
    if value is None and flag.optional:
        return
    kinds = (int,) if flag.kind in WHOLE else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or (isinstance(value, float) and math.isnan(value)):
        kind = "a whole number" if flag.kind in WHOLE else "a number"
        raise StartupError(f"{flag.written} must be {kind}, got {value!r}.")
    if bound.holds(value):
        return
    given = value if isinstance(value, int) else f"{value:g}"
    if source.startswith(VARIABLE):
        raise StartupError(f"{source.removeprefix(VARIABLE)}={given} {bound.rule(value)}.")
    raise StartupError(f"{flag.written} {bound.rule(value)}, got {given}.")


CPU_SPACE = "VLLM_CPU_KVCACHE_SPACE"
UNITS = {"VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB": "MiB"}
"""Units of variables whose flag takes bytes."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The complete settings of a server.

    Args:
        sources: field name -> ``flag``, ``file PATH`` or ``environment NAME``; defaults are absent.
        notes: lines for the terminal.
        shapes: the bucket variables that are set; they have no flags.
        model_root: the model as the user named it, a hub id or folder; "": not known before it is found.
    """

    engine: EngineConfig
    server: ServerConfig
    sources: dict[str, str]
    notes: list[str]
    shapes: dict[str, str] = field(default_factory=dict)
    model_root: str = ""


def resolve_settings(given: command_line.ParsedArguments, environ: Mapping[str, str]) -> Settings:
    """Resolves every value by precedence: flag > file > environment > default.

    Raises:
        StartupError: one line about the first invalid value.
    """
    notes = [*given.notes, *envs.review(environ, get_flag_variables(), find_variable)]
    chosen: dict[str, FlagValue] = {}
    sources: dict[str, str] = {}
    for name, (value, variable) in _read_environment(environ).items():
        chosen[name], sources[name] = value, f"{VARIABLE}{variable}"
    if given.config is not None:
        for name, value in _read_file(given.config, notes).items():
            chosen[name], sources[name] = value, f"file {given.config}"
    for name, value in given.values.items():
        chosen[name], sources[name] = value, "flag"
    if "warmup" not in chosen and envs.get_bool("VLLM_SKIP_WARMUP", environ):
        chosen["warmup"], sources["warmup"] = "skip", f"{VARIABLE}VLLM_SKIP_WARMUP"
    if "kv_cache_memory_bytes" not in chosen and (space := _get_cpu_kv_space(chosen, environ)):
        chosen["kv_cache_memory_bytes"], sources["kv_cache_memory_bytes"] = (
            space,
            f"{VARIABLE}{CPU_SPACE}",
        )
    flags = get_flag_table()
    engine = EngineConfig(**{k: v for k, v in chosen.items() if flags[k].owner == "engine"})
    server = ServerConfig(**{k: v for k, v in chosen.items() if flags[k].owner == "server"})
    check_numbers(engine, sources)
    check_numbers(server, sources)
    _check_no_blanks(server)
    check_allowed_hosts(server.allowed_hosts)
    requested_speculation(engine)
    engine = _complete_adapters(engine, server)
    _check_efforts(server.reasoning_effort_map)
    if server.ssl_keyfile and not server.ssl_certfile:
        raise StartupError("--ssl-keyfile needs --ssl-certfile.")
    if server.ssl_cert_reqs and not server.ssl_certfile:
        raise StartupError("--ssl-cert-reqs needs --ssl-certfile.")
    if server.metrics_auth and server.metrics_open:
        raise StartupError("--metrics-auth and --metrics-open contradict each other; give one.")
    notes += bucket_env.read_bucket_options(environ).notes
    notes += _list_idle_flags(engine, server)
    notes += _warn_about_graph_settings(engine, sources, environ)
    return Settings(engine, server, sources, notes, _read_bucket_variables(environ))


def _complete_adapters(engine: EngineConfig, server: ServerConfig) -> EngineConfig:
    """Returns the configuration with the number of adapters in host memory.

    Raises:
        StartupError: there are settings of adapters without ``--enable-lora``.
    """
    if not engine.enable_lora:
        given = [server.lora_modules, server.default_mm_loras, server.allowed_lora_path]
        names = ("--lora-modules", "--default-mm-loras", "--allowed-lora-path")
        idle = next((name for name, value in zip(names, given, strict=True) if value), None)
        if idle is not None:
            raise StartupError(f"{idle} needs --enable-lora.")
        return engine
    if engine.max_cpu_loras is not None:
        return engine
    return replace(engine, max_cpu_loras=max(engine.max_loras, len(server.lora_modules)))


def _list_idle_flags(engine: EngineConfig, server: ServerConfig) -> list[str]:
    """A line for each flag of ours that is given and does nothing, or not all that its name says."""
    notes = list_ignored_keys(engine)
    if engine.trust_remote_code:
        notes.append("--trust-remote-code has no effect: no code of a repository ever runs.")
    if server.show_hidden_metrics_for_version:
        notes.append(
            "--show-hidden-metrics-for-version shows all of them as --show-hidden-metrics does, whatever the version."
        )
    return notes


def _check_efforts(efforts: JsonMapping) -> None:
    """Raises StartupError if ``--reasoning-effort-map`` has an unknown effort, or a value that is no text."""
    unknown = next((name for name in efforts if name not in REASONING_EFFORTS), None)
    if unknown is not None:
        raise StartupError(f"--reasoning-effort-map: {unknown[:40]!r} is none of {', '.join(REASONING_EFFORTS)}.")
    wrong = next((name for name, value in efforts.items() if not isinstance(value, str)), None)
    if wrong is not None:
        raise StartupError(f"--reasoning-effort-map: the value of {wrong!r} must be a text.")


def _check_no_blanks(server: ServerConfig) -> None:
    """Refuses an empty key or name, as from an unset variable of a script: an empty key would admit every client."""
    for given, flag, what in (
        (server.api_key, "--api-key", "a key is empty, which guards nothing; leave the flag out to serve everybody"),
        (server.served_model_name, "--served-model-name", "a name is empty"),
    ):
        if any(not one.strip() for one in given):
            raise StartupError(f"{flag}: {what}.")
    for name in server.served_model_name:
        check_name(name, "--served-model-name")


def _read_environment(environ: Mapping[str, str]) -> dict[str, tuple[FlagValue, str]]:
    """Returns field name -> (value, variable) from the environment."""
    found: dict[str, tuple[FlagValue, str]] = {}
    for flag in get_flag_table().values():
        for name in reversed(flag.env):
            text = environ.get(name)
            if text:
                found[flag.name] = flag.parse(text + UNITS.get(name, ""), name), name
    return found


def _get_cpu_kv_space(chosen: Mapping[str, FlagValue], environ: Mapping[str, str]) -> int:
    """Returns the bytes of a CPU's KV cache from vLLM's variable; 0: the server chooses."""
    text = envs.get(CPU_SPACE, environ)
    if text is None or likely(chosen.get("device", "auto")) != "cpu":
        return 0
    return int(get_flag_table()["kv_cache_memory_bytes"].parse(f"{text}GiB", CPU_SPACE) or 0)


FILE_BYTES, FILE_VALUES = 1 << 20, 10_000
"""Most bytes and values of a file of ``--config``: aliases in a kilobyte can stand for billions of values."""


def _read_file(path: str, notes: list[str]) -> dict[str, FlagValue]:
    """Reads the values of a YAML file, whose keys are long option names."""
    if not path.endswith((".yaml", ".yml")):
        raise StartupError(f"--config {path}: the file must end in .yaml or .yml.")
    import yaml

    try:
        content = yaml.safe_load(read_regular_text(path, most=FILE_BYTES))
    except OSError as error:
        raise StartupError(f"--config {path}: {error.strerror}.") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        line = " ".join(str(error).split())
        raise StartupError(f"--config {path}: not valid YAML ({line[:120]}).") from None
    if _count_values(content, {}) > FILE_VALUES:
        raise StartupError(f"--config {path}: more than {FILE_VALUES} values, those of aliases included.")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise StartupError(f"--config {path}: must be a mapping from names to values.")
    found: dict[str, FlagValue] = {}
    vllm_flags: dict[str, FlagValue] = {}
    try:
        for key, value in content.items():
            _add_file_entry(str(key), value, found, vllm_flags)
        settled = convert_flags(vllm_flags, ROWS, found)
    except StartupError as error:
        raise StartupError(f"--config {path}: {error}") from None
    notes += settled.notes
    return found | settled.values


def _count_values(content: object, known: dict[int, int]) -> int:
    """Counts the values of a YAML file as often as aliases name them; one that contains itself counts as too many."""
    if not isinstance(content, dict | list):
        return 1
    if id(content) not in known:
        known[id(content)] = FILE_VALUES + 1
        inner = content.values() if isinstance(content, dict) else content
        known[id(content)] = 1 + sum(_count_values(value, known) for value in inner)
    return known[id(content)]


def _add_file_entry(key: str, value: FlagValue, found: dict[str, FlagValue], vllm_flags: dict[str, FlagValue]) -> None:
    """Adds one line of the file to the values of our flags, or to those of vLLM's."""
    hit = find_flag(key)
    if hit.flag is not None:
        converted = hit.flag.convert(value, key)
        found[hit.flag.name] = not converted if hit.negated else converted
    elif hit.name in ROWS:
        converted = ROWS[hit.name].convert(value)
        vllm_flags[hit.name] = not converted if hit.negated else converted
    else:
        raise StartupError(f"{key} is not allowed in a file.")


def _read_bucket_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the bucket variables that are set."""
    return {e.name: environ[e.name] for e in envs.TABLE if envs.shapes(e.name) and environ.get(e.name)}


def _warn_about_graph_settings(
    engine: EngineConfig, sources: Mapping[str, str], environ: Mapping[str, str]
) -> list[str]:
    """Returns a warning for each graph or bucket setting, if the device is a CPU."""
    if likely(engine.device) != "cpu":
        return []
    written = [
        source.removeprefix(VARIABLE) if source.startswith(VARIABLE) else get_flag_table()[name].written
        for name, source in sources.items()
        if name.startswith("graph_")
    ]
    written += _read_bucket_variables(environ)
    return [f"{name} has no effect on a CPU, which plans no shapes and captures no graphs." for name in written]


MASK = "****"


def format_startup_lines(settings: Settings) -> Iterator[str]:
    """Yields one line for each value that the user chose or that differs from its default; secrets are masked."""
    for flag in get_flag_table().values():
        value = getattr(settings.engine if flag.owner == "engine" else settings.server, flag.name)
        source = settings.sources.get(flag.name)
        if value == flag.default and source is None:
            continue
        shown = MASK if flag.secret and value else repr(value)
        yield f"{flag.name} = {shown} ({source or 'derived'})"
    for name, value in settings.shapes.items():
        yield f"{name} = {value!r} (environment)"


ARG_START = 45
"""Index of a field of /proc/self/stat, counted after the name: the address of the command line in memory."""
LONG = 4
"""Shortest key that is also masked inside words."""


def hide_keys(settings: Settings) -> Iterator[str]:
    """Masks keys that were passed as flags; yields a warning for each such flag."""
    for flag in get_flag_table().values():
        if flag.secret and settings.sources.get(flag.name) == "flag":
            value = getattr(settings.engine if flag.owner == "engine" else settings.server, flag.name)
            mask([value] if isinstance(value, str) else value)
            yield (
                f"everybody on this machine could read {flag.written} until now, and shell histories and service files "
                f"keep it: set {flag.env[0]} or use a file of --config instead."
            )


def mask(keys: Iterable[str]) -> None:
    """Overwrites ``keys`` with asterisks in this process's arguments; does nothing if the system hides those.

    Linux shows the memory that held the arguments at the start, so this changes that memory; ``sys.argv`` is a copy.
    """
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        shown = Path("/proc/self/cmdline").read_bytes()
    except OSError:
        return
    start = int(fields[ARG_START])
    if not start or not shown or ctypes.string_at(start, len(shown)) != shown:
        return
    for key in keys:
        for at in _find_key(shown, os.fsencode(key)):
            ctypes.memset(start + at, ord("*"), len(os.fsencode(key)))


def _find_key(shown: bytes, key: bytes) -> Iterator[int]:
    """Yields the offsets of ``key``: as a whole word, after =, or anywhere if it is too long for a chance match."""
    at = shown.find(key) if key else -1
    while at >= 0:
        before, after = shown[at - 1 : at], shown[at + len(key) : at + len(key) + 1]
        if len(key) >= LONG or (before in (b"\0", b"=") and after in (b"\0", b"")):
            yield at
        at = shown.find(key, at + len(key))
