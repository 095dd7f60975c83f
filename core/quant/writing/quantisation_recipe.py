"""How ``quantize`` converts a linear layer: its scheme, the stored tensors, and the entry of config.json."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trencadis.core.checkpoint.quant_config import ONLINE_GROUP
from trencadis.core.checkpoint.quantised_tensor_readers import pack_words
from trencadis.core.json_types import JsonObject
from trencadis.core.quant.online_quant import ScaleSearch
from trencadis.core.quant.quantised_tensor import QTensor
from trencadis.core.quant.quantised_weight_layout_and_bytes import Scheme, groups_of
from trencadis.core.quant.writing.safetensors_writer import TensorSlot

CLIPS = tuple(1 - step / 40 for step in range(17))
"""Fractions of a group's largest magnitude that are tried as its range: 1 down to 0.6."""

FORMATS = {"fp8": "float-quantized", "int8": "int-quantized", "int4": "pack-quantized"}
GROUPS = (32, 64, 128)
STRIPE = 1024
"""Rows packed at a time, because a code temporarily takes 8 bytes."""


@dataclass(frozen=True)
class Recipe:
    """How every linear layer of the decoder is stored.

    Args:
        to: ``fp8``, ``int8`` (a scale per row, 8-bit activations) or ``int4`` (groups, unquantised activations).
        group: columns that share a scale; 0 unless ``int4``.
        scales: the dtype of the stored scales: the checkpoint's.
    """

    to: str
    group: int
    scales: torch.dtype

    @property
    def scheme(self) -> Scheme:
        """The quantisation scheme."""
        if self.to == "int4":
            return Scheme(4, group=self.group or ONLINE_GROUP)
        return Scheme(8, "float" if self.to == "fp8" else "int", activations="token")

    @property
    def search(self) -> ScaleSearch:
        """The scales that are tried. Clipping never helps floats, whose codes are denser near zero."""
        return ScaleSearch((1.0,) if self.to == "fp8" else CLIPS, self.scales)

    def slots(self, base: str, shape: tuple[int, int]) -> list[TensorSlot]:
        """Returns the tensors stored for the weight [out, in] of module ``base``."""
        rows, columns = shape
        scale = TensorSlot(f"{base}.weight_scale", self.scales, (rows, groups_of(columns, self.scheme.group)))
        if self.to == "int4":
            words = TensorSlot(f"{base}.weight_packed", torch.int32, (rows, -(-columns // 8)))
            return [words, scale, TensorSlot(f"{base}.weight_shape", torch.int64, (2,))]
        kind = torch.float8_e4m3fn if self.to == "fp8" else torch.int8
        return [TensorSlot(f"{base}.weight", kind, shape), scale]

    def tensors(self, base: str, q: QTensor) -> dict[str, Tensor]:
        """Returns the contents of the tensors listed by ``slots``."""
        found = {f"{base}.weight_scale": q.scale.to(self.scales)}
        if self.to != "int4":
            return found | {f"{base}.weight": q.data}
        parts = [q.data[start : start + STRIPE] for start in range(0, len(q.data), STRIPE)]
        words = torch.cat([pack_words(part.short() + 8, 4, 1) for part in parts])
        return found | {f"{base}.weight_packed": words, f"{base}.weight_shape": torch.tensor(q.shape)}

    def config(self, ignore: list[str]) -> JsonObject:
        """Returns ``quantization_config``; ``ignore``: modules that stay unquantised."""
        scheme, kind = self.scheme, "float" if self.to == "fp8" else "int"
        weights = {
            "num_bits": scheme.bits, "type": kind, "symmetric": True, "dynamic": False, "observer": "mse",
            "strategy": "group" if scheme.group else "channel", "group_size": scheme.group or None,
        }  # fmt: skip
        inputs = {"num_bits": 8, "type": kind, "symmetric": True, "dynamic": True, "strategy": "token"}
        group = {
            "targets": ["Linear"], "weights": weights, "input_activations": None if self.to == "int4" else inputs,
            "output_activations": None, "format": FORMATS[self.to],
        }  # fmt: skip
        return {
            "quant_method": "compressed-tensors", "format": FORMATS[self.to], "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": ignore, "kv_cache_scheme": None,
        }  # fmt: skip
