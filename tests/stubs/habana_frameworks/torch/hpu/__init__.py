from __future__ import annotations

import os

from habana_frameworks.torch.utils.internal import is_lazy

if is_lazy():
    from habana_frameworks.torch.hpu.graphs import wrap_in_hpu_graph as wrap_in_hpu_graph

CHOSEN: list[int] = []


def is_available() -> bool:
    return True


def device_count() -> int:
    return int(os.environ.get("HABANA_STUB_CARDS", "1"))


def set_device(device: int) -> None:
    CHOSEN.append(device)


def get_device_name(device: int | None = None) -> str:
    return "GAUDI2"


def synchronize(device: int | None = None) -> None: ...


def mem_get_info(device: int | None = None) -> tuple[int, int]:
    total = int(os.environ.get("HABANA_STUB_GIB", "96")) << 30
    return total - (total >> 4), total
