"""Predicts how long a full step takes on this machine, so that a slow step is not taken for a hang."""

from __future__ import annotations

import time

import torch

from trencadis.core.models.decoder import Decoder

PROBE_ROWS = 16
REPEATS = 2


def step_seconds(model: Decoder, tokens: int) -> float:
    """Predicted seconds of a step of ``tokens``: the time of one layer's MLP, scaled to the bytes of the whole model.

    Attention is not counted, so a limit made from this figure needs a factor for it. A slot of the vision tower costs
    less than a token of the text model.
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
