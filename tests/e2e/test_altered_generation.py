"""Each altered key of generation_config.json gives transformers' greedy answer, or is refused; never another one."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hostile.altered_config import GONE, altered, verdict
from trencadis import LLM
from trencadis.assets import demo_path
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.errors import StartupError
from trencadis.server.prompts.sampling_params import NEUTRAL, SamplingDefaults

RIGHT, REFUSED = "right", "refused"
NAN = math.nan
FILE = "generation_config.json"
LENGTH = 12
PROMPT = list(range(40, 60))
CASES: list[tuple[str, Any, str]] = [
    ("temperature", 0.7, RIGHT), ("temperature", -1, REFUSED), ("temperature", NAN, REFUSED), ("top_k", 5, RIGHT),
    ("temperature", "hot", REFUSED), ("temperature", 5.0, REFUSED), ("top_k", -5, REFUSED), ("top_k", 1.5, REFUSED),
    ("top_p", 0.9, RIGHT), ("top_p", 0, REFUSED), ("top_p", 1.5, REFUSED), ("min_p", 0.1, RIGHT), ("min_p", 2, REFUSED),
    ("repetition_penalty", 1.3, RIGHT), ("repetition_penalty", 0.8, RIGHT), ("repetition_penalty", 0, REFUSED),
    ("repetition_penalty", NAN, REFUSED), ("repetition_penalty", None, RIGHT), ("do_sample", "no", REFUSED),
    ("max_new_tokens", 3, RIGHT), ("max_new_tokens", 0, REFUSED), ("max_new_tokens", -1, REFUSED),
    ("max_new_tokens", 2.5, REFUSED), ("min_new_tokens", 9, RIGHT), ("min_new_tokens", 99, REFUSED),
    ("max_length", 24, RIGHT), ("max_length", 0, REFUSED), ("eos_token_id", "x", REFUSED),
    ("eos_token_id", -1, REFUSED),
    ("eos_token_id", [10**6], REFUSED), ("eos_token_id", True, REFUSED), ("eos_token_id", "second", RIGHT),
    ("num_beams", 4, REFUSED), ("num_beams", 1, RIGHT), ("num_return_sequences", 2, REFUSED),
    ("no_repeat_ngram_size", 2, REFUSED), ("no_repeat_ngram_size", 0, RIGHT), ("suppress_tokens", [1], REFUSED),
    ("begin_suppress_tokens", [1], REFUSED), ("bad_words_ids", [[1]], REFUSED), ("forced_bos_token_id", 5, REFUSED),
    ("forced_eos_token_id", 5, REFUSED), ("sequence_bias", [[[1], 2.0]], REFUSED), ("min_length", 30, REFUSED),
    ("encoder_repetition_penalty", 1.5, REFUSED), ("guidance_scale", 2.0, REFUSED), ("penalty_alpha", 0.6, REFUSED),
    ("exponential_decay_length_penalty", [2, 1.5], REFUSED), ("stop_strings", ["a"], REFUSED), ("max_time", 1, REFUSED),
    ("watermarking_config", {"bias": 2.0}, REFUSED), ("typical_p", 0.5, REFUSED), ("epsilon_cutoff", 0.1, REFUSED),
    ("renormalize_logits", True, RIGHT), ("length_penalty", 2.0, RIGHT), ("pad_token_id", 1, RIGHT),
    ("bos_token_id", 7, RIGHT), ("use_cache", True, RIGHT), ("transformers_version", "4.1", RIGHT),
]  # fmt: skip
CHECKPOINTS = ("demo", "qwen2_5_vl", "llama")


class Pair:
    """A checkpoint here and in transformers, each loaded once; only what the file decides changes."""

    def __init__(self, source: Path) -> None:
        import transformers

        self.source = source
        self.llm = LLM(str(source), dtype="float32", max_model_len=256, kv_cache_memory_bytes=8 << 20, threads=1)
        vision = load_config(source).vision is not None
        auto = transformers.AutoModelForImageTextToText if vision else transformers.AutoModelForCausalLM
        self.model = auto.from_pretrained(source, dtype=torch.float32).eval()

    def ours(self, path: Path) -> torch.Tensor:
        """The answer to a request that says nothing of sampling."""
        scheduler, service = self.llm.engine.scheduler, self.llm.service
        eos = load_config(path).eos
        service.defaults = SamplingDefaults.read(path)
        service.eos = frozenset(eos)
        scheduler.limits = replace(scheduler.limits, eos=eos)
        requested = self.llm._chat_defaults(len(PROMPT))
        return torch.tensor(self.llm.generate([PROMPT], requested, use_tqdm=False)[0].outputs[0].token_ids).float()

    def reference(self, path: Path) -> torch.Tensor:
        from transformers import GenerationConfig

        ids = torch.tensor([PROMPT])
        made = GenerationConfig.from_pretrained(path)
        with torch.no_grad():
            out = self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=made)
        tokens: torch.Tensor = out[0, len(PROMPT) :].float()
        return tokens


@pytest.fixture(scope="module")
def pair(checkpoint: Callable[..., Path]) -> Any:
    made: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if name not in made:
            made[name] = Pair(Path(demo_path()) if name == "demo" else checkpoint(name))
        return made[name]

    yield get
    for one in made.values():
        one.llm.close()


def wrong(pair: Pair, tmp_path: Path, picked: list[tuple[str, Any, str]]) -> list[str]:
    lines = []
    base = altered(pair.source, tmp_path / "base", FILE, "max_new_tokens", LENGTH)
    second = int(pair.reference(base)[1])
    for i, (key, value, expected) in enumerate(picked):
        path = altered(base, tmp_path / str(i), FILE, key, [second] if value == "second" else value)
        found = verdict(lambda path=path: pair.ours(path), lambda path=path: pair.reference(path), key)
        if found != expected:
            lines.append(f"{key} = {'(none)' if value is GONE else value!r}: {found}, expected: {expected}")
    return lines


@pytest.mark.long
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_altered_key(pair: Any, tmp_path: Path, name: str) -> None:
    assert not wrong(pair(name), tmp_path, CASES)


def test_a_sample_of_altered_keys(pair: Any, tmp_path: Path) -> None:
    fixed = [case for case in CASES if case[0] in ("eos_token_id", "repetition_penalty", "min_new_tokens")]
    assert not wrong(pair("llama"), tmp_path, [*fixed, *random.Random(3).sample(CASES, 5)])


def test_sampling_with_one_candidate_and_the_length_of_both_together(pair: Any, tmp_path: Path) -> None:
    one = pair("llama")
    path = altered(one.source, tmp_path / "a", FILE, "max_length", len(PROMPT) + 6)
    assert one.ours(path).tolist() == one.reference(path).tolist() and len(one.ours(path)) == 6
    for key, value in (("do_sample", True), ("top_k", 1), ("temperature", 1.7)):
        path = altered(path, tmp_path / key, FILE, key, value)
    assert one.ours(path).tolist() == one.reference(path).tolist()


def write(folder: Path, **values: Any) -> Path:
    (folder / FILE).write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("key", NEUTRAL)
def test_what_is_not_implemented_is_refused_and_neutral_values_pass(tmp_path: Path, key: str) -> None:
    for value in (None, *NEUTRAL[key]):
        assert SamplingDefaults.read(write(tmp_path, **{key: value})) == SamplingDefaults()
    with pytest.raises(StartupError, match=rf"{FILE}: {key} is 7; .*--generation-config vllm"):
        SamplingDefaults.read(write(tmp_path, **{key: 7}))
    assert SamplingDefaults.read(tmp_path, "vllm") == SamplingDefaults()
    assert SamplingDefaults.read(tmp_path, override={key: None}) == SamplingDefaults()


def test_the_override_is_checked_and_wins(tmp_path: Path) -> None:
    path = write(tmp_path, do_sample=False, temperature=0.5, top_p=0.5)
    read = SamplingDefaults.read(path)
    assert read.greedy and read.get_temperature(1) == 0 and read.get_temperature(2) == 1
    assert SamplingDefaults.read(path, override={"temperature": 0.3}).get_temperature(1) == 0.3
    for wrong_one, part in (({"temprature": 1}, "did you mean temperature"), ({"top_p": 2}, "top_p is 2")):
        with pytest.raises(StartupError, match=part):
            SamplingDefaults.read(path, override=wrong_one)


def test_an_old_checkpoint_holds_them_in_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"temperature": 0.4, "hidden_size": 8, "num_beams": 1}))
    assert SamplingDefaults.read(tmp_path).values["temperature"] == 0.4
