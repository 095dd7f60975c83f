"""A rank of a small engine on an emulated card; run alone, or as two processes over gloo.

python -P -m tests.fakes.two_ranks RANK STORE CHECKPOINT OUT EVERY
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trencadis.backends.hpu.backend import HpuBackend
from trencadis.backends.hpu.emulator.emulated_bridge import EmulatedRuntime, bridge
from trencadis.backends.hpu.emulator.injected_faults import parse
from trencadis.backends.hpu.hccl_comm import HpuComm
from trencadis.backends.hpu.hpu_settings import HpuSettings
from trencadis.backends.hpu.shape_policy import policy
from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.device.backend import BackendConfig
from trencadis.core.graphs.graph_capture_within_memory_budget import GraphCaptures
from trencadis.core.graphs.graph_manager import GraphManager, GraphObserver
from trencadis.core.graphs.warmup import Warmup
from trencadis.core.launches import host_inputs as host
from trencadis.core.launches.kv_cache_and_state_allocation import allocate_persistent
from trencadis.core.memory.graph_selection import GraphPrice
from trencadis.core.memory.memory_division import GraphSettings, MemoryInUse, divide_memory
from trencadis.core.models import model_loader
from trencadis.core.step import Encode, ImageRows, Row, Sample
from trencadis.multimodal.qwen2_vl.qwen2_and_qwen2_5_vision_config import PATCH_VALUES

BUCKETS = (
    Bucket(Stage.FRESH, (2, 64)), Bucket(Stage.DECODE, (2, 8)), Bucket(Stage.VISION, (256,)),
    Bucket(Stage.SAMPLE, (2,), "full"),
)  # fmt: skip


class Engine:
    """A rank's share of a model, its tensors, and one conversation: an image, a prompt about it, some tokens."""

    def __init__(self, rank: int, world: int, path: Path) -> None:
        self.config = load_config(path)
        settings = BackendConfig(block_size=16, vocab_size=self.config.text.vocab, rank=rank, world=world)
        self.backend = HpuBackend(
            settings, policy(""), bridge({"WORLD_SIZE": str(world)}), HpuSettings(fp32_softmax_vision=True)
        )
        self.model = model_loader.load_model(self.config, self.backend)
        text = dataclasses.replace(self.config.text, kv_heads=self.config.text.kv_heads // world)
        share = dataclasses.replace(self.config, text=text)
        made = allocate_persistent(share, self.backend, blocks=20, block_size=16, arena_rows=64, seqs=4, tokens=100)
        self.model.bind(made)
        self.bodies: dict[str, Any] = {
            "text": self.model.text, "vision": self.model.vision, "full": lambda t: self.model.head(t, True)
        }  # fmt: skip

    def manager(self, lazily: bool = False) -> tuple[GraphManager, GraphCaptures]:
        """New programs, none prepared, and the accounts of their graphs, captured at first use if ``lazily``."""
        backend = self.backend
        plan = Plan(backend.policy, buckets=tuple(sorted(BUCKETS)), block_size=16)
        manager = GraphManager(backend, self.bodies, plan, GraphObserver(lazy=lazily))
        for bucket in BUCKETS:
            manager.program(bucket)
        memory = backend.memory
        before = MemoryInUse(memory.total(), others=memory.total() - memory.free())
        division = divide_memory(before, 0.5, "free", GraphSettings(), 1 << 20, multimodal=True, kv_bytes=0)
        prices = [GraphPrice(b, 1 << 20) for b in BUCKETS]
        return manager, GraphCaptures(manager, before, division, GraphSettings(), prices, True)

    def talk(self, manager: GraphManager, tokens: int = 2) -> tuple[torch.Tensor, ...]:
        """Log-probabilities of the drawn tokens, the last hidden row, the image's arena rows."""
        rng = np.random.default_rng(0)
        pixels = rng.integers(0, 256, (8 * 6, PATCH_VALUES), dtype=np.uint8)
        image = Encode("a", (1, 8, 6), 64, pixels, np.arange(2, 14, dtype=np.int32))
        manager.run(BUCKETS[2], self.model.pack([image], 256), 64)
        positions = rng.integers(0, 30, (3, 20)).astype(np.int32)
        prompt = tuple(int(t) for t in rng.integers(0, 300, 20))
        row = Row(1, 1, 0, prompt, (3, 5), positions, (ImageRows(4, image.rows),))
        manager.run(BUCKETS[0], host.text_inputs([row]), 20)
        drawn = []
        for step in range(tokens):
            draw = host.SampleRow(20 if step == 0 else 1, 1, Sample(0.9, uniform=0.4, full=True))
            sample, _ = manager.run(BUCKETS[3], host.head_inputs([draw], self.config.text.vocab), 1)
            drawn.append(sample.logprob.cpu()[0].item())
            again = Row(1, 1, 20 + step, (-1,), (3, 5), np.full((3, 1), 20 + step, np.int32))
            manager.run(BUCKETS[1], host.text_inputs([again]), 1)
        state = self.model.persistent  # type: ignore[attr-defined]
        return torch.tensor(drawn), state.hidden.cpu()[1:2], state.arena.cpu()[2:14]


def failing(engine: Engine, rank: int, lazily: bool, every: int) -> list[Any]:
    """Lets memory run out on rank 1 in captures; returns what was captured, what failed, and the conversation.

    ``every``: 1 for each capture, 2 for every other.
    """
    found = []
    for k in range(1, len(BUCKETS) + 1, every):
        manager, captures = engine.manager(lazily)
        assert EmulatedRuntime.device is not None
        EmulatedRuntime.device.faults = parse(f"oom@capture:{k}" if rank else "")
        if not lazily:
            Warmup(manager, captures).run_all()
        conversation = engine.talk(manager)
        found.append(
            (sorted(map(str, manager.list_captured())), captures.failed, dict(captures.accounts.spent), conversation)
        )
    return found


def collectives() -> None:
    """Checks sums and gathers, run and replayed."""
    b = bridge({"WORLD_SIZE": "2"})
    rank = torch.distributed.get_rank()
    comm = HpuComm(b, BackendConfig(rank=rank, world=2))

    class Body(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            b.mark_step()
            return comm.all_reduce(x * 2), comm.all_gather(x + 1)

    graph: Any = b.wrap_in_hpu_graph(Body())
    x = torch.full((1, 2), float(rank)).to(b.device)
    for value in (0.0, 10.0, 20.0):
        x.copy_(torch.full((1, 2), value + rank))
        for bypass in (True, False):
            total, both = graph.forward(x, bypass_hpu_graphs=bypass)
            assert total.cpu().tolist() == [[4 * value + 2] * 2], total.cpu()
            assert both.cpu().tolist() == [[value + 1, value + 1, value + 2, value + 2]], both.cpu()
    assert comm.least([5 + rank, 9 - rank]) == (5, 8)


def main(rank: int, store: str, path: str, out: str, every: int) -> None:
    """Runs one of two ranks and saves what it found to ``out``; ``every``: of the captures at first use."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    collectives()
    engine = Engine(rank, 2, Path(path))
    manager, captures = engine.manager()
    Warmup(manager, captures).run_all()
    assert len(manager.list_captured()) == len(BUCKETS)
    conversation = engine.talk(manager)
    torch.save((conversation, failing(engine, rank, False, 1), failing(engine, rank, True, every)), out)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _, which, store, path, out, every = sys.argv
    main(int(which), store, path, out, int(every))
