"""A model on the CPU whose launches a test makes by hand, as the runner would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trencadis.backends.cpu import make_backend
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.device.backend import BackendConfig, SamplerState
from trencadis.core.kv_cache_format import RESERVED_BLOCKS
from trencadis.core.launch_inputs import StepInputs
from trencadis.core.launches.kv_cache_and_state_allocation import kv_cache, recurrent_states
from trencadis.core.models.model_and_ops_api import Persistent
from trencadis.core.models.model_loader import load_model

BLOCK, BLOCKS, ARENA = 4, 64, 512


class HandDrivenModel:
    """A model with a KV cache, an arena of its own and one row of blocks; no scheduler, no runner."""

    def __init__(
        self,
        path: Path,
        policy: str = "serving",
        ops: str = "fast",
        change: Callable[[ModelConfig], ModelConfig] = lambda config: config,
    ) -> None:
        self.config = change(load_config(path))
        c = self.config.text
        options = {"policy": policy, "ops": ops, "threads": "1"}
        self.backend = make_backend(
            BackendConfig(
                block_size=BLOCK, vocab_size=c.vocab, options=options, upto=c.upto, recurrent=c.recurrent is not None
            )
        )
        self.model: Any = load_model(self.config, self.backend)
        bits = -(-c.vocab // 8)
        self.state = SamplerState(
            torch.zeros(9, dtype=torch.int32), torch.zeros(9, c.vocab, dtype=torch.int32),
            torch.zeros(9, bits, dtype=torch.uint8), torch.zeros(9, 300, dtype=torch.int64), torch.zeros(9, 300),
        )  # fmt: skip
        self.kv = kv = kv_cache(self.config, self.backend, BLOCKS - RESERVED_BLOCKS, BLOCK)
        self.hidden, self.arena = torch.zeros(256, c.width), torch.zeros(ARENA * self.config.row_parts, c.width)
        states = recurrent_states(self.config, self.backend, 9)
        self.model.bind(Persistent(kv, self.hidden, self.arena, self.state, recurrent=states))
        order = np.random.default_rng(3).permutation(np.arange(2, BLOCKS)).astype(np.int32)
        self.blocks = order[None]

    def run(self, stage: Stage, body: Any, inputs: Any, *needs: int) -> Any:
        policy = self.backend.policy
        dims = [-(-n // a) * a for n, a in zip(needs, policy.alignment[stage], strict=True)]
        program = self.backend.program(Bucket(stage, tuple(dims)), body)
        self.backend.fill(program, inputs)
        return program.run()

    def prefill(
        self, ids: list[int], chunk: int, positions: Any = None, rows: Any = None, upto: Any = None
    ) -> torch.Tensor:
        """Logits [n, V] of a prompt in chunks; ``rows``: arena row of each token or 0; ``upto``: see ``StepInputs``."""
        n = len(ids)
        if positions is None:
            positions = np.tile(np.arange(n, dtype=np.int32), (3, 1))
            positions[0] *= not 0 < self.config.text.long_from < n
        rows = np.zeros(n, np.int32) if rows is None else rows
        out = []
        for start in range(0, n, chunk):
            stop = min(start + chunk, n)
            size = stop - start
            inputs = StepInputs(
                tokens=np.array(ids[start:stop], np.int32), from_slot=np.zeros(size, np.int32),
                positions=np.ascontiguousarray(positions[:, start:stop]), image_row=rows[start:stop],
                out_row=np.arange(1, size + 1, dtype=np.int32), row_start=np.array([0, size], np.int32),
                context=np.array([start], np.int32), blocks=self.blocks, slot=np.ones(1, np.int32),
                adapter=np.zeros(1, np.int32), upto=None if upto is None else upto[start:stop],
            )  # fmt: skip
            if size == 1:
                self.run(Stage.DECODE, self.model.text, inputs, 1)
            else:
                self.run(Stage.PREFILL, self.model.text, inputs, size, 1)
            with torch.inference_mode():
                out.append(self.model.lm_head(self.hidden[1 : size + 1]).clone())
        return torch.cat(out)
