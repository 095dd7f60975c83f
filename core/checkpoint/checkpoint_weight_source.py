"""Access to a checkpoint's tensors by canonical name, converted to the engine's dtype or quantised."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trencadis.core.checkpoint.family import StoredNames
from trencadis.core.checkpoint.model_config import ModelConfig, TextConfig
from trencadis.core.checkpoint.quant_config import canonical_name
from trencadis.core.checkpoint.quantised_tensor_readers import MARKS, READERS, RawWeight
from trencadis.core.checkpoint.weight_file_reader import FLOATS, DummyWeights
from trencadis.core.checkpoint.weight_source_interface import StackedPart, StoredRows, stack
from trencadis.core.device.backend import Backend
from trencadis.core.errors import StartupError
from trencadis.core.quant.online_quant import quantise
from trencadis.core.quant.quantised_tensor import QTensor
from trencadis.core.quant.quantised_weight_layout_and_bytes import FLOATS8, Scheme

log = logging.getLogger("trencadis.engine")

KV_SCALES = ("{}_scale", "{}_proj.{}_scale", "{}_proj.output_scale", "attn.{}_scale")
"""Names of a layer's KV scales, in the forms that different tools write."""

EXPERTS = ".experts."

OLD_KINDS = ((".gamma", ".weight"), (".beta", ".bias"))
"""Names of norm tensors in checkpoints converted from TensorFlow -> current names."""


class CheckpointSource:
    """A ``core.checkpoint.weight_source_interface.WeightSource`` over a checkpoint's tensors.

    Args:
        names: maps stored names to canonical ones; tensors without a canonical name are ignored.
        config: the model; its name is used in messages.
        skipped: prefixes of stored names that a log line counts (``Family.skipped``).

    Raises:
        StartupError: two different tensors have the same canonical name, or a fused one has not the size of its parts.
    """

    def __init__(
        self,
        weights: Iterable[tuple[str, Tensor]],
        names: StoredNames,
        backend: Backend,
        config: ModelConfig,
        skipped: tuple[str, ...] = (),
    ) -> None:
        self.label, self.device, self.dtype = config.name, backend.device, backend.dtype
        self.values, self.quant = backend.values, config.quant
        # Codes stay on the host if the card's 8-bit floats have another range than the file's.
        self.codes = torch.device("cpu") if backend.policy.quantised == FLOATS8 else backend.device
        self.dummy = weights if isinstance(weights, DummyWeights) else None
        self.tensors: dict[str, Tensor] = {}
        self._stored_as: dict[str, str] = {}
        left_out = 0
        for stored, tensor in weights:
            if skipped and stored.startswith(skipped):
                left_out += 1
                continue
            name = canonical(stored, names)
            if name is None or not config.share.holds(name):
                continue
            module, _, kind = name.rpartition(".")
            if tensor.ndim == 2 and kind == "weight" and module.endswith(names.transposed or "\0"):
                tensor = tensor.t()
            if names.alternating and EXPERTS in name:
                for part, piece in split_alternating(name, tensor):
                    self._add(part, piece, stored)
                continue
            if tensor.ndim == 3 and name.endswith(names.transposed or "\0"):
                tensor = expert_rows(config.text, name, tensor)
            for one, held in one_by_one(name, tensor):
                parts = fused_parts(config.text, one)
                for part, piece in self._cut(stored, one, held, parts) if parts else ((one, held),):
                    self._add(part, piece, stored)
        if left_out and backend.comm.rank == 0:
            log.info(
                "weights: %d of %s are not used: no token is guessed by a layer", left_out, "*, ".join(skipped) + "*"
            )
        if config.text.tied and "lm_head.weight" in self.tensors:
            # Some conversions store a tied table only under the head's name.
            self.tensors.setdefault("embed_tokens.weight", self.tensors["lm_head.weight"])
        self._last: tuple[str, QTensor] | None = None
        self.copied: bool = backend.ops.copies
        self._join_buffer: Tensor | None = None

    def _add(self, name: str, tensor: Tensor, stored: str) -> None:
        before = self.tensors.setdefault(name, tensor)
        twin = self._stored_as.setdefault(name, stored)
        if before is not tensor and not (before.shape == tensor.shape and torch.equal(before, tensor)):
            raise StartupError(f"{self.label} holds {twin} and {stored}, which are one weight and differ")

    def _cut(self, stored: str, name: str, tensor: Tensor, parts: Mapping[str, int]) -> Iterable[tuple[str, Tensor]]:
        """Splits a fused weight or bias into its parts, by output features."""
        if len(tensor) != sum(parts.values()):
            raise StartupError(
                f"{self.label}: {stored} has {len(tensor)} output features, config.json asks {sum(parts.values())}"
            )
        module, _, kind = name.rpartition(".")
        outer = module.rpartition(".")[0]
        pieces = torch.split(tensor, list(parts.values()))
        return [(f"{outer}.{part}.{kind}", piece) for part, piece in zip(parts, pieces, strict=True)]

    def has(self, name: str) -> bool:
        return name in self.tensors

    def kv_scale(self, name: str, kind: str) -> float:
        """Returns the scale of keys (``kind`` k) or values (v) of attention ``name``.

        Raises:
            StartupError: it is missing or not a single positive number.
        """
        if self.dummy is not None:
            return 1.0
        names = [f"{name}.{form.format(kind, kind)}" for form in KV_SCALES]
        found = next((n for n in names if n in self.tensors), None)
        if found is None:
            raise StartupError(
                f"{self.label} has no scales for the KV cache ({names[0]}); leave out --kv-cache-scales checkpoint"
            )
        held = self.tensors[found]
        value = float(held.float().flatten()[0]) if held.numel() == 1 else float("nan")
        if not 0 < value < float("inf"):
            said = f"{value:g}" if held.numel() == 1 else f"{held.numel()} values"
            raise StartupError(
                f"{self.label}: {found} holds {said}, where one positive scale is used; "
                "leave out --kv-cache-scales checkpoint"
            )
        return value

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns the tensor [shape] in the backend's dtype, on its device.

        Raises:
            StartupError: the tensor is missing, or has another shape or an unsupported dtype.
        """
        return self._move(self._find(name, shape))

    def take_float(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Implements ``core.checkpoint.weight_source_interface.FloatSource``."""
        return self._find(name, shape).to(device=self.device, dtype=torch.float32).contiguous()

    def shard(self, name: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> Tensor:
        """Returns ``take`` restricted to [start, stop) along ``dim``; only that part is read."""
        tensor = self._find(name, shape)
        if stop - start < shape[dim]:
            tensor = tensor.narrow(dim, start, stop - start)
        return self._move(tensor)

    def take_stacked(self, parts: Sequence[StackedPart], inputs: int) -> Tensor:
        """Returns the joined parts, converted while they are copied.

        If the backend copies weights, each call reuses the same memory.
        """
        if not self.copied or self.dummy is not None:
            return stack(self, parts, inputs)
        found = [self._find(part.name, (part.size, inputs))[part.start : part.stop] for part in parts]
        if len(parts) == 1 and len(found[0]) == parts[0].width:
            return self._move(found[0])
        rows, at = sum(part.width for part in parts), 0
        if self._join_buffer is None or self._join_buffer.numel() < rows * inputs:
            self._join_buffer = torch.empty(rows * inputs, dtype=self.dtype, device=self.device)
        out = self._join_buffer[: rows * inputs].view(rows, inputs)
        for tensor, part in zip(found, parts, strict=True):
            out[at : at + len(tensor)] = tensor
            out[at + len(tensor) : at + part.width] = 0
            at += part.width
        return out

    def stored(self, parts: Sequence[StackedPart], inputs: int, start: int, stop: int) -> StoredRows | None:
        """Implements ``core.checkpoint.weight_source_interface.StoringSource`` with views of the mapped files."""
        if not self.copied or self.dummy is not None:
            return None
        found = [self._find(p.name, (p.size, inputs))[p.start : p.stop, start:stop] for p in parts]
        if any(t.dtype != found[0].dtype or t.stride(1) != 1 or not len(t) for t in found):
            return None
        return StoredRows(found, [p.width for p in parts], stop - start, self.dtype)

    def scheme(self, name: str) -> Scheme | None:
        """Returns how config.json says that the weight of module ``name`` is quantised; None: it is not."""
        return self.quant.scheme(name) if self.quant is not None else None

    def take_quantised(
        self, name: str, shape: tuple[int, int], dim: int, start: int, stop: int, own: str = ""
    ) -> QTensor | None:
        """Returns the weight [out, in] of module ``name``, restricted to [start, stop) along ``dim``; None: not
        quantised.

        A checkpoint may store weights in 16 bits that its config.json counts as quantised: the stored form is used.

        Args:
            own: the module whose scheme applies if a head uses the embedding's table.

        Raises:
            StartupError: its tensors are missing, have wrong shapes, or hold invalid values.
        """
        scheme = self.scheme(own or name)
        if self.quant is None or (scheme is None and not self._has_quantised_tensors(name)):
            return None
        if scheme is None:
            raise StartupError(f"{self.label}: {name} is stored quantised, and config.json counts it as 16 bits")
        if self.quant.method == "online":
            return self._quantise_online(name, shape, dim, start, stop, scheme, own or name)
        if self.dummy is None and not self._has_quantised_tensors(name):
            return None
        whole = self._last[1] if self._last is not None and self._last[0] == name else self._read(name, shape, scheme)
        self._last = (name, whole)
        part = whole.rows(start, stop) if dim == 0 else whole.inputs(start, stop)
        return self._move_quantised(part)

    def _has_quantised_tensors(self, name: str) -> bool:
        """Returns True if a tensor is stored that only quantised weights have."""
        assert self.quant is not None
        return any(self.has(f"{name}.{mark}") for mark in MARKS.get(self.quant.method, ()))

    def _read(self, name: str, shape: tuple[int, int], scheme: Scheme) -> QTensor:
        assert self.quant is not None
        if self.dummy is not None:
            return quantise(self.dummy.make(f"{name}.weight", shape, self.values), scheme, self.dtype)
        raw = RawWeight(self.label, name, shape, scheme, lambda end: self.tensors.get(f"{name}.{end}"), self.dtype)
        return READERS[self.quant.method](raw)

    def _quantise_online(
        self, name: str, shape: tuple[int, int], dim: int, start: int, stop: int, scheme: Scheme, module: str
    ) -> QTensor:
        """Quantises the stored weight.

        If it is split by inputs, the whole weight is quantised first, so that all ranks get the scales that a single
        rank would get.
        """
        assert self.quant is not None
        tensor, what = self._find(f"{name}.weight", shape), f"{self.label}: {name}"
        given = self.quant.given_scale(module)
        fixed = None if given is None else given.weight
        if dim == 0:
            made = quantise(tensor[start:stop], scheme, self.dtype, what, fixed=fixed)
        else:
            made = quantise(tensor, scheme, self.dtype, what, fixed=fixed).inputs(start, stop)
        return self._move_quantised(made if given is None else replace(made, activation=given.activation))

    def _move_quantised(self, q: QTensor) -> QTensor:
        return q if q.data.is_meta and self.codes.type == "cpu" else q.moved(self.codes)

    def _find(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self.dummy.make(name, shape, self.values) if self.dummy is not None else self.tensors.get(name)
        if tensor is None:
            packed = [s for s in ("qweight", "weight_packed") if self.has(f"{name.removesuffix('.weight')}.{s}")]
            why = f", but has .{packed[0]}: config.json has no quantization_config that fits" if packed else ""
            raise StartupError(f"{self.label} lacks the weight {name}{why}")
        if tuple(tensor.shape) != shape:
            raise StartupError(f"{self.label}: {name} has shape {list(tensor.shape)}, config.json asks {list(shape)}")
        if tensor.dtype not in FLOATS:
            known = "supported: bfloat16, float16, float32"
            raise StartupError(f"{self.label}: {name} holds {tensor.dtype} without scales; {known}")
        return tensor

    def _move(self, tensor: Tensor) -> Tensor:
        return tensor.to(device=self.device, dtype=self.dtype).contiguous()


def layer_number(name: str) -> int:
    """Returns the layer that a canonical or stored name belongs to; -1: none."""
    parts = name.split("layers.", 1)[-1].split(".", 1)
    return int(parts[0]) if len(parts) > 1 and parts[0].isdigit() else -1


def fused_parts(c: TextConfig, name: str) -> dict[str, int] | None:
    """Returns the parts, in order, of a weight or bias that some checkpoints store fused -> output features.

    None: not fused.
    """
    module, _, kind = name.rpartition(".")
    fused = module.rpartition(".")[2]
    if kind not in ("weight", "bias") or fused not in ("qkv_proj", "gate_up_proj"):
        return None
    if fused == "qkv_proj":
        c = c.of_layer(layer_number(name))
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        return {"q_proj": q, "k_proj": kv, "v_proj": kv}
    inner = c.experts.inner if c.experts is not None and EXPERTS in module else c.intermediate
    return {"gate_proj": inner, "up_proj": inner}


def expert_rows(c: TextConfig, name: str, tensor: Tensor) -> Tensor:
    """Returns the experts of a layer as [experts, out, in]; they may be stored so or as [experts, in, out]."""
    if c.experts is None:
        return tensor
    outputs = 2 * c.experts.inner if name.endswith("gate_up_proj") else c.hidden
    inputs = c.hidden if name.endswith("gate_up_proj") else c.experts.inner
    return tensor if tuple(tensor.shape[1:]) == (outputs, inputs) else tensor.transpose(1, 2)


def one_by_one(name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    """Splits experts stored as one tensor [experts, out, in] into single weights; returns other tensors unchanged."""
    outer, mark, last = name.rpartition(EXPERTS)
    if not mark or tensor.ndim != 3 or "." in last:
        return [(name, tensor)]
    return [(f"{outer}{EXPERTS}{i}.{last}.weight", one) for i, one in enumerate(tensor.unbind())]


def split_alternating(name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    """Splits a tensor of all experts of a layer, stored as ``StoredNames.alternating`` says, into views by part."""
    outer, _, last = name.rpartition(EXPERTS)
    part = next((part for part in ("gate_up_proj", "down_proj") if last.startswith(part)), "")
    kind = {"": "weight", "_bias": "bias", "_blocks": "blocks", "_scales": "scales"}.get(last.removeprefix(part), last)
    if not part or "." in last:  # an expert by itself
        return [(name, tensor)]
    found = []
    for i, one in enumerate(tensor.unbind()):
        by_rows = one.t() if kind == "weight" and one.ndim == 2 else one
        if part == "gate_up_proj":
            found.append((f"{outer}{EXPERTS}{i}.gate_proj.{kind}", by_rows[0::2]))
            found.append((f"{outer}{EXPERTS}{i}.up_proj.{kind}", by_rows[1::2]))
        else:
            found.append((f"{outer}{EXPERTS}{i}.{part}.{kind}", by_rows))
    return found


def canonical(stored: str, names: StoredNames) -> str | None:
    """Returns the canonical form of a stored name; None if no prefix matches."""
    name = canonical_name(stored, names.prefixes.items(), names.inner)
    if name is None:
        return None
    for old, new in OLD_KINDS:
        name = name[: -len(old)] + new if name.endswith(old) else name
    return name
