# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project

import math
from types import SimpleNamespace

import pytest
import torch

from vllm.v1.spec_decode.fly import compute_fly_entropy
from vllm.v1.watermarking import GumbelWatermarker
from vllm.v1.watermarking.spec_decode import watermarked_rejection_sample
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.watermark import philox_gumbel_sample
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    RejectionSampler,
    gather_draft_sampled,
)
from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import (
    rejection_sample,
)

VOCAB_SIZE = 4096

# Skip if no CUDA - Triton kernel requires GPU
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("CUDA required for rejection sampler tests", allow_module_level=True)


def _build_rejection_sample_inputs(
    target_logits_1d: torch.Tensor,
    draft_logits_1d: torch.Tensor,
    num_speculative_steps: int,
    temperature: float,
    num_trials: int,
) -> dict:
    """Build rejection_sample kwargs from a fixed target and draft distribution.

    target_logits_1d must already have temperature applied (the sampler applies
    sampling params before verification), whereas draft_logits_1d must not:
    rejection_sample divides the draft logits by the temperature on load.
    """
    device = target_logits_1d.device
    vocab_size = target_logits_1d.shape[0]
    K = num_speculative_steps
    num_logits = num_trials * (K + 1)

    target_logits = target_logits_1d.unsqueeze(0).expand(num_logits, -1).contiguous()
    draft_logits = (
        draft_logits_1d.view(1, 1, vocab_size).expand(num_trials, K, -1).contiguous()
    )

    scaled_draft_logits_1d = draft_logits_1d.float()
    if temperature > 0:
        scaled_draft_logits_1d = scaled_draft_logits_1d / temperature
    draft_probs = torch.softmax(scaled_draft_logits_1d, dim=0)
    draft_tokens = torch.multinomial(
        draft_probs.expand(num_trials, -1), K, replacement=True
    )
    draft_sampled_2d = torch.zeros(num_trials, K + 1, dtype=torch.int64, device=device)
    draft_sampled_2d[:, 1:] = draft_tokens
    draft_sampled = draft_sampled_2d.reshape(-1)

    cu_num_logits = torch.arange(num_trials + 1, dtype=torch.int32, device=device) * (
        K + 1
    )
    pos = torch.arange(num_logits, dtype=torch.int32, device=device)
    idx_mapping = torch.arange(num_trials, dtype=torch.int32, device=device)
    expanded_idx_mapping = torch.arange(
        num_trials, dtype=torch.int32, device=device
    ).repeat_interleave(K + 1)
    expanded_local_pos = torch.arange(K + 1, dtype=torch.int32, device=device).repeat(
        num_trials
    )
    temp_tensor = torch.full(
        (num_trials,), temperature, dtype=torch.float32, device=device
    )
    seed = torch.arange(num_trials, dtype=torch.int64, device=device)

    return dict(
        target_logits=target_logits,
        draft_logits=draft_logits,
        draft_sampled=draft_sampled,
        cu_num_logits=cu_num_logits,
        pos=pos,
        idx_mapping=idx_mapping,
        expanded_idx_mapping=expanded_idx_mapping,
        expanded_local_pos=expanded_local_pos,
        temperature=temp_tensor,
        seed=seed,
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("has_draft_logits", [False, True])
@pytest.mark.parametrize("top_k", [1, 3])
def test_fly_requires_entropy_and_native_lookahead(
    temperature: float, has_draft_logits: bool, top_k: int
):
    """Defer only supported rejections with a full, natively accepted window."""
    device = "cuda"
    inputs = _build_rejection_sample_inputs(
        torch.zeros(10, device=device),
        torch.zeros(10, device=device),
        num_speculative_steps=4,
        temperature=temperature,
        num_trials=7,
    )
    # Full window, low entropy, masked token, consecutive rejections,
    # short request, placeholder draft, and bonus-only request.
    counts = [5, 5, 5, 5, 3, 5, 1]
    target_probs = torch.zeros(7, 5, 10, device=device)
    target_probs[:, 0, 7:10] = torch.tensor([1e-12, 0.5, 0.5], device=device)
    for row, token in enumerate([2, 3, 4, 8], start=1):
        target_probs[:, row, token] = 1.0
    target_probs[1, 0, 8:10] = torch.tensor([1.0, 0.0], device=device)
    target_probs[2, 0, 7] = 0.0
    target_probs[3, 1, 2] = 1e-12
    target_probs[3, 1, 8:10] = 0.5
    draft_tokens = inputs["draft_sampled"].view(7, 5)
    draft_tokens[:, 1:] = torch.tensor([7, 2, 3, 4], device=device)
    draft_tokens[5, 2] = -1
    if has_draft_logits:
        inputs["draft_logits"].fill_(float("-inf"))
        for step, token in enumerate([7, 2, 3, 4]):
            inputs["draft_logits"][:, step, token] = 0.0
    else:
        inputs["draft_logits"] = None
    rows = torch.tensor(
        [req * 5 + row for req, count in enumerate(counts) for row in range(count)],
        device=device,
    )
    inputs["target_logits"] = target_probs.log().view(-1, 10)[rows]
    for key in ("draft_sampled", "pos", "expanded_idx_mapping", "expanded_local_pos"):
        inputs[key] = inputs[key][rows]
    inputs["cu_num_logits"] = torch.tensor(
        [0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=device
    )

    sampled, num_sampled = rejection_sample(
        **inputs,
        num_speculative_steps=4,
        fly_window_size=2,
        fly_entropy_threshold=0.5,
        fly_entropy_top_k=top_k,
    )
    assert num_sampled.tolist() == [5 if top_k == 3 else 1, 1, 1, 1, 1, 1, 1]
    if top_k == 3:
        assert sampled[0].tolist() == [7, 2, 3, 4, 8]
    else:
        assert sampled[0, 0].item() >= 8
    assert sampled[1:6, 0].min().item() >= 8


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("failing_step", [None, 2, 5])
def test_fly_pending_window_preserves_recovery_position(
    temperature: float, failing_step: int | None
):
    """A failed window recovers at its first rejection using that position's p/q."""
    device = "cuda"
    num_steps, vocab_size, num_trials = 7, 16, 32
    draft_ids = torch.arange(1, num_steps + 1, device=device)
    steps = torch.arange(num_steps, device=device)
    draft_probs = torch.zeros(num_steps, vocab_size, device=device)
    draft_probs[steps, draft_ids] = 0.8
    draft_probs[:, -1] = 0.2
    target_probs = torch.zeros(num_steps + 1, vocab_size, device=device)
    target_probs[steps, draft_ids] = 0.9
    target_probs[:-1, -1] = 0.1
    target_probs[-1, -2:] = torch.tensor([0.7, 0.3], device=device)
    # Distinct normalizers expose accidentally overwritten recovery statistics.
    shifts = torch.arange(num_steps + 1, device=device)[:, None] * 11
    native_logits = target_probs.log() + shifts
    rejections = [0, 3] + ([] if failing_step is None else [failing_step])
    target_probs[rejections] = 0
    target_probs[rejections, draft_ids[rejections]] = 1e-12
    target_probs[rejections, -2:] = torch.tensor([0.7, 0.3], device=device)
    inputs = _build_rejection_sample_inputs(
        native_logits[0], draft_probs[0].log(), num_steps, temperature, num_trials
    )
    inputs["target_logits"] = (target_probs.log() + shifts).repeat(num_trials, 1)
    inputs["draft_logits"] = (
        draft_probs.log() * (temperature if temperature > 0 else 1) + steps[:, None] * 7
    ).repeat(num_trials, 1, 1)
    inputs["draft_sampled"].view(num_trials, num_steps + 1)[:, 1:] = draft_ids
    rejected_step = (
        num_steps if failing_step is None else (0 if failing_step == 2 else 3)
    )
    reference_inputs = dict(inputs)
    reference_logits = (
        inputs["target_logits"].clone().view(num_trials, num_steps + 1, vocab_size)
    )
    for step in (0, 3):
        if step < rejected_step:
            reference_logits[:, step] = native_logits[step]
    reference_inputs["target_logits"] = reference_logits.flatten(0, 1)
    expected, expected_counts = rejection_sample(
        **reference_inputs, num_speculative_steps=num_steps
    )
    sampled, counts = rejection_sample(
        **inputs, num_speculative_steps=num_steps, fly_window_size=2
    )
    assert counts.tolist() == [rejected_step + 1] * num_trials
    assert torch.equal(counts, expected_counts)
    assert torch.equal(
        sampled[:, : rejected_step + 1], expected[:, : rejected_step + 1]
    )


@pytest.mark.parametrize("top_k", [1, 3, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fly_entropy_from_logits_matches_probabilities(
    top_k: int,
    dtype: torch.dtype,
):
    """Logits match probability-based entropy with masking and top-k clipping."""
    torch.manual_seed(7)
    logits = torch.randn(2, 20, dtype=dtype, device="cuda")[:, :17]
    logits[0, 0] = -30
    logits[0, 3] = -float("inf")
    logits[1] = -float("inf")
    logits[1, 1] = 0
    reference_entropy = compute_fly_entropy(
        logits.softmax(-1, dtype=torch.float32), top_k
    )
    torch.testing.assert_close(
        compute_fly_entropy(logits, top_k, from_logits=True),
        reference_entropy,
        atol=1e-5,
        rtol=1e-5,
    )


def _assert_distribution_match(
    sampled_tokens: torch.Tensor,
    target_probs: torch.Tensor,
    device: str,
    label: str = "",
    min_expected: float = 5.0,
):
    """Assert sampled tokens match the target distribution via a
    chi-squared goodness-of-fit test. This is done by computing
    observed vs expected token counts (target_probs * num_samples),
    then checking that the chi-squared statistic is below a conservative
    threshold. The threshold is set at df + 10*sqrt(2*df), which
    corresponds to ~10 sigma under the chi-squared distribution's
    normal approximation, effectively disallowing false positives.

    NOTE: Tokens with expected count < min_expected are merged into
    a single "other" bin to minimize chi-squared noise.
    """
    num_samples = sampled_tokens.shape[0]
    vocab_size = target_probs.shape[0]

    observed = torch.zeros(vocab_size, device=device, dtype=torch.float32)
    observed.scatter_add_(0, sampled_tokens, torch.ones(num_samples, device=device))
    expected = target_probs * num_samples

    sufficient = expected >= min_expected
    obs_main = observed[sufficient]
    exp_main = expected[sufficient]

    obs_other = observed[~sufficient].sum().unsqueeze(0)
    exp_other = expected[~sufficient].sum().unsqueeze(0)

    if exp_other.item() >= min_expected:
        obs_all = torch.cat([obs_main, obs_other])
        exp_all = torch.cat([exp_main, exp_other])
    else:
        obs_all = obs_main
        exp_all = exp_main

    chi2 = ((obs_all - exp_all) ** 2 / exp_all).sum().item()
    df = obs_all.shape[0] - 1
    if df < 1:
        # All samples were merged into < 2 bins, which is too
        # few to evaluate.
        return

    threshold = df + 10 * math.sqrt(2 * df)
    prefix = f"[{label}] " if label else ""
    assert chi2 < threshold, (
        f"{prefix}Chi-squared test failed: chi2={chi2:.1f}, "
        f"df={df}, threshold={threshold:.1f}. "
        f"Output distribution does not match target distribution."
    )


def test_watermarked_bonus_uses_target_key():
    target_logits = torch.randn(16, device="cuda")
    inputs = _build_rejection_sample_inputs(
        target_logits,
        target_logits,
        num_speculative_steps=1,
        temperature=1.0,
        num_trials=1,
    )
    draft_token = inputs["draft_sampled"][1]
    contexts = torch.tensor(
        [[10, 11], [11, draft_token.item()]], dtype=torch.int64, device="cuda"
    )

    sampled, num_sampled = watermarked_rejection_sample(
        **inputs,
        num_speculative_steps=1,
        contexts=contexts,
        watermarking=torch.tensor([True], device="cuda"),
        watermarker=GumbelWatermarker(key=42, context_width=2),
    )
    expected = GumbelWatermarker(key=42, context_width=2).sample(
        target_logits.unsqueeze(0), contexts[1:]
    )

    assert num_sampled.item() == 2
    assert sampled[0, 1] == expected.token_ids[0]


def test_watermarked_recovery_uses_target_key():
    target_logits = torch.tensor([float("-inf"), 0.0, 1.0, 2.0], device="cuda")
    draft_logits = torch.tensor([100.0, -100.0, -100.0, -100.0], device="cuda")
    inputs = _build_rejection_sample_inputs(
        target_logits,
        draft_logits,
        num_speculative_steps=1,
        temperature=1.0,
        num_trials=1,
    )
    inputs["draft_sampled"][1] = 0
    contexts = torch.tensor([[10, 11], [11, 0]], dtype=torch.int64, device="cuda")

    sampled, num_sampled = watermarked_rejection_sample(
        **inputs,
        num_speculative_steps=1,
        contexts=contexts,
        watermarking=torch.tensor([True], device="cuda"),
        watermarker=GumbelWatermarker(key=42, context_width=2),
    )
    expected = GumbelWatermarker(key=42, context_width=2).sample(
        target_logits.unsqueeze(0), contexts[:1]
    )

    assert num_sampled.item() == 1
    assert sampled[0, 0] == expected.token_ids[0]


def test_repeated_draft_context_does_not_change_acceptance():
    torch.manual_seed(0)
    num_trials = 8
    # A draft distribution of its own, so the drafts are not accepted outright.
    target_logits = torch.randn(64, device="cuda")
    draft_logits = torch.randn(64, device="cuda")
    inputs = _build_rejection_sample_inputs(
        target_logits,
        draft_logits,
        num_speculative_steps=1,
        temperature=1.0,
        num_trials=num_trials,
    )
    expected, expected_num_sampled = rejection_sample(**inputs, num_speculative_steps=1)

    sampled, num_sampled = watermarked_rejection_sample(
        **inputs,
        num_speculative_steps=1,
        contexts=torch.tensor([[10, 11], [11, 12]], device="cuda").repeat(
            num_trials, 1
        ),
        watermarking=torch.ones(num_trials, dtype=torch.bool, device="cuda"),
        watermarking_skip_mask=torch.tensor([True, False], device="cuda").repeat(
            num_trials
        ),
        watermarker=GumbelWatermarker(key=42, context_width=2),
    )

    # Some drafts must actually be rejected, or the ordinary-residual branch
    # the skip mask selects is never reached.
    assert (expected_num_sampled == 1).any()
    torch.testing.assert_close(num_sampled, expected_num_sampled, rtol=0, atol=0)
    torch.testing.assert_close(sampled[:, :1], expected[:, :1], rtol=0, atol=0)


def test_repeated_context_skip_mask_is_read_per_row_in_a_block():
    """A block of three drafts, accepted at row 0 and rejected at row 1.

    The skip mask selects the sampler per row, so the row the target recovers
    at decides which key draws the recovery token.
    """
    num_speculative_steps = 3
    target_logits = torch.tensor([float("-inf"), 0.0, 1.0, 2.0], device="cuda")
    draft_logits = torch.tensor([30.0, -30.0, -30.0, -30.0], device="cuda")
    inputs = _build_rejection_sample_inputs(
        target_logits,
        draft_logits,
        num_speculative_steps=num_speculative_steps,
        temperature=1.0,
        num_trials=1,
    )
    # Row 0 drafts a token the target gives 0.67 and the draft e**-60, so it is
    # accepted; row 1 drafts a token the target gives no mass, so it is not.
    inputs["draft_sampled"][1] = 3
    inputs["draft_sampled"][2] = 0
    contexts = torch.tensor(
        [[10, 11], [11, 3], [3, 0], [0, 1]], dtype=torch.int64, device="cuda"
    )
    expected, expected_num_sampled = rejection_sample(
        **inputs, num_speculative_steps=num_speculative_steps
    )
    assert expected_num_sampled.item() == 2
    assert expected[0, 0].item() == 3

    watermarker = GumbelWatermarker(key=42, context_width=2)
    skipped, skipped_num_sampled = watermarked_rejection_sample(
        **inputs,
        num_speculative_steps=num_speculative_steps,
        contexts=contexts,
        watermarking=torch.tensor([True], device="cuda"),
        watermarking_skip_mask=torch.tensor([False, True, False, False], device="cuda"),
        watermarker=watermarker,
    )

    assert skipped_num_sampled.item() == 2
    torch.testing.assert_close(skipped[:, :2], expected[:, :2], rtol=0, atol=0)

    watermarked, watermarked_num_sampled = watermarked_rejection_sample(
        **inputs,
        num_speculative_steps=num_speculative_steps,
        contexts=contexts,
        watermarking=torch.tensor([True], device="cuda"),
        watermarking_skip_mask=torch.zeros(
            num_speculative_steps + 1, dtype=torch.bool, device="cuda"
        ),
        watermarker=watermarker,
    )
    # The residual equals the target to within e**-60, so the recovery token is
    # the target key's draw on the rejected row's context.
    recovery = GumbelWatermarker(key=42, context_width=2).sample(
        target_logits.unsqueeze(0), contexts[1:2], lambda _: None
    )

    assert watermarked_num_sampled.item() == 2
    assert watermarked[0, 0].item() == 3
    assert watermarked[0, 1] == recovery.token_ids[0]


def test_repeated_recovery_context_uses_ordinary_residual_sample():
    target_logits = torch.tensor([float("-inf"), 0.0, 1.0, 2.0], device="cuda")
    draft_logits = torch.tensor([100.0, -100.0, -100.0, -100.0], device="cuda")
    inputs = _build_rejection_sample_inputs(
        target_logits,
        draft_logits,
        num_speculative_steps=1,
        temperature=1.0,
        num_trials=1,
    )
    inputs["draft_sampled"][1] = 0
    expected, expected_num_sampled = rejection_sample(**inputs, num_speculative_steps=1)

    sampled, num_sampled = watermarked_rejection_sample(
        **inputs,
        num_speculative_steps=1,
        contexts=torch.tensor([[10, 11], [11, 0]], device="cuda"),
        watermarking=torch.tensor([True], device="cuda"),
        watermarking_skip_mask=torch.tensor([True, False], device="cuda"),
        watermarker=GumbelWatermarker(key=42, context_width=2),
    )

    torch.testing.assert_close(num_sampled, expected_num_sampled, rtol=0, atol=0)
    torch.testing.assert_close(sampled[:, :1], expected[:, :1], rtol=0, atol=0)


def test_repeated_bonus_context_uses_ordinary_target_sample():
    target_logits = torch.randn(64, device="cuda")
    inputs = _build_rejection_sample_inputs(
        target_logits,
        target_logits,
        num_speculative_steps=1,
        temperature=1.0,
        num_trials=1,
    )
    expected, expected_num_sampled = rejection_sample(**inputs, num_speculative_steps=1)

    sampled, num_sampled = watermarked_rejection_sample(
        **inputs,
        num_speculative_steps=1,
        contexts=torch.tensor([[10, 11], [11, 12]], device="cuda"),
        watermarking=torch.tensor([True], device="cuda"),
        watermarking_skip_mask=torch.tensor([False, True], device="cuda"),
        watermarker=GumbelWatermarker(key=42, context_width=2),
    )

    torch.testing.assert_close(num_sampled, expected_num_sampled, rtol=0, atol=0)
    torch.testing.assert_close(sampled[:, :2], expected[:, :2], rtol=0, atol=0)


def test_repeated_context_does_not_change_unwatermarked_or_greedy_rows():
    target_logits = torch.randn(64, device="cuda")
    inputs = _build_rejection_sample_inputs(
        target_logits,
        target_logits,
        num_speculative_steps=1,
        temperature=1.0,
        num_trials=2,
    )
    inputs["temperature"][1] = 0
    expected, expected_num_sampled = rejection_sample(**inputs, num_speculative_steps=1)

    sampled, num_sampled = watermarked_rejection_sample(
        **inputs,
        num_speculative_steps=1,
        contexts=torch.tensor([[10, 11], [11, 12], [20, 21], [21, 22]], device="cuda"),
        watermarking=torch.tensor([False, True], device="cuda"),
        watermarking_skip_mask=torch.ones(4, dtype=torch.bool, device="cuda"),
        watermarker=GumbelWatermarker(key=42, context_width=2),
    )

    torch.testing.assert_close(num_sampled, expected_num_sampled, rtol=0, atol=0)
    for row, length in enumerate(num_sampled):
        torch.testing.assert_close(
            sampled[row, : int(length)], expected[row, : int(length)], rtol=0, atol=0
        )


def test_watermarked_recovery_supports_smaller_draft_vocabulary():
    target_logits = torch.tensor([float("-inf"), 0.0, 1.0, 2.0, 100.0], device="cuda")
    draft_logits = torch.tensor([100.0, -100.0, -100.0, -100.0], device="cuda")
    inputs = _build_rejection_sample_inputs(
        target_logits[:4],
        draft_logits,
        num_speculative_steps=1,
        temperature=1.0,
        num_trials=1,
    )
    inputs["target_logits"] = target_logits.unsqueeze(0).expand(2, -1).contiguous()
    inputs["draft_sampled"][1] = 0
    contexts = torch.tensor([[10, 11], [11, 0]], dtype=torch.int64, device="cuda")
    watermarker = GumbelWatermarker(key=42, context_width=2)

    sampled, num_sampled = watermarked_rejection_sample(
        **inputs,
        num_speculative_steps=1,
        contexts=contexts,
        watermarking=torch.tensor([True], device="cuda"),
        watermarker=watermarker,
    )
    expected = watermarker.sample(target_logits[:4].unsqueeze(0), contexts[:1])

    assert num_sampled.item() == 1
    assert sampled[0, 0] == expected.token_ids[0]


@pytest.mark.parametrize(
    "num_speculative_steps,temperature",
    [
        (1, 0.6),
        (3, 0.6),
        (1, 1.0),
        (3, 1.0),
    ],
)
@pytest.mark.parametrize("draft_logits_dtype", [torch.float32, torch.bfloat16])
def test_stochastic_rejection_sample(
    num_speculative_steps: int, temperature: float, draft_logits_dtype: torch.dtype
):
    """Verify that rejection sampling produces the target distribution.
    This is done by simulating many independent trials of speculative
    decoding (from a fixed target and draft distribution). We then
    run rejection sample on all of the trials (requests), and verify
    that the sampled tokens at every position follow the target
    distribution p(x).

    Parametrized over the draft-logits dtype: storing them in the draft head's
    dtype must not bias the output distribution.
    """
    torch.manual_seed(42)
    device = "cuda"
    num_trials = 10 * VOCAB_SIZE

    target_logits_1d = torch.randn(VOCAB_SIZE, device=device, dtype=torch.float32)
    draft_logits_1d = torch.randn(VOCAB_SIZE, device=device, dtype=torch.float32).to(
        draft_logits_dtype
    )

    if temperature > 0:
        target_logits_1d /= temperature

    inputs = _build_rejection_sample_inputs(
        target_logits_1d,
        draft_logits_1d,
        num_speculative_steps,
        temperature=temperature,
        num_trials=num_trials,
    )

    sampled, num_sampled = rejection_sample(
        **inputs, num_speculative_steps=num_speculative_steps
    )

    target_probs = torch.softmax(target_logits_1d, dim=0)
    for pos in range(num_speculative_steps + 1):
        accepted_mask = num_sampled >= pos + 1
        _assert_distribution_match(
            sampled[accepted_mask, pos], target_probs, device, label=f"position {pos}"
        )


# The test above spreads its samples too thin to resolve a small distributional
# bias: VOCAB_SIZE bins over 10 * VOCAB_SIZE trials is ~10 samples per bin.
# Sixteen bins over 200K trials is ~12K per bin, which resolves a few percent.
NARROW_VOCAB_SIZE = 16
NARROW_NUM_TRIALS = 200_000


def _gumbel_drafted_tokens(
    inputs: dict,
    draft_logits_1d: torch.Tensor,
    num_trials: int,
    num_speculative_steps: int,
) -> torch.Tensor:
    """Proposals drawn with gumbel_sample, shaped like inputs["draft_sampled"].

    _build_rejection_sample_inputs draws them with torch.multinomial, which is
    independent of the resample noise by construction. Production drafts come
    from gumbel_sample keyed by pos[t * (K + 1) + i] for step i of trial t --
    the same entry _rejection_kernel and _resample_kernel read for that token --
    so the draft and the residual compete for one noise stream.
    """
    k = num_speculative_steps
    vocab_size = draft_logits_1d.shape[0]
    device = draft_logits_1d.device
    draft_tokens = gumbel_sample(
        draft_logits_1d.unsqueeze(0).expand(num_trials * k, vocab_size).float(),
        inputs["expanded_idx_mapping"]
        .view(num_trials, k + 1)[:, :k]
        .reshape(-1)
        .contiguous(),
        inputs["temperature"],
        inputs["seed"],
        inputs["pos"].view(num_trials, k + 1)[:, :k].reshape(-1).contiguous(),
        apply_temperature=True,
        is_drafting=True,
    )
    draft_sampled = torch.zeros(num_trials * (k + 1), dtype=torch.int64, device=device)
    draft_sampled.view(num_trials, k + 1)[:, 1:] = draft_tokens.view(num_trials, k)
    return draft_sampled


@pytest.mark.parametrize("num_speculative_steps", [1, 3])
def test_gumbel_drafted_rejection_sample_is_unbiased(num_speculative_steps: int):
    """The proposal and the residual resample must not share a noise vector.

    Draws proposals on the same (seed, pos) stream the sampler verifies and
    resamples with, then checks the output still follows the target. Conditioned
    on a proposal winning the argmax, every other token's Gumbel is truncated
    below that max -- most tightly for the tokens the draft ranked highest -- so
    a shared stream makes the residual under-weight exactly those tokens.

    Runs narrow because the wide-vocab test above cannot resolve this: dropping
    `is_drafting=True` in _gumbel_drafted_tokens takes position 0 from chi2 ~12 to
    ~1500 against a threshold of ~70 here, while leaving that test passing.
    """
    torch.manual_seed(42)
    device = "cuda"

    # A draft that ranks tokens in exactly the opposite order rejects ~73% of
    # proposals, so most trials reach the residual resample where the bias
    # lives. The disagreement has to be constructed rather than sampled: two
    # independent randn draws land close together often enough that the signal
    # swings between chi2 ~14 and ~1900 depending on the seed. At temperature
    # 1.0 the target needs no scaling before being passed in.
    target_logits_1d = torch.randn(
        NARROW_VOCAB_SIZE, device=device, dtype=torch.float32
    )
    draft_logits_1d = -target_logits_1d

    inputs = _build_rejection_sample_inputs(
        target_logits_1d,
        draft_logits_1d,
        num_speculative_steps,
        temperature=1.0,
        num_trials=NARROW_NUM_TRIALS,
    )
    inputs["draft_sampled"] = _gumbel_drafted_tokens(
        inputs, draft_logits_1d, NARROW_NUM_TRIALS, num_speculative_steps
    )

    sampled, num_sampled = rejection_sample(
        **inputs, num_speculative_steps=num_speculative_steps
    )

    # Position 0 carries the power: every trial reaches it, while later
    # positions are only reached on acceptance, which is rare by construction.
    assert (num_sampled >= 1).all()
    target_probs = torch.softmax(target_logits_1d, dim=0)
    for pos in range(num_speculative_steps + 1):
        accepted_mask = num_sampled >= pos + 1
        _assert_distribution_match(
            sampled[accepted_mask, pos], target_probs, device, label=f"position {pos}"
        )


@pytest.mark.parametrize("use_block_verification", [False, True])
@pytest.mark.parametrize("probabilistic_draft", [False, True])
def test_multiround_rejection_sample_is_unbiased(
    use_block_verification: bool, probabilistic_draft: bool
):
    """Uncommitted positions must receive fresh noise on later verification rounds."""
    torch.manual_seed(42)
    num_trials, num_tokens, k = 32768, 6, 2
    device = "cuda"
    target_probs = torch.tensor(
        [0.3, 0.7] if probabilistic_draft else [0.5, 0.5], device=device
    )
    draft_logits = torch.tensor(
        [0.7, 0.3] if probabilistic_draft else [1.0, 0.0], device=device
    ).log()
    inputs = _build_rejection_sample_inputs(
        target_probs.log(), draft_logits, k, 1.0, num_trials
    )
    seeds = inputs["seed"]
    output = torch.full((num_trials, num_tokens + k), -1, device=device)
    output[:, 0] = torch.multinomial(target_probs, num_trials, replacement=True)
    lengths = torch.ones(num_trials, dtype=torch.int64, device=device)
    accepted = 0
    while (lengths < num_tokens).any():
        active = (lengths < num_tokens).nonzero().flatten()
        n = active.numel()
        starts = lengths[active]
        local_positions = torch.arange(k + 1, device=device).repeat(n)
        positions = (starts[:, None] + torch.arange(k + 1, device=device)).flatten()
        draft_sampled = torch.zeros((n, k + 1), dtype=torch.int64, device=device)
        draft_sampled[:, 0] = output[active, starts - 1]
        logits_cache = inputs["draft_logits"] if probabilistic_draft else None
        if probabilistic_draft:
            for step in range(k):
                draft_sampled[:, step + 1] = gumbel_sample(
                    draft_logits.expand(n, -1),
                    active,
                    inputs["temperature"],
                    seeds,
                    starts + step,
                    apply_temperature=True,
                    is_drafting=True,
                    logits_cache=logits_cache,
                    logits_cache_col=torch.tensor(step, device=device),
                )
        sampled, counts = rejection_sample(
            target_logits=target_probs.log().expand(n * (k + 1), -1).contiguous(),
            draft_logits=logits_cache,
            draft_sampled=draft_sampled.flatten(),
            cu_num_logits=torch.arange(n + 1, dtype=torch.int32, device=device)
            * (k + 1),
            pos=positions,
            idx_mapping=active,
            expanded_idx_mapping=active.repeat_interleave(k + 1),
            expanded_local_pos=local_positions,
            temperature=inputs["temperature"],
            seed=seeds,
            num_speculative_steps=k,
            use_block_verification=use_block_verification,
        )
        for column in range(k + 1):
            valid = counts > column
            output[active[valid], starts[valid] + column] = sampled[valid, column]
        lengths[active] += counts
        accepted += (counts - 1).sum().item()

    assert accepted > num_trials, "The test must exercise accepted draft tokens."
    for position in range(num_tokens):
        _assert_distribution_match(
            output[:, position], target_probs, device, label=f"position {position}"
        )


@pytest.mark.parametrize("num_speculative_steps", [1, 3])
def test_greedy_rejection_sample(num_speculative_steps: int):
    """Verify that greedy (temperature=0) always outputs the target argmax
    at every accepted position.
    """
    torch.manual_seed(42)
    device = "cuda"
    num_trials = 10 * VOCAB_SIZE

    target_logits_1d = torch.randn(VOCAB_SIZE, device=device, dtype=torch.float32)
    draft_logits_1d = torch.randn(VOCAB_SIZE, device=device, dtype=torch.float32)

    inputs = _build_rejection_sample_inputs(
        target_logits_1d,
        draft_logits_1d,
        num_speculative_steps,
        temperature=0.0,
        num_trials=num_trials,
    )

    sampled, num_sampled = rejection_sample(
        **inputs, num_speculative_steps=num_speculative_steps
    )

    target_argmax = target_logits_1d.argmax().item()

    steps = torch.arange(num_speculative_steps + 1, device=device).unsqueeze(0)
    accepted_mask = steps < num_sampled.unsqueeze(1)

    assert (sampled[accepted_mask] == target_argmax).all(), (
        "Greedy sampling produced tokens that are not the target argmax"
    )


@pytest.mark.parametrize(
    "num_speculative_steps,temperature,unconditional_rates",
    [
        (3, 1.0, [0.9, 0.5, 0.2]),
        (3, 0.0, [0.9, 0.5, 0.2]),
        (3, 1.0, [1.0, 1.0, 1.0]),
        (3, 0.0, [1.0, 1.0, 1.0]),
        (3, 1.0, [0.0, 0.0, 0.0]),
        (3, 0.0, [0.0, 0.0, 0.0]),
        (1, 1.0, [0.7]),
        (1, 0.0, [0.7]),
    ],
)
def test_synthetic_rejection_sample(
    num_speculative_steps: int,
    temperature: float,
    unconditional_rates: list[float],
):
    """Verify that synthetic rejection sampling produces the expected
    per-position acceptance rates. The unconditional rate at position i
    is P(all draft steps 0..i accepted) = product(conditional_rates[0:i+1]).
    This is approximately mean(num accepted >= i + 1) over many trials.
    """
    from vllm.v1.spec_decode.utils import unconditional_to_conditional_rates

    torch.manual_seed(42)
    device = "cuda"
    num_trials = 10 * VOCAB_SIZE
    deviation_tol = 1e-2

    target_logits_1d = torch.randn(VOCAB_SIZE, device=device, dtype=torch.float32)
    draft_logits_1d = torch.randn(VOCAB_SIZE, device=device, dtype=torch.float32)

    if temperature > 0:
        target_logits_1d /= temperature

    inputs = _build_rejection_sample_inputs(
        target_logits_1d,
        draft_logits_1d,
        num_speculative_steps,
        temperature=temperature,
        num_trials=num_trials,
    )

    conditional_rates = unconditional_to_conditional_rates(unconditional_rates)
    synthetic_conditional_rates = torch.tensor(
        conditional_rates, dtype=torch.float32, device=device
    )

    _, num_sampled = rejection_sample(
        **inputs,
        num_speculative_steps=num_speculative_steps,
        synthetic_conditional_rates=synthetic_conditional_rates,
    )

    # num_sampled includes the resampled/bonus token.
    num_accepted = num_sampled - 1
    for i, expected_rate in enumerate(unconditional_rates):
        observed_rate = (num_accepted >= i + 1).float().mean().item()
        assert abs(observed_rate - expected_rate) < deviation_tol, (
            f"Step {i}: observed rate {observed_rate:.4f} deviates from "
            f"expected rate {expected_rate:.4f} by more than {deviation_tol}."
        )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_nan_target_logits_in_range(temperature: float):
    """Regression test for NaN breaking tl.argmax index bounds.

    An all-NaN target logits row makes every per-block local max NaN.
    tl.argmax over such a block returns an index into the padded region
    (>= num_blocks), causing an OOB read of the local-argmax tensors in
    _compute_global_target_argmax (greedy) and _insert_resampled_kernel
    (stochastic). The vocab size below gives a non-power-of-2 block count
    (3 blocks of 8192, padded to 4) so the padded region exists. Post-fix,
    NaN is mapped to -inf, so the kernels must complete without error and
    emit in-range token ids.
    """
    torch.manual_seed(0)
    device = "cuda"
    num_trials = 4
    K = 1
    vocab_size = 20000  # 3 vocab blocks of 8192, padded to 4

    target_logits_1d = torch.full(
        (vocab_size,), float("nan"), device=device, dtype=torch.float32
    )
    draft_logits_1d = torch.randn(vocab_size, device=device, dtype=torch.float32)

    inputs = _build_rejection_sample_inputs(
        target_logits_1d,
        draft_logits_1d,
        K,
        temperature=temperature,
        num_trials=num_trials,
    )

    sampled, num_sampled = rejection_sample(**inputs, num_speculative_steps=K)

    assert ((num_sampled >= 1) & (num_sampled <= K + 1)).all()
    steps = torch.arange(K + 1, device=device).unsqueeze(0)
    valid = steps < num_sampled.unsqueeze(1)
    assert (sampled[valid] >= 0).all()
    assert (sampled[valid] < vocab_size).all()


def test_placeholder_draft_token_rejected():
    """A placeholder draft id (-1) must be rejected without reading the logit
    tensors out of bounds, for any sampling method.
    """
    torch.manual_seed(0)
    device = "cuda"
    num_trials = 64
    K = 1
    temperature = 0.6

    target_logits_1d = torch.randn(VOCAB_SIZE, device=device) / temperature
    draft_logits_1d = torch.randn(VOCAB_SIZE, device=device)

    inputs = _build_rejection_sample_inputs(
        target_logits_1d,
        draft_logits_1d,
        K,
        temperature=temperature,
        num_trials=num_trials,
    )
    inputs["draft_sampled"].view(num_trials, K + 1)[:, 1:] = -1

    sampled, num_sampled = rejection_sample(**inputs, num_speculative_steps=K)

    assert torch.equal(num_sampled, torch.ones_like(num_sampled))
    recovered = sampled[:, 0]
    assert (recovered >= 0).all() and (recovered < VOCAB_SIZE).all()


@pytest.mark.parametrize("has_draft_logits", [True, False])
@pytest.mark.parametrize("num_placeholders", [1, 2])
def test_block_verification_placeholder_truncates_block(
    has_draft_logits: bool, num_placeholders: int
):
    """Trailing placeholder (-1) draft ids end the block early. The last real
    draft token must then be verified against the closed-form threshold rather
    than a residual mass derived from the placeholder position, whose logits
    describe a token that was never drafted.
    """
    torch.manual_seed(42)
    device = "cuda"
    num_trials = 20 * VOCAB_SIZE
    K = 3
    temperature = 1.0

    target_logits_1d = torch.randn(VOCAB_SIZE, device=device) / temperature
    draft_logits_1d = torch.randn(VOCAB_SIZE, device=device)

    inputs = _build_rejection_sample_inputs(
        target_logits_1d,
        draft_logits_1d,
        K,
        temperature=temperature,
        num_trials=num_trials,
    )
    if not has_draft_logits:
        inputs["draft_logits"] = None
    inputs["draft_sampled"].view(num_trials, K + 1)[:, K + 1 - num_placeholders :] = -1

    sampled, num_sampled = rejection_sample(
        **inputs, num_speculative_steps=K, use_block_verification=True
    )

    num_real = K - num_placeholders
    assert (num_sampled <= num_real + 1).all(), (
        "Accepted a draft token at or after a placeholder."
    )
    target_probs = torch.softmax(target_logits_1d, dim=0)
    for pos in range(num_real + 1):
        accepted_mask = num_sampled >= pos + 1
        _assert_distribution_match(
            sampled[accepted_mask, pos], target_probs, device, label=f"position {pos}"
        )


def test_greedy_placeholder_emits_target_argmax():
    """Greedy sampling skips resampling and relies on the rejection kernel
    storing the target argmax at the rejected position. A placeholder must not
    bypass that store, or the output slot is returned uninitialized.
    """
    torch.manual_seed(0)
    device = "cuda"
    num_trials = 512
    K = 3

    target_logits_1d = torch.randn(VOCAB_SIZE, device=device)
    draft_logits_1d = torch.randn(VOCAB_SIZE, device=device)

    inputs = _build_rejection_sample_inputs(
        target_logits_1d,
        draft_logits_1d,
        K,
        temperature=0.0,
        num_trials=num_trials,
    )
    target_argmax = int(target_logits_1d.argmax())
    draft_sampled = inputs["draft_sampled"].view(num_trials, K + 1)
    # Accept the first draft so that the rejection lands on the placeholder.
    draft_sampled[:, 1] = target_argmax
    draft_sampled[:, 2:] = -1

    sampled, num_sampled = rejection_sample(**inputs, num_speculative_steps=K)

    assert torch.equal(num_sampled, torch.full_like(num_sampled, 2))
    steps = torch.arange(K + 1, device=device).unsqueeze(0)
    emitted = sampled[steps < num_sampled.unsqueeze(1)]
    assert (emitted == target_argmax).all(), (
        "Greedy sampling emitted a token that is not the target argmax"
    )


@pytest.mark.parametrize("use_block_verification", [False, True])
def test_placeholder_blocks_later_draft_tokens(use_block_verification: bool):
    """A placeholder is not necessarily the final draft. Nothing at or after
    one may be accepted, even when a valid draft follows it.
    """
    torch.manual_seed(0)
    device = "cuda"
    num_trials = 4 * VOCAB_SIZE
    K = 3
    temperature = 1.0

    # An identical draft is accepted with probability ~1, so any token after
    # the placeholder would be accepted unless it is explicitly blocked. The
    # draft logits are stored pre-temperature, so pass the unscaled base.
    draft_logits_1d = torch.randn(VOCAB_SIZE, device=device)
    target_logits_1d = draft_logits_1d / temperature

    inputs = _build_rejection_sample_inputs(
        target_logits_1d,
        draft_logits_1d,
        K,
        temperature=temperature,
        num_trials=num_trials,
    )
    inputs["draft_sampled"].view(num_trials, K + 1)[:, 2] = -1

    _, num_sampled = rejection_sample(
        **inputs,
        num_speculative_steps=K,
        use_block_verification=use_block_verification,
    )

    # Only the first draft is verifiable, plus one resampled token.
    assert (num_sampled <= 2).all(), "Accepted a draft token past a placeholder."
    assert (num_sampled == 2).float().mean().item() > 0.9, (
        "The first draft was rarely accepted; the test is not exercising "
        "acceptance past the placeholder."
    )


def test_verify_rejects_unproposed_drafts():
    """Zero drafts padded onto a step starting in the prefill must be rejected."""
    torch.manual_seed(0)
    device = "cuda"
    num_trials = 256
    K = 8

    # Row 0: token 0 is very unlikely. Rows >= 1 follow the zero inputs and
    # predict token 0. The never-written draft logits row is uniform.
    target_logits_1d = torch.randn(VOCAB_SIZE, device=device)
    target_logits_1d[0] = -20.0
    inputs = _build_rejection_sample_inputs(
        target_logits_1d,
        torch.zeros(VOCAB_SIZE, device=device),
        K,
        temperature=1.0,
        num_trials=num_trials,
    )
    target_rest = torch.randn(VOCAB_SIZE, device=device)
    target_rest[0] = 20.0
    inputs["target_logits"].view(num_trials, K + 1, VOCAB_SIZE)[:, 1:] = target_rest
    inputs["draft_sampled"].view(num_trials, K + 1)[:, 1:] = 0

    # Each request's first logit is the last prefill token, as in the first
    # decode step after a P/D remote KV load.
    first_pos = inputs["pos"].view(num_trials, K + 1)[:, 0]
    prefill_len = first_pos + 1
    rejection_sampler = object.__new__(RejectionSampler)
    rejection_sampler.sampler = SimpleNamespace(
        apply_sampling_params=lambda logits, *args: logits,
        sampling_states=SimpleNamespace(
            temperature=SimpleNamespace(gpu=inputs["temperature"]),
            seeds=SimpleNamespace(gpu=inputs["seed"]),
        ),
        use_fp64_gumbel=False,
    )
    rejection_sampler.num_speculative_steps = K
    rejection_sampler.synthetic_conditional_rates = None
    rejection_sampler.use_block_verification = True
    rejection_sampler.fly_window_size = 0
    rejection_sampler.fly_entropy_threshold = 0.3
    rejection_sampler.fly_entropy_top_k = 3
    rejection_sampler.watermark_key = None

    def verify() -> tuple[torch.Tensor, torch.Tensor]:
        draft_sampled, pos = gather_draft_sampled(
            inputs["draft_sampled"],
            inputs["pos"],
            torch.arange(num_trials * (K + 1), device=device),
            inputs["expanded_idx_mapping"],
            inputs["expanded_local_pos"],
            prefill_len,
        )
        _, sampled, num_sampled = rejection_sampler._verify(
            inputs["target_logits"],
            inputs["draft_logits"],
            draft_sampled,
            pos,
            inputs["cu_num_logits"],
            inputs["idx_mapping"],
            None,
            inputs["expanded_idx_mapping"],
            inputs["expanded_local_pos"],
            None,
            draft_sampled,
        )
        return sampled, num_sampled

    sampled, num_sampled = verify()
    assert (num_sampled == 1).all()
    # Resampled from the target at row 0, not from a residual.
    assert (sampled[:, 0] != 0).all()

    # Once past the prefill, block verification accepts the same zero drafts.
    prefill_len.copy_(first_pos)
    _, num_sampled = verify()
    assert (num_sampled == K + 1).all()


@pytest.mark.parametrize(
    "num_speculative_steps,temperature",
    [
        (1, 0.6),
        (3, 0.6),
        (1, 1.0),
        (3, 1.0),
        (5, 1.0),
    ],
)
@pytest.mark.parametrize("has_draft_logits", [True, False])
def test_block_verification_rejection_sample(
    num_speculative_steps: int, temperature: float, has_draft_logits: bool
):
    """Verify that block verification (Sun et al.) preserves the target
    distribution at every accepted position, for both the full draft-logits
    case and the one-hot (no draft logits) case. Block verification changes
    *which* prefix is accepted, but the marginal of every output position must
    still match the target distribution p(x).
    """
    torch.manual_seed(42)
    device = "cuda"
    num_trials = 10 * VOCAB_SIZE

    target_logits_1d = torch.randn(VOCAB_SIZE, device=device, dtype=torch.float32)
    draft_logits_1d = torch.randn(VOCAB_SIZE, device=device, dtype=torch.float32)

    if temperature > 0:
        target_logits_1d /= temperature

    inputs = _build_rejection_sample_inputs(
        target_logits_1d,
        draft_logits_1d,
        num_speculative_steps,
        temperature=temperature,
        num_trials=num_trials,
    )
    if not has_draft_logits:
        inputs["draft_logits"] = None

    sampled, num_sampled = rejection_sample(
        **inputs,
        num_speculative_steps=num_speculative_steps,
        use_block_verification=True,
    )

    target_probs = torch.softmax(target_logits_1d, dim=0)
    for pos in range(num_speculative_steps + 1):
        accepted_mask = num_sampled >= pos + 1
        _assert_distribution_match(
            sampled[accepted_mask, pos], target_probs, device, label=f"position {pos}"
        )


@pytest.mark.parametrize("num_speculative_steps", [3, 5])
def test_block_verification_accepts_at_least_as_many(num_speculative_steps: int):
    """Block verification is designed to accept at least as long a prefix as
    token verification in expectation. Verify the mean accepted length is no
    worse than the standard method on the same inputs.
    """
    torch.manual_seed(0)
    device = "cuda"
    num_trials = 20 * VOCAB_SIZE
    temperature = 1.0

    target_logits_1d = torch.randn(VOCAB_SIZE, device=device, dtype=torch.float32)
    # A draft close to the target gives block verification room to recover
    # prefixes that token verification would have truncated.
    draft_logits_1d = target_logits_1d + 0.5 * torch.randn(
        VOCAB_SIZE, device=device, dtype=torch.float32
    )

    inputs = _build_rejection_sample_inputs(
        target_logits_1d,
        draft_logits_1d,
        num_speculative_steps,
        temperature=temperature,
        num_trials=num_trials,
    )

    _, num_sampled_standard = rejection_sample(
        **inputs, num_speculative_steps=num_speculative_steps
    )
    _, num_sampled_block = rejection_sample(
        **inputs,
        num_speculative_steps=num_speculative_steps,
        use_block_verification=True,
    )

    mean_standard = (num_sampled_standard - 1).float().mean().item()
    mean_block = (num_sampled_block - 1).float().mean().item()
    # Allow a small slack for sampling noise.
    assert mean_block >= mean_standard - 1e-2, (
        f"Block verification mean accepted length {mean_block:.4f} is worse "
        f"than standard {mean_standard:.4f}."
    )


@pytest.mark.parametrize("has_draft_logits", [True, False])
@pytest.mark.parametrize("fly_window_size", [0, 2])
def test_chunked_requests_match_full_batch(
    has_draft_logits: bool, fly_window_size: int
):
    torch.manual_seed(7)
    device = "cuda"
    num_reqs = 5
    num_speculative_steps = 3
    vocab_size = 257

    target_logits = torch.randn(vocab_size, device=device)
    draft_logits = torch.randn(vocab_size, device=device)
    inputs = _build_rejection_sample_inputs(
        target_logits,
        draft_logits,
        num_speculative_steps,
        temperature=0.6,
        num_trials=num_reqs,
    )
    padded_target_logits = torch.empty(
        inputs["target_logits"].shape[0], vocab_size + 3, device=device
    )
    padded_target_logits[:, :vocab_size].copy_(inputs["target_logits"])
    inputs["target_logits"] = padded_target_logits[:, :vocab_size]
    assert inputs["target_logits"].stride(-1) == 1
    assert not inputs["target_logits"].is_contiguous()
    if not has_draft_logits:
        inputs["draft_logits"] = None

    if fly_window_size:
        native, native_counts = rejection_sample(
            **inputs, num_speculative_steps=num_speculative_steps
        )
        gated, gated_counts = rejection_sample(
            **inputs,
            num_speculative_steps=num_speculative_steps,
            fly_window_size=fly_window_size,
            fly_entropy_threshold=float("inf"),
        )
        assert torch.equal(gated_counts, native_counts)
        valid = (
            torch.arange(num_speculative_steps + 1, device=device)
            < native_counts[:, None]
        )
        assert torch.equal(gated[valid], native[valid])

    sampled, num_sampled = rejection_sample(
        **inputs,
        num_speculative_steps=num_speculative_steps,
        fly_window_size=fly_window_size,
        fly_entropy_threshold=0.0,
    )

    sampled_chunks = []
    num_sampled_chunks = []
    for start, end in ((0, 2), (2, 5)):
        lo = start * (num_speculative_steps + 1)
        hi = end * (num_speculative_steps + 1)
        chunk_inputs = dict(inputs)
        for name in (
            "target_logits",
            "draft_sampled",
            "pos",
            "expanded_idx_mapping",
            "expanded_local_pos",
        ):
            chunk_inputs[name] = inputs[name][lo:hi]
        chunk_inputs["cu_num_logits"] = inputs["cu_num_logits"][start : end + 1] - lo
        chunk_inputs["idx_mapping"] = inputs["idx_mapping"][start:end]

        chunk_sampled, chunk_num_sampled = rejection_sample(
            **chunk_inputs,
            num_speculative_steps=num_speculative_steps,
            fly_window_size=fly_window_size,
            fly_entropy_threshold=0.0,
        )
        sampled_chunks.append(chunk_sampled)
        num_sampled_chunks.append(chunk_num_sampled)

    chunked_sampled = torch.cat(sampled_chunks)
    chunked_num_sampled = torch.cat(num_sampled_chunks)
    assert torch.equal(chunked_num_sampled, num_sampled)
    steps = torch.arange(num_speculative_steps + 1, device=device)
    valid = steps.unsqueeze(0) < num_sampled.unsqueeze(1)
    assert torch.equal(chunked_sampled[valid], sampled[valid])


@pytest.mark.parametrize("use_block_verification", [False, True])
@pytest.mark.parametrize("has_draft_logits", [False, True])
def test_adaptive_draft_lengths_match_and_bonus_oracle(
    use_block_verification: bool, has_draft_logits: bool
):
    torch.manual_seed(7)
    device = "cuda"
    K = 3
    num_drafts = [3, 1, 0, 2, 3, 2]
    temperatures = [1.0, 0.0, 0.0, 0.6, 0.0, 1.0]
    greedy_num_matches = {1: 1, 2: 0, 4: 2}
    num_reqs = len(num_drafts)

    num_logits_per_req = torch.tensor(num_drafts, device=device) + 1
    cu_num_logits = torch.zeros(num_reqs + 1, dtype=torch.int32, device=device)
    cu_num_logits[1:] = num_logits_per_req.cumsum(0)
    num_logits = int(cu_num_logits[-1])
    idx_mapping = torch.arange(num_reqs, dtype=torch.int32, device=device)
    expanded_idx_mapping = idx_mapping.repeat_interleave(num_logits_per_req)
    expanded_local_pos = (
        torch.arange(num_logits, dtype=torch.int32, device=device)
        - cu_num_logits[expanded_idx_mapping]
    )

    draft_logits = torch.randn(num_reqs, K, VOCAB_SIZE, device=device)
    target_logits = torch.randn(num_logits, VOCAB_SIZE, device=device)
    # Allocate at exactly num_logits so a lookahead past the batch is OOB.
    draft_sampled = torch.randint(VOCAB_SIZE, (num_logits,), device=device)
    target_argmax = target_logits.argmax(dim=-1)
    for req_idx, num_matches in greedy_num_matches.items():
        lo = int(cu_num_logits[req_idx])
        for step in range(num_drafts[req_idx]):
            token = target_argmax[lo + step]
            if step >= num_matches:
                token = (token + 1) % VOCAB_SIZE
            draft_sampled[lo + step + 1] = token

    inputs = dict(
        target_logits=target_logits,
        draft_logits=draft_logits if has_draft_logits else None,
        draft_sampled=draft_sampled,
        cu_num_logits=cu_num_logits,
        pos=torch.arange(num_logits, dtype=torch.int32, device=device),
        idx_mapping=idx_mapping,
        expanded_idx_mapping=expanded_idx_mapping,
        expanded_local_pos=expanded_local_pos,
        temperature=torch.tensor(temperatures, device=device),
        seed=torch.arange(num_reqs, dtype=torch.int64, device=device),
        num_speculative_steps=K,
        use_block_verification=use_block_verification,
    )
    sampled, num_sampled = rejection_sample(**inputs)

    for req_idx, num_matches in greedy_num_matches.items():
        lo = int(cu_num_logits[req_idx])
        n = num_matches + 1
        assert int(num_sampled[req_idx]) == n, f"greedy request {req_idx}"
        assert torch.equal(sampled[req_idx, :n], target_argmax[lo : lo + n]), (
            f"greedy request {req_idx}"
        )

    for req_idx in range(num_reqs):
        lo, hi = int(cu_num_logits[req_idx]), int(cu_num_logits[req_idx + 1])
        req_inputs = dict(inputs)
        for name in (
            "target_logits",
            "draft_sampled",
            "pos",
            "expanded_idx_mapping",
            "expanded_local_pos",
        ):
            req_inputs[name] = inputs[name][lo:hi]
        req_inputs["cu_num_logits"] = cu_num_logits[req_idx : req_idx + 2] - lo
        req_inputs["idx_mapping"] = idx_mapping[req_idx : req_idx + 1]

        req_sampled, req_num_sampled = rejection_sample(**req_inputs)

        n = int(req_num_sampled[0])
        assert n <= num_drafts[req_idx] + 1
        assert int(num_sampled[req_idx]) == n, f"request {req_idx} mismatch"
        assert torch.equal(sampled[req_idx, :n], req_sampled[0, :n]), (
            f"request {req_idx} mismatch"
        )


def _residual_recovery_logits(
    inputs: dict,
    num_sampled: torch.Tensor,
    vocab_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    target_logits = inputs["target_logits"]
    draft_logits = inputs["draft_logits"]
    cu_num_logits = inputs["cu_num_logits"]
    resample_rows = cu_num_logits[:-1].to(torch.int64) + num_sampled.to(torch.int64) - 1
    req_state_indices = inputs["expanded_idx_mapping"][resample_rows].to(torch.int64)
    temperatures = inputs["temperature"][req_state_indices]

    is_bonus = resample_rows == cu_num_logits[1:] - 1
    next_rows = (resample_rows + 1).clamp_max(inputs["draft_sampled"].shape[0] - 1)
    needs_residual = ~is_bonus & (inputs["draft_sampled"][next_rows] >= 0)

    target_rows = target_logits[resample_rows][:, :vocab_size].float()
    target_rows = torch.where(target_rows.isnan(), float("-inf"), target_rows)
    if draft_logits is None:
        rejected = inputs["draft_sampled"][next_rows].clamp_min(0)
        one_hot = torch.arange(vocab_size, device=target_rows.device).unsqueeze(
            0
        ) == rejected.unsqueeze(-1)
        residual_logits = torch.where(one_hot, float("-inf"), target_rows)
    else:
        draft_steps = (num_sampled.to(torch.int64) - 1).clamp_max(
            draft_logits.shape[1] - 1
        )
        draft_rows = draft_logits[req_state_indices, draft_steps][
            :, :vocab_size
        ].float()
        draft_rows = torch.where(draft_rows.isnan(), float("-inf"), draft_rows)
        draft_rows = draft_rows / temperatures.unsqueeze(-1)
        target_log_probs = torch.log_softmax(target_rows, dim=-1)
        draft_log_probs = torch.log_softmax(draft_rows, dim=-1)
        ratio = torch.exp(draft_log_probs - target_log_probs)
        residual_logits = torch.where(
            ratio < 1,
            target_log_probs + torch.log1p(-ratio.clamp_max(1)),
            float("-inf"),
        )
    recovery = torch.where(needs_residual.unsqueeze(-1), residual_logits, target_rows)
    return recovery, resample_rows


def _watermark_inputs(
    num_trials: int,
    num_speculative_steps: int,
    context_width: int,
    vocab_size: int,
    one_hot_draft: bool,
    temperature: float = 1.0,
) -> tuple[dict, torch.Tensor]:
    device = "cuda"
    target_logits_1d = torch.randn(vocab_size, device=device) / temperature
    draft_logits_1d = torch.randn(vocab_size, device=device)
    inputs = _build_rejection_sample_inputs(
        target_logits_1d,
        draft_logits_1d,
        num_speculative_steps,
        temperature=temperature,
        num_trials=num_trials,
    )
    if one_hot_draft:
        inputs["draft_logits"] = None
    inputs["draft_sampled"].view(num_trials, num_speculative_steps + 1)[::5, 1] = -1
    num_logits = inputs["target_logits"].shape[0]
    contexts = torch.randint(
        0, vocab_size, (num_logits, context_width), dtype=torch.int64, device=device
    )
    contexts[::7, 0] = -1
    return inputs, contexts


@pytest.mark.parametrize("one_hot_draft", [False, True])
# Cover one full block and a partial multi-block vocabulary.
@pytest.mark.parametrize("vocab_size", [1024, 3500])
def test_watermarked_recovery_matches_philox_gumbel_sample(
    one_hot_draft: bool, vocab_size: int
):
    torch.manual_seed(7)
    key = 0xDA39A3EE5E6B4B0D
    context_width = 4
    inputs, contexts = _watermark_inputs(
        num_trials=128,
        num_speculative_steps=2,
        context_width=context_width,
        vocab_size=vocab_size,
        one_hot_draft=one_hot_draft,
    )
    watermarker = GumbelWatermarker(key=key, context_width=context_width)

    sampled, num_sampled = watermarked_rejection_sample(
        **inputs,
        num_speculative_steps=2,
        contexts=contexts,
        watermarking=torch.ones(128, dtype=torch.bool, device="cuda"),
        watermarker=watermarker,
    )

    recovery, resample_rows = _residual_recovery_logits(inputs, num_sampled, vocab_size)
    expected = philox_gumbel_sample(recovery, contexts[resample_rows], key)
    recovered = sampled[torch.arange(128, device="cuda"), num_sampled.long() - 1]
    torch.testing.assert_close(recovered, expected, rtol=0, atol=0)

    is_bonus = resample_rows == inputs["cu_num_logits"][1:] - 1
    next_rows = (resample_rows + 1).clamp_max(inputs["draft_sampled"].shape[0] - 1)
    is_placeholder = ~is_bonus & (inputs["draft_sampled"][next_rows] < 0)
    assert int((~is_bonus & ~is_placeholder).sum()) > 0
    assert int(is_placeholder.sum()) > 0
    if not one_hot_draft:
        # One-hot drafts almost never reach the bonus row.
        assert int(is_bonus.sum()) > 0


def test_watermarked_recovery_leaves_disabled_rows_on_the_stock_draw():
    torch.manual_seed(11)
    num_trials = 96
    vocab_size = 512
    inputs, contexts = _watermark_inputs(
        num_trials=num_trials,
        num_speculative_steps=3,
        context_width=2,
        vocab_size=vocab_size,
        one_hot_draft=False,
    )
    watermarking = torch.zeros(num_trials, dtype=torch.bool, device="cuda")
    watermarking[::2] = True
    inputs["temperature"][:8] = 0.0

    stock_sampled, stock_num_sampled = rejection_sample(
        **inputs, num_speculative_steps=3
    )
    sampled, num_sampled = watermarked_rejection_sample(
        **inputs,
        num_speculative_steps=3,
        contexts=contexts,
        watermarking=watermarking,
        watermarker=GumbelWatermarker(key=99, context_width=2),
    )

    torch.testing.assert_close(num_sampled, stock_num_sampled, rtol=0, atol=0)
    rows = torch.arange(num_trials, device="cuda")
    positions = num_sampled.long() - 1
    disabled = ~watermarking | (inputs["temperature"] == 0)
    torch.testing.assert_close(
        sampled[rows[disabled], positions[disabled]],
        stock_sampled[rows[disabled], positions[disabled]],
        rtol=0,
        atol=0,
    )
    for req in range(num_trials):
        n = int(num_sampled[req]) - 1
        torch.testing.assert_close(
            sampled[req, :n], stock_sampled[req, :n], rtol=0, atol=0
        )
    assert int(disabled.sum()) > 0 and int((~disabled).sum()) > 0


def test_watermarked_recovery_is_unchanged_by_fp64_gumbel():
    torch.manual_seed(13)
    inputs, contexts = _watermark_inputs(
        num_trials=64,
        num_speculative_steps=2,
        context_width=4,
        vocab_size=2048,
        one_hot_draft=False,
    )
    watermarker = GumbelWatermarker(key=2**63 + 12345, context_width=4)
    kwargs = dict(
        num_speculative_steps=2,
        contexts=contexts,
        watermarking=torch.ones(64, dtype=torch.bool, device="cuda"),
        watermarker=watermarker,
    )
    sampled32, num_sampled32 = watermarked_rejection_sample(**inputs, **kwargs)
    sampled64, num_sampled64 = watermarked_rejection_sample(
        **inputs, **kwargs, use_fp64=True
    )
    rows = torch.arange(64, device="cuda")
    torch.testing.assert_close(num_sampled64, num_sampled32, rtol=0, atol=0)
    torch.testing.assert_close(
        sampled64[rows, num_sampled64.long() - 1],
        sampled32[rows, num_sampled32.long() - 1],
        rtol=0,
        atol=0,
    )
