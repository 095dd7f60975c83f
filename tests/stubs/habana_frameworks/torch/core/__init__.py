from __future__ import annotations

MARKS: list[str] = []


def mark_step(device_str: str = "", sync: bool = False) -> None:
    MARKS.append(device_str)
