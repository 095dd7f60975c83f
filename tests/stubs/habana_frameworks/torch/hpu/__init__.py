from __future__ import annotations

import os
import time

import torch
from habana_frameworks.torch.hpu import failures
from habana_frameworks.torch.utils.internal import is_lazy

if is_lazy():
    from habana_frameworks.torch.hpu.graphs import wrap_in_hpu_graph as wrap_in_hpu_graph

CHOSEN: list[int] = []
"""Modules that ``set_device`` has chosen."""


def is_available() -> bool:
    return True


def device_count() -> int:
    return int(os.environ.get("HABANA_STUB_CARDS", "1"))


def modules() -> list[int]:
    """Of the cards that a process may number."""
    return [int(n) for n in os.environ.get("HABANA_VISIBLE_MODULES", "0,1,2,3,4,5,6,7").split(",")]


def set_device(device: int) -> None:
    """A module that is named already wins over ``device``; otherwise the card is named by its place."""
    available, chosen = modules(), int(os.environ.get("HLS_MODULE_ID") or -1)
    if chosen >= 0:
        device = next((i for i in range(device_count()) if available[i] == chosen), device)
        assert available[device] == chosen, "another module was set before"
    if chosen == -1 and "HABANA_VISIBLE_MODULES" not in os.environ and device_count() < 8:
        assert device == 0, "HABANA_VISIBLE_MODULES is not provided"
    else:
        os.environ["HLS_MODULE_ID"] = str(available[device])
    CHOSEN.append(available[device])


ALLOWANCE = int(os.environ.get("PT_HCCL_MEMORY_ALLOWANCE_MB", "384")) << 20
POOL: dict[str, int] = {}
"""Bytes that the pool leaves to HCCL, settled when the card is opened."""


def open_pool() -> int:
    """The pool takes all of the card's memory at once, less an allowance where ``WORLD_SIZE`` names several ranks."""
    return POOL.setdefault("allowance", ALLOWANCE if int(os.environ.get("WORLD_SIZE") or 1) > 1 else 0)


def get_device_name(device: int | None = None) -> str:
    open_pool()
    return os.environ.get("HABANA_STUB_CARD", "GAUDI2")


def synchronize() -> None:
    failures.surface()


def mem_get_info(device: int | None = None) -> tuple[int, int]:
    total = (int(os.environ.get("HABANA_STUB_GIB", "96")) << 30) - open_pool()
    return total - (total >> 4), total


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.timing, self.at = enable_timing, 0.0

    def record(self, stream: object = None) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        assert self.timing and end.timing
        return 1e3 * (end.at - self.at)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        failures.surface()


PINNING = os.environ.get("HABANA_STUB_PIN", "")
"""``plain``: ``pin_memory`` takes no device; ``refused``: there is no pinned memory."""


def _pin_memory(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
    """Ordinary memory: a torch without a device build has no other."""
    if PINNING == "refused":
        raise RuntimeError("Pin memory is not supported on HPU")
    if PINNING == "plain" and device is not None:
        raise TypeError("pin_memory() takes 1 positional argument but 2 were given")
    assert device == "hpu" or PINNING == "plain"
    return tensor.clone()


torch.Tensor.pin_memory = _pin_memory  # type: ignore[assignment, method-assign]
