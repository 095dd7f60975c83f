"""The environment variables that are read in addition to those of flags: name, kind, default, meaning."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from trencadis.core.errors import StartupError, suggest_name

TRUE = ("true", "t", "1", "yes", "y", "on")
FALSE = ("false", "f", "0", "no", "n", "off")
PREFIXES = ("VLLM_", "TRENCADIS_")

READ = "read"
IGNORED = "ignored"
REFUSED = "refused"
ALWAYS = "any value"


@dataclass(frozen=True, slots=True)
class Env:
    """One variable.

    Args:
        kind: bool, int, float, str or secret.
        effect: ``read``; ``ignored`` (accepted, one line says why); ``refused`` (the requested behaviour is not
            supported; the meaning says why and what to do).
        refuses: the values for which a refused variable is an error: ``true``, ``false``, or any value.
        plugin: True for variables of vLLM's Gaudi plug-in or its PyTorch bridge; the documentation lists them in a
            separate table.
    """

    name: str
    kind: str
    default: str
    meaning: str
    effect: str = READ
    refuses: str = ""
    plugin: bool = False


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


_NEUTRAL = {
    "the backend chooses how attention is computed": (
        "VLLM_PROMPT_USE_FLEX_ATTENTION", "VLLM_PROMPT_ATTN_IMPL", "VLLM_FUSED_BLOCK_SOFTMAX",
        "VLLM_FUSEDSDPA_SLIDE_THLD", "VLLM_FUSEDSDPA_SLIDE_RIGHT",
        "VLLM_HPU_FSDPA_SLICE_ENABLED", "VLLM_HPU_FSDPA_SLICE_SEQ_LEN_THLD", "VLLM_HPU_FSDPA_SLICE_CHUNK_SIZE",
        "VLLM_HPU_FSDPA_SLICE_WITH_GRAPH_BREAKS", "VLLM_MERGED_PREFILL", "VLLM_ROW_PARALLEL_CHUNKS",
        "VLLM_ROW_PARALLEL_CHUNK_THRESHOLD",
    ),
    "rotary factors are made once a launch": ("VLLM_COS_SIN_RECOMPUTE",),
    "ids of equal probability stay or go together": ("VLLM_HANDLE_TOPK_DUPLICATES",),
    "`--async-depth` says how far steps overlap": ("VLLM_DELAYED_SAMPLING",),
    "`--log-level debug` says more": ("VLLM_DEBUG",),
    "KV blocks may lie anywhere: nothing is moved": (
        "VLLM_DEFRAG", "VLLM_DEFRAG_THRESHOLD", "VLLM_DEFRAG_WITH_GRAPHS",
    ),
    "what lives as long as the server is not walked by the collector": (
        "VLLM_GC_THR_GEN0", "VLLM_GC_THR_GEN1", "VLLM_GC_THR_GEN2", "VLLM_GC_THR_MULTIPLIER",
    ),
    "found by itself": ("VLLM_HW", "VLLM_BUILD", "VLLM_ENGINE_VERSION", "VLLM_MODEL_TYPE"),
    "there are no experimental switches": ("VLLM_ENABLE_EXPERIMENTAL_FLAGS", "VLLM_DEVELOPER_MODE"),
    "the device computes experts by kernels of its own; answers are the same": (
        "VLLM_MOE_CHUNK", "VLLM_MOE_TOKEN_BOUNDARY", "VLLM_HPU_MOE_GATHER", "VLLM_HPU_MOE_GATHER_RATIO",
        "VLLM_HPU_MOE_GATHER_VERIFY",
    ),
    "a launch takes its tokens in one row": ("VLLM_FLATTEN_INPUT",),
    "no model that is served has what it tunes": (
        "VLLM_ALIBI_USE_FLOAT32_BIASES", "VLLM_COMPACT_GDN",
        "VLLM_USE_HYBRID_CACHE", "VLLM_USE_NAIVE_MAMBA_CACHE_SHARING", "VLLM_MAMBA_USE_PYTORCH",
        "VLLM_GDN_LEGACY_PHASE_B", "VLLM_GDN_COMPUTE_FP32", "VLLM_GDN_EXACT_SOLVE",
        "VLLM_DISABLE_SHARED_EXPERTS_STREAM",
    ),
    "`--quantization` and the checkpoint say which scales there are": (
        "VLLM_DISABLE_MARK_SCALES_AS_CONST", "VLLM_HPU_FORCE_CHANNEL_FP8", "VLLM_SCALE_ADJUSTMENT",
    ),
    "weights are copied once, and waited for": ("VLLM_WEIGHT_LOAD_FORCE_SYNC",),
    "KV caches are not sent to other servers": ("VLLM_HPU_NIXL_STAGING_SLOTS",),
}  # fmt: skip
_PLUGIN: tuple[Env, ...] = (
    Env("VLLM_HPU_LOG_STEP_GRAPH_COMPILATION", "bool", "false", "one line for each launch that compiled something"),
    Env("VLLM_HPU_LOG_STEP_GRAPH_COMPILATION_ALL", "bool", "false", "the same for every launch"),
    Env("VLLM_HPU_LOG_STEP_CPU_FALLBACKS", "bool", "false", "one line for each launch with an operation that the card "
        "sent back to the host"),
    Env("VLLM_HPU_LOG_STEP_CPU_FALLBACKS_ALL", "bool", "false", "the same for every launch"),
    Env("VLLM_BRIDGE_MODE", "str", "", "lazy or eager: another name for PT_HPU_LAZY_MODE=1 or 0"),
    Env("PT_HPU_LAZY_MODE", "str", "by the stack", "1: lazy mode (graphs), 0: compile mode; docs/hpu.md says which "
        "stack has which"),
    Env("PT_HPU_ENABLE_LAZY_COLLECTIVES", "str", "true", "collectives inside graphs; several ranks need them"),
    Env("PT_HPUGRAPH_DISABLE_TENSOR_CACHE", "str", "0", "lazy mode, 1: graphs keep their outputs alone, and the "
        "ledger prices them so; Intel's guide wants false for Qwen"),
    Env("PT_HPU_ENABLE_SYNAPSE_INPUT_REUSE", "str", "0", "compile mode: 1 is refused, because recipes would write "
        "into static inputs, which are filled only where they change"),
    Env("PT_HPU_RECIPE_CACHE_CONFIG", "str", "a folder for each stack and rank below TRENCADIS_CACHE", "folder of "
        "compiled recipes, whether to empty it first, its most megabytes: `/var/cache/recipes,false,10240`"),
    Env("FUSER_ENABLE_MULTI_THREADED_INVOCATIONS", "str", "1", "compile mode: several threads compile"),
    Env("PT_HPU_WEIGHT_SHARING", "str", "0", "weights of compiled graphs are inputs: there is nothing to share"),
    Env("RUNTIME_SCALE_PATCHING", "str", "1", "compile mode: scales of 8-bit floats are patched into recipes"),
    Env("VLLM_MM_WARMUP_OUTSIDE_COMPILE_ONLY", "bool", "true in lazy mode", "image launches run while they are warmed "
        "up; false: they are only compiled"),
    Env("HABANA_VISIBLE_MODULES", "str", "all", "module ids of the cards to use; `--device hpu:1` is its second"),
    Env("VLLM_ENABLE_BUCKETING", "bool", "true", "a card has no shapes but buckets", REFUSED, "false"),
    Env("VLLM_PREFIX_CACHING", "bool", "true", "`--no-enable-prefix-caching` turns it off", REFUSED, "false"),
    Env("VLLM_SOFTMAX_CONST_NORM", "bool", "false", "scores are shifted by their largest, which is exact", REFUSED,
        "true"),
    Env("VLLM_SOFTMAX_CONST_NORM_VALUE", "str", "", "scores are shifted by their largest, which is exact", REFUSED,
        ALWAYS),
    Env("VLLM_USE_FAKE_HPU", "bool", "false", "TRENCADIS_HPU_EMULATOR=1 emulates a card", REFUSED, "true"),
    Env("VLLM_PROFILER_ENABLED", "str", "", "there is no trace of the host; `/metrics` has stages", REFUSED, ALWAYS),
    Env("VLLM_PT_PROFILE", "str", "", "it would profile one shape and end; benchmarks do that", REFUSED, ALWAYS),
    Env("VLLM_PROFILE_PROMPT", "str", "", "it would profile one shape and end; benchmarks do that", REFUSED, ALWAYS),
    Env("VLLM_PROFILE_DECODE", "str", "", "it would profile one shape and end; benchmarks do that", REFUSED, ALWAYS),
    Env("VLLM_PROFILE_STEPS", "str", "", "it would profile some steps and end; benchmarks do that", REFUSED, ALWAYS),
    Env("QUANT_CONFIG", "str", "", "neural-compressor's JSON, whose files hold the scales of `--quantization inc`"),
    Env("VLLM_HPU_CONVERT_TO_FP8UZ", "bool", "false", "fp8 codes are fitted to the card's range as they load", REFUSED,
        "true"),
    Env("VLLM_DYNAMIC_KV_QUANT", "bool", "false", "`--kv-cache-dtype fp8` keeps 8 bits and a scale a token", REFUSED,
        "true"),
    Env("VLLM_HPU_HETERO_KV_LAYOUT", "bool", "false", "KV caches are not sent to other servers", REFUSED, "true"),
    Env("VLLM_HPU_NIXL_JOINT_KV", "bool", "false", "KV caches are not sent to other servers", REFUSED, "true"),
    Env("VLLM_HPU_MULTI_MODEL_CONFIG", "str", "", "a server has one model", REFUSED, ALWAYS),
    *(Env(name, "str", "", why, IGNORED) for why, names in _NEUTRAL.items() for name in names),
)  # fmt: skip

TABLE: tuple[Env, ...] = (
    Env("VLLM_SKIP_WARMUP", "bool", "false", "no warm-up before serving; nothing is warmed on a CPU"),
    Env("VLLM_TRACE_FUNCTION", "bool", "false", "the calls of this package, in a file a process; slow"),
    Env("TRENCADIS_CACHE", "str", "~/.cache/trencadis", "folder of measurements that later starts use"),
    Env("HF_HUB_OFFLINE", "bool", "false", "never ask the hub: only what its cache holds"),
    Env("OMP_NUM_THREADS", "int", "from the cgroup", "threads of the engine; `--threads` wins"),
    Env("VLLM_CONTIGUOUS_PA", "bool", "false", "contiguous paged attention excludes prefix sharing: ignored", IGNORED),
    Env("VLLM_FP32_SOFTMAX", "bool", "", "hpu: softmax of text in float32, by default as the model's family wants; "
        "true: also the products of its scores; elsewhere both always are"),
    Env("VLLM_FP32_SOFTMAX_VISION", "bool", "false", "hpu: softmax of images in float32; elsewhere it always is"),
    Env("VLLM_PROMPT_USE_FUSEDSDPA", "bool", "true", "hpu: the fused attention kernel for prompts and images"),
    Env("VLLM_FUSED_BLOCK_SOFTMAX_ADJUSTMENT", "bool", "", "hpu: blocks of a decoding row joined by Gaudi 3's kernel, "
        "by default where the plug-in has it and the family wants it"),
    Env("VLLM_CONFIG_HIDDEN_LAYERS", "int", "1", "hpu: layers between two graph cuts"),
    Env("VLLM_HPU_FORCE_MARK_STEP", "bool", "true", "hpu: graph cuts between layers; false: only where they must be"),
    Env("VLLM_T_COMPILE_REGIONAL_COMPILATION", "bool", "true", "hpu, compile mode: layers are compiled alone "
        "and shared; false: each bucket as a whole"),
    Env("VLLM_REGIONAL_COMPILATION", "bool", "true", "older name of VLLM_T_COMPILE_REGIONAL_COMPILATION"),
    Env("VLLM_T_COMPILE_FULLGRAPH", "bool", "", "hpu, compile mode: what the compiler cannot take breaks the graph "
        "there, with a warning; true: it is an error; false: no warning"),
    Env("VLLM_T_COMPILE_DYNAMIC_SHAPES", "bool", "false", "hpu, compile mode: true is refused, since every "
        "bucket has one shape"),
    Env("VLLM_FULL_WARMUP", "bool", "false", "hpu, compile mode: guards are skipped after warm-up, and a "
        "compilation is an error then"),
    Env("TRENCADIS_HPU_DECODE_FUSEDSDPA", "bool", "false", "hpu: a decoding row attends to its blocks by the fused "
        "kernel, which reads keys and values once"),
    Env("TRENCADIS_HPU_DECODE_LAYERS", "int", "4", "hpu, compile mode: layers of a decode launch that are dispatched "
        "as one, 1, 2 or 4"),
    Env("TRENCADIS_HPU_COLLECTIVES", "str", "functional", "hpu, compile mode: sums over ranks inside compiled graphs "
        "(functional) or between them (eager)"),
    Env("TRENCADIS_HPU_EMULATOR", "bool", "", "1: emulate a Gaudi even where there is one; 0: never emulate"),
    Env("TRENCADIS_HPU_EMULATOR_PROFILE", "str", "gaudi2", "the card that is emulated: gaudi2 or gaudi3"),
    Env("TRENCADIS_HPU_EMULATOR_KIND", "str", "compute", "compute: real values; meta: shapes and bytes alone"),
    Env("TRENCADIS_HPU_EMULATOR_HOST_MEMORY", "str", "512MiB", "host memory that an emulated card's KV cache may fill"),
    Env("TRENCADIS_HPU_EMULATOR_FAULTS", "str", "", "faults to inject, see docs/hpu-internals.md"),
    Env("TRENCADIS_CUDA_WHOLE_LAYERS", "bool", "true", "cuda: decoder layers of up to 16 rows in six launches"),
    Env(
        "TRENCADIS_CUDA_DEPENDENT_LAUNCHES", "bool", "true",
        "cuda: from sm_90 on, a kernel of a fused layer starts while the one before it ends",
    ),
    Env(
        "TRENCADIS_CUDA_BLOCK_PRODUCTS", "bool", "true",
        "cuda: weights of fp8 in blocks of 128 are multiplied by activations in fp8, where their scheme rounds them",
    ),
    Env(
        "TRENCADIS_CUDA_PEER_SUMS", "bool", "true",
        "cuda: ranks sum up to 4 MiB over each other's memory, where a check at the start finds the sums right",
    ),
    Env("TRENCADIS_CUDA_TWIN", "bool", "false", "cuda: no card, its twin on the CPU, for tests, see docs/cuda.md"),
    Env("TRENCADIS_CUDA_TWIN_FAULTS", "str", "", "cuda: faults of the CPU twin, for tests, see docs/cuda.md"),
    Env("TRENCADIS_CPU_KERNELS", "str", "auto", "cpu: which kernels serve: torch, or own kernels by name (avx2, "
        "avx_vnni, avx512, avx512_vnni, amx), see docs/quantisation.md"),
    Env("TRENCADIS_CPU_CHECKS", "bool", "false", "cpu: slots, rows and blocks that kernels get are checked against "
        "their bounds, for debugging"),
    Env("TRENCADIS_CPU_HUGE_PAGES", "bool", "true", "cpu: packed weights lie on huge pages, where the system has some"),
    Env("VLLM_CPU_OMP_THREADS_BIND", "str", "auto", "cpu: which CPUs threads are kept to: lists, one a rank "
        "(0-31|32-63), nobind, or auto: the cores of one node first, where there are several"),
    Env("VLLM_CPU_NUM_OF_RESERVED_CPU", "int", "0", "cpu: cores of each rank that auto leaves free"),
    Env("VLLM_USE_V1", "bool", "true", "there is one engine", IGNORED),
    Env("VLLM_NO_USAGE_STATS", "bool", "true", "no usage figures are ever sent", IGNORED),
    Env("VLLM_DO_NOT_TRACK", "bool", "true", "no usage figures are ever sent", IGNORED),
    Env("VLLM_WORKER_MULTIPROC_METHOD", "str", "spawn", "the engine is always a fresh process", IGNORED),
    Env("VLLM_TARGET_DEVICE", "str", "", "`--device` chooses the device", IGNORED),
    Env("VLLM_CPU_KVCACHE_SPACE", "str", "", "cpu: KV cache in GiB, 0: by itself; `--kv-cache-memory-bytes` wins"),
    Env("VLLM_MULTIMODAL_BUCKETS", "str", "", "patches of an image (width x height / 14^2) for each VISION bucket, "
        "divisible by 64; None: images unpadded"),
    Env("VLLM_MULTIMODAL_RESOLUTIONS", "str", "", "images that get VISION buckets of their own: WxH, WxHxN or "
        "WxHxN-M, pixels and how many at a time"),
    Env("VLLM_BUCKETING_STRATEGY", "str", "exp", "exp, lin or pad: how sizes along an axis are chosen"),
    Env("VLLM_EXPONENTIAL_BUCKETING", "bool", "", "older: true is exp, false is lin; wins over the strategy"),
    Env("VLLM_BUCKETING_FROM_FILE", "str", "", "file of (rows, query tokens, blocks) buckets; replaces the strategy"),
    *(Env(name, "int", "", _bucket_meaning(name)) for name in _BUCKETS),
    Env("CUDA_VISIBLE_DEVICES", "str", "all", "cuda: cards by index, UUID or MIG instance; `--device cuda:1` is its "
        "second"),
    Env("RANK", "int", "", "external_launcher: the number of this process, from torchrun"),
    Env("WORLD_SIZE", "int", "", "external_launcher: processes in all, from torchrun"),
    Env("LOCAL_RANK", "int", "", "external_launcher: the number of this process on its machine, from torchrun"),
    Env("LOCAL_WORLD_SIZE", "int", "", "external_launcher: processes on this machine, from torchrun"),
    Env("MASTER_ADDR", "str", "", "external_launcher: the machine of rank 0, from torchrun"),
    Env("RAY_ADDRESS", "str", "auto", "ray: the cluster, `host:port`; auto: the one that runs on this machine"),
    Env("RAY_AUTH_MODE", "str", "disabled", "ray: token: the cluster asks for one, and this process shows it"),
    Env("RAY_AUTH_TOKEN_PATH", "str", "~/.ray/auth_token", "ray: the file that has the cluster's token; RAY_AUTH_TOKEN "
        "has it itself, and wins"),
    Env("TRENCADIS_RAY_NODE", "str", "", "ray: the node that this engine was put on; the server sets it"),
    Env("TRENCADIS_MACHINE_ROOT", "str", "/", "hpu: folder below which cards and their driver are found, for tests"),
    *(replace(e, plugin=True) for e in _PLUGIN),
)  # fmt: skip

BY_NAME: dict[str, Env] = {e.name: e for e in TABLE}


_SECRET = re.compile(r"(^|_)(KEY|APIKEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$")


def secret(name: str) -> bool:
    """Returns True if a variable holds a secret, by the table or, if it is not listed, by its name."""
    known = BY_NAME.get(name)
    return known.kind == "secret" if known is not None else bool(_SECRET.search(name.upper()))


def shapes(name: str) -> bool:
    """Returns True if a variable of the table changes the planned shapes."""
    return "_BUCKET" in name or name == "VLLM_EXPONENTIAL_BUCKETING"


def parse_bool(text: str, name: str) -> bool:
    """Parses ``true t 1 yes y on`` and their opposites, in upper or lower case.

    Raises:
        StartupError: the text is anything else; the message names the variable or flag.
    """
    low = text.strip().lower()
    if low in TRUE:
        return True
    if low in FALSE or not low:
        return False
    raise StartupError(f"{name}={text!r} is neither true ({' '.join(TRUE)}) nor false ({' '.join(FALSE)}).")


def get(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Returns the text of a variable of the table; None if it is unset or empty."""
    env = BY_NAME[name]
    return (os.environ if environ is None else environ).get(env.name) or None


def get_bool(name: str, environ: Mapping[str, str] | None = None) -> bool:
    """Returns a boolean of the table, or its default if it is unset; raises StartupError if it cannot be parsed."""
    text = get(name, environ)
    return parse_bool(BY_NAME[name].default if text is None else text, name)


def get_int(name: str, environ: Mapping[str, str] | None = None) -> int | None:
    """Returns an integer of the table, or its default if it is unset (None if the default is no number).

    Raises StartupError if it cannot be parsed.
    """
    text = get(name, environ)
    if text is None:
        default = BY_NAME[name].default
        return int(default) if default.lstrip("-").isdigit() else None
    try:
        return int(text)
    except ValueError:
        raise StartupError(f"{name}={text!r} is not a whole number.") from None


def get_float(name: str, environ: Mapping[str, str] | None = None) -> float | None:
    """Returns a number of the table; None if it is unset. Raises StartupError if it cannot be parsed."""
    text = get(name, environ)
    try:
        value = None if text is None else float(text)
    except ValueError:
        value = float("nan")
    if value is not None and not abs(value) < float("inf"):
        raise StartupError(f"{name}={text!r} is not a number.")
    return value


def review(
    environ: Mapping[str, str], flags: Collection[str] = (), others: Callable[[str], Env | None] = lambda name: None
) -> Iterator[str]:
    """Yields one line for each variable that is set and has no effect or is unknown.

    Args:
        flags: names of the variables that flags read.
        others: looks up a variable of another server by name.

    Raises:
        StartupError: a variable is refused, or a boolean or number cannot be parsed.
    """
    for name in sorted(environ):
        env = BY_NAME.get(name) or others(name)
        if env is None:
            if name.startswith(PREFIXES) and name not in flags:
                yield _unknown(name, flags)
            continue
        if not environ[name]:
            continue
        if env.effect == REFUSED:
            _refuse(env, environ[name])
        if name in BY_NAME:
            _read(env, environ)
        if env.effect == IGNORED:
            yield f"{name} has no effect: {env.meaning}."


def _read(env: Env, environ: Mapping[str, str]) -> None:
    """Parses a variable by its kind, so that StartupError is raised if that fails."""
    if env.kind == "bool":
        get_bool(env.name, environ)
    elif env.kind == "int":
        get_int(env.name, environ)
    elif env.kind == "float":
        get_float(env.name, environ)


def _refuse(env: Env, text: str) -> None:
    """Raises StartupError if the value requests unsupported behaviour.

    The opposite value is accepted, as it is the default.
    """
    asks = True if env.refuses == ALWAYS else parse_bool(text, env.name) == (env.refuses == "true")
    if asks:
        raise StartupError(f"{env.name}={text!r} is refused: {env.meaning}. Unset it.")


def _unknown(name: str, flags: Collection[str]) -> str:
    suggestion = suggest_name(name, (*BY_NAME, *flags))
    hint = f"; did you mean {suggestion}?" if suggestion else "."
    return f"{name} is not a variable that Trencadis reads{hint}"
