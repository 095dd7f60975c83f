"""The decoder that all text models share, composed of the parts that its ``TextConfig`` selects.

The start of text launches on every pipeline stage but the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from trencadis.core.checkpoint.checkpoint_weight_source import CheckpointSource
from trencadis.core.checkpoint.decoder_layer_config import RecurrentConfig
from trencadis.core.checkpoint.model_config import ModelConfig, TextConfig
from trencadis.core.checkpoint.model_registry import family_of
from trencadis.core.checkpoint.pooling_description import Pooling
from trencadis.core.checkpoint.weight_source_interface import WeightSource
from trencadis.core.device.backend import (
    AdapterRows,
    Attn,
    Backend,
    HeadTensors,
    HeadTensorsOut,
    Ops,
    PoolTensors,
    PoolTensorsOut,
    ResetTensors,
    Rotary,
    TextTensors,
    VisionTensors,
)
from trencadis.core.device.launch_tensors import RecurrentRows, first_rows
from trencadis.core.errors import StartupError
from trencadis.core.launch_inputs import VisionInputs
from trencadis.core.models.attention import Attention
from trencadis.core.models.decoder_layer import DecoderLayer as DecoderLayer
from trencadis.core.models.decoder_layer import LayerInputEmbedding, SinglePartLayer
from trencadis.core.models.linear_and_embedding import (
    NO_ADAPTERS,
    Embedding,
    ImageAdapters,
    Linear,
    LMHead,
    SamplingHead,
    TowerLayer,
)
from trencadis.core.models.mlp_and_norms import Norm, norm_of
from trencadis.core.models.model_and_ops_api import GroupingOps, HostLayering, Persistent, RecurrentOps, StatefulLayer
from trencadis.core.models.pooler import Pooler
from trencadis.core.models.recurrent_layers import make_recurrent_layer
from trencadis.core.models.rotary_embedding import TextRotary
from trencadis.core.step import Encode

NumberedLayer = tuple[int, Any]
"""A layer or a group of layers that run as one, after the number of its first layer."""


class FirstLayerInputs(NamedTuple):
    """What the first layer of a stage takes, for n tokens.

    Args:
        x: [n, hidden].
        residual: [n, hidden], to which x is added; None: zeros.
        rotary: rotary factors.
        window_rotary: those of layers with a table of their own; None: all layers use ``rotary``.
        deepstack_rows: for each DeepStack part, the rows of the arena that are added after a layer, int64 [n].
        layer_inputs: the tokens' embeddings for each layer, if there are any.
    """

    x: Tensor
    residual: Tensor | None
    rotary: Rotary
    window_rotary: Rotary | None
    deepstack_rows: tuple[Tensor, ...] = ()
    layer_inputs: tuple[Tensor, ...] = ()


class StageEntry:
    """The start of a text launch on every stage but the first, instead of ``core.models.decoder.DecoderEntry``.

    The previous stage sends the residual stream as one tensor. Later stages need no token ids, so ``tokens`` holds each
    token's row of that tensor, counted from 1; padding uses row 0, which stays zero.
    """

    def __init__(self, ops: Ops, c: TextConfig, device: torch.device) -> None:
        self.ops, self.config = ops, c
        self.rotary = TextRotary(c, device)

    def __call__(self, tokens: Tensor, positions: Tensor, stream: Tensor) -> FirstLayerInputs:
        """Returns rows of ``stream`` as the inputs of this stage's first layer.

        Args:
            tokens: int32 [n]; ``positions``: int32 [3, n].
            stream: [tokens of the largest step + 1, hidden].
        """
        ops = self.ops
        x = ops.gather_rows(stream, tokens.long())
        residual = None if self.config.sums_stream else ops.first_residual(x)
        return FirstLayerInputs(x, residual, self.rotary(ops, positions), self.rotary.of_windows(ops, positions))


def join_streams(x: Tensor, residual: Tensor) -> Tensor:
    """Returns the residual stream [n, hidden] of which a layer's output is not yet a part."""
    return x + residual


class DecoderEntry:
    """The start of a text launch; its shapes depend only on the padded number of tokens."""

    def __init__(self, backend: Backend, c: TextConfig, embedding: Embedding, parts: int = 0) -> None:
        self.ops, self.embedding, self.config, self.parts = backend.ops, embedding, c, max(parts, 1)
        self.takes_images, self.sums_stream = parts > 0, c.sums_stream
        self.rotary = TextRotary(c, backend.device)
        # Rounded to the dtype of the embeddings, as in the original 16-bit models.
        self.scale = float(torch.tensor(c.embedding_scale, dtype=backend.dtype))
        self.widen = Linear(backend.ops, backend.comm) if c.width != c.hidden else None
        self.position_table: Tensor | None = None  # [positions, hidden], learned
        self.types: Tensor | None = None  # [token types, hidden]
        self.norm = norm_of(c.norm, backend.ops, c.hidden, c.eps) if c.types else None
        self.layer_inputs = LayerInputEmbedding(backend, c) if c.layer_inputs else None
        self.adds_tables = bool(c.width != c.hidden or c.learned or c.types)

    def load(self, source: WeightSource) -> None:
        c = self.config
        if self.widen is not None:
            self.widen.pack(source.take("project_in.weight", (c.hidden, c.width)), None)
        if c.learned:
            self.position_table = source.take("embed_positions.weight", (c.learned, c.hidden))
        if self.norm is not None:
            self.types = source.take("embed_types.weight", (c.types, c.hidden))
            self.norm.load(source, "embed_norm")
        if self.layer_inputs is not None:
            self.layer_inputs.load(source)

    def __call__(
        self, tokens: Tensor, from_slot: Tensor, positions: Tensor, image_row: Tensor, last: Tensor, arena: Tensor
    ) -> FirstLayerInputs:
        """Returns embeddings as the inputs of the first layer.

        The arguments are fields of ``TextTensors``. Tokens without an image have row 0, whose parts are all zeros.
        """
        ops = self.ops
        if self.parts > 1:
            image_row = image_row * self.parts
        x = self.embedding(tokens, from_slot, last, image_row, arena)
        if self.scale != 1:
            x = self._scale_embeddings(x, image_row)
        if self.adds_tables:
            x = self._add_tables(x, positions)
        residual = None if self.sums_stream else ops.first_residual(x)
        rotary = self.rotary(ops, positions)
        windowed = None if self.rotary.local is None else self.rotary.of_windows(ops, positions)
        deepstack_rows: tuple[Tensor, ...] = ()
        if self.parts > 1:
            deepstack_rows = tuple(image_row.long() + part for part in range(1, self.parts))
        own: tuple[Tensor, ...] = ()
        if self.layer_inputs is not None:
            own = self.layer_inputs(x, tokens, from_slot, last, image_row)
        return FirstLayerInputs(x, residual, rotary, windowed, deepstack_rows, own)

    def _add_tables(self, x: Tensor, positions: Tensor) -> Tensor:
        """Projects embeddings to the hidden size and adds learned positions and token types."""
        ops = self.ops
        if self.widen is not None:
            x = self.widen(x)
        if self.position_table is not None:
            x = x + ops.gather_rows(self.position_table, (positions[0] + self.config.position_offset).long())
        if self.types is not None and self.norm is not None:
            x = self.norm(x + ops.gather_rows(self.types, (positions[1] - positions[0]).long()))[0]
        return x

    def _scale_embeddings(self, x: Tensor, image_row: Tensor) -> Tensor:
        """Multiplies embeddings by their scale; image rows, if the model takes any, are not scaled."""
        if not self.takes_images:
            return x * self.scale
        return x * torch.where(image_row > 0, 1.0, self.scale).to(x.dtype)[:, None]

    def nbytes(self) -> int:
        tables = sum(t.nbytes for t in (self.position_table, self.types) if t is not None)
        tables += self.layer_inputs.nbytes() if self.layer_inputs is not None else 0
        return tables + (self.widen.bytes if self.widen else 0) + (self.norm.nbytes() if self.norm else 0)


class DeepStackAdd:
    """Adds a part of an image's arena row to the residual stream after a layer."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def __call__(self, x: Tensor, rows: Tensor, arena: Tensor) -> Tensor:
        """Returns x plus rows of ``arena`` (int64 [n]): [n, hidden]."""
        return x + self.ops.gather_rows(arena, rows)


class DecoderExit:
    """The end of a text launch: final norm, projection to the head's width, and storing of the hidden rows."""

    def __init__(self, ops: Ops, norm: Norm | None, narrow: Linear | None = None) -> None:
        self.ops, self.norm, self.narrow = ops, norm, narrow

    def load(self, source: WeightSource, c: TextConfig) -> None:
        if self.norm is not None:
            self.norm.load(source, "norm")
        if self.narrow is not None:
            self.narrow.pack(source.take("project_out.weight", (c.width, c.hidden)), None)

    def __call__(self, x: Tensor, residual: Tensor | None, out_row: Tensor, hidden: Tensor) -> None:
        """Stores the normed rows, [n, width of the head], in ``hidden[out_row]``."""
        if self.norm is not None:
            x = self.norm(x, residual)[0]
        elif residual is not None:
            x = x + residual
        self.ops.scatter_rows(hidden, out_row, x if self.narrow is None else self.narrow(x))

    def nbytes(self) -> int:
        return (self.norm.nbytes() if self.norm else 0) + (self.narrow.bytes if self.narrow else 0)


class Decoder:
    """A text model; also the text half of vision-language models. The family defines the names of its weights.

    A pipeline stage builds and loads only its share (``ModelConfig.share``).
    """

    persistent: Persistent
    embedding: Embedding
    enter: DecoderEntry
    lm_head: LMHead
    first: Attention | None = None
    """Attention of the stage's first layer with a KV cache; None: no layer has one."""
    recurrent_layer: Callable[[Backend, TextConfig, RecurrentConfig], StatefulLayer] = staticmethod(
        make_recurrent_layer
    )
    """Makes the layer in the place of attention where ``TextConfig.recurrent`` says so; families may have others."""
    adapter_numbers: Tensor | None = None
    """int32 [slots]: the numbers of the slots of LoRA adapters (``core.lora.adapter_store``), from 1 on."""

    def __init__(self, config: ModelConfig, backend: Backend) -> None:
        c = config.text
        self.config, self.backend, self.ops = config, backend, backend.ops
        if config.vision is not None:
            backend.slot = config.vision.slot
        group = config.quant.widest_group() if config.quant is not None else 1
        aligned = config.alignment_unit(backend.policy.aligned)
        share = self.share = config.share
        kind = DecoderLayer if c.mlp_layers is None else cast(type[DecoderLayer], SinglePartLayer)
        self.layers = [kind(backend, c, group, index, aligned, self._make_mixer(index)) for index in share.layers]
        if share.starts:
            parts = config.row_parts if config.vision is not None else 0
            if share.stages > 1 and parts - 1 > len(self.layers):
                raise StartupError(f"the first pipeline stage needs {parts - 1} layers: they take parts of an image")
            self.embedding = Embedding(self.ops, c.vocab, c.width)
            self.enter = DecoderEntry(backend, c, self.embedding, parts)
            self.deepstack_add = DeepStackAdd(self.ops)
        else:
            self.take_over = StageEntry(self.ops, c, backend.device)
        if share.ends:
            self.lm_head = LMHead(self.ops, backend.comm, c.vocab, c.width, c.logit_scale, aligned, c.logit_cap)
            norm = norm_of(c.norm, self.ops, c.hidden, c.eps) if c.final_norm else None
            self.leave = DecoderExit(self.ops, norm, Linear(self.ops, backend.comm) if c.width != c.hidden else None)
            self.sampling = SamplingHead(self.ops, self.lm_head, backend.policy.best_head)
        else:
            self.leave = DecoderExit(self.ops, None)
        self.pooler = Pooler(self.ops)
        first = share.first
        self.readers = {i - first: c.kv_source(i) - first for i in share.layers if c.kv_source(i) != i}
        """Layers of this stage that read the keys of an earlier one -> that layer; by their places in ``layers``."""
        self.taps: tuple[int, ...] = ()
        """Layers before which the residual stream is given to ``keep_states``."""
        self.keep_states: Callable[..., None] | None = None
        self.spans: list[tuple[int, Sequence[DecoderLayer]]] = [(0, self.layers)]
        """Neighbours that may run as one, each with the number of its first layer."""

    def tap(self, layers: Sequence[int], keep: Callable[..., None]) -> None:
        """Lets each text launch end with ``keep(*states, out_row, persistent.states)``.

        ``states``: residual streams [n, hidden] before ``layers``, in this order; several may be of one layer.
        """
        self.taps, self.keep_states = tuple(layers), keep
        starts = sorted({0, *layers})
        self.spans = [(a, self.layers[a:b]) for a, b in zip(starts, [*starts[1:], len(self.layers)], strict=True)]

    def _make_mixer(self, index: int) -> StatefulLayer | None:
        """Returns the recurrent layer in the place of attention; None: layer ``index`` has attention."""
        c = self.config.text
        if c.recurrent is None or index not in c.recurrent.layers:
            return None
        return self.recurrent_layer(self.backend, c, c.recurrent)

    def list_tower_layers(self) -> Iterator[TowerLayer]:
        """Yields the layers of the vision tower that take adapters, as far as this stage holds them."""
        yield from ()

    def prepare_image_adapters(self, inputs: VisionTensors) -> ImageAdapters:
        """Returns the adapters of a VISION launch."""
        if inputs.adapter is None or inputs.cell_adapter is None:
            return NO_ADAPTERS
        assert self.adapter_numbers is not None
        both = (inputs.adapter, inputs.cell_adapter)
        made = (self.ops.prepare_adapters(one, self.adapter_numbers, self.backend.dtype) for one in both)
        return ImageAdapters(*made)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Loads checkpoint tensors by their stored names, in any order; raises StartupError if one is missing."""
        family = family_of(self.config.architecture)
        self.load_from(CheckpointSource(weights, family.names, self.backend, self.config, family.skipped))

    def load_from(self, source: WeightSource) -> None:
        """Loads and packs every layer by canonical names."""
        share, packed = self.share, False
        if share.starts:
            alone = self.config.pooling is None and self._one_table() and not source.has("lm_head.weight")
            packed = self.embedding.load(source, "embed_tokens", self.lm_head if alone else None)
            self.enter.load(source)
        for i, layer in zip(share.layers, self.layers, strict=True):
            with self._host_memory_for(layer, i):
                layer.load(source, f"layers.{i}")
        if not share.ends:
            return
        self.leave.load(source, self.config.text)
        if self.config.pooling is not None and self.config.pooling.classes:
            self._load_classes(source, self.config.pooling)
        elif self.config.pooling is None and not packed:
            self._load_head(source)

    def _host_memory_for(self, layer: DecoderLayer, index: int) -> AbstractContextManager[None]:
        """Returns a context in which a layer loads: weights of some layers go to host memory (``--cpu-offload-gb``)."""
        if not self.backend.policy.host_weights:
            return nullcontext()
        return cast(HostLayering, self.backend).host_layers.loading(layer, index, len(self.layers))

    def _load_head(self, source: WeightSource) -> None:
        tied = self.config.text.tied and not self._own_head(source)
        if tied and self._one_table():
            self.lm_head.pack(self.embedding.table, None)
            self.embedding.share(self.lm_head)
        else:
            self.lm_head.load(source, "embed_tokens" if tied else "lm_head")

    def _one_table(self) -> bool:
        """Returns True if a tied table can serve both; a head that is quantised while loading needs its own weight."""
        quant, whole = self.config.quant, self.share.stages == 1 and self.backend.comm.world == 1
        online = quant is not None and quant.method == "online" and quant.scheme("lm_head") is not None
        return self.config.text.tied and whole and not online

    def _load_classes(self, source: WeightSource, pooling: Pooling) -> None:
        """Loads the class head, or the output head's rows of the label tokens.

        Pooling engines need no other part of it.
        """
        c, tokens = self.config.text, pooling.label_tokens
        if not tokens:
            self.pooler.load(source, pooling, c.width)
            return
        tied = c.tied and not source.has("lm_head.weight")
        name = "embed_tokens" if tied else "lm_head"
        self.pooler.load_label_tokens(source, name, (c.vocab, c.width), tokens, c.logit_scale, c.logit_cap)

    def _own_head(self, source: WeightSource) -> bool:
        """Returns True if a checkpoint with a tied head stores a different one, which transformers then uses."""
        name = "lm_head.weight"
        if not self.share.starts:
            return source.has(name)  # either the same table, or the one to use
        table = self.embedding.table
        return source.has(name) and not torch.equal(source.take(name, (table.shape[0], table.shape[1])), table)

    def bind(self, persistent: Persistent) -> None:
        """Sets the persistent tensors that the bodies read and write."""
        self.persistent = persistent
        caching = [x.attention for x in self.layers if x.attention is not None and not x.recurrent]
        for attention, kv in zip((one for one in caching if not one.reads_kv), persistent.kv, strict=True):
            attention.bind(kv)
        for reader, source in self.readers.items():
            self.layers[reader].attention.bind(self.layers[source].attention.kv)
        for layer, state in zip((x for x in self.layers if x.recurrent), persistent.recurrent, strict=True):
            cast(StatefulLayer, layer.attention).bind(state)
        self.first = caching[0] if caching else None

    def text(self, inputs: TextTensors) -> None:
        """Computes n tokens and stores their normed hidden states in ``persistent.hidden[out_row]``.

        A pipeline stage other than the last stores the residual stream there, for the next stage.
        """
        p, ops = self.persistent, self.ops
        rows = len(inputs.out_row)
        # The result of ``_start`` gets no name: it would live as long as the launch.
        x, residual, rotary, local, deepstack_rows, layer_inputs = (
            self._start(inputs) if len(inputs.tokens) == rows else first_rows(self._start(inputs), rows)
        )
        attn, first = inputs.attn, self.first
        if first is not None:
            attn = ops.prepare_attn(attn, first.heads, first.kv)
        causal = self._causal_attn(inputs.attn, attn) if self.config.text.causal_full_layers else attn
        held = None if inputs.recurrent is None else self._prepare_states(inputs.recurrent, inputs.attn)
        layers: Iterable[NumberedLayer] = enumerate(self.layers)
        rows_of: tuple[AdapterRows, ...] = ()
        if inputs.adapter is not None:
            assert self.adapter_numbers is not None
            rows_of = (ops.prepare_adapters(inputs.adapter, self.adapter_numbers, self.backend.dtype),)
        elif not deepstack_rows and not layer_inputs and not self.readers and hasattr(ops, "group_layers"):
            layers = self._group_layers(cast(GroupingOps, ops), attn)
        states: dict[int, Tensor] = {}
        given: dict[int, Sequence[Tensor]] = {}
        for i, layer in layers:
            if i in self.taps:
                states[i] = x if residual is None else ops.region(join_streams, x, residual)
            place = held if layer.recurrent else local if layer.local else rotary
            if layer_inputs:
                place = cast(Rotary, place)._replace(layer_input=layer_inputs[i])
            if i in self.readers:
                k, v = given[self.readers[i]]
                place = cast(Rotary, place)._replace(keys=k, values=v)
            x, residual, *own = ops.layer(layer, x, residual, place, causal if layer.causal else attn, *rows_of)
            if own:
                given[i] = own
            if i < len(deepstack_rows):
                x = ops.region(self.deepstack_add, x, deepstack_rows[i], p.arena)
            ops.cut("layer")
        if self.keep_states is not None:
            ops.by_rows(self.keep_states, (*(states[i] for i in self.taps), inputs.out_row), p.states)
        ops.by_rows(self.leave, (x, residual, inputs.out_row), p.hidden)

    def _group_layers(self, ops: GroupingOps, attn: Attn) -> Iterator[NumberedLayer]:
        """Yields what runs in place of the layers; the first part of a span with its number, others beyond all."""
        for start, some in self.spans:
            for place, part in enumerate(ops.group_layers(some, attn)):
                yield (len(self.layers) if place else start), part

    def _causal_attn(self, given: Attn, prepared: Attn) -> Attn:
        """Returns the attention inputs of layers in which no token sees later ones; ``given``: those of the launch."""
        first, upto = self.first, getattr(given, "upto", None)
        if first is None or upto is None:
            return prepared
        return self.ops.prepare_attn(given._replace(upto=None), first.heads, first.kv)

    def _prepare_states(self, rows: RecurrentRows, attn: Attn) -> RecurrentRows | None:
        """Returns what the recurrent layers of this stage share; None if there are none."""
        return cast(RecurrentOps, self.ops).prepare_recurrent(rows, attn) if self.persistent.recurrent else None

    def _start(self, inputs: TextTensors) -> FirstLayerInputs:
        """Returns the inputs of this stage's first layer, [m, hidden] each, m at least n."""
        p, ops = self.persistent, self.ops
        if self.share.starts:
            tokens = (inputs.tokens, inputs.from_slot, inputs.positions, inputs.image_row)
            return ops.region(self.enter, *tokens, p.state.last, p.arena)
        assert p.stream is not None
        return ops.region(self.take_over, inputs.tokens, inputs.positions, p.stream)

    def head(self, inputs: HeadTensors, full: bool) -> HeadTensorsOut:
        """Samples from r hidden rows; ``full`` adds masks, penalties, filters and logprobs."""
        return self.ops.region(self.sampling, self.persistent.hidden, inputs, self.persistent.state, full)

    def masked_head(self, inputs: HeadTensors) -> HeadTensorsOut:
        """Returns the best id that the mask of each of r hidden rows allows."""
        return self.ops.region(self.sampling.take_masked_best, self.persistent.hidden, inputs, self.persistent.state)

    def penalised_head(self, inputs: HeadTensors) -> HeadTensorsOut:
        """Returns the best id of each of r hidden rows after penalties, bias and mask."""
        return self.ops.region(self.sampling.take_penalised_best, self.persistent.hidden, inputs, self.persistent.state)

    def drawn_head(self, inputs: HeadTensors) -> HeadTensorsOut:
        """Samples from r hidden rows, without log-probabilities."""
        p = self.persistent
        return self.ops.region(self.sampling.draw_without_logprobs, p.hidden, inputs, p.state)

    def score_top(self, count: int, inputs: HeadTensors) -> HeadTensorsOut:
        """Scores the targets of r hidden rows and the ``count`` top ids, more than other programs report."""
        return self.ops.region(self.sampling.score_top, self.persistent.hidden, inputs, count)

    def pool(self, inputs: PoolTensors) -> PoolTensorsOut:
        """Sums hidden rows by group; with a class head, returns their scores instead."""
        return self.ops.region(self.pooler, self.persistent.hidden, inputs)

    def reset(self, inputs: ResetTensors) -> None:
        """Replaces the sampler state of r rows."""
        self.ops.by_rows(self.ops.reset, (inputs,), self.persistent.state)

    def vision(self, inputs: VisionTensors) -> None:
        raise NotImplementedError(f"{self.config.architecture} has no vision tower")

    def pack(self, images: Sequence[Encode], slots: int) -> VisionInputs:
        raise NotImplementedError(f"{self.config.architecture} has no vision tower")

    def nbytes(self) -> int:
        """Returns the bytes of all weights as loaded; a tied table counts for both the embedding and the head."""
        parts: list[Any] = [self.leave, self.pooler, *self.layers]
        if self.share.starts:
            parts += [self.embedding, self.enter]
        total: int = sum(part.nbytes() for part in parts)
        return total + (self.lm_head.bytes if self.share.ends else 0)


def make(config: ModelConfig, backend: Backend) -> Decoder:
    """Builds the model of any text family that the decoder supports."""
    return Decoder(config, backend)
