"""The VLLM_* bucket variables as values. Pure Python; the names are those of vLLM's Gaudi fork."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trencadis.core import envs
from trencadis.core.errors import StartupError
from trencadis.core.layout import WINDOW_SLOTS
from trencadis.core.shapes.axes import STRATEGIES
from trencadis.core.shapes.bucket_file import FileBucket, read_file

AXES = {
    "prompt_bs": ("VLLM_PROMPT_BS",),
    "prompt_query": ("VLLM_PROMPT_QUERY", "VLLM_PROMPT_SEQ"),
    "prompt_ctx": ("VLLM_PROMPT_CTX",),
    "decode_bs": ("VLLM_DECODE_BS",),
    "decode_block": ("VLLM_DECODE_BLOCK",),
}
"""Axis -> prefixes of its variables; the first one that is set wins (SEQ is the older name of QUERY)."""

LEAST = {"prompt_ctx": 0}
"""Smallest legal MIN of an axis, if it is not 1; a context of 0 blocks belongs to another stage anyway."""


@dataclass(frozen=True)
class AxisAsked:
    """The user's settings of one axis; None: the default. ``names``: bound -> the variable that set it."""

    minimum: int | None = None
    step: int | None = None
    maximum: int | None = None
    pad_max: int | None = None
    pad_percent: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class BucketOptions:
    """The user's settings of shapes.

    Args:
        vision: slots of VISION buckets; None: the default list.
        pad_vision: False: images are not padded to a list.
        listed: the buckets of a file.
        notes: lines for the terminal about variables without effect.
    """

    strategy: str = "exp"
    axes: Mapping[str, AxisAsked] = field(default_factory=dict)
    vision: tuple[int, ...] | None = None
    pad_vision: bool = True
    listed: tuple[FileBucket, ...] = ()
    notes: tuple[str, ...] = ()

    def axis(self, name: str) -> AxisAsked:
        """The user's settings of an axis of ``AXES``."""
        return self.axes.get(name, AxisAsked())


def read(environ: Mapping[str, str]) -> BucketOptions:
    """All bucket variables of ``environ``.

    Raises:
        StartupError: one line that names the variable, its value and the rule that it breaks.
    """
    notes: list[str] = []
    strategy = _strategy(environ, notes)
    path = envs.get("VLLM_BUCKETING_FROM_FILE", environ)
    listed: tuple[FileBucket, ...] = ()
    if path:
        strategy, listed = "file", read_file(path, "VLLM_BUCKETING_FROM_FILE")
    axes = {name: _axis(name, environ, notes) for name in AXES}
    notes += _without_effect(strategy, axes)
    vision, pad_vision = vision_list(envs.get("VLLM_MULTIMODAL_BUCKETS", environ), "VLLM_MULTIMODAL_BUCKETS")
    return BucketOptions(strategy, axes, vision, pad_vision, listed, tuple(notes))


def _strategy(environ: Mapping[str, str], notes: list[str]) -> str:
    """The generator's name; if both variables are set, the older boolean wins, as in vLLM's Gaudi fork."""
    asked = envs.get("VLLM_BUCKETING_STRATEGY", environ)
    known = tuple(s for s in STRATEGIES if s != "file")
    if asked is not None and asked.strip().lower() not in known:
        raise StartupError(f"VLLM_BUCKETING_STRATEGY={asked!r} must be one of {', '.join(known)}.")
    name = asked.strip().lower() if asked else "exp"
    if envs.get("VLLM_EXPONENTIAL_BUCKETING", environ) is None:
        return name
    older = "exp" if envs.get_bool("VLLM_EXPONENTIAL_BUCKETING", environ) else "lin"
    if asked and older != name:
        notes.append(f"VLLM_EXPONENTIAL_BUCKETING wins over VLLM_BUCKETING_STRATEGY={asked}: {older} is used.")
    return older


_BOUNDS = {"MIN": "minimum", "STEP": "step", "MAX": "maximum", "PAD_MAX": "pad_max", "PAD_PERCENT": "pad_percent"}


def _axis(name: str, environ: Mapping[str, str], notes: list[str]) -> AxisAsked:
    found: dict[str, int] = {}
    names: dict[str, str] = {}
    for bound, attribute in _BOUNDS.items():
        for prefix in AXES[name]:
            variable = f"{prefix}_BUCKET_{bound}"
            value = envs.get_int(variable, environ)
            if value is None:
                continue
            if attribute in found:
                if found[attribute] != value:
                    notes.append(f"{variable}={value} has no effect: {names[attribute]}={found[attribute]} wins.")
                continue
            _check_bound(variable, bound, value, LEAST.get(name, 1))
            found[attribute], names[attribute] = value, variable
    if "minimum" in found and "maximum" in found and found["minimum"] > found["maximum"]:
        low, high = names["minimum"], names["maximum"]
        raise StartupError(f"{low}={found['minimum']} must not be above {high}={found['maximum']}.")
    return AxisAsked(**found, names=names)


def _check_bound(variable: str, bound: str, value: int, least: int) -> None:
    if bound == "PAD_PERCENT":
        if not 0 <= value <= 50:
            raise StartupError(f"{variable}={value} must lie in 0..50.")
        return
    lowest = {"MIN": least, "MAX": least, "STEP": 1, "PAD_MAX": 0}[bound]
    if value < lowest:
        raise StartupError(f"{variable}={value} must be at least {lowest}.")


def _without_effect(strategy: str, axes: Mapping[str, AxisAsked]) -> list[str]:
    """Lines for variables that the chosen generator does not read."""
    unread = {"exp": ("pad_max", "pad_percent"), "lin": ("pad_max", "pad_percent"), "pad": ()}
    lines = []
    for axis in axes.values():
        for attribute, variable in axis.names.items():
            if attribute in unread.get(strategy, tuple(_BOUNDS.values())):
                lines.append(f"{variable} has no effect with the {strategy} strategy.")
    return lines


def vision_list(text: str | None, name: str) -> tuple[tuple[int, ...] | None, bool]:
    """Slots of VISION buckets (None: the default list), and whether images are padded at all.

    Raises:
        StartupError: an entry that is no whole number, not positive or not divisible by 64, or an empty list.
    """
    if text is None:
        return None, True
    if text.strip() == "None":
        return None, False
    entries = [part.strip() for part in text.split(",") if part.strip()]
    if not entries:
        raise StartupError(f"{name}={text!r} holds no bucket; give slots such as 1600,3136, or None, or unset it.")
    found = set()
    for entry in entries:
        if not entry.isdigit() or int(entry) == 0 or int(entry) % WINDOW_SLOTS:
            raise StartupError(f"{name}={text}: {entry!r} must be a positive whole number divisible by {WINDOW_SLOTS}.")
        found.add(int(entry))
    return tuple(sorted(found)), True
