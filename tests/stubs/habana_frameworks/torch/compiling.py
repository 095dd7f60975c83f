"""The backend ``hpu_backend`` of torch.compile: counts what it compiles and runs it as it was traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from habana_frameworks.torch import AT_IMPORT
from habana_frameworks.torch.hpu import failures
from habana_frameworks.torch.hpu.metrics import TOTALS

REUSE = AT_IMPORT.get("PT_HPU_ENABLE_SYNAPSE_INPUT_REUSE", "1").lower() not in ("0", "false", "no", "off", "n", "f")
"""On where nothing is said: a recipe takes the memory of an input that it has read for the last time."""

SCRATCH = 1 << 16
"""Elements of the largest input that the stub scribbles over; caches and weights are larger."""


def hpu_backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """Called by Dynamo for each graph."""
    TOTALS["graph_compilation"] += 1
    refused = TOTALS["graph_compilation"] == failures.REFUSED
    if not REUSE:

        def run(*args: Any) -> Any:
            failures.reach()
            if refused:
                failures.refuse()
            return graph.forward(*args)

        return run

    def scribbled(*args: Any) -> Any:
        out = graph(*args)
        for arg in args:
            if isinstance(arg, torch.Tensor) and arg.dtype in (torch.int32, torch.int64) and arg.numel() < SCRATCH:
                arg.zero_()
        return out

    return scribbled
