"""torchvision beside a torch that it was not built for: transformers imports it, whether or not anything calls it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys

OPERATORS = ("nms", "qnms")
"""torchvision registers kernels for these when it is imported; its compiled half declares them."""


def usable_torchvision() -> None:
    """Makes ``import torchvision`` work where it is installed.

    Its CUDA build beside CPU torch fails for want of operators that its compiled half would have declared, so they are
    declared here. Where that half loads, it must find none of them: a second declaration ends the process.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except (ImportError, OSError, RuntimeError):
        import torch

        for name in [m for m in sys.modules if m.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in OPERATORS:
            with contextlib.suppress(RuntimeError):
                torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
