"""The environment variables that are read beside those of flags: name, kind, default, meaning."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from trencadis.core.errors import StartupError
from trencadis.core.nearest import nearest

TRUE = ("true", "t", "1", "yes", "y", "on")
FALSE = ("false", "f", "0", "no", "n", "off")
PREFIXES = ("VLLM_", "TRENCADIS_")

READ = "read"
IGNORED = "ignored"
LATER = "later"


@dataclass(frozen=True, slots=True)
class Env:
    """One variable.

    Args:
        kind: bool, int, float, str or secret.
        effect: ``read``; ``ignored`` (accepted, one line says why); ``later`` (refused: no part reads it yet).
    """

    name: str
    kind: str
    default: str
    meaning: str
    effect: str = READ


_BUCKETS = tuple(
    f"VLLM_{stage}_{axis}_BUCKET_{bound}"
    for stage, axes in (("PROMPT", ("BS", "SEQ", "QUERY", "CTX")), ("DECODE", ("BS", "BLOCK")))
    for axis in axes
    for bound in ("MIN", "STEP", "MAX", "PAD_MAX", "PAD_PERCENT")
)
_AXIS = {
    "PROMPT_BS": "rows of a prompt launch",
    "PROMPT_SEQ": "older name of the QUERY variables",
    "PROMPT_QUERY": "tokens of a prompt row",
    "PROMPT_CTX": "KV blocks before a prompt chunk",
    "DECODE_BS": "rows of a decode launch",
    "DECODE_BLOCK": "KV blocks of a decode launch",
}
_BOUND = {
    "MIN": "smallest size",
    "STEP": "what sizes are rounded up to (exp) or grow by (lin, pad)",
    "MAX": "largest size; raised where one full-length row needs more",
    "PAD_MAX": "pad: most that a need is padded by",
    "PAD_PERCENT": "pad: most padding in percent of what is run, 0 to 50",
}


def _bucket_meaning(name: str) -> str:
    axis, _, bound = name.removeprefix("VLLM_").partition("_BUCKET_")
    return f"{_AXIS[axis]}: {_BOUND[bound]}"


TABLE: tuple[Env, ...] = (
    Env("VLLM_SKIP_WARMUP", "bool", "false", "no warm-up before serving; nothing is warmed on a CPU"),
    Env("TRENCADIS_CACHE", "str", "~/.cache/trencadis", "folder of measurements that later starts use"),
    Env("HF_HUB_OFFLINE", "bool", "false", "never ask the hub: only what its cache holds"),
    Env("OMP_NUM_THREADS", "int", "from the cgroup", "threads of the engine; `--threads` wins"),
    Env("VLLM_CONTIGUOUS_PA", "bool", "false", "contiguous paged attention excludes prefix sharing: ignored", IGNORED),
    Env("VLLM_FP32_SOFTMAX", "bool", "", "hpu: softmax of text in float32, by default for Qwen2 and Qwen2.5-VL; "
        "elsewhere it always is"),
    Env("VLLM_FP32_SOFTMAX_VISION", "bool", "false", "hpu: softmax of images in float32; elsewhere it always is"),
    Env("VLLM_PROMPT_USE_FUSEDSDPA", "bool", "true", "hpu: the fused attention kernel for prompts and images"),
    Env("VLLM_CONFIG_HIDDEN_LAYERS", "int", "1", "hpu: layers between two graph cuts"),
    Env("VLLM_HPU_FORCE_MARK_STEP", "bool", "true", "hpu: graph cuts between layers; false: only where they must be"),
    Env("VLLM_T_COMPILE_REGIONAL_COMPILATION", "bool", "true", "hpu, compile mode: layers are compiled alone "
        "and shared; false: each bucket as a whole"),
    Env("VLLM_REGIONAL_COMPILATION", "bool", "true", "older name of VLLM_T_COMPILE_REGIONAL_COMPILATION"),
    Env("VLLM_T_COMPILE_FULLGRAPH", "bool", "true", "hpu, compile mode: what the compiler cannot take is an error; "
        "false: it breaks the graph there"),
    Env("VLLM_T_COMPILE_DYNAMIC_SHAPES", "bool", "false", "hpu, compile mode: true is refused, since every "
        "bucket has one shape"),
    Env("VLLM_FULL_WARMUP", "bool", "false", "hpu, compile mode: guards are skipped after warm-up, and a "
        "compilation is an error then"),
    Env("TRENCADIS_HPU_EMULATOR", "bool", "", "1: emulate a Gaudi even where there is one; 0: never emulate"),
    Env("TRENCADIS_HPU_EMULATOR_PROFILE", "str", "gaudi2", "the card that is emulated: gaudi2 or gaudi3"),
    Env("TRENCADIS_HPU_EMULATOR_KIND", "str", "compute", "compute: real values; meta: shapes and bytes alone"),
    Env("TRENCADIS_HPU_EMULATOR_HOST_MEMORY", "str", "512MiB", "host memory that an emulated card's KV cache may fill"),
    Env("TRENCADIS_HPU_EMULATOR_FAULTS", "str", "", "faults to inject, see docs/hpu-emulator.md"),
    Env("TRENCADIS_CUDA_TWIN", "bool", "false", "cuda: no card, its twin on the CPU, for tests, see docs/cuda.md"),
    Env("TRENCADIS_CUDA_TWIN_FAULTS", "str", "", "cuda: faults of the CPU twin, for tests, see docs/cuda.md"),
    Env("VLLM_USE_V1", "bool", "true", "there is one engine", IGNORED),
    Env("VLLM_NO_USAGE_STATS", "bool", "true", "no usage figures are ever sent", IGNORED),
    Env("VLLM_DO_NOT_TRACK", "bool", "true", "no usage figures are ever sent", IGNORED),
    Env("VLLM_WORKER_MULTIPROC_METHOD", "str", "spawn", "the engine is always a fresh process", IGNORED),
    Env("VLLM_TARGET_DEVICE", "str", "", "`--device` chooses the device", IGNORED),
    Env("VLLM_CPU_KVCACHE_SPACE", "str", "", "`--kv-cache-memory-bytes` sets the KV cache", IGNORED),
    Env("VLLM_MULTIMODAL_BUCKETS", "str", "", "slots of VISION buckets, each divisible by 64; None: images unpadded"),
    Env("VLLM_MULTIMODAL_RESOLUTIONS", "str", "", "comes with warm-up by image sizes", LATER),
    Env("VLLM_BUCKETING_STRATEGY", "str", "exp", "exp, lin or pad: how sizes along an axis are chosen"),
    Env("VLLM_EXPONENTIAL_BUCKETING", "bool", "", "older: true is exp, false is lin; wins over the strategy"),
    Env("VLLM_BUCKETING_FROM_FILE", "str", "", "file of (rows, query tokens, blocks) buckets; replaces the strategy"),
    *(Env(name, "int", "", _bucket_meaning(name)) for name in _BUCKETS),
)  # fmt: skip

BY_NAME: dict[str, Env] = {e.name: e for e in TABLE}


_SECRET = re.compile(r"(^|_)(KEY|APIKEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$")


def secret(name: str) -> bool:
    """Whether a variable holds a key, by the table or, if it is not in there, by its name."""
    known = BY_NAME.get(name)
    return known.kind == "secret" if known is not None else bool(_SECRET.search(name.upper()))


def shapes(name: str) -> bool:
    """Whether a variable of the table changes the planned shapes."""
    return "_BUCKET" in name or name == "VLLM_EXPONENTIAL_BUCKETING"


def parse_bool(text: str, name: str) -> bool:
    """Parses ``true t 1 yes y on`` and their opposites, in upper or lower case.

    Raises:
        StartupError: anything else; the line names the variable or flag.
    """
    low = text.strip().lower()
    if low in TRUE:
        return True
    if low in FALSE or not low:
        return False
    raise StartupError(f"{name}={text!r} is neither true ({' '.join(TRUE)}) nor false ({' '.join(FALSE)}).")


def get(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """The text of a variable of the table; None if it is unset or empty."""
    env = BY_NAME[name]
    return (os.environ if environ is None else environ).get(env.name) or None


def get_bool(name: str, environ: Mapping[str, str] | None = None) -> bool:
    """A boolean of the table, or its default if it is unset."""
    text = get(name, environ)
    return parse_bool(BY_NAME[name].default if text is None else text, name)


def get_int(name: str, environ: Mapping[str, str] | None = None) -> int | None:
    """An integer of the table, or its default if it is unset; None if that is no number."""
    text = get(name, environ)
    if text is None:
        default = BY_NAME[name].default
        return int(default) if default.lstrip("-").isdigit() else None
    try:
        return int(text)
    except ValueError:
        raise StartupError(f"{name}={text!r} is not a whole number.") from None


def get_float(name: str, environ: Mapping[str, str] | None = None) -> float | None:
    """A number of the table; None if it is unset."""
    text = get(name, environ)
    try:
        value = None if text is None else float(text)
    except ValueError:
        value = float("nan")
    if value is not None and not abs(value) < float("inf"):
        raise StartupError(f"{name}={text!r} is not a number.")
    return value


def review(environ: Mapping[str, str], flags: Collection[str] = ()) -> Iterator[str]:
    """One line for each variable that is set and has no effect or is unknown. ``flags``: variables that flags read.

    Raises:
        StartupError: a variable that no part reads yet, or a boolean or number that cannot be read.
    """
    for name in sorted(environ):
        env = BY_NAME.get(name)
        if env is None:
            if name.startswith(PREFIXES) and name not in flags:
                yield _unknown(name, flags)
            continue
        if not environ[name]:
            continue
        if env.effect == LATER:
            raise StartupError(f"{name} is not supported yet: it {env.meaning}. Unset it.")
        if env.kind == "bool":
            get_bool(name, environ)
        elif env.kind == "int":
            get_int(name, environ)
        elif env.kind == "float":
            get_float(name, environ)
        if env.effect == IGNORED:
            yield f"{name} has no effect: {env.meaning}."


def _unknown(name: str, flags: Collection[str]) -> str:
    near = nearest(name, (*BY_NAME, *flags))
    hint = f"; did you mean {near}?" if near else "."
    return f"{name} is not a variable that Trencadis reads{hint}"


def markdown(flags: Iterable[Env]) -> str:
    """The table as ``docs/environment.md``. ``flags``: the variables that set a flag."""
    every = (*flags, *TABLE)
    titles = (
        (READ, "Read"),
        (IGNORED, "Accepted without effect (one line says so)"),
        (LATER, "Refused until the part that reads them is there"),
    )
    lines = [
        "# Environment variables",
        "",
        "Made by `tools/gen_environment.py` from `core/envs.py` and the table of flags; do not edit.",
        "",
        f"Booleans take `{' '.join(TRUE)}` and `{' '.join(FALSE)}`. "
        "A flag wins over the file of `--config`, the file over the environment, the environment over the default. "
        "An unknown `VLLM_*` or `TRENCADIS_*` variable prints one line with the nearest known name.",
    ]
    for effect, title in titles:
        lines += ["", f"## {title}", "", "| variable | kind | default | meaning |", "|---|---|---|---|"]
        lines += [f"| `{e.name}` | {e.kind} | {e.default or '-'} | {e.meaning} |" for e in every if e.effect == effect]
    return "\n".join(lines) + "\n"
