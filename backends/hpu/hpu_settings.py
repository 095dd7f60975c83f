"""Switches of the backend, read once from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trencadis.core.envs import parse_bool
from trencadis.core.errors import StartupError

FULLGRAPH = "VLLM_T_COMPILE_FULLGRAPH=1 makes this an error, =0 breaks graphs without a warning"
"""What a user may set about parts that cannot be traced, in words."""


VISION_OUTSIDE = "VLLM_MM_WARMUP_OUTSIDE_COMPILE_ONLY"
DECODE_PARTS = "TRENCADIS_HPU_DECODE_FUSEDSDPA"
DECODE_LAYERS = "TRENCADIS_HPU_DECODE_LAYERS"
COLLECTIVES = "TRENCADIS_HPU_COLLECTIVES"

SYMBOLS = {
    "VLLM_PROMPT_USE_FUSEDSDPA": ("fused_sdpa", "FusedSDPA"),
    DECODE_PARTS: ("sdpa_parts", "sdpa_recomp_fwd"),
    "VLLM_FUSED_BLOCK_SOFTMAX_ADJUSTMENT": ("block_adjustment", "block_softmax_adjustment"),
}
"""Variables that ask for a kernel of the plug-in: the bridge's field, and the kernel's name."""


@dataclass(frozen=True)
class HpuSettings:
    """Settings of how a launch is computed and cut.

    Args:
        fp32_softmax: text attention computes its softmax in float32; by default only for families whose
            accuracy suffers in bfloat16.
        fp32_products: scores are products of float32 too, at several times the bytes of keys, where the card has no
            product of bfloat16 into float32; False: they are rounded to the model's type first.
        fp32_softmax_vision: the same for images.
        decode_parts: DECODE attends to each block by the fused kernel.
        fused_sdpa: prompts and images use the fused attention kernel, if the plug-in has it.
        block_adjustment: blocks of a decoding row are joined by the fused kernel if the plug-in has it; unset means the
        default of the model family.
        adjustment_compiled: also in compile mode, where no public list of the compiler has that kernel, so that it may
            split each layer's graph.
        context_slice: stored tokens whose keys and values a CONTEXT launch holds at a time.
        cut_layers: layers between two cuts.
        decode_layers: compile mode: layers of a DECODE launch in one region, one of ``region_compiler.SIZES``.
        cuts: graphs are cut between layers; at collectives and in long loops they always are.
        regional: compile mode: parts of a body are compiled by themselves; False: one compilation a bucket.
        fullgraph: compile mode: parts are compiled as one graph each.
        graph_breaks: compile mode: a part that cannot be traced as one graph is compiled again with graph breaks;
            False: it is an error.
        full_warmup: compile mode: after warm-up guards are skipped, and a compilation is an error.
        vision_outside: launches of VISION are warmed up by running them, outside of compile-only mode; None: in lazy
            mode.
        eager_collectives: compile mode: sums over ranks are no part of compiled graphs.
        asked: variables of ``SYMBOLS`` that the user has switched on.
    """

    fp32_softmax: bool = True
    fp32_products: bool = False
    fp32_softmax_vision: bool = False
    decode_parts: bool = False
    fused_sdpa: bool = True
    block_adjustment: bool = True
    adjustment_compiled: bool = False
    context_slice: int = 8192
    cut_layers: int = 1
    decode_layers: int = 4
    cuts: bool = True
    regional: bool = True
    fullgraph: bool = True
    graph_breaks: bool = False
    full_warmup: bool = False
    vision_outside: bool | None = None
    eager_collectives: bool = False
    asked: tuple[str, ...] = ()

    def vision_compiles_for_real(self, lazy: bool) -> bool:
        """Returns True if VISION launches run while they are compiled: the plug-in's graph compiler was seen to fail
        on them in compile-only mode.
        """
        return lazy if self.vision_outside is None else self.vision_outside


def settings(environ: Mapping[str, str], options: Mapping[str, str] | None = None) -> HpuSettings:
    """Reads the switches for a model.

    Args:
        options: of the backend; ``fp32_softmax`` and ``block_adjustment`` are the model family's defaults ("1", "0").

    Raises:
        StartupError: a value cannot be parsed; one line.
    """

    wanted = options or {}

    def flag(name: str, default: bool) -> bool:
        return parse_bool(environ[name], name) if environ.get(name) else default

    layers = environ.get("VLLM_CONFIG_HIDDEN_LAYERS") or "1"
    if not layers.isdigit() or int(layers) < 1:
        raise StartupError(f"VLLM_CONFIG_HIDDEN_LAYERS={layers!r} is not a whole number above 0.")
    if flag("VLLM_T_COMPILE_DYNAMIC_SHAPES", False):
        raise StartupError(
            "VLLM_T_COMPILE_DYNAMIC_SHAPES: every bucket has one shape, and the bridge leaves attention out of graphs "
            "with dynamic ones; unset it."
        )
    regional = flag("VLLM_REGIONAL_COMPILATION", True)
    return HpuSettings(
        fp32_softmax=flag("VLLM_FP32_SOFTMAX", wanted.get("fp32_softmax", "1") == "1"),
        fp32_products=flag("VLLM_FP32_SOFTMAX", False),
        decode_parts=flag(DECODE_PARTS, False),
        fp32_softmax_vision=flag("VLLM_FP32_SOFTMAX_VISION", False),
        fused_sdpa=flag("VLLM_PROMPT_USE_FUSEDSDPA", True),
        block_adjustment=flag("VLLM_FUSED_BLOCK_SOFTMAX_ADJUSTMENT", wanted.get("block_adjustment", "1") == "1"),
        adjustment_compiled=flag("VLLM_FUSED_BLOCK_SOFTMAX_ADJUSTMENT", False),
        cut_layers=int(layers),
        decode_layers=_decode_layers(environ),
        cuts=flag("VLLM_HPU_FORCE_MARK_STEP", True),
        regional=flag("VLLM_T_COMPILE_REGIONAL_COMPILATION", regional),
        fullgraph=flag("VLLM_T_COMPILE_FULLGRAPH", True),
        graph_breaks=not environ.get("VLLM_T_COMPILE_FULLGRAPH"),
        full_warmup=flag("VLLM_FULL_WARMUP", False),
        vision_outside=flag(VISION_OUTSIDE, False) if environ.get(VISION_OUTSIDE) else None,
        eager_collectives=_collectives(environ) == "eager",
        asked=tuple(name for name in SYMBOLS if flag(name, False)),
    )


def require_symbols(found: HpuSettings, bridge: object) -> None:
    """Raises StartupError, one line, if the user asks for a kernel that the bridge of this release or card lacks."""
    for name in found.asked:
        field, kernel = SYMBOLS[name]
        if getattr(bridge, field) is None:
            raise StartupError(f"{name}: the plug-in has no {kernel} on this card or in this release; unset it.")


def _decode_layers(environ: Mapping[str, str]) -> int:
    """Returns how many layers of a DECODE launch one region has."""
    value = environ.get(DECODE_LAYERS) or "4"
    if value not in ("1", "2", "4"):
        raise StartupError(f"{DECODE_LAYERS}={value!r}: 1, 2 or 4.")
    return int(value)


def _collectives(environ: Mapping[str, str]) -> str:
    """Returns how compile mode sums over ranks: ``functional`` (inside of compiled graphs) or ``eager`` (between)."""
    value = environ.get(COLLECTIVES) or "functional"
    if value not in ("functional", "eager"):
        raise StartupError(f"{COLLECTIVES}={value!r}: functional or eager.")
    return value
