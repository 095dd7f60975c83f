"""What attention that reads nothing back saves, by the emulator's own books: operations and bytes of a mean launch."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks import launches as launches_benchmark
from benchmarks.launches import TRAFFIC, Card, launches, mean, planned
from tests.traffic.launch_lines import MODELS, model_of
from trencadis.backends.hpu.shape_policy import SERVING
from trencadis.core.buckets import LORA, Bucket, Stage
from trencadis.core.lora.adapter_store import AdapterStore
from trencadis.core.models.decoder import Decoder

BEFORE = {"chat": (2662.8, 1207.6e6), "documents": (2651.9, 8799.1e6), "mixed": (2643.7, 5047.1e6)}
"""Operations and bytes made of a mean launch at commit 32f33fb: 120 requests, seed 401."""

ONE = {
    Bucket(Stage.FRESH, (2, 256)): (1310, None),
    Bucket(Stage.CONTEXT, (64, 16)): (1870, None),
    Bucket(Stage.DECODE, (16, 128)): (2682, 2_434_284_064),
    Bucket(Stage.VISION, (1600,)): (2331, 4_951_802_368),
}
"""The same of single launches. Rotary in float32 writes more of a prompt's queries than the gathers that are gone."""


@pytest.mark.long
def test_a_head_for_masks_alone_is_counted_and_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks alone would need a tenth of the bytes; why their eight graphs are not planned: docs/hpu-internals.md."""
    monkeypatch.setattr(launches_benchmark, "HEAD_ROWS", (1,))
    made = {variant: count for _, variant, _, count in launches_benchmark.list_heads()}
    assert made["greedy"] < made["masked"] < made["penalised"] / 9 < made["draw"] / 80
    assert not SERVING.masked_head


@pytest.mark.long
def test_a_launch_takes_a_fifth_less_on_three_traces() -> None:
    plan, card = planned(), Card()
    for name in TRAFFIC:
        counts = launches(name, plan, 401, 120)
        now = mean(counts, {bucket: card.figures(bucket) for bucket in counts})
        ops, made = BEFORE[name]
        print(f"{name}: {ops:.0f} operations before, {now.ops:.0f} now ({now.ops / ops - 1:+.1%}); "
              f"{made / 1e6:.0f} MB before, {now.made / 1e6:.0f} MB now ({now.made / made - 1:+.1%})")  # fmt: skip
        assert now.ops <= 0.8 * ops and now.made <= 0.8 * made


def test_single_launches_take_less() -> None:
    """The four stages; decoding, which is most launches, a fifth less of both."""
    card = Card()
    for bucket, (ops, made) in ONE.items():
        now = card.figures(bucket)
        share = 0.8 if bucket.stage in (Stage.DECODE, Stage.VISION) else 1.0
        assert now.ops <= share * ops, bucket
        assert made is None or now.made <= (0.8 if bucket.stage is Stage.DECODE else 0.9) * made, bucket


MADE = {"3B": (18_529_883_008, 36), "7B": (30_489_095_808, 28)}
"""A DECODE launch of 32 rows and 1,024 blocks in compile mode: bytes made before keys kept their type, and layers."""


@pytest.mark.parametrize("name", MADE)
def test_decoding_makes_less_than_half_and_masks_once_a_launch(name: str) -> None:
    """0.45 of the bytes, and 75 operations a layer instead of 110: masks, owners and spreads are made once."""
    card = Card(lazy=False, model=model_of(*MODELS[1 if name == "3B" else 2]), blocks=1100)
    now = card.figures(Bucket(Stage.DECODE, (32, 1024)))
    before, layers = MADE[name]
    print(f"{name}: {now.made / before:.3f} of the bytes, {now.ops / layers:.1f} operations a layer")
    assert now.made <= 0.45 * before and now.ops <= 75 * layers


@pytest.mark.long
@pytest.mark.parametrize(("hidden", "heads", "kv_heads", "inner"), [(2048, 16, 2, 11008), (3584, 28, 4, 18944)])
def test_a_launch_with_adapters_multiplies_little_more(
    hidden: int, heads: int, kv_heads: int, inner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer of 3B and of 7B, eight slots of rank 16: at most 1.15 of a launch without, though all slots count."""
    monkeypatch.setattr(launches_benchmark, "ROWS", 8)
    monkeypatch.setattr(launches_benchmark, "TOKENS", 256)
    model = model_of(hidden, 1, heads, kv_heads, inner, vision=False)
    text = dataclasses.replace(model.text, vocab=1024, mrope_section=None)
    small = dataclasses.replace(model, architecture="Qwen2ForCausalLM", text=text)
    card = Card(model=small, blocks=40, computes=True)
    assert isinstance(card.model, Decoder)
    buckets = Bucket(Stage.DECODE, (8, 16)), Bucket(Stage.FRESH, (1, 128))
    without = [card.figures(bucket) for bucket in buckets]
    AdapterStore(card.model, card.backend, 8, 16)
    for bucket, before in zip(buckets, without, strict=True):
        plain, adapted = (card.figures(dataclasses.replace(bucket, variant=variant)) for variant in ("", LORA))
        assert plain == before, "slots cost launches without adapters nothing: the same operations and bytes"
        print(f"{bucket}: {adapted.products / plain.products:.3f} of the multiplications")
        assert 1 < adapted.products / plain.products <= 1.15


def test_a_launch_with_adapters_has_three_operations_more_for_each_matrix() -> None:
    """28 layers of 7B with four matrices each; one for the tokens' slots, three for a mask of 1, 2 and 3 parts."""
    card = Card()
    assert isinstance(card.model, Decoder)
    AdapterStore(card.model, card.backend, 8, 16)
    for bucket in (Bucket(Stage.DECODE, (32, 1024)), Bucket(Stage.FRESH, (2, 256)), Bucket(Stage.CONTEXT, (64, 16))):
        plain, adapted = (card.figures(dataclasses.replace(bucket, variant=variant)).ops for variant in ("", LORA))
        print(f"{bucket}: {adapted / plain:.3f} of the operations")
        assert adapted - plain == 28 * 4 * 3 + 1 + 3 * 3
