"""Formats of weights and KV cache other than the engine's dtype: device checks, and notes for users."""

from __future__ import annotations

from trencadis.core.buckets import Policy
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.errors import StartupError
from trencadis.core.memory.weight_bytes import weight_notes
from trencadis.core.quant.kv_cache_format import kv_notes


def check_kv_format(device: str, model: ModelConfig, policy: Policy) -> None:
    """Raises StartupError if a device does not support the requested KV cache format.

    The message names one that does.
    """
    form = model.text.kv
    if form is not None and form.name not in policy.kv_codes:
        has = f"it has {' and '.join(policy.kv_codes)}; " if policy.kv_codes else ""
        raise StartupError(
            f"--kv-cache-dtype {form.requested}: {device} has no such KV cache; {has}--device cpu has it"
        )


def format_notes(model: ModelConfig, itemsize: int, policy: Policy) -> list[str]:
    """Returns notes on both formats for users; ``itemsize``: bytes of the engine's dtype."""
    return [*weight_notes(model, itemsize, policy.quantised), *kv_notes(model.text.kv)]
