"""LoRA adapters of offline callers: the request that names one, and those that an engine has read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import BadRequest, StartupError
from trencadis.core.request import AdapterRef
from trencadis.server.config.model_download import find_adapter_folder
from trencadis.server.prompts.adapter_registry import MOST_ADAPTERS, AdapterRegistry


@dataclass(frozen=True)
class LoRARequest:
    """An adapter by name.

    Args:
        lora_int_id: a number from 1; it has no effect, since adapters are told apart by their contents.
        lora_path: a folder with PEFT's files, or a hub id.
        base_model_name: has no effect.
        load_inplace: reads the files again although the name is known.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise BadRequest(f"lora_int_id must be at least 1, got {self.lora_int_id}.", param="lora_int_id")
        if not self.lora_path:
            raise BadRequest("lora_path must name a folder or a hub id.", param="lora_path")

    @property
    def name(self) -> str:
        """The name."""
        return self.lora_name

    @property
    def path(self) -> str:
        """The folder or hub id."""
        return self.lora_path


LoRARequests: TypeAlias = LoRARequest | Sequence[LoRARequest | None] | None
"""One adapter for all prompts, one for each (None: the base model), or none."""


class OfflineAdapters:
    """The adapters of an engine that is used offline; each is read when a prompt first names it.

    Args:
        model: the base model, which adapters must fit.
    """

    def __init__(self, model: ModelConfig, engine: EngineConfig) -> None:
        self._registry: AdapterRegistry | None = None
        if engine.enable_lora:
            self._registry = AdapterRegistry(model, engine, (engine.model,), partial(find_adapter_folder, engine))

    def find(self, asked: LoRARequest | None) -> AdapterRef | None:
        """Returns the adapter of a prompt; reads it if its name is new or has another path.

        Raises:
            BadRequest: it cannot be read, does not fit, or the engine takes no adapters.
        """
        if asked is None:
            return None
        if self._registry is None:
            raise BadRequest("lora_request needs an engine made with enable_lora=True.", param="lora_request")
        if not isinstance(asked, LoRARequest):
            raise BadRequest(f"lora_request must be a LoRARequest, not {type(asked).__name__}.", param="lora_request")
        served = self._registry.served
        known = served.get(asked.lora_name)
        if known is not None and known.root == asked.lora_path and not asked.load_inplace:
            return known.ref
        try:
            if known is None and len(served) >= MOST_ADAPTERS:
                del served[next(iter(served))]  # offline, nothing unloads adapters
            return self._registry.add(asked.lora_name, asked.lora_path, replace=True).ref
        except StartupError as error:
            raise BadRequest(f"The adapter cannot be loaded: {error}", param="lora_request") from None

    def find_all(self, asked: LoRARequests, count: int) -> list[AdapterRef | None]:
        """Returns the adapter of each of ``count`` prompts.

        Raises:
            BadRequest: as ``find``, or the numbers of prompts and adapters differ.
        """
        if asked is None or not isinstance(asked, Sequence):
            return [self.find(asked)] * count
        if len(asked) != count:
            raise BadRequest(f"{count} prompts came with {len(asked)} lora requests.", param="lora_request")
        return [self.find(one) for one in asked]
