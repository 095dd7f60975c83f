"""Switches of the backend, read once from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trencadis.core.envs import parse_bool
from trencadis.core.errors import StartupError


@dataclass(frozen=True)
class Settings:
    """How a launch is computed and cut.

    Args:
        fp32_softmax: attention of text in float32 inside; unset means on, because bfloat16 was found to cost accuracy
            on Qwen2.
        fp32_softmax_vision: the same for pictures.
        fused_sdpa: prompt attention by the fused kernel where the plug-in has it.
        cut_layers: layers between two cuts.
        cuts: whether layers are cut at all; collectives and long loops always are.
    """

    fp32_softmax: bool = True
    fp32_softmax_vision: bool = False
    fused_sdpa: bool = True
    cut_layers: int = 1
    cuts: bool = True


def settings(environ: Mapping[str, str]) -> Settings:
    """Raises StartupError in one line for a value that cannot be read."""

    def flag(name: str, default: bool) -> bool:
        return parse_bool(environ[name], name) if environ.get(name) else default

    layers = environ.get("VLLM_CONFIG_HIDDEN_LAYERS") or "1"
    if not layers.isdigit() or int(layers) < 1:
        raise StartupError(f"VLLM_CONFIG_HIDDEN_LAYERS={layers!r} is no whole number above 0.")
    return Settings(
        fp32_softmax=flag("VLLM_FP32_SOFTMAX", True),
        fp32_softmax_vision=flag("VLLM_FP32_SOFTMAX_VISION", False),
        fused_sdpa=flag("VLLM_PROMPT_USE_FUSEDSDPA", True),
        cut_layers=int(layers),
        cuts=flag("VLLM_HPU_FORCE_MARK_STEP", True),
    )
