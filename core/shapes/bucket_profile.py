"""Files of recorded needs (``--bucket-profile``): written by ``trencadis plan``, read at start. Pure Python."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable

from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.device_shape_policy import Policy
from trencadis.core.errors import StartupError
from trencadis.core.json_types import JsonMapping
from trencadis.core.operator_files import read_regular
from trencadis.core.shapes.bucket_options import BucketOptions
from trencadis.core.shapes.bucket_planner import COARSE
from trencadis.core.shapes.launch_costs import work_of
from trencadis.core.shapes.plan_from_recorded_needs import LearnedPlan, TooFewGraphs, learn_plan
from trencadis.core.shapes.sample_and_reset_sizes import HEADS, thin_heads
from trencadis.core.shapes.shape_need_histogram import MAX_CELLS, NeedHistogram

FORMAT = "trencadis bucket profile"
VERSION = 1
MAX_BYTES = 256 << 10
MAX_SIZE = 1 << 31


def read_profile(path: str, policy: Policy, block_size: int) -> NeedHistogram:
    """Reads the needs of a profile.

    Raises:
        StartupError: the file is unreadable, no profile, or of a device with other launches or KV blocks.
    """
    try:
        data = read_regular(path, MAX_BYTES)
    except OSError as error:
        why = f"larger than {MAX_BYTES >> 10} KiB" if error.errno == errno.EFBIG else error.strerror
        raise StartupError(f"--bucket-profile {path}: {why}.") from None
    try:
        return _parse(json.loads(data), policy, block_size)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = str(error) if type(error) is ValueError else f"no profile ({type(error).__name__})"
        raise StartupError(f"--bucket-profile {path}: {reason[:200]}.") from None


def _parse(record: JsonMapping, policy: Policy, block_size: int) -> NeedHistogram:
    if record["format"] != FORMAT or record["version"] != VERSION:
        raise ValueError(f"not version {VERSION} of a bucket profile")
    if record["block_size"] != block_size:
        raise ValueError(
            f"recorded with KV blocks of {str(record['block_size'])[:20]} tokens; here they have {block_size}"
        )
    cells = record["cells"]
    if len(cells) > MAX_CELLS:
        raise ValueError(f"more than {MAX_CELLS} cells")
    found = NeedHistogram()
    for name, variant, dims, weight in cells:
        axes = policy.axes.get(Stage[name])
        if axes is None or len(axes) != len(dims):
            raise ValueError(f"stage {name} has other axes on this device")
        if not all(type(d) is int and 0 < d <= MAX_SIZE for d in dims):
            raise ValueError(f"sizes are whole numbers from 1 to {MAX_SIZE}")
        if type(weight) not in (int, float) or not (math.isfinite(weight) and 0 < weight <= 1e15):
            raise ValueError("weights are finite numbers above 0")
        found.add(Stage[name], dims, float(weight), str(variant))
    return found


def write_profile(path: str, needs: NeedHistogram, block_size: int, least: float = 0.0) -> None:
    """Writes the needs of at least the weight ``least`` to a new file, which then replaces ``path``.

    Raises:
        StartupError: the file cannot be written.
    """
    cells = [
        [stage.name, variant, list(dims), round(weight, 6)]
        for (stage, variant), dims, weight in needs.list_cells(least)
        if round(weight, 6) > 0
    ]
    lines = ",\n".join(map(json.dumps, cells))
    head = json.dumps({"format": FORMAT, "version": VERSION, "block_size": block_size})
    text = f'{head[:-1]}, "cells": [\n{lines}\n]}}\n'
    folder, name = os.path.split(os.path.abspath(path))
    made = ""
    try:
        handle, made = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(made, path)
    except OSError as error:
        if made and os.path.exists(made):
            os.unlink(made)
        raise StartupError(f"the bucket profile {path} cannot be written: {error.strerror}.") from None


def merge_into_profile(
    path: str, needs: NeedHistogram, policy: Policy, block_size: int, least: float, fade: float = 1.0
) -> None:
    """Adds needs to a profile, which several engines may share; creates it if there is none.

    Args:
        least: cells below this weight are not written.
        fade: factor of the weights that the file has, because they are older.

    Raises:
        StartupError: the file is no profile of this device, or cannot be written.
    """
    folder, name = os.path.split(os.path.abspath(path))
    try:
        lock = os.open(os.path.join(folder, f".{name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StartupError(f"the bucket profile {path} cannot be written: {error.strerror}.") from None
    try:
        _lock(lock, path)
        whole = read_profile(path, policy, block_size) if os.path.exists(path) else NeedHistogram()
        whole.scale(fade)
        whole.merge(needs)
        write_profile(path, whole, block_size, least)
    finally:
        os.close(lock)


def _lock(descriptor: int, path: str) -> None:
    """Waits for the lock of the profile ``path``, which other engines may hold."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:  # some network file systems have no locks
        raise StartupError(f"the bucket profile {path} cannot be locked: {error.strerror}.") from None


def learn_from_profile(
    path: str, plan: Plan, options: BucketOptions, max_graphs: int, work: Callable[[Bucket], float]
) -> LearnedPlan:
    """Returns the plan of at most ``max_graphs`` graphs for the needs of a profile.

    Stages whose sizes the user has set keep their buckets, in addition to ``max_graphs``; so do SAMPLE and RESET, with
    fewer sizes (``thin_heads``).

    Raises:
        StartupError: the profile is refused, or ``max_graphs`` is too small.
    """
    needs = read_profile(path, plan.policy, plan.block_size)
    try:
        found = learn_plan(plan, needs, max_graphs, list_set_stages(plan, options), work)
    except TooFewGraphs as error:
        raise StartupError(f"--max-graphs {max_graphs}: these limits need at least {error.least}.") from None
    return dataclasses.replace(found, plan=thin_heads(found.plan, needs))


def plan_by_profile(path: str, plan: Plan, options: BucketOptions, max_graphs: int, model: ModelConfig) -> Plan:
    """Returns the plan for the needs of a profile, with a note about it; see ``learn_from_profile``."""
    found = learn_from_profile(path, plan, options, max_graphs, work_of(model, plan.block_size))
    before, after = (sum(b.stage not in HEADS for b in p.buckets) for p in (plan, found.plan))
    replaced, static = before - after + found.graphs, found.static or 1.0
    note = (
        f"--bucket-profile: {found.graphs} shapes of text and images; its needs are expected to cost "
        f"{found.cost / static:.3f} of what they cost in {replaced}; no choice of as many costs less than "
        f"{found.bound / static:.3f}."
    )
    return dataclasses.replace(found.plan, notes=(*plan.notes, note))


def list_set_stages(plan: Plan, options: BucketOptions) -> Iterable[Stage]:
    """Returns the stages whose sizes the user has set."""
    if options.strategy != "exp":
        return [stage for stage in plan.policy.rules if stage is not Stage.VISION or options.vision]
    found = {stage for stage, names in COARSE.items() if any(options.axis(name).names for name in names)}
    if options.axis("prompt_query").names:
        found.add(Stage.PREFILL)
    if options.vision or not options.pad_vision:
        found.add(Stage.VISION)
    return found
