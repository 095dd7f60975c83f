"""torchvision is importable afterwards, whether or not its compiled half loads."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = "(Tensor dets, Tensor scores, float threshold) -> Tensor"
WHOLE = f'import torch\ntorch.library.define("torchvision::nms", "{SCHEMA}")\n'
"""What a compiled half does: a second declaration of an operator fails, in C++ by ending the process."""
BROKEN = 'import torch\ntorch.library.register_fake("torchvision::nms")(lambda dets, scores, threshold: scores)\n'
"""Without that half, kernels are registered for operators that nobody declared."""


@pytest.mark.parametrize("text", [WHOLE, pytest.param(BROKEN, marks=pytest.mark.long)], ids=["whole", "broken"])
def test_it_can_be_imported(text: str, tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(text)
    code = "from benchmarks.harness.vision_ops import usable_torchvision; usable_torchvision(); import torchvision"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed")
def test_the_installed_one() -> None:
    import torchvision

    assert torchvision.__version__
