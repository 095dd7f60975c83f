"""A smaller model drafts: answers are those without it, whatever it expects, and a good one is accepted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.adapters import adapter_of
from tests.oracles.transformers_model import GAP
from tests.speculation.test_cpu_answers import LENGTH, engine_of, run
from tests.speculation.test_families import answers, gap_at, prompts
from trencadis.core.engine.engine import Engine
from trencadis.core.errors import StartupError
from trencadis.core.kv.block_pool import BlockPool
from trencadis.core.request import Request, SamplingParams
from trencadis.core.scheduling.draft_scheduler import DraftScheduler
from trencadis.core.scheduling.sequence import Sequence

ALONE: dict[str, Any] = {
    "batch_invariant": False, "max_model_len": 384, "num_gpu_blocks_override": 200, "max_num_batched_tokens": 256,
    "encoder_cache_images": None, "mm_processor_kwargs": {},
}  # fmt: skip
Make = Callable[..., Path]


def drafted_by(path: Path, draft: Path, drafts: int = 4, **flags: Any) -> Engine:
    """An engine of ``path`` whose drafts ``draft`` makes."""
    asked = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": drafts}
    return engine_of(path, speculative_config=asked, spec_always=True, **flags)


def gap_after(path: Path, tokens: list[int]) -> float:
    """By how much the best log-probability after ``tokens`` is above the second best."""
    return gap_at(engine_of(path, speculation=False, **ALONE), tokens, [])


def test_a_model_accepts_its_own_drafts(checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Except where its two best ids are as good as equal: launches of one row and of five may choose either."""
    path = checkpoint("qwen2")
    plain = answers(engine_of(path, speculation=False, **ALONE), 40)
    engine = drafted_by(path, path, **ALONE)
    rejected, note = list[list[int]](), DraftScheduler.note

    def noted(self: DraftScheduler, seq: Sequence, drafted: int, accepted: int) -> None:
        note(self, seq, drafted, accepted)
        if accepted < drafted and not seq.ended:
            rejected.append(list(seq.tokens[:-1]))

    monkeypatch.setattr(DraftScheduler, "note", noted)
    drafted = answers(engine, 40)
    assert engine.scheduler.totals.spec_accepted > 150
    assert all(gap_after(path, tokens) < GAP for tokens in rejected)
    for number, prompt in enumerate(prompts(6, 90)):
        a, b = plain[f"r{number}", 0], drafted[f"r{number}", 0]
        if a != b:
            at = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
            assert gap_after(path, [*prompt, *a[:at]]) < GAP


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen2"])
def test_another_model_changes_no_answer(kind: str, checkpoint: Make, vl_checkpoint: Path) -> None:
    """Requests with images, every sampling field and grammars, in a pool that preempts; the draft knows nothing."""
    plain = run(engine_of(vl_checkpoint, speculation=False), 3, 16)
    draft = checkpoint(kind, seed=9)
    for drafts, flags in ((1, {"async_depth": 1}), (4, {"enable_prefix_caching": False})):
        engine = drafted_by(vl_checkpoint, draft, drafts, **flags)
        found = run(engine, 3, 16)
        assert (found.tokens, found.scores, found.ended) == (plain.tokens, plain.scores, plain.ended)
        assert engine.scheduler.totals.spec_draft_tokens > 30


def test_draws_of_the_same_number_are_accepted(vl_checkpoint: Path) -> None:
    """A model as its own draft draws what it will draw; its likeliest ids are accepted less often."""
    found = []
    for engine in (engine_of(vl_checkpoint, speculation=False), drafted_by(vl_checkpoint, vl_checkpoint, 3)):
        for seed in range(3):
            params = SamplingParams(temperature=1.0, top_p=0.95, seed=seed, max_tokens=40, ignore_eos=True)
            engine.add(Request(f"r{seed}", [5, 6, 7], params))
        tokens: dict[str, list[int]] = {}
        while not engine.idle():
            for delta in engine.step():
                tokens.setdefault(delta.id, []).extend(delta.tokens)
        engine.close()
        found.append(tokens)
    assert found[0] == found[1]
    totals = engine.scheduler.totals
    assert totals.spec_accepted > 0.7 * totals.spec_draft_tokens


def test_blocks_are_held_for_the_call_alone(vl_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the draft model takes comes back before the step is built, also where only some fit."""
    engine = drafted_by(vl_checkpoint, vl_checkpoint, 7, num_gpu_blocks_override=-(-LENGTH // 16) + 1)
    taken: list[int] = []
    take = BlockPool.take

    def noted(pool: BlockPool, count: int) -> Any:
        taken.append(count)
        return take(pool, count)

    monkeypatch.setattr(BlockPool, "take", noted)
    run(engine, 7, 12)
    assert taken and engine.scheduler.totals.preemptions


def broken(path: Path, folder: Path, **changes: Any) -> Path:
    """A copy of a checkpoint with other values in its config.json."""
    shutil.copytree(path, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def test_what_cannot_draft_is_refused_in_one_line(vl_checkpoint: Path, checkpoint: Make, tmp_path: Path) -> None:
    other = broken(checkpoint("qwen2"), tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["added_tokens"][0]["id"], tokenizer["added_tokens"][1]["id"] = 321, 320
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    cases: list[tuple[str, dict[str, Any], str]] = [
        (str(checkpoint("qwen2", vocab_size=352)), {}, "has 352 ids and"),
        (str(tmp_path / "none"), {}, "is no folder of a checkpoint"),
        (str(adapter_of(vl_checkpoint, tmp_path / "adapter")), {}, "is a LoRA adapter, and a draft model takes none"),
        (str(broken(checkpoint("qwen2"), tmp_path / "short", max_position_embeddings=64)), {}, "--max-model-len 64"),
        (str(other), {}, "the tokenizers of other and"),
        (str(checkpoint("qwen2")), {"tensor_parallel_size": 2}, "leave out -tp and -pp"),
        (str(checkpoint("qwen2")), {"packed_weights_dir": "p"}, "leave out --packed-weights-dir"),
    ]
    for draft, flags, words in cases:
        with pytest.raises(StartupError) as error:
            drafted_by(vl_checkpoint, Path(draft), **flags)
        assert words in str(error.value) and "\n" not in str(error.value), (draft, error.value)
    with pytest.raises(StartupError, match="must be the folder of a checkpoint"):
        engine_of(vl_checkpoint, speculative_config={"method": "draft_model"})
