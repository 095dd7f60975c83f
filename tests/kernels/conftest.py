"""Kernel tests: Triton's interpreter on CPU tensors, or the card where one is there (TRITON_INTERPRET=0)."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    from tests.oracles import interpreter

    interpreter.install()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run: ``cpu`` under the interpreter, else ``cuda``."""
    if INTERPRETED:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA device, and TRITON_INTERPRET=0 asked for one")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def interpreted() -> None:
    """The test needs the interpreter."""
    if not INTERPRETED:
        pytest.skip("looks inside Triton's interpreter; TRITON_INTERPRET=1 runs it")
