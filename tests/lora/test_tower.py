"""Adapters of vision towers and of the layers after them: rows of images, answers, slots, and what is refused."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.adapters import LANGUAGE, TOWER, adapter_of, load_base, matrices, train_with_peft, write_adapter
from tests.lora.conftest import Adapter, Base
from tests.lora.test_other_bases import adapted_names
from tests.lora.test_same_tokens import Merged, request_of
from tests.oracles.transformers_model import Oracle, assert_same, make_image
from tests.vision import vision_checkpoints
from tests.vision.all_families.family_list import WRITERS
from tests.vision.extra_families.minicpmv import minicpmv
from tests.vision.family_harness import FamilyHarness
from trencadis import LLM, SamplingParams
from trencadis.core.buckets import LORA, Bucket, Stage
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.family import TOWER as TOWER_PART
from trencadis.core.checkpoint.model_registry import family_of, image_processor
from trencadis.core.errors import StartupError
from trencadis.core.launches.host_inputs import add_image_adapters
from trencadis.core.lora.adapter_files import check_tower, read_adapter
from trencadis.core.lora.adapter_store import AdapterStore
from trencadis.core.request import AdapterRef
from trencadis.core.step import AdapterUpload, Encode
from trencadis.offline_adapters import LoRARequest

BOTH = rf"{LANGUAGE}|{TOWER}"
BASE: dict[str, Any] = dict(
    dtype="float32", max_model_len=1024, max_num_seqs=6, kv_cache_memory_bytes=32 << 20, max_num_batched_tokens=256,
    enable_lora=True, max_loras=2, max_cpu_loras=4, limit_mm_per_prompt={"image": 2},
    mm_processor_kwargs={"min_pixels": 56 * 56, "max_pixels": 40_000},
)  # fmt: skip
FAMILIES = tuple(name for name in WRITERS if name not in ("minicpmv", "mllama", "phi3_v"))
"""Families whose towers take adapters; Phi-3.5-vision's modules are named in another way than the tests' pattern."""
LARGEST = 64 * 64


def rows_of(harness: FamilyHarness, images: Sequence[Encode], adapted: bool) -> list[torch.Tensor]:
    """The arena rows of each image, encoded in one launch."""
    bucket = harness.plan.fit(Stage.VISION, (sum(i.slots for i in images),))
    inputs = harness.model.pack(images, bucket.dims[0])
    if adapted:
        bucket = Bucket(Stage.VISION, bucket.dims, LORA)
        add_image_adapters(inputs, images)
    program = harness.backend.program(bucket, harness.model.vision)
    harness.backend.fill(program, inputs)
    program.run()
    harness.backend.synchronize()
    arena = harness.model.persistent.arena.cpu().view(-1, harness.wide)
    return [arena[image.rows.tolist()].clone() for image in images]


def drawn_images(path: Path, harness: FamilyHarness, slots: Sequence[int]) -> list[Encode]:
    """The tiles of one image for each adapter of ``slots``."""
    rng, made, row, found = np.random.default_rng(0), image_processor(load_config(path), {}), harness.reserved, []
    for slot in slots:
        shown = made.prepare(make_image(rng, low=60, high=150, aspect=2), "")
        for item in shown.items or (shown,):
            count = len(item.pixels) // harness.cell
            rows = np.arange(row, row + count, dtype=np.int32)
            found.append(Encode(str(len(found)), item.grid, item.slots, item.pixels, rows, slot))
            row += count
    return found


def merged_rows(folder: Path, images: Sequence[Encode]) -> list[torch.Tensor]:
    """The rows of images that a checkpoint's own tower makes on the CPU."""
    return rows_of(FamilyHarness(folder, "cpu", LARGEST), images, False)


def hold_rows(path: Path, adapter: Callable[..., Path], merged: Merged, device: str) -> None:
    """Asserts that one launch with images of the base and of two adapters gives the rows of merged checkpoints."""
    folders = [adapter(path, seed=seed, rank=rank, pattern=TOWER) for seed, rank in ((1, 8), (2, 3))]
    harness = FamilyHarness(path, device, LARGEST)
    store = AdapterStore(harness.model, harness.backend, 2, 8)
    for number, folder in enumerate(folders, 1):
        digest = read_adapter(folder, harness.model.config).digest
        assert store.load(AdapterRef(digest, str(folder), "", True)).result() == ""
        store.upload([AdapterUpload(number, digest)])
    images = drawn_images(path, harness, (0, 1, 2, 1))
    got = rows_of(harness, images, True)
    store.close()
    wants = [merged_rows(folder, images) for folder in (path, *(merged(path, one) for one in folders))]
    for number, image in enumerate(images):
        want = wants[image.adapter][number]
        assert (got[number] - want).abs().max() <= 2e-5 * want.abs().max(), (device, number)
        if image.adapter:
            assert (want - wants[0][number]).abs().max() > 1e-2 * want.abs().max(), "the adapter changes the rows"


@pytest.mark.parametrize("device", ["cpu", "hpu", "twin"])
def test_rows_are_those_of_the_merged_tower(base: Base, adapter: Adapter, merged: Merged, device: str) -> None:
    hold_rows(base("qwen2_5_vl"), adapter, merged, device)


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", "padded", "hpu", "twin"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_every_family(
    tmp_path_factory: pytest.TempPathFactory, adapter: Adapter, merged: Merged, family: str, device: str
) -> None:
    path = WRITERS[family](tmp_path_factory.mktemp(family))
    assert TOWER_PART in family_of(load_config(path).architecture).adapters
    hold_rows(path, adapter, merged, device)


PEFT = ("qwen2_vl", "qwen3_vl", "gemma3", "llava", "internvl", "smolvlm", "mistral3")
"""Families of other towers than Qwen2.5-VL's, whose logits ``test_peft_logits`` compares."""


@pytest.mark.parametrize("family", [f if f == "llava" else pytest.param(f, marks=pytest.mark.long) for f in PEFT])
def test_rows_are_those_of_the_tower_that_peft_merges(tmp_path: Path, family: str) -> None:
    """peft writes the adapter, and merges it into transformers' model; all its names are those that peft gives."""
    pytest.importorskip("peft", reason="peft is among the packages of the tests: pip install peft")
    path = WRITERS[family](tmp_path / "base")
    theirs: dict[Path, Path] = {}

    def train(path: Path, *, seed: int, rank: int, pattern: str) -> Path:
        model, folder, out = load_base(path), tmp_path / f"a{seed}", tmp_path / f"theirs {seed}"
        linear = [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)]
        targets = [name for name in linear if re.fullmatch(pattern, name) and "patch_merger" not in name]
        assert any(re.search(r"\.(layers?|blocks)\.0\.", name) for name in targets)
        adapted = train_with_peft(
            model, folder, "|".join(map(re.escape, targets)), seed=seed, r=rank, lora_alpha=2 * rank
        )
        adapted.merge_and_unload().save_pretrained(out)
        for file in path.iterdir():
            if not (out / file.name).exists() and file.suffix == ".json":
                shutil.copy(file, out / file.name)
        theirs[folder] = out
        return folder

    hold_rows(path, train, lambda _, folder: theirs[folder], "cpu")


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", "hpu", "twin"])
def test_rows_beside_recurrent_layers(
    tmp_path_factory: pytest.TempPathFactory, adapter: Adapter, merged: Merged, device: str
) -> None:
    hold_rows(vision_checkpoints.qwen3_5(tmp_path_factory.mktemp("qwen3_5")), adapter, merged, device)


MIXED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "Qwen3.5": (vision_checkpoints.qwen3_5, TOWER),
    "LFM2-VL": (vision_checkpoints.lfm2_vl, ""),
    "MiniCPM-V 4.6": (minicpmv, ""),
}
"""Models with recurrent layers and images: their checkpoint, and the names of their tower that take adapters."""


@pytest.mark.parametrize("family", [f if f == "LFM2-VL" else pytest.param(f, marks=pytest.mark.long) for f in MIXED])
def test_images_of_models_with_recurrent_layers(tmp_path: Path, merged: Merged, family: str) -> None:
    write, tower = MIXED[family]
    path = write(tmp_path / "base")
    names = adapted_names(load_config(path))
    one = adapter_of(path, tmp_path / "a", rf"(?!.*(vision|visual)){names}|{tower or 'none'}", seed=1)
    image = make_image(np.random.default_rng(1), low=60, high=120, aspect=2)
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "What is in the picture?"}]
    chat: list[Any] = [{"role": "user", "content": parts}]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
    found, flags = [], {name: value for name, value in BASE.items() if name != "mm_processor_kwargs"}
    for folder, kinds in ((path, [one, None]), (merged(path, one), [None])):
        llm = LLM(str(folder), **flags)
        made = llm.chat([chat] * len(kinds), params, use_tqdm=False, lora_request=[*map(request_of, kinds)])
        found += [one.outputs[0] for one in made]
        llm.close()
    scores = [[next(iter(v.values())).logprob for v in out.logprobs or []] for out in found]
    assert found[0].token_ids == found[2].token_ids != found[1].token_ids
    np.testing.assert_allclose(scores[0], scores[2], atol=1e-3)


VARIANTS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "padded, chunks of 7, arena of two": {"policy": "padded", "max_num_batched_tokens": 7, "encoder_cache_images": 2},
    "one slot": {"max_loras": 1},
    "two ranks": {"tensor_parallel_size": 2},
    "two ranks, each with a tower": {"tensor_parallel_size": 2, "mm_encoder_tp_mode": "data"},
    "two stages": {"pipeline_parallel_size": 2},
    "emulated hpu": {"device": "hpu", "warmup": "skip", "block_size": 64},
    "compiled hpu": {"device": "hpu", "warmup": "skip", "block_size": 64},
    "cuda twin": {"device": "cuda", "policy": "twin", "warmup": "skip", "block_size": 16},
}
QUICK = ("cpu",)
"""Variants of ``make test``."""


@pytest.mark.parametrize("variant", [v if v in QUICK else pytest.param(v, marks=pytest.mark.long) for v in VARIANTS])
def test_one_image_has_rows_of_its_own_for_each_adapter(
    base: Base, adapter: Adapter, merged: Merged, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    """Requests with the same image and question: the base, an adapter of the tower twice, another one, one of the
    decoder alone, which shares the base's rows.
    """
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    if variant == "compiled hpu":
        monkeypatch.setenv("PT_HPU_LAZY_MODE", "0")
    path = base("qwen2_5_vl")
    one, two = (adapter(path, seed=seed, rank=4, pattern=BOTH) for seed in (1, 2))
    text = adapter(path, seed=3)
    kinds = [None, one, two, text, one, None]
    image = make_image(np.random.default_rng(1), low=80, high=150, aspect=2)
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "What is in the picture?"}]
    chat: list[dict[str, Any]] = [{"role": "user", "content": parts}]
    wants = {}
    for kind in dict.fromkeys(kinds):
        oracle = Oracle(path if kind is None else merged(path, kind), min_pixels=56 * 56, max_pixels=40_000)
        wants[kind] = oracle.answer(oracle.inputs(chat, [image]), 5)
    llm = LLM(str(path), **{**BASE, **VARIANTS[variant]})
    try:
        params = SamplingParams(temperature=0, max_tokens=5)
        asked = [request_of(kind) for kind in kinds]
        made = llm.chat([chat] * len(kinds), params, use_tqdm=False, lora_request=asked)
        llm.engine.scheduler.check()
        assert_same([(m.outputs[0].token_ids, wants[kind]) for m, kind in zip(made, kinds, strict=True)])
        assert len({tuple(want.tokens) for want in wants.values()}) > 2, "adapters change the answers"
        if "arena" not in variant:
            assert llm.engine.stats().images_encoded == 3, "the base, and two adapters of the tower"
    finally:
        llm.close()


def test_a_model_without_parts_that_take_adapters_is_refused_in_one_line(tmp_path: Path) -> None:
    path = WRITERS["mllama"](tmp_path / "base")
    with pytest.raises(StartupError, match=r"adapters of MllamaForConditionalGeneration are merged") as caught:
        LLM(str(path), **{**BASE, "mm_processor_kwargs": None})
    assert "\n" not in str(caught.value)


def test_what_no_tower_takes_is_refused(base: Base, adapter: Adapter, tmp_path: Path) -> None:
    path = base("qwen2_5_vl")
    config, shapes = load_config(path), dict(matrices(path, TOWER))
    assert shapes and read_adapter(write_adapter(tmp_path / "a", shapes), config).in_tower
    name = next(module for module in shapes if module.endswith("attn.qkv"))
    outputs, inputs = shapes[name]
    for number, (other, shape, why) in enumerate((
        (name, (outputs, inputs + 1), "is for another model: visual.blocks.0.attn.qkv is"),
        (name.replace("attn.qkv", "attn.q_proj"), (inputs, inputs), "are not kept beside"),
        (name.replace("blocks.0", "blocks.99"), (outputs, inputs), "are not kept beside"),
    )):  # fmt: skip
        made = read_adapter(write_adapter(tmp_path / str(number), {other: shape}), config)
        with pytest.raises(StartupError, match=why) as caught:
            check_tower(made, config)
        assert "\n" not in str(caught.value)
    pixtral = WRITERS["mistral3"](tmp_path / "mistral3")
    merger = read_adapter(adapter_of(pixtral, tmp_path / "m", r".*patch_merger\.merging_layer"), load_config(pixtral))
    with pytest.raises(StartupError, match="trencadis merge-lora merges them"):
        check_tower(merger, load_config(pixtral))


def test_a_name_with_other_weights_meets_no_earlier_rows_of_an_image(
    base: Base, adapter: Adapter, tmp_path: Path
) -> None:
    """Loaded in place three times, with the weights of two adapters of the tower: rows are found by the digest."""
    path, folder, found = base("qwen2_5_vl"), tmp_path / "a", []
    image = make_image(np.random.default_rng(1), low=80, high=150, aspect=2)
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "What is in the picture?"}]
    chat: list[Any] = [{"role": "user", "content": parts}]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    llm = LLM(str(path), **BASE)
    for seed in (1, 2, 1):
        folder.mkdir(exist_ok=True)
        for file in adapter(path, seed=seed, rank=4, pattern=TOWER).iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        asked = LoRARequest("a", 1, str(folder), load_inplace=True)
        (made,) = llm.chat(chat, params, use_tqdm=False, lora_request=asked)
        found.append((made.outputs[0].token_ids, llm.engine.stats().images_encoded, made.num_cached_tokens))
    llm.close()
    alone = LLM(str(path), **BASE)
    (fresh,) = alone.chat(
        chat, params, use_tqdm=False, lora_request=request_of(adapter(path, seed=2, rank=4, pattern=TOWER))
    )
    alone.close()
    assert found[0][0] == found[2][0] != found[1][0] == fresh.outputs[0].token_ids
    assert [encoded for _, encoded, _ in found] == [1, 2, 2], "the third one has the rows of the first"
    assert [cached for *_, cached in found][:2] == [0, 0] and found[2][2] > 0
