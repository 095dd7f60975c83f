"""Reads scales that Intel's neural-compressor measured: ``QUANT_CONFIG`` names its configuration, which names the
files.

The JSON variants of its files are read: ``<dump_stats_path>_hooks_<observer>_<SCALE_METHOD>`` with the scales, else
``<dump_stats_path>_hooks_<observer>`` with the largest magnitudes; each as one file or as ``_<rank>_<world>`` ones. Its
.npz files are pickles and are never opened. Torch-free.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from trencadis.core.checkpoint.json_fields import read_json
from trencadis.core.errors import StartupError
from trencadis.core.json_types import Json, JsonMapping, JsonObject

VARIABLE = "QUANT_CONFIG"
WITHOUT = "--quantization fp8 needs no measurement"

LEAST_RANGE, INPUT_BACKOFF, WEIGHT_BACKOFF = 240.0, 0.25, 0.5
"""The range of e4m3 on the smallest card, and the fractions of it that measured magnitudes of activations and weights
are scaled to.

They are neural-compressor's values and leave headroom for larger values.
"""

FREE = ("UNIT_SCALE", "HW_ALIGNED_SINGLE_SCALE")
"""Methods whose scales are all 1, without files."""

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
NODE = re.compile(r"(?:^|\.)layers\.(\d+)\.(self_attn|mlp)\.(\w+)$")
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class GivenScale(NamedTuple):
    """The divisors of a module's activations and of its weight; weight None: one scale per row is computed while
    loading.
    """

    activation: float
    weight: float | None


def given_scales(path: str) -> dict[str, GivenScale]:
    """Returns the scales of each module by its canonical name.

    Args:
        path: the value of ``QUANT_CONFIG``.

    Raises:
        StartupError: a file is missing or has other contents; the message names it.
    """
    if not path:
        raise StartupError(f"--quantization inc takes its scales from the files that {VARIABLE} names; {WITHOUT}")
    settings = read_json(Path(path))
    if settings is None:
        raise StartupError(f"{VARIABLE}={path}: there is no such file; {WITHOUT}")
    mode = str(settings.get("mode", "QUANTIZE")).upper()
    if mode not in ("QUANTIZE", "LOAD"):
        raise StartupError(f"{path}: mode is {mode}; implemented: QUANTIZE. Measuring is not built; {WITHOUT}")
    if str(settings.get("fp8_config", "E4M3")).upper() != "E4M3":
        raise StartupError(f"{path}: fp8_config is {settings['fp8_config']}; implemented: E4M3")
    method = settings.get("scale_method", "MAXABS_HW")
    if not isinstance(method, str):
        raise StartupError(f"{path}: scale_method is an object; implemented: one name for all modules")
    found = dict(_read_scales(path, settings, method.upper()))
    if not found:
        raise StartupError(f"{path}: its files hold no scales of a decoder's linear layers; {WITHOUT}")
    blocked = _names(settings, "blocklist", "blacklist")
    allowed = _names(settings, "allowlist", "whitelist")
    return {
        name: scale
        for name, scale in found.items()
        if not any(part in name for part in blocked) and (not allowed or any(part in name for part in allowed))
    }


def _names(settings: JsonMapping, *keys: str) -> list[str]:
    """Returns the parts of module names that a block or allow list holds."""
    held: JsonObject = next((settings[k] for k in keys if isinstance(settings.get(k), dict)), {})
    return [str(name) for name in held.get("names", []) if name]


def _read_scales(path: str, settings: JsonMapping, method: str) -> Iterator[tuple[str, GivenScale]]:
    """Yields (module, scales) from all files; if the files of several ranks differ, the larger scale counts."""
    if method in FREE:
        raise StartupError(f"{path}: scale_method {method} has no files and rounds without scales; {WITHOUT}")
    base = str(settings.get("dump_stats_path", "stats")) + "_hooks_" + str(settings.get("observer", "maxabs"))
    files, measured = _files(f"{base}_{method}"), False
    if not files:
        files, measured = _files(base), True
    if not files:
        raise StartupError(f"{path}: neither {base}_{method}.json nor {base}.json is there (or with _0_1); {WITHOUT}")
    joined: dict[str, GivenScale] = {}
    for file in files:
        for name, scale in _nodes(file, measured):
            joined[name] = _larger(joined[name], scale) if name in joined else scale
    yield from joined.items()


def _files(base: str) -> list[Path]:
    """Returns ``base``.json, or the files of all ranks of one world size; empty: there are none."""
    whole = Path(f"{base}.json")
    if whole.is_file():
        return [whole]
    worlds: dict[int, list[Path]] = {}
    for file in sorted(whole.parent.glob(f"{whole.stem}_*.json")):
        found = re.fullmatch(r"_(\d+)_(\d+)", file.stem.removeprefix(whole.stem))
        if found is not None and int(found[1]) < int(found[2]):
            worlds.setdefault(int(found[2]), []).append(file)
    return next((files for world, files in sorted(worlds.items()) if len(files) == world), [])


def _larger(a: GivenScale, b: GivenScale) -> GivenScale:
    weight = None if a.weight is None or b.weight is None else max(a.weight, b.weight)
    return GivenScale(max(a.activation, b.activation), weight)


def _nodes(file: Path, measured: bool) -> Iterator[tuple[str, GivenScale]]:
    held = read_json(file) or {}
    nodes = held.get("Nodes")
    if not isinstance(nodes, dict):
        raise StartupError(f"{file}: Nodes is missing; it is no file of neural-compressor's scales")
    for node, values in nodes.items():
        modules = _modules(str(node))
        if not modules or not isinstance(values, dict):
            continue
        activation = max(_numbers(values.get("inputs")), default=None)
        if activation is None:
            raise StartupError(f"{file}: {node} has no scale of its input")
        weights = list(_numbers((values.get("params") or {}).get("weight")))
        weight = weights[0] if len(weights) == 1 else None
        if measured:
            activation = _power(activation / (LEAST_RANGE * INPUT_BACKOFF))
            weight = None if weight is None else _power(weight / (LEAST_RANGE * WEIGHT_BACKOFF))
        for value in (activation, *([] if weight is None else [weight])):
            if not math.isfinite(value) or value <= 0:
                raise StartupError(f"{file}: {node} has a scale of {value:g}; every scale is finite and above zero")
        yield from ((module, GivenScale(activation, weight)) for module in modules)


def _power(scale: float) -> float:
    """Returns the smallest power of two >= ``scale``, as neural-compressor's default methods round."""
    return 2.0 ** math.ceil(math.log2(scale)) if scale > 0 and math.isfinite(scale) else scale


def _numbers(tree: Json) -> Iterator[float]:
    """Yields the numbers in nested lists and objects."""
    if isinstance(tree, bool) or tree is None:
        return
    if isinstance(tree, int | float):
        yield float(tree)
        return
    parts: Iterable[Json] = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    for part in parts:
        yield from _numbers(part)


def _modules(node: str) -> tuple[str, ...]:
    """Returns the canonical names of a decoder node, which is named as in vLLM's fused modules or as in a
    checkpoint.
    """
    if node == "lm_head" or node.endswith(".lm_head"):
        return ("lm_head",)
    found = NODE.search(node)
    if found is None or "visual" in node:
        return ()
    parts = FUSED.get(found[3], (found[3],))
    return tuple(f"layers.{found[1]}.{found[2]}.{part}" for part in parts if part in MODULES)
