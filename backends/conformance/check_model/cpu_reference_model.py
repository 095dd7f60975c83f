"""Runs this engine's model of a checkpoint on the CPU, launch by launch, on one rank or on ranks in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trencadis.backends.cpu import make_backend
from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.checkpoint.model_config import OUT, POST, ModelConfig
from trencadis.core.cross_attention_inputs import (
    CrossAttentionSpans,
    count_units,
    make_cross_attention_inputs,
    variant_of,
)
from trencadis.core.device.backend import Backend, BackendConfig, Comm
from trencadis.core.launch_inputs import StepInputs
from trencadis.core.launches.kv_cache_and_state_allocation import allocate_persistent
from trencadis.core.models import model_loader
from trencadis.core.models.attention import SharedAttention
from trencadis.core.step import Encode

BLOCK, BLOCKS = 8, 32
Note = Callable[[Any, int], None]
"""Records the tensor or the pair of tensors that a part of a layer returned for a number of tokens."""
Int32 = NDArray[np.int32]


@dataclass(frozen=True)
class PromptArrays:
    """Arrays of a prompt with an image besides its ids, per token.

    Args:
        rows: int32 [n]: the arena row in place of its embedding; 0: none.
        positions: int32 [3, n].
        upto: int32 [n]: the last position that it sees; None: its own.
        cross_attention: image rows that the tokens attend to; None: no layer uses cross-attention.
    """

    rows: Int32
    positions: Int32
    upto: Int32 | None
    cross_attention: CrossAttentionSpans | None = None


class CpuReferenceModel:
    """Recomputes a model on the CPU step by step, with blocks for one row; ``comm``: communicator of the ranks that
    share it.
    """

    def __init__(self, config: ModelConfig, comm: Comm | None = None, blocks: int = BLOCKS, arena: int = 4) -> None:
        self.config = config
        t = config.text
        settings = BackendConfig(
            block_size=BLOCK,
            vocab_size=t.vocab,
            windows=t.windows,
            upto=t.upto,
            sinks=t.sinks,
            recurrent=t.recurrent is not None,
            options={"threads": "1"},
        )
        self.backend: Backend = make_backend(settings)
        if comm is not None:
            self.backend.comm = comm
        self.model: Any = model_loader.load_model(config, self.backend)
        self.model.bind(
            allocate_persistent(
                config, self.backend, blocks=blocks, block_size=BLOCK, arena_rows=arena, seqs=2, tokens=BLOCK * blocks
            )
        )
        order = np.random.default_rng(3).permutation(np.arange(2, blocks)).astype(np.int32)
        self.blocks = order[None]

    def encode(self, items: Sequence[Encode]) -> Tensor:
        """Encodes items in one launch; returns float32 [rows of the arena, width], only the first part of each row."""
        bucket = Plan(self.backend.policy).fit(Stage.VISION, (sum(item.slots for item in items),))
        program = self.backend.program(bucket, self.model.vision)
        self.backend.fill(program, self.model.pack(items, bucket.dims[0]))
        program.run()
        arena: Tensor = self.model.persistent.arena
        return arena[:: self.config.row_parts].float().clone()

    def logits(self, ids: list[int], chunk: int, prompt: PromptArrays | None = None) -> Tensor:
        """Returns logits, float32 [n, vocabulary], of a prompt in chunks of ``chunk`` tokens; hidden rows of a pooling
        model.
        """
        out, n = [], len(ids)
        if prompt is None:
            positions = np.tile(np.arange(n, dtype=np.int32), (3, 1))
            whole = None if self.config.text.causal else np.full(n, n - 1, np.int32)
            prompt = PromptArrays(np.zeros(n, np.int32), positions, whole)
        positions, upto = prompt.positions.copy(), prompt.upto
        positions[0] *= not 0 < self.config.text.long_from < n  # see core/models/rotary_embedding.py
        hidden = self.model.persistent.hidden
        for start in range(0, n, chunk):
            size = min(chunk, n - start)
            stop = start + size
            spans = [] if prompt.cross_attention is None else [prompt.cross_attention.restrict(start, stop)]
            inputs = StepInputs(
                tokens=np.array(ids[start:stop], np.int32), from_slot=np.zeros(size, np.int32),
                positions=np.ascontiguousarray(positions[:, start:stop]), image_row=prompt.rows[start:stop],
                out_row=np.arange(1, size + 1, dtype=np.int32), row_start=np.array([0, size], np.int32),
                context=np.array([start], np.int32), blocks=self.blocks, slot=np.ones(1, np.int32),
                adapter=np.zeros(1, np.int32),
                upto=None if upto is None else np.minimum(upto[start:stop], stop - 1),
                cross_attention=make_cross_attention_inputs(spans, [size]) if spans else None,
            )  # fmt: skip
            variant = variant_of(count_units(spans))
            self._launch(inputs, variant, *((Stage.DECODE, 1) if size == 1 else (Stage.PREFILL, size, 1)))
            with torch.inference_mode():
                rows = hidden[1 : size + 1]
                out.append((self.model.lm_head(rows) if self.config.pooling is None else rows).clone())
        return torch.cat(out).float()

    def _launch(self, inputs: StepInputs, variant: str, stage: Stage, *needs: int) -> None:
        sizes = zip(needs, self.backend.policy.alignment[stage], strict=True)
        bucket = Bucket(stage, tuple(-(-n // a) * a for n, a in sizes), variant)
        program = self.backend.program(bucket, self.model.text)
        self.backend.fill(program, inputs)
        program.run()

    def parts(self, ids: list[int]) -> dict[str, Tensor]:
        """Returns the outputs of each part, as ``TransformersOracle.parts``; covers parts of the shared decoder
        only.
        """
        outputs: dict[str, Tensor] = {}
        model, kept = self.model, list(self.model.layers)
        for i, layer in enumerate(kept):
            taps = {"attention": f"attention of layer {i}", "mlp": f"MLP of layer {i}"}
            for part, name in taps.items():
                if getattr(layer, part) is not None:
                    setattr(layer, part, HookedPart(getattr(layer, part), _note(name, outputs)))
            if self.config.text.mlp_layers is None and self.config.text.norm_placement not in (POST, OUT):
                layer.post_norm = HookedPart(layer.post_norm, _note(f"sum behind attention of layer {i}", outputs, 1))
            first = _note("embeddings", outputs) if i == 0 else None
            model.layers[i] = HookedPart(layer, _note(f"sum behind layer {i}", outputs), first)
        outputs["logits"] = self.logits(ids, len(ids))
        for layer in kept:
            for part in ("attention", "mlp", "post_norm"):
                held = getattr(layer, part, None)
                if isinstance(held, HookedPart):
                    setattr(layer, part, held.inner)
        model.layers[:] = kept
        return outputs


def _note(name: str, outputs: dict[str, Tensor], index: int | None = None) -> Note:
    """Returns a hook that copies the first ``n`` rows of a tensor, of the sum of a pair, or of its item ``index``."""

    def note(out: Any, n: int) -> None:
        if isinstance(out, tuple):
            held = [t for t in out[:2] if t is not None] if index is None else [out[index]]
            out = sum(t.clone() for t in held)
        outputs[name] = out.detach().clone()[:n]

    return note


class HookedPart:
    """A part of a layer whose results are recorded, and its inputs too if ``before`` is given."""

    def __init__(self, inner: Any, after: Note, before: Note | None = None) -> None:
        self.inner, self.after, self.before = inner, after, before

    def __call__(self, x: Tensor, *rest: Any) -> Any:
        if self.before is not None:
            self.before((x, rest[0]), len(x))
        out = self.inner(x, *rest)
        self.after(out, len(x))
        return out

    def share(self, x: Tensor, *rest: object) -> SharedAttention:
        """Runs attention whose keys and values later layers read."""
        shared: SharedAttention = self.inner.share(x, *rest)
        self.after(shared.out, len(x))
        return shared

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class RankExchange:
    """Barrier at which ranks, as threads of this process, exchange tensors."""

    def __init__(self, world: int) -> None:
        self.parts: list[Tensor | None] = [None] * world
        self.barrier = threading.Barrier(world, timeout=600)

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        """Returns the tensors of all ranks, after all have called this."""
        self.parts[rank] = x.clone()
        self.barrier.wait()
        found = [part.clone() for part in self.parts if part is not None]
        self.barrier.wait()
        return found


class ThreadComm:
    """Implements ``core.device.backend.Comm`` for one rank of a ``RankExchange``."""

    def __init__(self, exchange: RankExchange, rank: int, world: int) -> None:
        self.meeting, self.rank, self.world = exchange, rank, world

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self.meeting.exchange(self.rank, x)).sum(0)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self.meeting.exchange(self.rank, x), dim=-1)

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        found = torch.stack(self.meeting.exchange(self.rank, torch.tensor(values))).amin(0)
        return tuple(int(value) for value in found)


def tensor_parallel_logits(config: ModelConfig, ids: list[int], world: int) -> list[Tensor]:
    """Returns the logits of each of ``world`` ranks; raises the first exception of a rank."""
    exchange, found, errors = RankExchange(world), dict[int, Tensor](), list[Exception]()

    def run(rank: int) -> None:
        try:
            found[rank] = CpuReferenceModel(config, ThreadComm(exchange, rank, world)).logits(ids, len(ids))
        except Exception as error:  # raised again by the calling thread
            errors.append(error)
            exchange.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [found[rank] for rank in range(world)]
