"""The example package whose family sees: it passes ``check-model`` with images, and answers as transformers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.hostile.altered_config import altered
from tests.oracles.transformers_model import Answer, assert_same, make_image
from tests.vision.extra_families.paligemma import EXAMPLE, installed, paligemma, run_transformers
from tests.vision.family_harness import VARIANTS
from tests.vision.vision_checkpoints import IMAGE
from trencadis import LLM, SamplingParams
from trencadis.core.checkpoint import model_registry
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.errors import StartupError
from trencadis.server.cli.main import main

BASE: dict[str, Any] = dict(
    dtype="float32", max_model_len=256, max_num_seqs=4, kv_cache_memory_bytes=32 << 20, max_num_batched_tokens=256
)
NAMES = ("model_paligemma", "paligemma_processor", "paligemma_tower")
QUESTIONS = ("caption en", "detect a cat ; a dog", "What colour?\nAnswer:", "zwölf 🙂", "")


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Installed, for this process and for the decode workers."""
    with pytest.MonkeyPatch.context() as patch:
        folder = str(installed(tmp_path_factory.mktemp("site")))
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", folder)
        patch.setenv("TRENCADIS_HPU_EMULATOR", "1")
        forget()
        yield
    for name in NAMES:
        sys.modules.pop(name, None)
    forget()


def forget() -> None:
    model_registry.installed_families.cache_clear()
    model_registry.family_of.cache_clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return paligemma(tmp_path_factory.mktemp("paligemma"))


def checked(capsys: Any, path: Path, *words: str) -> dict[str, dict[str, Any]]:
    capsys.readouterr()
    main(["check-model", str(path), "--json", *words])
    return {one["name"]: one for one in json.loads(capsys.readouterr().out)["results"]}


def test_the_example_passes_with_images(folder: Path, capsys: Any) -> None:
    results = checked(
        capsys, folder, "--only", "config,weights,ledger,pictures,logits.whole,tokens.serving,padding.serving"
    )
    failed = {name: one["reason"] for name, one in results.items() if one["status"] == "fail"}
    assert not failed, failed
    assert {"pictures.rows", "pictures.logits"} <= results.keys()


@pytest.mark.long
def test_the_example_passes_every_check(folder: Path, capsys: Any) -> None:
    results = checked(capsys, folder)
    skipped = {name for name, one in results.items() if one["status"] == "skip"}
    assert skipped == {"logits.chunks-of-7", "logits.chunks-of-1"} and len(results) == 14
    assert all(one["status"] != "fail" for one in results.values()), results


MISTAKES: dict[str, tuple[str, str, str, str]] = {
    "another deviation": ("paligemma_tower", "colours_of(config))", "type(colours_of(config))())", "pictures.rows"),
    "resampled otherwise": ("paligemma_processor", "Resampling.BICUBIC", "Resampling.BILINEAR", "pictures.rows"),
    "a causal prompt": ("model_paligemma", "causal=False", "causal=True", "pictures.logits"),
    "embeddings of words without their scale": ("model_paligemma", "heads.hidden**0.5", "1.0", "pictures.logits"),
}  # fmt: skip
"""(module, what is right, what stands in its place, the check that fails)."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str, folder: Path, capsys: Any, monkeypatch: Any, tmp_path: Path) -> None:
    module, right, wrong, check = MISTAKES[mistake]
    site = installed(tmp_path)
    source = (site / f"{module}.py").read_text()
    assert source.count(right) == 1
    (site / f"{module}.py").write_text(source.replace(right, wrong))
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    others = [place for place in sys.path if not (Path(place) / "model_paligemma.py").exists()]
    monkeypatch.setattr(sys, "path", [str(site), *others])
    forget()
    try:
        assert checked(capsys, folder, "--only", check)[check]["status"] == "fail"
    finally:
        monkeypatch.undo()
        for name in NAMES:
            sys.modules.pop(name, None)
        forget()


def test_the_example_is_small() -> None:
    files = [file for file in EXAMPLE.iterdir() if file.suffix in (".py", ".toml", ".jinja")]
    assert len(files) == 5 and sum(len(file.read_text().splitlines()) for file in files) < 250


def test_a_published_file_is_read(folder: Path, tmp_path: Path, capsys: Any) -> None:
    """paligemma-3b-pt-224's config.json leaves most keys out; a random checkpoint of its keys passes."""
    held = {
        "architectures": ["PaliGemmaForConditionalGeneration"], "bos_token_id": 2, "eos_token_id": 1,
        "hidden_size": 2048, "ignore_index": -100, "image_token_index": 257152, "model_type": "paligemma",
        "pad_token_id": 0, "projection_dim": 2048, "torch_dtype": "float32",
        "text_config": {
            "hidden_size": 2048, "intermediate_size": 16384, "model_type": "gemma", "num_attention_heads": 8,
            "num_hidden_layers": 18, "num_image_tokens": 256, "num_key_value_heads": 1, "torch_dtype": "float32",
            "vocab_size": 257216,
        },
        "vision_config": {
            "hidden_size": 1152, "intermediate_size": 4304, "model_type": "siglip_vision_model",
            "num_attention_heads": 16, "num_hidden_layers": 27, "num_image_tokens": 256, "patch_size": 14,
            "projection_dim": 2048, "projector_hidden_act": "gelu_fast", "vision_use_head": False,
        },
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(held))
    config = load_config(tmp_path)
    assert (config.text.head_dim, config.text.layers, config.text.tied, config.unread) == (256, 18, True, ())
    assert config.vision is not None and config.vision.hidden == 1152
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    settings |= {"size": {"height": 224, "width": 224}, "image_seq_length": 256}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    results = checked(capsys, tmp_path, "--dummy", "--only", "config,weights,ledger,pictures")
    assert {one["status"] for one in results.values()} == {"pass"}, results


def ask(path: Path, model: Any, text: str, images: list[Any], length: int) -> tuple[list[int], Answer]:
    given = run_transformers(path)(text=[text], images=[images], return_tensors="pt")
    given.pop("labels")
    with torch.inference_mode():
        out = model.generate(
            **given, max_new_tokens=length, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
    logits = torch.stack([row[0].float() for row in out.logits])
    best, ids = logits.topk(2).values, given["input_ids"]
    tokens = out.sequences[0, ids.shape[1] :].tolist()
    return ids[0].tolist(), Answer(tokens, (best[:, 0] - best[:, 1]).tolist(), logits)


WHOLE = {name: flags for name, flags in VARIANTS.items() if "chunks" not in name} | {
    "padded": {"policy": "padded"}, "few blocks": {"num_gpu_blocks_override": 14, "max_model_len": 128},
}  # fmt: skip


def answers(path: Path, oracle: Any, seeds: range, variant: str, most: int) -> None:
    """Prompts of up to ``most`` images; those of "few blocks" are so long that sequences are preempted."""
    prompts, wanted, few = [], [], variant == "few blocks"
    length = 30 if few else 8
    for seed in seeds:
        rng = np.random.default_rng(seed)
        images = [make_image(rng, high=300) for _ in range(int(rng.integers(1, most + 1)))]
        text = "<image>" * len(images) + QUESTIONS[int(rng.integers(len(QUESTIONS)))]
        prompts.append({"prompt": text, "multi_modal_data": {"image": images}})
        wanted.append(ask(path, oracle(path), text, images, length))
    with LLM(str(path), **{**BASE, **WHOLE[variant]}) as llm:
        got = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=length), use_tqdm=False)
        assert [o.prompt_token_ids for o in got] == [ids for ids, _ in wanted]
        assert_same([(o.outputs[0].token_ids, answer) for o, (_, answer) in zip(got, wanted, strict=True)])
        llm.engine.scheduler.check()
        assert (llm.engine.scheduler.totals.preemptions > 0) == few


@pytest.mark.parametrize("variant", WHOLE)
def test_prompts_answer_as_transformers(variant: str, folder: Path, oracle: Any) -> None:
    """What was drawn before a sequence was preempted sees what stands before it, as it did at first."""
    answers(folder, oracle, range(4), variant, 2 if variant == "cpu" else 1)


@pytest.mark.long
@pytest.mark.parametrize("variant", WHOLE)
def test_forty_prompts(variant: str, folder: Path, oracle: Any) -> None:
    answers(folder, oracle, range(100, 140), variant, 1 if variant == "few blocks" else 2)


def test_forks_and_the_template(folder: Path, oracle: Any) -> None:
    image = make_image(np.random.default_rng(5), high=200)
    ids, answer = ask(folder, oracle(folder), "<image>caption en", [image], 6)
    parts: Any = [{"type": "image", "image": image}, {"type": "text", "text": "caption en"}]
    with LLM(str(folder), **BASE) as llm:
        params = SamplingParams(n=2, temperature=0, max_tokens=6)
        got = llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)
        assert got[0].prompt_token_ids == ids and ids.count(IMAGE) == 36
        assert_same([(one.token_ids, answer) for one in got[0].outputs])


@pytest.mark.parametrize(("file", "key", "value"), [
    ("config.json", "projection_dim", 32), ("config.json", "text_config.model_type", "gemma2"),
    ("config.json", "text_config.use_bidirectional_attention", False),
    ("preprocessor_config.json", "resample", 2), ("preprocessor_config.json", "image_seq_length", 9),
    ("preprocessor_config.json", "size", {"height": 56, "width": 224}),
])  # fmt: skip
def test_other_values_are_refused(file: str, key: str, value: Any, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError) as refused:
        model_registry.image_processor(load_config(altered(folder, tmp_path / "altered", file, key, value)), {})
    assert key in str(refused.value) and "\n" not in str(refused.value)
