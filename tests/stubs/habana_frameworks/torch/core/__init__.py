from __future__ import annotations

from habana_frameworks.torch import LAZY

MARKS: list[str] = []


def mark_step(device_str: str = "", sync: bool = False) -> None:
    if LAZY:  # in compile mode it does nothing, and Dynamo traces it
        MARKS.append(device_str)
