"""Gemma-4 with quantised weights: stored in the forms that its checkpoints have, or rounded as they load."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from torch import Tensor

from tests.fakes.hand_driven_model import HandDrivenModel
from tests.families.test_same_tokens import CARDS
from tests.families.text_checkpoints import FORMS, family_checkpoint
from tests.quant import checkpoints as quantised
from trencadis import LLM, SamplingParams
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.models.model_loader import load_model

pytestmark = pytest.mark.part("quantised")


def every_linear(name: str, tensor: Tensor) -> bool:
    """Whether ``name`` is a weight that tools quantise unless a list leaves it out: routers, and the small matrices of
    embeddings for each layer, are linear layers too.
    """
    small = ("per_layer_input_gate", "per_layer_projection", "per_layer_model_projection", "router.proj")
    return quantised.linear(name, tensor) or any(name.endswith(f"{one}.weight") for one in small)


KINDS: dict[str, Callable[[Path, Path], tuple[Path, Path]]] = {
    "pack-quantized": lambda a, b: quantised.checkpoint(a, b, "pack-quantized", 4, 32, False, chosen=every_linear),
    "int-quantized": lambda a, b: quantised.checkpoint(a, b, "int-quantized", 8, 0, chosen=every_linear),
    "float-quantized": lambda a, b: quantised.fp8(a, b, "float-quantized", 1, chosen=every_linear),
    "fp8 in blocks": lambda a, b: quantised.fp8(a, b, "fp8", 16, 16, chosen=every_linear),
    "awq": lambda a, b: quantised.checkpoint(a, b, "awq", 4, 32, False),
    "gptq": lambda a, b: quantised.checkpoint(a, b, "gptq", 4, 32, True),
}
WIDTHS = {"vocab_size_per_layer_input": 344, "hidden_size_per_layer_input": 32}
"""Sizes that groups of 32 divide."""

CASES = [(form, kind) for form in FORMS["gemma4"] for kind in KINDS]
QUICK = [0, 8, 13, 18]
"""A share of the cases: each form under another kind."""

Files = Callable[[str, str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """``files(form, kind)``: (the quantised checkpoint, its twin), made once."""

    @cache
    def source(form: str) -> Path:
        wider = WIDTHS if FORMS["gemma4"][form].get("hidden_size_per_layer_input") else {}
        return family_checkpoint(tmp_path_factory.mktemp("gemma4"), family="gemma4", form=form, **wider)

    return cache(lambda form, kind: KINDS[kind](source(form), tmp_path_factory.mktemp("quantised")))


LONG = [pytest.param(*case, marks=[] if number in QUICK else pytest.mark.long) for number, case in enumerate(CASES)]


@pytest.mark.parametrize(("form", "kind"), LONG)
def test_stored_codes_answer_as_their_values(form: str, kind: str, files: Files) -> None:
    """Keys that are values, heads of two sizes, layers without keys and small matrices of other names are read."""
    ids = np.random.default_rng(0).integers(0, 300, 60).tolist()
    got, want = (HandDrivenModel(path, "padded", "reference").prefill(ids, 60) for path in files(form, kind))
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()


@pytest.mark.long
@pytest.mark.parametrize("flags", [{}, {"tensor_parallel_size": 2}, *CARDS.values()], ids=str)
@pytest.mark.parametrize(("form", "kind"), CASES)
def test_ranks_and_cards_answer_alike(
    form: str, kind: str, flags: dict[str, Any], files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where integers are multiplied, or activations rounded to 8 bits, a token near a tie may take another expert."""
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    got, want = (prompt_values(path, **flags) for path in files(form, kind))
    away = np.abs(got - want) / want.std()
    assert np.median(away) <= 0.12, (np.median(away), away.max())


def prompt_values(path: Path, **flags: Any) -> npt.NDArray[np.float64]:
    """The log-probabilities of the tokens of six prompts, given those before them."""
    llm = LLM(str(path), dtype="float32", max_model_len=128, max_num_seqs=3, kv_cache_memory_bytes=16 << 20, **flags)
    prompts = [[5 * n + i % 7 for i in range(3, 17 + n)] for n in range(6)]
    made = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1), use_tqdm=False)
    llm.close()
    return np.array([
        place[token].logprob
        for requested, one in zip(prompts, made, strict=True)
        for token, place in zip(requested, one.prompt_logprobs or (), strict=True)
        if place is not None
    ])  # fmt: skip


@pytest.mark.parametrize(
    "method", ["int4", pytest.param("int8", marks=pytest.mark.long), pytest.param("fp8", marks=pytest.mark.long)]
)
def test_weights_are_rounded_as_they_load_and_counted(method: str, files: Files) -> None:
    """What plans count of each layer is what the model holds."""
    import torch

    from trencadis.backends.cpu import make_backend
    from trencadis.core.device.backend import BackendConfig
    from trencadis.core.memory.memory_estimator import MemoryEstimator

    form = list(FORMS["gemma4"])[2]
    config = load_config(files(form, "awq")[1], method)
    backend = make_backend(BackendConfig(dtype=torch.bfloat16, options={"threads": "1"}))
    model = load_model(config, backend)
    sized = MemoryEstimator(config, 2, quantised=backend.policy.quantised)
    held = [layer.nbytes() for layer in model.layers]  # type: ignore[attr-defined]
    assert [sized.layer(place) for place in range(config.text.layers)] == held
