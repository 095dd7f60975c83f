"""Chats through the whole engine on the CUDA backend, its kernels interpreted: as transformers and the CPU answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.oracles.transformers_model import Oracle, assert_same, conversation
from tests.traffic.predicted_answers import predict
from trencadis import LLM, SamplingParams
from trencadis.backends.cuda import support_checks
from trencadis.backends.cuda.kernels.layers import fused_verify_attention
from trencadis.core.buckets import Stage

PIXELS: dict[str, Any] = {"min_pixels": 3136, "max_pixels": 12_544}
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_num_seqs": 3, "max_num_batched_tokens": 64, "max_model_len": 256,
    "kv_cache_memory_bytes": 4 << 20, "mm_processor_kwargs": PIXELS, "encoder_cache_images": 2,
}  # fmt: skip


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Iterator[Callable[..., LLM]]:
    """``cuda(path, **settings)``: an engine as ``--device cuda --enforce-eager`` starts it."""
    if device.type == "cpu":
        monkeypatch.setattr(support_checks, "pick_device", lambda *_: device)
    made: list[LLM] = []

    def start(path: Path, **settings: Any) -> LLM:
        made.append(LLM(str(path), **{**SETTINGS, "device": "cuda", "enforce_eager": True, **settings}))
        return made[-1]

    yield start
    for llm in made:
        llm.close()


GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, top_k=30, presence_penalty=0.3, seed=3, max_tokens=6, logprobs=3)


@pytest.mark.parametrize("params", [GREEDY, pytest.param(SAMPLED, marks=pytest.mark.long)], ids=["greedy", "sampled"])
def test_a_chat_with_an_image(vl_checkpoint: Path, cuda: Callable[..., LLM], params: SamplingParams) -> None:
    """The tokens that the CPU gives, by the code path of ``--device cuda``: plan, ledger, vision, chunks, decode."""
    chat, _ = conversation(np.random.default_rng(1), high=100, most=1)
    llm, cpu = cuda(vl_checkpoint), LLM(str(vl_checkpoint), device="cpu", **SETTINGS)
    ours, reference = (x.chat([chat], params)[0].outputs[0] for x in (llm, cpu))
    assert ours.token_ids == reference.token_ids
    assert llm.engine.info().device.startswith("cuda")
    cpu.close()


@pytest.mark.long
@pytest.mark.parametrize("depth", [0, 1])
def test_the_same_tokens_as_transformers(vl_checkpoint: Path, cuda: Callable[..., LLM], depth: int) -> None:
    """Eight chats at once, of up to two images: chunks, mixed launches, decode."""
    rng = np.random.default_rng(depth)
    oracle = Oracle(vl_checkpoint, **PIXELS)
    chats = [conversation(rng, high=150, most=2) for _ in range(8)]
    llm = cuda(vl_checkpoint, async_depth=depth, max_model_len=1024, kv_cache_memory_bytes=16 << 20)
    got = llm.chat([c for c, _ in chats], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    want = [oracle.answer(oracle.inputs(messages, images), 8) for messages, images in chats]
    assert_same([(g.outputs[0].token_ids, w) for g, w in zip(got, want, strict=True)])
    print(f"depth {depth}: {len(chats)} chats, {sum(len(g.outputs[0].token_ids) for g in got)} tokens, all the same")


def bits(outputs: list[Any]) -> list[Any]:
    """Tokens, and log-probabilities as they are."""
    return [(o.token_ids, [(x.logprob, *x.top_logprobs) for x in o.logprobs]) for o in (r.outputs[0] for r in outputs)]


@pytest.mark.long
@pytest.mark.parametrize(("all_images", "chunk"), [(0, 16), (1, 16), (1, 64)])
def test_batch_invariant(vl_checkpoint: Path, cuda: Callable[..., LLM], all_images: int, chunk: int) -> None:
    """The same bits alone and among others, in one chunk and in many, decoded alone and in mixed launches."""
    rng = np.random.default_rng(4)
    chats = [conversation(rng, high=100, most=all_images)[0] for _ in range(3)]
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=3, logprobs=5, ignore_eos=True)
    llm = cuda(vl_checkpoint, batch_invariant=True)
    alone = [bits(llm.chat([c], params))[0] for c in chats]
    assert bits(cuda(vl_checkpoint, batch_invariant=True, max_num_batched_tokens=chunk).chat(chats, params)) == alone


@pytest.mark.long
def test_batch_invariant_with_drafts(vl_checkpoint: Path, cuda: Callable[..., LLM]) -> None:
    """Tokens and scores of VERIFY launches have the bits of those without; some drafts are right and some wrong."""
    rng = np.random.default_rng(6)
    chats = [conversation(rng, high=80, most=most)[0] for most in (0, 1)]
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=8, logprobs=5, ignore_eos=True)
    plain = bits(cuda(vl_checkpoint, batch_invariant=True).chat(chats, params))
    llm = cuda(vl_checkpoint, batch_invariant=True, spec_method="ngram", spec_tokens=3, spec_always=True)
    predict(llm, [[id + (at == 2) for at, id in enumerate(ids)] for ids, _ in plain])
    assert bits(llm.chat(chats, params)) == plain
    totals = llm.engine.scheduler.totals
    assert 4 <= totals.spec_accepted < totals.spec_draft_tokens
    assert any(b.stage is Stage.VERIFY for b in llm.engine.executor._rank.graphs.hits)  # type: ignore[attr-defined]


@pytest.mark.long
def test_drafts_change_no_answer(
    vl_checkpoint: Path, cuda: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """VERIFY by layers of six launches: the greedy answers of DECODE."""
    attend, fused = fused_verify_attention.attend, list[int]()

    def noted(qkv: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        fused.append(len(qkv))
        return attend(qkv, *args, **more)

    rng = np.random.default_rng(7)
    chats = [conversation(rng, high=80, most=most)[0] for most in (0, 1)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    plain = [r.outputs[0].token_ids for r in cuda(vl_checkpoint, speculation=False).chat(chats, params)]
    llm = cuda(vl_checkpoint, spec_method="ngram", spec_tokens=3, spec_always=True)
    predict(llm, plain)
    monkeypatch.setattr(fused_verify_attention, "attend", noted)
    assert [r.outputs[0].token_ids for r in llm.chat(chats, params)] == plain
    assert llm.engine.scheduler.totals.spec_accepted >= 8
    assert 8 in fused, "two rows of a token and three drafts"


def test_batch_invariant_takes_one_card(vl_checkpoint: Path, cuda: Callable[..., LLM]) -> None:
    from trencadis.backends.cuda import make_backend
    from trencadis.core.device.backend import BackendConfig
    from trencadis.core.errors import StartupError

    with pytest.raises(StartupError, match=r"--tensor-parallel-size 1, not 2$"):
        make_backend(BackendConfig(block_size=16, heads=4, kv_heads=2, head_dim=16, batch_invariant=True, world=2))
    with pytest.raises(StartupError, match="the twin of a card does not promise it"):
        make_backend(BackendConfig(block_size=16, batch_invariant=True, options={"policy": "twin"}))


def test_a_library_that_sums_by_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from trencadis.backends.cpu.reference_ops import ReferenceOps
    from trencadis.backends.cuda.ops import InvariantCudaOps
    from trencadis.core.errors import StartupError

    plain = ReferenceOps.linear

    def careless(self: Any, x: torch.Tensor, w: Any) -> torch.Tensor:
        return plain(self, x, w) * (1 + 1e-6 * (torch.arange(len(x)) % 4))[:, None]

    weight = torch.randn(24, 32)
    InvariantCudaOps().pack_weight(weight)
    monkeypatch.setattr(ReferenceOps, "linear", careless)
    with pytest.raises(StartupError, match="--batch-invariant: on this device"):
        InvariantCudaOps().pack_weight(weight)
