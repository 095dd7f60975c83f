from __future__ import annotations

import os

import torch
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


class Event:
    def record(self, stream: object = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


def _pin_memory(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
    """Ordinary memory: a torch without a device build has no other."""
    assert device == "hpu"
    return tensor.clone()


torch.Tensor.pin_memory = _pin_memory  # type: ignore[assignment, method-assign]
