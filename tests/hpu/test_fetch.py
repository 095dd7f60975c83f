"""What a launch sampled, on its way to the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from trencadis.backends.hpu.emulator.device_tensor import DEVICE
from trencadis.core.device.backend import HeadTensorsOut


def test_what_was_sampled_is_complete_when_it_is_read(hpu: Callable[..., Any]) -> None:
    """And stays so when the next replay writes the same tensors."""
    backend = hpu()
    token = torch.arange(4, dtype=torch.int32).to(DEVICE)
    some = torch.arange(8, dtype=torch.float32).view(4, 2).to(DEVICE)
    pending = backend.fetch(HeadTensorsOut(token, None, token, token, some), 3)
    for device, next_one in ((token, 9), (some, -1.0)):
        device.copy_(torch.full(device.shape, next_one, dtype=device.dtype))
    found = pending.result()
    assert pending.done() and found.logprob is None
    for values in (found.token, found.rank, found.top_id):
        np.testing.assert_array_equal(values, [0, 1, 2])
    np.testing.assert_array_equal(found.top_logprob, [[0, 1], [2, 3], [4, 5]])
