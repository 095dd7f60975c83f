"""Allocates the tensors that persist between launches: KV cache, states, hidden rows, image arena, sampler state."""

from __future__ import annotations

import torch

from trencadis.core.checkpoint.model_config import ModelConfig, TextConfig
from trencadis.core.device.backend import Backend, LayerKV, SamplerState
from trencadis.core.kv_cache_format import RESERVED_BLOCKS
from trencadis.core.memory.memory_estimator import arena_width, held_rows, kv_heads, row_width, state_slots
from trencadis.core.models.kv_cache_quantisation import kept_type
from trencadis.core.models.model_and_ops_api import Persistent, RecurrentState
from trencadis.core.request import MAX_BIAS


def kv_cache(model: ModelConfig, backend: Backend, blocks: int, block_size: int) -> list[LayerKV]:
    """Allocates keys and values of each layer, in the backend's dtype or as codes; ``LayerKV`` lists the shapes."""
    held = blocks + RESERVED_BLOCKS
    tokens = (held * block_size,) if backend.policy.flat_kv else (held, block_size)

    def layer(t: TextConfig) -> LayerKV:
        d, kv_format, heads = t.head_dim, t.kv, kv_heads(t, backend.comm.world)

        def allocate(dtype: torch.dtype, *last: int) -> torch.Tensor:
            return backend.zeros((*tokens, heads, *last), dtype)

        if kv_format is None:
            return LayerKV(allocate(backend.dtype, d), allocate(backend.dtype, d))
        codes: torch.dtype = getattr(torch, backend.policy.kv_codes[kv_format.name])
        kept = allocate(kept_type(backend.dtype), kv_format.kept) if kv_format.kept else None
        return LayerKV(allocate(codes, d), allocate(codes, d), allocate(torch.float16), allocate(torch.float16), kept)

    return [layer(model.text.of_layer(index)) for index in model.cached]


def by_block(cache: torch.Tensor, block_size: int) -> torch.Tensor:
    """Returns one of ``LayerKV``'s tensors, flat or not, as [blocks, block_size, KV heads, head_dim]."""
    return cache if cache.dim() == 4 else cache.view(-1, block_size, *cache.shape[1:])


def hidden_rows(model: ModelConfig, backend: Backend, tokens: int) -> torch.Tensor:
    """Allocates [tokens of the largest step + 1, width] of the backend's dtype; row 0 is the sink."""
    return backend.zeros((tokens + 1, row_width(model)), backend.dtype)


def stream_rows(model: ModelConfig, backend: Backend, tokens: int) -> torch.Tensor | None:
    """Allocates [tokens of the largest step + 1, hidden] for the previous stage's output; None on the first stage."""
    return None if model.share.starts else backend.zeros((tokens + 1, model.text.hidden), backend.dtype)


def image_arena(model: ModelConfig, backend: Backend, rows: int) -> torch.Tensor:
    """Allocates [rows x parts of a row, width] of the backend's dtype; the parts of a row are adjacent.

    ``rows`` counts those of the first stage.
    """
    return backend.zeros(
        (held_rows(model, rows) * model.row_parts, arena_width(model, backend.comm.world)), backend.dtype
    )


def sampler_state(model: ModelConfig, backend: Backend, seqs: int) -> SamplerState:
    """Allocates sampler state for ``seqs`` sequences, the spare ones and the sink.

    ``SamplerState`` lists the shapes.
    """
    vocab, slots = model.text.vocab, state_slots(model, seqs)
    return SamplerState(
        last=backend.zeros((slots,), torch.int32),
        counts=backend.zeros((slots, vocab), torch.int32),
        prompt_mask=backend.zeros((slots, -(-vocab // 8)), torch.uint8),
        bias_id=backend.zeros((slots, MAX_BIAS), torch.int64),
        bias_value=backend.zeros((slots, MAX_BIAS), torch.float32),
    )


def recurrent_states(model: ModelConfig, backend: Backend, slots: int) -> list[RecurrentState]:
    """Allocates the states of each recurrent layer of the stage; ``slots`` includes the sink."""
    r, ranks = model.text.recurrent, backend.comm.world
    if r is None:
        return []

    def layer() -> RecurrentState:
        conv = backend.zeros((slots, r.kernel - 1, r.channels(ranks)), backend.dtype)
        if r.width:
            return RecurrentState(conv, None)
        return RecurrentState(
            conv, backend.zeros((slots, r.value_heads // ranks, r.key_dim, r.value_dim), torch.float32)
        )

    return [layer() for _ in model.recurrent]


def allocate_persistent(
    model: ModelConfig,
    backend: Backend,
    *,
    blocks: int,
    block_size: int,
    arena_rows: int,
    seqs: int,
    tokens: int,
    states: int = 0,
) -> Persistent:
    """Allocates all persistent tensors for ``seqs`` sequences and steps of at most ``tokens`` tokens.

    ``states``: slots of recurrent state with the sink; 0: one for each sequence.
    """
    return Persistent(
        kv=kv_cache(model, backend, blocks, block_size),
        hidden=hidden_rows(model, backend, max(tokens, seqs)),
        arena=image_arena(model, backend, arena_rows),
        state=sampler_state(model, backend, seqs),
        stream=stream_rows(model, backend, max(tokens, seqs)),
        recurrent=recurrent_states(model, backend, states or seqs + 1),
    )
