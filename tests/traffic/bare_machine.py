"""A Python that lacks what a bare GPU machine lacks, so that offline use stays possible without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MISSING = (
    *("msgspec", "pydantic", "fastapi", "starlette", "uvicorn", "yaml", "prometheus_client", "psutil", "openai", "av"),
)
PREFACE = """
import sys
class Missing:
    names = {names!r}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""


def run_without_packages(code: str, *lacking: str, limit: float = 120.0) -> subprocess.CompletedProcess[str]:
    """``code`` in a process of its own, from the checkout, without MISSING and ``lacking``."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    text = PREFACE.format(names={*MISSING, *lacking}) + code
    return subprocess.run(
        [sys.executable, "-P", "-c", text], cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit
    )
