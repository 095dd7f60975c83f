"""What a request says about its LoRA adapter. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """An adapter that a request uses.

    Args:
        digest: digest of the adapter's contents, which identifies it everywhere; names may be given again.
        path: its folder, from which every rank reads it.
        name: the name that it is served under, for messages and metrics.
        tower: True if the outputs of the vision tower change.
    """

    digest: str
    path: str
    name: str
    tower: bool = False
