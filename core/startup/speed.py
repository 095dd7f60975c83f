"""How long a full step may take on this machine: what tells a slow step from a hang."""

from __future__ import annotations

import time

import torch

from trencadis.core.models.decoder import Decoder

PROBE_ROWS = 16
REPEATS = 2


def step_seconds(model: Decoder, tokens: int) -> float:
    """Seconds predicted for a step of ``tokens``: one layer's MLP is timed and scaled by bytes to the whole model.

    Attention is not counted; whoever uses the figure as a limit leaves a factor for it. Encoder launches of as many
    slots cost less than as many tokens of the text model that they belong to.
    """
    mlp = model.layers[0].mlp
    x = torch.zeros(PROBE_ROWS, model.config.text.hidden, dtype=model.backend.dtype, device=model.backend.device)
    taken = []
    with torch.inference_mode():
        for _ in range(1 + REPEATS):  # the first call makes kernels
            started = time.perf_counter()
            mlp(x)
            taken.append(time.perf_counter() - started)
    return min(taken[1:]) / PROBE_ROWS * (model.nbytes() / mlp.nbytes()) * tokens
