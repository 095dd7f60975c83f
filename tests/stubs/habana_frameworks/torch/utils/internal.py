from __future__ import annotations

from habana_frameworks.torch import LAZY


def is_lazy() -> bool:
    return LAZY
