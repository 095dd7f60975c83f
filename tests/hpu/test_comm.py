"""Two ranks on two emulated cards: sums and gathers inside a graph, over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent

CODE = """
import sys
import torch
from trencadis.backends.hpu.comm import HpuComm
from trencadis.backends.hpu.emulator.namespace import bridge
rank, store = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
b = bridge({})
comm = HpuComm(b, rank, 2)

class Body(torch.nn.Module):
    def forward(self, x):
        b.mark_step()
        return comm.all_reduce(x * 2), comm.all_gather(x + 1)

graph = b.wrap_in_hpu_graph(Body())
x = torch.full((1, 2), float(rank)).to(b.device)
for value in (0.0, 10.0, 20.0):
    x.copy_(torch.full((1, 2), value + rank))
    for bypass in (True, False):
        total, both = graph.forward(x, bypass_hpu_graphs=bypass)
        assert total.cpu().tolist() == [[4 * value + 2] * 2], total.cpu()
        assert both.cpu().tolist() == [[value + 1, value + 1, value + 2, value + 2]], both.cpu()
torch.distributed.destroy_process_group()
print("fine")
"""


def test_collectives_in_graphs(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-P", "-c", CODE]
    ranks = [
        subprocess.Popen([*command, str(r), str(tmp_path / "store")], env=env, stdout=subprocess.PIPE, text=True)
        for r in range(2)
    ]
    assert [r.communicate(timeout=60)[0] for r in ranks] == ["fine\n", "fine\n"]


SHARDS = """
import dataclasses, sys
from pathlib import Path
import numpy as np
import torch
from trencadis.backends.hpu.backend import HpuBackend
from trencadis.backends.hpu.emulator.namespace import bridge
from trencadis.backends.hpu.policy import policy
from trencadis.backends.hpu.settings import Settings
from trencadis.core import inputs as host
from trencadis.core.backend import BackendConfig
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.models import registry
from trencadis.core.models.config import load_config
from trencadis.core.persistent import persistent
from trencadis.core.step import Encode, ImageRows, Row, Sample
rank, world, store, path, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), sys.argv[5]
if world > 1:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
config = load_config(path)
settings = BackendConfig(block_size=16, vocab_size=config.text.vocab, rank=rank, world=world)
backend = HpuBackend(settings, policy(""), bridge({}), Settings(fp32_softmax_vision=True))
model = registry.build(config, backend)
share = dataclasses.replace(config, text=dataclasses.replace(config.text, kv_heads=config.text.kv_heads // world))
model.bind(persistent(share, backend, blocks=20, block_size=16, arena_rows=64, seqs=4, tokens=100))
rng = np.random.default_rng(0)
pixels = rng.integers(0, 256, (8 * 6, 1176), dtype=np.uint8)
image = Encode("a", (1, 8, 6), 64, pixels, np.arange(2, 14, dtype=np.int32))

def run(bucket, body, inputs):
    program = backend.program(bucket, body)
    program.fill(inputs)
    program.capture()
    return program.replay()

run(Bucket(Stage.VISION, (256,)), model.vision, model.pack([image], 256))
positions = rng.integers(0, 30, (3, 20)).astype(np.int32)
tokens = tuple(int(t) for t in rng.integers(0, 300, 20))
row = Row(1, 1, 0, tokens, (3, 5), positions, (ImageRows(4, image.rows),))
run(Bucket(Stage.FRESH, (2, 64)), model.text, host.text_inputs([row]))
drawn = []
for step in range(4):
    draw = (20 if step == 0 else 1, 1, Sample(0.9, uniform=0.4, full=True))
    inputs = host.head_inputs([draw], config.text.vocab)
    sample = run(Bucket(Stage.SAMPLE, (2,), "full"), lambda t: model.head(t, True), inputs)
    drawn.append(sample.logprob.cpu()[0].item())
    again = Row(1, 1, 20 + step, (-1,), (3, 5), np.full((3, 1), 20 + step, np.int32))
    run(Bucket(Stage.DECODE, (2, 8)), model.text, host.text_inputs([again]))
torch.save((torch.tensor(drawn), model.persistent.hidden.cpu()[1:2], model.persistent.arena.cpu()[2:14]), out)
"""


def test_shards_add_up_to_the_whole(tmp_path: Path, vl_checkpoint: Path) -> None:
    """Text, pictures and sampling on two ranks equal one; KV heads, MLPs, the tower and the head are cut."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-P", "-c", SHARDS]
    results = []
    for world in (1, 2):
        files = [tmp_path / f"{world}-{rank}" for rank in range(world)]
        ranks = [
            subprocess.Popen(
                [*command, str(r), str(world), str(tmp_path / "store2"), str(vl_checkpoint), str(files[r])], env=env
            )
            for r in range(world)
        ]
        assert [r.wait(timeout=100) for r in ranks] == [0] * world
        results += [torch.load(f) for f in files]
    for found in results[1:]:
        for one, other in zip(found, results[0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
