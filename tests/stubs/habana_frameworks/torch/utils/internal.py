from __future__ import annotations

from habana_frameworks.torch import AT_IMPORT


def is_lazy() -> bool:
    return AT_IMPORT.get("PT_HPU_LAZY_MODE", "1") != "0"
