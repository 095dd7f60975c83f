"""``trencadis merge-lora``: writes a checkpoint with a LoRA adapter merged into its weights."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from trencadis.core.config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.process import torch_env
from trencadis.server.config import hub
from trencadis.server.processes import signals

USAGE = """\
usage: trencadis merge-lora MODEL ADAPTER OUT

Writes the checkpoint MODEL (a folder or hub id, 16- or 32-bit safetensors) to the new folder OUT, with the LoRA
adapter ADAPTER (a folder or hub id with PEFT's adapter_config.json and adapter_model.safetensors) added to its weights:
those of the decoder, of the vision tower and of the layers after it. The sums are computed in float32 and stored in the
checkpoint's type. `trencadis serve OUT` serves it like any other checkpoint; --lora-modules serves several adapters
beside one model without merging.
"""


def main(words: Sequence[str]) -> int:
    """Runs the ``merge-lora`` command; returns the exit code."""
    if any(word in ("-h", "--help") for word in words):
        print(USAGE, end="")
        return 0
    unknown = next((word for word in words if word.startswith("-")), None)
    if unknown is not None:
        raise StartupError(f"merge-lora does not know {unknown}; --help says what it takes.")
    if len(words) != 3:
        raise StartupError("merge-lora needs a checkpoint, an adapter and a new folder: merge-lora MODEL ADAPTER OUT.")
    signals.raise_early_stop()
    torch_env.import_torch()
    merging = import_module("trencadis.core.quant.writing.merge_adapter")  # imports torch
    model = hub.find_model_folder(EngineConfig(model=words[0]))
    adapter = hub.find_adapter_folder(EngineConfig(), words[1])
    count = merging.merge_adapter(model, adapter, Path(words[2]).expanduser())
    print(f"{words[2]}: {count} matrices changed")
    return 0
