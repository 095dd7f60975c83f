"""Operations and bytes of Gaudi's launches on traffic, as the emulator counts them: no values, no times.

python -m benchmarks.launches [--requests 120] [--seed 401] [--json FILE]

Each trace is cut into launches of a 7B plan. Each distinct bucket is run once on a card without values, and its
figures count as often as the trace launches it. *Operations* are those that Python hands to the card, views too.
*Bytes made* are those of every tensor that a launch makes, which is about what it writes; *peak* is the most that
is held at a time. SAMPLE and RESET are left out. ``--heads`` prints those of SAMPLE's variants instead, in compile
mode, and of ``masked`` beside them, which no plan has.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.reporting import table
from benchmarks.packing import qwen_7b
from benchmarks.traces.generate import TRACES, Record
from trencadis.backends.hpu.backend import HpuBackend
from trencadis.backends.hpu.emulator.allocator import LiveBytes
from trencadis.backends.hpu.emulator.card_profiles_and_op_support import profile
from trencadis.backends.hpu.emulator.device_tensor import flatten
from trencadis.backends.hpu.emulator.emulated_bridge import make_bridge
from trencadis.backends.hpu.emulator.emulated_device import EmulatedDevice
from trencadis.backends.hpu.emulator.launch_recording_and_replay import LayerReuse, leaf_key, signature
from trencadis.backends.hpu.hpu_settings import HpuSettings
from trencadis.backends.hpu.shape_policy import SERVING, policy
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig
from trencadis.core.device.backend import BackendConfig
from trencadis.core.engine.startup_plan import DryRun, PlannedDevice, StartupPlan
from trencadis.core.engine_config import EngineConfig
from trencadis.core.graphs.graph_manager import body_of
from trencadis.core.launches.kv_cache_and_state_allocation import allocate_persistent
from trencadis.core.models import model_loader
from trencadis.core.shapes.bucket_options import BucketOptions
from trencadis.server.plan.trace_plan_comparison import (
    list_text_launches,
    list_vision_launches,
    read_request,
    replay_needs,
)

BLOCK, ROWS, TOKENS = 128, 128, 32768
HEADER = ("launches", "operations", "made, MB", "peak, MB")


@dataclass(frozen=True)
class LaunchFigures:
    """One launch, or the mean of many. ``made`` and ``peak`` in bytes.

    ``products``: multiplications of matrix products, which a card without values does not count.
    """

    ops: float
    made: float
    peak: float
    products: float = 0.0


def mixed(seed: int, requests: int) -> Iterator[Record]:
    """A third of each of the other traces, by arrival."""
    found = [r for name in TRACES for r in TRACES[name](seed, requests // len(TRACES))]
    return iter(sorted(found, key=lambda r: float(r["arrival"])))


TRAFFIC: dict[str, Callable[[int, int], Iterator[Record]]] = {
    "chat": TRACES["chat"],
    "documents": TRACES["documents"],
    "mixed": mixed,
}


def planned() -> StartupPlan:
    """The plan of Qwen2.5-VL-7B on a card of 96 GiB."""
    config = EngineConfig(max_num_seqs=ROWS, max_num_batched_tokens=TOKENS, max_model_len=32768)
    images = ImageNeeds(65536, 64, 16384)
    return DryRun(config, qwen_7b(), SERVING, BucketOptions(), images, PlannedDevice("hpu", 96 << 30)).plan_startup()


def launches(name: str, plan: StartupPlan, seed: int, requests: int) -> Counter[Bucket]:
    """How often each bucket runs on a trace."""
    needs = replay_needs([read_request(r) for r in TRAFFIC[name](seed, requests)], plan)
    return Counter((*list_text_launches(needs, plan.plan), *list_vision_launches(needs, plan.plan)))


class Card:
    """A card that counts what each launch makes; without values, a repeated layer counts what its first run did."""

    def __init__(
        self, lazy: bool = True, model: ModelConfig | None = None, blocks: int = 4096, computes: bool = False
    ) -> None:
        self.made = 0
        self.device = EmulatedDevice(profile(""), computes=computes)
        model = model or qwen_7b()
        text = model.text
        cfg = BackendConfig(
            dtype=torch.bfloat16, block_size=BLOCK, vocab_size=text.vocab, heads=text.heads, kv_heads=text.kv_heads,
            head_dim=128,
        )  # fmt: skip
        bridge = make_bridge(self.device, lazy)
        self.backend = HpuBackend(cfg, policy("", lazy=lazy), bridge, HpuSettings())
        self.model = model_loader.load_model(model, self.backend, EngineConfig(load_format="dummy"))
        self.model.bind(
            allocate_persistent(
                model, self.backend, blocks=blocks, block_size=BLOCK, arena_rows=4096, seqs=2 * ROWS, tokens=TOKENS
            )
        )

    def figures(self, bucket: Bucket) -> LaunchFigures:
        """The figures of one launch of ``bucket``."""
        head = self.model.head
        bodies = {
            "text": self.model.text, "vision": self.model.vision, "greedy": partial(head, full=False),
            "masked": self.model.masked_head, "penalised": self.model.penalised_head, "draw": self.model.drawn_head,
        }  # fmt: skip
        body = bodies[body_of(bucket)]
        program = self.backend.program(bucket, body)
        self.made = 0
        with self._counted(), torch.no_grad(), self.device.launch() as scope:
            body(program.inputs)
        return LaunchFigures(scope.ops, self.made, scope.live.peak, scope.products)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        known: dict[Any, int] = {}
        add, layer = LiveBytes.add, LayerReuse.layer

        def counted_add(live: LiveBytes, count: int) -> None:
            self.made += count
            add(live, count)

        def counted_layer(repeats: LayerReuse, scope: Any, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
            key = (signature(run), *(leaf_key(leaf) for leaf in flatten(args)))
            before = self.made
            out = layer(repeats, scope, run, args)
            if self.made == before:
                self.made += known.get(key, 0)  # 0: a part that makes nothing, such as a store
            known[key] = self.made - before
            return out

        LiveBytes.add, LayerReuse.layer = counted_add, counted_layer  # type: ignore[method-assign]
        try:
            yield
        finally:
            LiveBytes.add, LayerReuse.layer = add, layer  # type: ignore[method-assign]


def mean(counts: Counter[Bucket], figures: dict[Bucket, LaunchFigures]) -> LaunchFigures:
    """A launch's mean over a trace."""
    total = sum(counts.values())
    ops, made, peak = (
        sum(getattr(figures[b], name) * n for b, n in counts.items()) / total for name in ("ops", "made", "peak")
    )
    return LaunchFigures(ops, made, peak)


def measured(seed: int, requests: int) -> dict[str, dict[str, LaunchFigures]]:
    """Trace -> stage, or ``all`` -> the mean launch."""
    plan, card = planned(), Card()
    figures: dict[Bucket, LaunchFigures] = {}
    found = {}
    for name in TRAFFIC:
        counts = launches(name, plan, seed, requests)
        for bucket in counts.keys() - figures.keys():
            figures[bucket] = card.figures(bucket)
        rows = {"all": mean(counts, figures)}
        for stage in Stage:
            own = Counter({b: n for b, n in counts.items() if b.stage is stage})
            if own:
                rows[stage.name.lower()] = mean(own, figures)
        found[name] = rows
    return found


HEADS = ("greedy", "masked", "penalised", "draw")
HEAD_ROWS = (1, 32, 128)


def list_heads() -> Iterator[tuple[int, str, float, float]]:
    """Yields rows, variant, operations and bytes made of SAMPLE, each on a card of its own, which repeats no launch."""
    for rows in HEAD_ROWS:
        for variant in HEADS:
            found = Card(lazy=False, blocks=300).figures(Bucket(Stage.SAMPLE, (rows,), variant))
            yield rows, variant, found.ops, found.made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--seed", type=int, default=401)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--heads", action="store_true", help="the variants of SAMPLE")
    args = parser.parse_args()
    if args.heads:
        rows = [(f"{count} {variant}", round(ops), made / 1e6) for count, variant, ops, made in list_heads()]
        print(table(("rows", "operations", "made, MB"), rows))
        return
    found = measured(args.seed, args.requests)
    for name, rows in found.items():
        print(name)
        print(table(HEADER, [(s, round(f.ops), f.made / 1e6, f.peak / 1e6) for s, f in rows.items()]))
    if args.json:
        args.json.write_text(json.dumps({n: {s: asdict(f) for s, f in r.items()} for n, r in found.items()}, indent=1))


if __name__ == "__main__":
    main()
