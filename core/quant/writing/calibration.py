"""Computes the inputs of a decoder's linear layers for prompts, layer by layer, so that only one layer is in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trencadis.core.buckets import Bucket, Stage
from trencadis.core.checkpoint.checkpoint_weight_source import CheckpointSource
from trencadis.core.checkpoint.model_config import ModelConfig, TextConfig, reserved_rows
from trencadis.core.checkpoint.model_registry import family_of
from trencadis.core.checkpoint.pooling_description import Pooling
from trencadis.core.checkpoint.weight_source_interface import StackedPart, WeightSource, stack
from trencadis.core.device import backend as devices
from trencadis.core.device.backend import (
    Attn,
    Backend,
    BackendConfig,
    Body,
    ExpertBiases,
    ExpertWeights,
    Inputs,
    LayerKV,
    Ops,
    TextTensors,
    Weight,
)
from trencadis.core.device.launch_tensors import Rotary, first_rows
from trencadis.core.kv_cache_format import RESERVED_BLOCKS
from trencadis.core.launch_inputs import StepInputs
from trencadis.core.launches import kv_cache_and_state_allocation
from trencadis.core.models.decoder import Decoder
from trencadis.core.models.decoder_layer import DecoderLayer
from trencadis.core.models.model_and_ops_api import RecurrentOps, RecurrentState
from trencadis.core.models.model_loader import make_model
from trencadis.core.models.recurrent_layers import make_recurrent_layer
from trencadis.core.quant.quantised_tensor import QTensor
from trencadis.core.request import Request
from trencadis.core.scheduling.encoder_cache import rows_of_run
from trencadis.core.step import Encode

BLOCK = 128
"""Tokens per block of the single layer's cache."""


@dataclass(frozen=True)
class Calibrant:
    """One calibration prompt: ids, media, positions, and the pixels uint8 [patches, values of a patch] of each span."""

    request: Request
    pixels: Sequence[NDArray[np.uint8]]


class Gram(NamedTuple):
    """Statistics of a weight's inputs x: float32 [in, in], the sum of x x^T, and the number of inputs."""

    sums: Tensor
    rows: int


class CalibrationOps:
    """Wraps a device's ops to also sum X^T X of the inputs of named weights.

    Experts are recorded only if the device multiplies them one by one, as a CPU does.
    """

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.names: dict[int, tuple[str, ...]] = {}
        self.requested: list[str] = []
        self.wanted: frozenset[str] = frozenset()
        self.grams: dict[tuple[str, ...], Gram] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def pack_weight(self, weight: Tensor, bias: Tensor | None = None) -> Weight:
        """Packs a weight and records its modules: those requested since the previous weight."""
        made = self._ops.pack_weight(weight, bias)
        self.names[id(made)], self.requested = tuple(self.requested), []
        return made

    def pack_quantised(self, q: QTensor, bias: Tensor | None = None) -> Weight:
        """Packs the dequantised values, as in every device's reference."""
        return self.pack_weight(q.values(), bias)

    def pack_experts(
        self, gate_up: Sequence[Tensor], down: Sequence[Tensor], biases: ExpertBiases | None = None
    ) -> ExpertWeights:
        """Packs experts and records the modules of each matrix; gate and up projections share their input."""
        made: Any = self._ops.pack_experts(gate_up, down, biases)
        asked = self.requested
        self.requested = []
        for name in asked:
            module, _, part = name.rpartition(".")
            weight = (made.down if part == "down_proj" else made.gate_up)[int(module.rpartition(".")[2])]
            self.names[id(weight)] = (*self.names.get(id(weight), ()), name)
        return cast(ExpertWeights, made)

    def pack_quantised_experts(
        self, gate_up: Sequence[Tensor | QTensor], down: Sequence[Tensor | QTensor],
        biases: ExpertBiases | None = None,
    ) -> ExpertWeights:  # fmt: skip
        """Packs the dequantised values of experts."""
        plain = [[q.values() if isinstance(q, QTensor) else q for q in some] for some in (gate_up, down)]
        return self.pack_experts(plain[0], plain[1], biases)

    def experts(self, x: Tensor, scores: Tensor, w: ExpertWeights, top: int, normalise: bool, kind: str) -> Tensor:
        """Runs the device's implementation with these ops, so that its products are recorded."""
        return type(self._ops).experts(cast(Ops, self), x, scores, w, top, normalise, kind)

    def linear(self, x: Tensor, w: Weight) -> Tensor:
        """Computes [n, in] -> [n, out] and records the inputs of wanted weights."""
        names = self.names.get(id(w), ())
        if not self.wanted.isdisjoint(names):
            wide = x.float()
            sums, rows = self.grams.get(names) or Gram(torch.zeros((x.shape[1], x.shape[1])), 0)
            self.grams[names] = Gram(sums.addmm_(wide.t(), wide), rows + len(x))
        return self._ops.linear(x, w)


class QuantisedOverlay:
    """A source in which some weights are replaced by quantised ones; reports requested names to ``CalibrationOps``."""

    def __init__(self, source: WeightSource, ops: CalibrationOps, made: Mapping[str, QTensor]) -> None:
        self._source, self._ops, self._made = source, ops, made

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._source.take(name, shape)

    def shard(self, name: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> Tensor:
        return self._source.shard(name, shape, dim, start, stop)

    def take_stacked(self, parts: Sequence[StackedPart], inputs: int) -> Tensor:
        return stack(self, parts, inputs)

    def take_quantised(
        self, name: str, shape: tuple[int, int], dim: int, start: int, stop: int, own: str = ""
    ) -> QTensor | None:
        self._ops.requested.append(name)
        made = self._made.get(name)
        if made is None:
            return self._source.take_quantised(name, shape, dim, start, stop, own)
        return made.inputs(start, stop) if dim else made.rows(start, stop)

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def kv_scale(self, name: str, kind: str) -> float:
        return self._source.kv_scale(name, kind)


class Calibration:
    """Holds the activations of all prompts before one decoder layer, from the first layer to the last.

    Args:
        config: the 16-bit checkpoint.
        weights: its tensors.
        prompts: the prompts, each within the model's maximum length.
        threads: CPU threads; 0: as many as this process may use.

    Memory: the embedding and the tower while prompts are embedded; then one layer, two times [tokens, hidden] of all
    prompts, and the sums of products of one layer's inputs.
    """

    def __init__(
        self, config: ModelConfig, weights: Iterable[tuple[str, Tensor]], prompts: Sequence[Calibrant], threads: int = 0
    ) -> None:
        self.config, self.prompts = config, prompts
        self.longest = max(len(p.request.tokens) for p in prompts)
        dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
        t = config.text
        settings = BackendConfig(
            dtype, BLOCK, max_tokens=self.longest, vocab_size=t.vocab, windows=t.windows, upto=t.upto, sinks=t.sinks,
            recurrent=t.recurrent is not None, options={"threads": str(threads)} if threads else None,
        )  # fmt: skip
        self.backend: Backend = devices.load("cpu")(settings)
        self.ops = CalibrationOps(self.backend.ops)
        self.backend.ops = self.ops
        self._weights = weights
        self._inputs = [_step(p, self._blocks(len(p.request.tokens)), t, reserved_rows(config)) for p in prompts]
        self._states: list[tuple[Tensor, Tensor | None]] = []
        self._parts: list[tuple[Tensor, ...]] = []  # for each prompt, the DeepStack rows added after its first layers
        self._embed()

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // BLOCK)

    @torch.inference_mode()
    def _embed(self) -> None:
        """Computes the activations before the first layer."""
        # A model without layers and without a head, whose embedding, tower and frequencies are the checkpoint's.
        config = replace(self.config, text=replace(self.config.text, layers=0, recurrent=None), pooling=Pooling())
        model = cast(Decoder, make_model(config, self.backend))
        self.source = CheckpointSource(self._weights, family_of(config.architecture).names, self.backend, self.config)
        model.load_from(self.source)
        self._rotary = model.enter.rotary
        rows = max(sum(s.arena_rows for s in p.request.spans) for p in self.prompts) + reserved_rows(config)
        held = kv_cache_and_state_allocation.allocate_persistent(
            config, self.backend, blocks=0, block_size=BLOCK, arena_rows=rows, seqs=1, tokens=1
        )
        model.bind(held)
        for prompt, inputs in zip(self.prompts, self._inputs, strict=True):
            for image in _images(prompt, reserved_rows(config)):
                self._run(Bucket(Stage.VISION, (image.slots,)), model.vision, model.pack([image], image.slots))

            def enter(t: TextTensors) -> None:
                count = len(t.out_row)
                found = model.enter(t.tokens, t.from_slot, t.positions, t.image_row, held.state.last, held.arena)
                x, residual, _, _, deepstack_rows, *_ = first_rows(found, count)
                self._states.append((x.clone(), residual))
                self._parts.append(tuple(held.arena[rows] for rows in deepstack_rows))

            self._run(self._bucket(inputs), enter, inputs)

    def _bucket(self, inputs: StepInputs) -> Bucket:
        return Bucket(Stage.PREFILL, (len(inputs.tokens), 1))

    def _run(self, bucket: Bucket, body: Body, inputs: Inputs) -> None:
        program = self.backend.program(bucket, body)
        self.backend.fill(program, inputs)
        program.run()

    @torch.inference_mode()
    def grams(self, number: int, modules: Iterable[str]) -> dict[str, Gram]:
        """Returns the input statistics of linear layers in layer ``number``, by canonical name; those with the same
        input share them.

        An expert that no token is routed to has none.
        """
        self.ops.grams, self.ops.wanted = {}, frozenset(modules)
        self._through(number, {}, keep=False)
        found, self.ops.grams, self.ops.wanted = self.ops.grams, {}, frozenset()
        return {name: gram for names, gram in found.items() for name in names}

    @torch.inference_mode()
    def advance(self, number: int, made: Mapping[str, QTensor]) -> None:
        """Advances to the next layer, using the quantised weights of layer ``number``."""
        self._through(number, made, keep=True)

    def _through(self, number: int, made: Mapping[str, QTensor], keep: bool) -> None:
        self.ops.names.clear()
        self.ops.requested.clear()
        text, mixer = self.config.text, None
        if text.recurrent is not None and number in text.recurrent.layers:
            mixer = make_recurrent_layer(self.backend, text, text.recurrent)
        layer = DecoderLayer(self.backend, text, index=number, mixer=mixer)
        layer.load(QuantisedOverlay(self.source, self.ops, made), f"layers.{number}")
        if mixer is not None:
            mixer.bind(self._state())
        else:
            layer.attention.kv = self._cache()
        for at, inputs in enumerate(self._inputs):

            def body(t: TextTensors, at: int = at) -> None:
                place, attn = self._prepare(t, layer)
                x, residual = self._states[at]
                rotary = first_rows(place, len(x)) if mixer is None else place
                out = layer(x.clone(), None if residual is None else residual.clone(), rotary, attn)
                found = cast(tuple[Tensor, Tensor | None], out)
                if keep:
                    parts = self._parts[at]
                    self._states[at] = (found[0] + parts[number], found[1]) if number < len(parts) else found

            self._run(self._bucket(inputs), body, inputs)

    def _prepare(self, t: TextTensors, layer: DecoderLayer) -> tuple[Rotary, Attn]:
        """Returns what a layer gets beside its inputs; a recurrent one gets its rows in place of rotary factors."""
        if layer.recurrent:
            assert t.recurrent is not None
            return cast(Rotary, cast(RecurrentOps, self.ops).prepare_recurrent(t.recurrent, t.attn)), t.attn
        made = self._rotary.of_windows if layer.local else self._rotary
        rotary = made(self.ops, t.positions)
        assert rotary is not None, "models with windows have rotary factors for them"
        return rotary, self.ops.prepare_attn(t.attn, layer.attention.heads, layer.attention.kv)

    def _state(self) -> RecurrentState:
        """Returns the state of one recurrent layer for one prompt at a time."""
        text = self.config.text
        assert text.recurrent is not None
        first = replace(text.recurrent, layers=(0,))
        one = replace(self.config, text=replace(text, layers=1, recurrent=first))
        return kv_cache_and_state_allocation.recurrent_states(one, self.backend, 2)[0]

    def _cache(self) -> LayerKV:
        one = replace(self.config, text=replace(self.config.text, layers=1, recurrent=None))
        return kv_cache_and_state_allocation.kv_cache(one, self.backend, self._blocks(self.longest), BLOCK)[0]


def _images(prompt: Calibrant, row: int) -> list[Encode]:
    """Returns the images of a prompt to encode; their arena rows are consecutive, starting at ``row``."""
    found = []
    for span, pixels in zip(prompt.request.spans, prompt.pixels, strict=True):
        rows = np.arange(row, row + span.arena_rows, dtype=np.int32)
        found.append(Encode(span.digest, span.grid, span.slots, pixels, rows))
        row += span.arena_rows
    return found


def _step(prompt: Calibrant, blocks: int, text: TextConfig, row: int) -> StepInputs:
    """Builds a launch that computes the whole prompt; ``row``: first arena row of its first item."""
    request, long_from = prompt.request, text.long_from
    n = len(request.tokens)
    image_row, upto = np.zeros(n, np.int32), np.arange(n, dtype=np.int32)
    for span in request.spans:
        upto[span.offset : span.end] = span.end - 1
        for run in span.list_runs():
            rows = rows_of_run(run, np.arange(row, row + span.arena_rows, dtype=np.int32))
            image_row[run.offset : run.offset + run.length] = rows
        row += span.arena_rows
    positions = np.stack([np.arange(n, dtype=np.int32)] * 3)
    positions[0] *= not 0 < long_from < n  # core/models/rotary_embedding.py
    if request.positions is not None:
        positions = np.frombuffer(request.positions, np.int32).reshape(3, n)
    return StepInputs(
        tokens=np.array(request.tokens, np.int32), from_slot=np.zeros(n, np.int32), positions=positions,
        image_row=image_row, out_row=np.arange(1, n + 1, dtype=np.int32), row_start=np.array([0, n], np.int32),
        context=np.zeros(1, np.int32),
        blocks=np.arange(RESERVED_BLOCKS, RESERVED_BLOCKS + blocks, dtype=np.int32)[None],
        slot=np.ones(1, np.int32), adapter=np.zeros(1, np.int32),
        upto=upto if text.bidirectional_images else None,
    )  # fmt: skip
