"""Determines the format of the KV cache from flags and checkpoint. Torch-free."""

from __future__ import annotations

from trencadis.core.checkpoint.json_fields import read_json
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.quant.kv_cache_format import FP8, INT8, KVFormat, parse_kv_format


def requested_kv_format(config: EngineConfig, model: ModelConfig) -> KVFormat | None:
    """Returns the format of keys and values in the KV cache; None: the engine's dtype.

    Raises:
        StartupError: the checkpoint's scales are requested, but the cache is not 8-bit or the scales are made for other
            codes.
    """
    static = config.kv_cache_scales == "checkpoint"
    form = parse_kv_format(config.kv_cache_dtype, model.text.head_dim, model.text.qkv_bias, static)
    if not static:
        return form
    flag = "--kv-cache-scales checkpoint"
    if form is None:
        raise StartupError(f"{flag} is for an 8-bit KV cache: add --kv-cache-dtype fp8 or int8")
    made_for = _codes(model)
    if form.name != made_for:
        raise StartupError(f"{flag}: {model.name} has scales for {made_for}; --kv-cache-dtype {made_for} fits")
    return form


def _codes(model: ModelConfig) -> str:
    """Returns the codes that a checkpoint's KV scales are made for; fp8 if config.json does not say."""
    raw = read_json(model.path / "config.json") or {}
    for place in (raw, raw.get("text_config")):
        quant = place.get("quantization_config") if isinstance(place, dict) else None
        scheme = quant.get("kv_cache_scheme") if isinstance(quant, dict) else None
        if isinstance(scheme, dict):
            return INT8 if scheme.get("type") == "int" else FP8
    return FP8
