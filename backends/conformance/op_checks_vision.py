"""Checks the ops of the vision tower against the reference; masks come from the backend's own ``fill``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trencadis.backends.conformance.backend_under_test import CheckTarget
from trencadis.backends.conformance.check_result import Skipped
from trencadis.backends.conformance.launch_harness import all_buckets, spread_buckets
from trencadis.backends.conformance.op_checks import Put, Work, check_close, error_summary, randn, vs_reference
from trencadis.backends.conformance.program_checks import make_harness
from trencadis.core.buckets import Stage
from trencadis.core.device.backend import Backend, Ops, VisionTensors
from trencadis.core.vision_config import WINDOW_SLOTS

VALUES = 768
"""Values of a slot if the model has no vision tower."""

NEAR = 4
"""Number of table rows that a position between them is interpolated from."""


class VisionOpBody:
    """A body that runs one vision op with the launch's own segments and positions."""

    def __init__(self, backend: Backend, name: str, parts: list[Tensor]) -> None:
        half, device = parts[0].shape[-1] // 2, backend.device
        self.ops, self.name, self.parts = backend.ops, name, [t.to(device) for t in parts]
        self.frequency, self.axis = torch.linspace(1, 0.01, half).to(device), (torch.arange(half) % 2).to(device)
        outs = 2 if name == "rope_vision" else 1
        self.outs = [backend.zeros(parts[0].shape, parts[0].dtype) for _ in range(outs)]

    def __call__(self, x: VisionTensors) -> None:
        q, k, v = self.parts
        found: Sequence[Tensor]
        if self.name == "rope_vision":
            found = self.ops.rope_vision(q, k, self.ops.rotary(x.position.t(), self.frequency, self.axis))
        else:
            segments = self.ops.prepare_segments(x.segments)
            found = [getattr(self.ops, self.name)(q, k, v, segments, q.shape[-1] ** -0.5)]
        for destination, value in zip(self.outs, found, strict=True):
            destination.copy_(value)


def _vision(target: CheckTarget, name: str) -> str:
    v = target.model.vision
    harness, errors = make_harness(target), []
    if v is None or Stage.VISION not in harness.stages:
        raise Skipped("the model or the policy has no vision")
    d = v.head_dim
    for bucket in spread_buckets(all_buckets(harness.plan, Stage.VISION), 2 if target.quick else 4):
        inputs, _ = harness.inputs(bucket, np.random.default_rng(3))
        slots = bucket.dims[0]
        real = (np.arange(slots) % WINDOW_SLOTS) < np.repeat(inputs.count, WINDOW_SLOTS)
        parts = [randn(slots, v.heads, d, seed=i).to(target.dtype) for i in range(3)]
        outs = []
        for backend, dtype in ((harness.backend, target.dtype), (target.reference(), torch.float32)):
            body = VisionOpBody(backend, name, [t.to(dtype) for t in parts])
            program = backend.program(bucket, body)
            backend.fill(program, inputs)
            program.run()
            backend.synchronize()
            outs.append([o.cpu()[torch.from_numpy(real)] for o in body.outs])
        errors += [check_close(str(bucket), f, w, target.dtype) for f, w in zip(*outs, strict=True)]
    return error_summary(errors)


def rope_vision(target: CheckTarget) -> str:
    """Rotates queries and keys by patch row and column."""
    return _vision(target, "rope_vision")


def attend_windows(target: CheckTarget) -> str:
    """Each slot attends to the real slots of its window."""
    return _vision(target, "attend_windows")


def attend_images(target: CheckTarget) -> str:
    """Each slot attends to the real slots of its image."""
    return _vision(target, "attend_images")


def patches(target: CheckTarget) -> str:
    """Normalises uint8 patches."""
    v = target.model.vision
    values = v.slot.values if v is not None else VALUES
    pixels = torch.randint(0, 256, (64, values), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    scale, shift = randn(values, seed=2), randn(values, seed=3)
    found = []

    def setup(ops: Ops, put: Put) -> Work:
        dtype = put(torch.zeros(1)).dtype
        device = put(torch.zeros(1)).device
        wide = [scale.to(device), shift.to(device)]
        return lambda p: [ops.patches(p, wide[0], wide[1], dtype)]

    found += vs_reference(target, setup, pixels)
    return error_summary(found)


def interpolate(target: CheckTarget) -> str:
    """Mixes rows of a table by shares, which are 0 in padding."""
    generator = torch.Generator().manual_seed(4)
    near = torch.randint(0, 48, (64, NEAR), dtype=torch.int32, generator=generator)
    share = torch.rand(64, NEAR, generator=generator) * (torch.arange(64) < 60)[:, None]

    def setup(ops: Ops, put: Put) -> Work:
        held = share.to(put(torch.zeros(1)).device)  # float32 whatever the backend's dtype is
        return lambda table, rows: [ops.interpolate(table, rows, held)]

    return error_summary(vs_reference(target, setup, randn(48, 72, seed=5), near))
