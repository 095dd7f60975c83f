"""Parses the VLLM_* bucket variables, whose names are those of vLLM's Gaudi fork, and generates sizes along an axis.

Every generator (``exp``, ``lin`` and ``pad``) ends at its maximum, so that the largest need always has a bucket.

The file of VLLM_BUCKETING_FROM_FILE has hand-written buckets; nothing in it is executed. Each line is a bucket or a set
of buckets: ``(rows, query tokens, blocks)``. Each item is a number, a list of numbers, or ``range(start, stop[,
step])``; a line stands for the product of its items. ``#`` begins a comment. Query 1 is a decode bucket, whose blocks
are those of the whole batch; otherwise the blocks are one row's context. Pure Python.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import isqrt
from typing import NamedTuple

from trencadis.core import envs
from trencadis.core.buckets import DEFAULT_VISION_SLOTS, align_up
from trencadis.core.device_shape_policy import Density
from trencadis.core.errors import StartupError
from trencadis.core.operator_files import read_regular_text
from trencadis.core.vision_config import WINDOW_SLOTS

WIDE_GAP = 1024
"""A gap between two sizes of the default VISION list is wide if it has more slots than this and than half of the
smaller size.
"""

STRATEGIES = ("exp", "lin", "pad", "file")


@dataclass(frozen=True)
class AxisSpan:
    """One axis to fill: sizes from ``minimum`` to ``maximum``, both included.

    Args:
        step: the unit that ``exp`` rounds up to; the increment of ``lin`` and ``pad``.
        density: points per octave of ``exp`` by size; above the last entry it is 1 (powers of two).
        pad_max: ``pad``: largest padding of a need; 0: a quarter of the maximum.
        pad_percent: ``pad``: largest padding of a need in percent of the padded size.
    """

    minimum: int
    step: int
    maximum: int
    density: tuple[Density, ...] = ()
    pad_max: int = 0
    pad_percent: int = 25


def exp(span: AxisSpan) -> tuple[int, ...]:
    """Returns octaves above the minimum, each divided into equal parts: 4, 5, 6, 7, 8, 10 .. at four points per
    octave.
    """
    sizes = []
    octave = span.minimum
    while octave < span.maximum:
        points = next((d.points for d in span.density if octave < d.upto), 1)
        sizes += [octave + octave * i // points for i in range(points)]
        octave *= 2
    return _with_maximum((-(-s // span.step) * span.step if s > span.minimum else s for s in sizes), span)


def lin(span: AxisSpan) -> tuple[int, ...]:
    """Returns the minimum doubled up to the step, then multiples of the step."""
    sizes = []
    size = span.minimum
    while size < span.step:
        sizes.append(size)
        size *= 2
    first = -(-span.minimum // span.step) * span.step
    return _with_maximum((*sizes, *range(first, span.maximum + 1, span.step)), span)


def pad(span: AxisSpan) -> tuple[int, ...]:
    """Returns the sizes of ``lin`` without those whose needs fit into the next one with little padding.

    A size is kept if the next one lies above the last one kept by more than ``pad_percent`` of itself or by more than
    ``pad_max``, or if it is a multiple of ``pad_max``; 0 percent is ``lin``, 50 percent nearly powers of two.
    """
    limit = span.pad_max or max(span.maximum // 4, 1)
    sizes: list[int] = []
    for size in lin(span):
        following = size + span.step
        gap = following - sizes[-1] if sizes else following
        if size <= span.step or 100 * gap > span.pad_percent * following or gap > limit or size % limit == 0:
            sizes.append(size)
    return _with_maximum(sizes, span)


def _with_maximum(sizes: Iterable[int], span: AxisSpan) -> tuple[int, ...]:
    kept = {s for s in sizes if span.minimum <= s < span.maximum}
    return (*sorted(kept), span.maximum)


def thinned(sizes: tuple[int, ...], cost: Callable[[int], float], tolerance: float, coarsest: int) -> tuple[int, ...]:
    """Returns ``sizes`` without those that save too little.

    The smallest need above the last size kept takes the largest size that costs at most ``tolerance`` more than the
    need itself and is at most ``coarsest`` times as large. The maximum is always kept.
    """
    kept: list[int] = []
    need = sizes[0]
    while not kept or kept[-1] < sizes[-1]:
        above = [s for s in sizes if s >= need]
        limit = (1 + tolerance) * cost(need)
        kept.append(max((s for s in above if cost(s) <= limit and s <= coarsest * need), default=above[0]))
        need = kept[-1] + 1
    return tuple(kept)


GENERATORS = {"exp": exp, "lin": lin, "pad": pad}


def sizes(strategy: str, span: AxisSpan) -> tuple[int, ...]:
    """Returns the ascending sizes of ``span``; the last is its maximum."""
    return GENERATORS[strategy](span)


def vision_boundaries(largest: int, windows: bool = True) -> tuple[int, ...]:
    """Returns the default VISION list, continued by factors of 1.5 up to ``largest`` slots.

    Args:
        windows: some layers attend inside windows, so that an image takes whole windows; False: it may need any
            multiple of 64, and wide gaps of the list get a size in the middle.
    """
    sizes = list(DEFAULT_VISION_SLOTS)
    if not windows:
        wide = [(a, b) for a, b in pairwise(sizes) if b - a > WIDE_GAP and 2 * b > 3 * a]
        sizes = sorted([*sizes, *(align_up(isqrt(a * b), WINDOW_SLOTS) for a, b in wide)])
    while sizes[-1] < largest:
        sizes.append(align_up(-(-sizes[-1] * 3 // 2), WINDOW_SLOTS))
    return tuple(sizes)


MOST = 10_000
"""Largest number of elements of one range."""


class FileBucket(NamedTuple):
    """One bucket of the file; ``query`` counts tokens per row."""

    rows: int
    query: int
    blocks: int


def read_file(path: str, name: str) -> tuple[FileBucket, ...]:
    """Returns the buckets of ``path``, ascending; ``name`` is the variable that named the file.

    Raises:
        StartupError: the file cannot be read, a line is no bucket, or there are no buckets.
    """
    try:
        lines = read_regular_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no UTF-8 text"
        raise StartupError(f"{name}={path}: {reason}.") from None
    found: set[FileBucket] = set()
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if text:
            try:
                found.update(_line(text))
            except ValueError as error:
                raise StartupError(f"{name}={path}, line {number}: {text[:60]!r} {error}.") from None
    if not found:
        raise StartupError(f"{name}={path}: no bucket; a line is (rows, query tokens, blocks).")
    return tuple(sorted(found))


def _line(text: str) -> list[FileBucket]:
    """Returns the buckets of one line; raises ValueError with a description of the error."""
    try:
        node = ast.parse(text, mode="eval").body
    except SyntaxError:
        raise ValueError("is no (rows, query tokens, blocks)") from None
    if not isinstance(node, ast.Tuple) or len(node.elts) != 3:
        raise ValueError("must hold three items: (rows, query tokens, blocks)")
    rows, query, blocks = (_item(e) for e in node.elts)
    if min(rows) < 1 or min(query) < 1 or min(blocks) < 0:
        raise ValueError("must have rows and tokens of at least 1 and blocks of at least 0")
    return [FileBucket(*dims) for dims in itertools.product(rows, query, blocks)]


def _item(node: ast.expr) -> list[int]:
    if isinstance(node, ast.List) and node.elts:
        return [_number(e) for e in node.elts]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        bounds = [_number(a) for a in node.args]
        if node.keywords or not 2 <= len(bounds) <= 3 or (len(bounds) == 3 and bounds[2] == 0):
            raise ValueError("has a range that is not range(start, stop[, step])")
        values = range(*bounds)
        if not 0 < len(values) <= MOST:
            raise ValueError(f"has a range of {len(values)} elements; 1 to {MOST} are allowed")
        return list(values)
    return [_number(node)]


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise ValueError("holds something other than numbers, lists and ranges")


AXES = {
    "prompt_bs": ("VLLM_PROMPT_BS",),
    "prompt_query": ("VLLM_PROMPT_QUERY", "VLLM_PROMPT_SEQ"),
    "prompt_ctx": ("VLLM_PROMPT_CTX",),
    "decode_bs": ("VLLM_DECODE_BS",),
    "decode_block": ("VLLM_DECODE_BLOCK",),
}
"""Axis -> prefixes of its variables; the first one that is set wins (SEQ is the older name of QUERY)."""

LEAST = {"prompt_ctx": 0}
"""Smallest valid MIN of an axis, if it is not 1; a context of 0 blocks belongs to another stage."""


@dataclass(frozen=True)
class AxisSettings:
    """The user's settings of one axis; None: the default. ``names``: bound -> the variable that set it."""

    minimum: int | None = None
    step: int | None = None
    maximum: int | None = None
    pad_max: int | None = None
    pad_percent: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PlannedImageSize:
    """Images of ``width`` x ``height`` pixels, before resizing, and how many of them arrive together.

    ``fewest`` and ``most`` are 0 if not given: as many as --limit-mm-per-prompt allows.
    """

    width: int
    height: int
    fewest: int = 0
    most: int = 0


@dataclass(frozen=True)
class BucketOptions:
    """The user's settings of launch shapes.

    Args:
        vision: slots of VISION buckets; None: the default list.
        pad_vision: False: images are not padded to a list.
        images: sizes of images that get their own buckets.
        listed: the buckets from a file.
        notes: lines about variables without effect.
    """

    strategy: str = "exp"
    axes: Mapping[str, AxisSettings] = field(default_factory=dict)
    vision: tuple[int, ...] | None = None
    pad_vision: bool = True
    images: tuple[PlannedImageSize, ...] = ()
    listed: tuple[FileBucket, ...] = ()
    notes: tuple[str, ...] = ()

    def axis(self, name: str) -> AxisSettings:
        """Returns the user's settings of an axis in ``AXES``."""
        return self.axes.get(name, AxisSettings())


def read_bucket_options(environ: Mapping[str, str]) -> BucketOptions:
    """Reads all bucket variables of ``environ``.

    Raises:
        StartupError: a value is invalid; one line with the variable, its value and the violated rule.
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
    images = parse_image_sizes(envs.get("VLLM_MULTIMODAL_RESOLUTIONS", environ))
    if images and not pad_vision:
        notes.append("VLLM_MULTIMODAL_RESOLUTIONS has no effect with VLLM_MULTIMODAL_BUCKETS=None.")
    return BucketOptions(strategy, axes, vision, pad_vision, images, listed, tuple(notes))


def _strategy(environ: Mapping[str, str], notes: list[str]) -> str:
    """Returns the generator's name; if both variables are set, the older boolean wins, as in vLLM's Gaudi fork."""
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


def _axis(name: str, environ: Mapping[str, str], notes: list[str]) -> AxisSettings:
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
    return AxisSettings(**found, names=names)


def _check_bound(variable: str, bound: str, value: int, least: int) -> None:
    if bound == "PAD_PERCENT":
        if not 0 <= value <= 50:
            raise StartupError(f"{variable}={value} must lie in 0..50.")
        return
    lowest = {"MIN": least, "MAX": least, "STEP": 1, "PAD_MAX": 0}[bound]
    if value < lowest:
        raise StartupError(f"{variable}={value} must be at least {lowest}.")


def _without_effect(strategy: str, axes: Mapping[str, AxisSettings]) -> list[str]:
    """Returns lines about variables that the chosen generator does not read."""
    unread = {"exp": ("pad_max", "pad_percent"), "lin": ("pad_max", "pad_percent"), "pad": ()}
    lines = []
    for axis in axes.values():
        for attribute, variable in axis.names.items():
            if attribute in unread.get(strategy, tuple(_BOUNDS.values())):
                lines.append(f"{variable} has no effect with the {strategy} strategy.")
    return lines


def vision_list(text: str | None, name: str) -> tuple[tuple[int, ...] | None, bool]:
    """Returns the slots of VISION buckets (None: the default list), and True if images are padded at all.

    Entries are numbers of patches of a whole image, width x height / 14**2, as Gaudi's guide counts them: 1600 is 560 x
    560 pixels. With that convention the sides of an image are multiples of 112, so its patches fill windows of 64, and
    a bucket of as many slots holds it.

    Raises:
        StartupError: an entry is not a positive whole number divisible by 64, or the list is empty.
    """
    if text is None:
        return None, True
    if text.strip() == "None":
        return None, False
    entries = [part.strip() for part in text.split(",") if part.strip()]
    if not entries:
        raise StartupError(f"{name}={text!r} holds no bucket; give patches such as 1600,3136, or None, or unset it.")
    found = set()
    for entry in entries:
        patches = int(entry) if entry.isdecimal() and len(entry) < 16 else 0
        if not patches or patches % WINDOW_SLOTS:
            hint = f" (the next one is {slots_of_patches(patches)})" if patches else ""
            raise StartupError(
                f"{name}={text}: {entry!r} must be a positive whole number divisible by {WINDOW_SLOTS}{hint}: patches "
                "of an image, width x height / 14^2."
            )
        found.add(slots_of_patches(patches))
    return tuple(sorted(found)), True


def slots_of_patches(patches: int) -> int:
    """Returns the slots of an image of ``patches`` patches that fill whole windows: 64 per window."""
    return -(-patches // WINDOW_SLOTS) * WINDOW_SLOTS


_SIZE = re.compile(r"(\d{1,6})x(\d{1,6})(?:x(\d{1,4})(?:-(\d{1,4}))?)?")


def parse_image_sizes(text: str | None, name: str = "VLLM_MULTIMODAL_RESOLUTIONS") -> tuple[PlannedImageSize, ...]:
    """Parses sizes of images: ``WxH``, ``WxHxN`` (N at a time) or ``WxHxN-M`` (N to M at a time), separated by commas.

    Raises:
        StartupError: an entry has another form, a side or count is 0, or a range ends before it begins.
    """
    found = []
    for entry in (part.strip() for part in (text or "").split(",")):
        if not entry:
            continue
        match = _SIZE.fullmatch(entry.lower())
        width, height, fewest, most = (int(n) if n else 0 for n in match.groups()) if match else (0, 0, 0, 0)
        counted = match is not None and match[3] is not None
        if not width or not height or (counted and not fewest) or (match is not None and match[4] and most < fewest):
            raise StartupError(
                f"{name}={text}: {entry!r} is no size; give WxH, WxHxN or WxHxN-M, such as 864x480x1-20 (pixels, then "
                "how many images come at a time, from 1)."
            )
        found.append(PlannedImageSize(width, height, fewest, most or fewest))
    return tuple(found)
