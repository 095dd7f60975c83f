# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project

import inspect
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import make_tensor_with_pad
from vllm.v1.pool.metadata import PoolingMetadata
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker.block_table import BlockTable, MultiGroupBlockTable
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

VOCAB_SIZE = 1024
NUM_OUTPUT_TOKENS = 20
MAX_PROMPT_SIZE = 100
DEVICE_TYPE = current_platform.device_type
DEVICES = [f"{DEVICE_TYPE}:{i}" for i in range(min(current_platform.device_count(), 2))]
MAX_NUM_PROMPT_TOKENS = 64


def _compare_objs(obj1, obj2, skip: Sequence = ("logitsprocs", "batch_update_builder")):
    attrs = inspect.getmembers(obj1, lambda a: not (inspect.isroutine(a)))
    attr_names = set(
        [a[0] for a in attrs if not (a[0].startswith("__") and a[0].endswith("__"))]
    )
    for attr_name in attr_names:
        if attr_name in skip:
            continue

        a = getattr(obj1, attr_name)
        b = getattr(obj2, attr_name)

        is_same = False
        if isinstance(a, torch.Tensor):
            if a.numel() == 0 or b.numel() == 0:
                is_same = a.numel() == 0 and b.numel() == 0
            elif torch.allclose(a, b):
                is_same = True
        elif isinstance(a, np.ndarray):
            if np.allclose(a, b):
                is_same = True
        elif isinstance(a, MultiGroupBlockTable):
            for a_i, b_i in zip(a.block_tables, b.block_tables):
                _compare_objs(a_i, b_i)
            is_same = True
        elif isinstance(a, (BlockTable, SamplingMetadata, PoolingMetadata)):
            _compare_objs(a, b)
            is_same = True  # if we make it here must be same
        elif a == b:
            is_same = True
        elif isinstance(a, CpuGpuBuffer):
            is_same = np.allclose(a.np, b.np) and torch.allclose(a.gpu, b.gpu)
        assert is_same, (
            f"Attribute {attr_name} is different in {obj1} and {obj2}: {a} != {b}"
        )


def _remove_requests(
    input_batch: InputBatch, batch_size: int, reqs: list[CachedRequestState]
) -> set[str]:
    """Remove some requests randomly from the batch and returns
    set of request removed
    """
    num_reqs_to_remove = np.random.randint(0, batch_size)
    req_indices_to_remove: set[int] = set()
    for _ in range(num_reqs_to_remove):
        req_index_to_remove = np.random.randint(0, batch_size)
        req_indices_to_remove.add(req_index_to_remove)

    req_ids_to_remove: set[str] = set()
    for index in req_indices_to_remove:
        input_batch.remove_request(reqs[index].req_id)
        req_ids_to_remove.add(reqs[index].req_id)
    return req_ids_to_remove


def _construct_expected_sampling_metadata(
    reqs: list[CachedRequestState],
    req_ids_retained: set[str],
    req_id_index_in_input_batch: dict[str, int],
    device: torch.device,
) -> SamplingMetadata:
    """Constructs and returns the expected SamplingMetadata for this
    batch.
    """
    num_reqs = len(req_ids_retained)
    output_token_ids: list[list[int]] = [list() for _ in range(num_reqs)]
    prompt_token_ids: list[list[int]] = [list() for _ in range(num_reqs)]
    presence_penalties = [0.0 for _ in range(num_reqs)]
    frequency_penalties = [0.0 for _ in range(num_reqs)]
    repetition_penalties = [1.0 for _ in range(num_reqs)]
    top_k = [0 for _ in range(num_reqs)]
    top_p = [0.0 for _ in range(num_reqs)]
    temperature = [0.0 for _ in range(num_reqs)]
    min_tokens = {}
    logit_bias: list[dict[int, float] | None] = [None] * num_reqs
    allowed_token_ids_mask = torch.zeros(
        num_reqs, VOCAB_SIZE, dtype=torch.bool, device=device
    )
    bad_words_token_ids = {}
    for req in reqs:
        if req.req_id not in req_ids_retained:
            continue
        assert req.prompt_token_ids is not None
        assert req.sampling_params is not None
        index_in_input_batch = req_id_index_in_input_batch[req.req_id]
        output_token_ids[index_in_input_batch] = req.output_token_ids
        prompt_token_ids[index_in_input_batch] = req.prompt_token_ids
        presence_penalties[index_in_input_batch] = req.sampling_params.presence_penalty
        frequency_penalties[index_in_input_batch] = (
            req.sampling_params.frequency_penalty
        )
        repetition_penalties[index_in_input_batch] = (
            req.sampling_params.repetition_penalty
        )
        top_k[index_in_input_batch] = req.sampling_params.top_k
        top_p[index_in_input_batch] = req.sampling_params.top_p
        temperature[index_in_input_batch] = req.sampling_params.temperature
        min_tokens[index_in_input_batch] = (
            req.sampling_params.min_tokens,
            req.sampling_params.all_stop_token_ids,
        )
        logit_bias[index_in_input_batch] = req.sampling_params.logit_bias
        if req.sampling_params.allowed_token_ids:
            allowed_token_ids_mask[index_in_input_batch][
                req.sampling_params.allowed_token_ids
            ] = True
        if req.sampling_params.bad_words_token_ids:
            bad_words_token_ids[index_in_input_batch] = (
                req.sampling_params.bad_words_token_ids
            )

    return SamplingMetadata(
        temperature=torch.tensor(temperature, dtype=torch.float, device=device),
        all_greedy=False,
        all_random=True,
        top_p=None
        if all(x == 1.0 for x in top_p)
        else torch.tensor(top_p, dtype=torch.float, device=device),
        top_k=None
        if all(x == 0 for x in top_k)
        else torch.tensor(top_k, dtype=torch.int, device=device),
        generators={},
        max_num_logprobs=0,
        prompt_token_ids=make_tensor_with_pad(
            prompt_token_ids,
            pad=VOCAB_SIZE,
            device=torch.device(device),
            dtype=torch.int64,
        ),
        frequency_penalties=torch.tensor(
            frequency_penalties, dtype=torch.float, device=device
        ),
        presence_penalties=torch.tensor(
            presence_penalties, dtype=torch.float, device=device
        ),
        repetition_penalties=torch.tensor(
            repetition_penalties, dtype=torch.float, device=device
        ),
        output_token_ids=output_token_ids,
        spec_token_ids=[[] for _ in range(len(output_token_ids))],
        no_penalties=(
            all(x == 0 for x in presence_penalties)
            and all(x == 0 for x in frequency_penalties)
            and all(x == 1 for x in repetition_penalties)
        ),
        allowed_token_ids_mask=allowed_token_ids_mask,
        bad_words_token_ids=bad_words_token_ids,
        logitsprocs=LogitsProcessors(),
    )


def _create_sampling_params():
    return SamplingParams(
        top_k=np.random.randint(1, 10),
        top_p=np.random.uniform(0.0, 1.0),
        presence_penalty=np.random.uniform(-2.0, 2.0),
        repetition_penalty=np.random.uniform(0.0, 2.0),
        frequency_penalty=np.random.uniform(-2.0, 2.0),
        min_tokens=np.random.randint(1, 10),
        stop_token_ids=[
            np.random.randint(0, VOCAB_SIZE) for _ in range(np.random.randint(10))
        ],
        logit_bias={0: np.random.uniform(-3.0, 3.0)},
    )


def _construct_cached_request_state(req_id_suffix: int):
    prompt_token_ids = [
        np.random.randint(0, VOCAB_SIZE)
        for _ in range(np.random.randint(0, MAX_PROMPT_SIZE))
    ]
    output_token_ids = [
        np.random.randint(0, VOCAB_SIZE)
        for _ in range(np.random.randint(0, NUM_OUTPUT_TOKENS))
    ]
    return CachedRequestState(
        req_id=f"req_id_{req_id_suffix}",
        prompt_token_ids=prompt_token_ids,
        sampling_params=_create_sampling_params(),
        pooling_params=None,
        mm_features=[],
        block_ids=([],),
        generator=None,
        num_computed_tokens=len(output_token_ids),
        output_token_ids=output_token_ids,
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch_size", [1, 2, 32, 64])
def test_sampling_metadata_in_input_batch(device: str, batch_size: int):
    """Tests the logic for managing sampling metadata in the InputBatch.

    This test involves adding a set of requests to the InputBatch,
    followed by removing a subset of them. Afterward, the batch is compacted,
    and the `make_sampling_metadata` method is invoked on the batch. The
    output of `make_sampling_metadata` is then compared against the expected
    results to ensure correctness.

    Note: Ignore logits processor logic, which is tested separately
    """
    input_batch: InputBatch = InputBatch(
        max_num_reqs=batch_size,
        max_model_len=1024,
        max_num_batched_tokens=1024,
        device=torch.device(device),
        vocab_size=1024,
        block_sizes=[1],
        max_num_blocks_per_req=[1024],
    )
    reqs: list[CachedRequestState] = []
    req_id_reqs = {}
    req_id_output_token_ids = {}

    # Add requests
    for req_index in range(batch_size):
        req: CachedRequestState = _construct_cached_request_state(req_index)
        assigned_req_index = input_batch.add_request(req)
        assert req_index == assigned_req_index
        reqs.append(req)
        req_id_reqs[req.req_id] = req
        req_id_output_token_ids[req.req_id] = req.output_token_ids

    # Remove some requests
    req_ids_to_remove = _remove_requests(input_batch, batch_size, reqs)
    req_ids_retained = set(req_id_reqs.keys()) - req_ids_to_remove

    # Compact the input batch
    input_batch.condense()

    # Generate the sampling metadata
    sampling_metadata = input_batch._make_sampling_metadata()

    # Create expected output.
    expected_sampling_metadata = _construct_expected_sampling_metadata(
        reqs, req_ids_retained, input_batch.req_id_to_index, device=torch.device(device)
    )

    def same(t1: torch.Tensor | None, t2: torch.Tensor | None) -> bool:
        return (t1 is None and t2 is None) or (
            t1 is not None and t2 is not None and torch.allclose(t1, t2)
        )

    # Assert the actual and expected output.
    assert torch.allclose(
        expected_sampling_metadata.temperature, sampling_metadata.temperature
    )
    assert same(expected_sampling_metadata.top_p, sampling_metadata.top_p)
    assert same(expected_sampling_metadata.top_k, sampling_metadata.top_k)
    assert torch.allclose(
        expected_sampling_metadata.frequency_penalties,
        sampling_metadata.frequency_penalties,
    )
    assert torch.allclose(
        expected_sampling_metadata.presence_penalties,
        sampling_metadata.presence_penalties,
    )
    assert torch.allclose(
        expected_sampling_metadata.repetition_penalties,
        sampling_metadata.repetition_penalties,
    )
    assert torch.allclose(
        expected_sampling_metadata.prompt_token_ids, sampling_metadata.prompt_token_ids
    )
    assert (
        expected_sampling_metadata.output_token_ids
        == sampling_metadata.output_token_ids
    )
    assert expected_sampling_metadata.no_penalties == sampling_metadata.no_penalties
    if sampling_metadata.allowed_token_ids_mask:
        assert torch.allclose(
            expected_sampling_metadata.allowed_token_ids_mask,
            sampling_metadata.allowed_token_ids_mask,
        )
    assert (
        expected_sampling_metadata.bad_words_token_ids
        == sampling_metadata.bad_words_token_ids
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch_size", [32])
@pytest.mark.parametrize("swap_list", [((0, 1),)])
def test_swap_states_in_input_batch(device: str, batch_size: int, swap_list: list):
    """Tests the logic for managing sampling metadata in the InputBatch.

    This test involves adding a set of requests to the InputBatch,
    followed by removing a subset of them. Afterward, the batch is compacted,
    and the `make_sampling_metadata` method is invoked on the batch. The
    output of `make_sampling_metadata` is then compared against the expected
    results to ensure correctness.

    Note: Ignore logits processor logic, which is tested separately
    """
    input_batch: InputBatch = InputBatch(
        max_num_reqs=batch_size,
        max_model_len=1024,
        max_num_batched_tokens=1024,
        device=torch.device(device),
        vocab_size=1024,
        block_sizes=[1],
        max_num_blocks_per_req=[1024],
    )
    ref_input_batch: InputBatch = InputBatch(
        max_num_reqs=batch_size,
        max_model_len=1024,
        max_num_batched_tokens=1024,
        device=torch.device(device),
        vocab_size=1024,
        block_sizes=[1],
        max_num_blocks_per_req=[1024],
    )

    reqs: list[CachedRequestState] = []
    req_id_reqs = {}
    req_id_output_token_ids = {}
    # Add requests
    for req_index in range(batch_size):
        req: CachedRequestState = _construct_cached_request_state(req_index)
        assigned_req_index = input_batch.add_request(req)
        assert assigned_req_index == req_index
        reqs.append(req)
        req_id_reqs[req.req_id] = req
        req_id_output_token_ids[req.req_id] = req.output_token_ids

    reordered_reqs = reqs.copy()
    for swap_pair in swap_list:
        reordered_reqs[swap_pair[0]], reordered_reqs[swap_pair[1]] = (
            reordered_reqs[swap_pair[1]],
            reordered_reqs[swap_pair[0]],
        )
        input_batch.swap_states(swap_pair[0], swap_pair[1])

    for req_index in range(batch_size):
        req = reordered_reqs[req_index]
        assigned_req_index = ref_input_batch.add_request(req)
        assert assigned_req_index == req_index

    input_batch.refresh_metadata()
    ref_input_batch.refresh_metadata()

    _compare_objs(input_batch, ref_input_batch)


@pytest.mark.parametrize("device", DEVICES)
def test_condense_clears_stale_allowed_token_ids_mask(device: str):
    """condense() must clear the mask row a constrained request is moved out
    of. Otherwise a later request that reuses that row without
    allowed_token_ids inherits the stale whitelist.
    See https://github.com/vllm-project/vllm/issues/43894.
    """
    batch_size = 4
    allowed_token_id = 13
    input_batch = InputBatch(
        max_num_reqs=batch_size,
        max_model_len=1024,
        max_num_batched_tokens=1024,
        device=torch.device(device),
        vocab_size=VOCAB_SIZE,
        block_sizes=[1],
        max_num_blocks_per_req=[1024],
    )

    def _make_req(suffix: int, allowed_token_ids=None) -> CachedRequestState:
        return CachedRequestState(
            req_id=f"req_id_{suffix}",
            prompt_token_ids=[1, 2, 3],
            sampling_params=SamplingParams(allowed_token_ids=allowed_token_ids),
            pooling_params=None,
            mm_features=[],
            block_ids=([],),
            generator=None,
            num_computed_tokens=0,
            output_token_ids=[],
        )

    # Only req_id_2 is constrained, and it lands on the highest row.
    assert input_batch.add_request(_make_req(0)) == 0
    assert input_batch.add_request(_make_req(1)) == 1
    assert input_batch.add_request(_make_req(2, [allowed_token_id])) == 2

    mask = input_batch.allowed_token_ids_mask_cpu_tensor
    assert mask is not None
    # The constrained row masks every token except the single allowed id.
    assert not mask[2][allowed_token_id].item()
    assert int(mask[2].sum().item()) == VOCAB_SIZE - 1

    # Free row 0, then condense: req_id_2 slides from row 2 down into row 0.
    input_batch.remove_request("req_id_0")
    input_batch.condense()
    assert input_batch.req_id_to_index["req_id_2"] == 0
    assert int(mask[2].sum().item()) == 0

    # A new unrestricted request reuses row 2 and must stay unconstrained.
    assert input_batch.add_request(_make_req(3)) == 2
    assert "req_id_3" not in input_batch.has_allowed_token_ids
    assert int(mask[2].sum().item()) == 0


@pytest.mark.parametrize("device", DEVICES)
def test_swap_states_preserves_allowed_token_ids_mask(device: str):
    """swap_states() must exchange the two allowed_token_ids_mask rows.

    Swapping row views via a tuple assignment
    (t[i1], t[i2] = t[i2], t[i1]) aliases them, so both rows collapse to the
    second row's contents and one request silently loses its token
    restriction. This is the sibling of the condense() leak fixed for
    https://github.com/vllm-project/vllm/issues/43894.
    """
    allowed_token_id = 13
    input_batch = InputBatch(
        max_num_reqs=2,
        max_model_len=1024,
        max_num_batched_tokens=1024,
        device=torch.device(device),
        vocab_size=VOCAB_SIZE,
        block_sizes=[1],
        max_num_blocks_per_req=[1024],
    )

    def _make_req(suffix: int, allowed_token_ids=None) -> CachedRequestState:
        return CachedRequestState(
            req_id=f"req_id_{suffix}",
            prompt_token_ids=[1, 2, 3],
            sampling_params=SamplingParams(allowed_token_ids=allowed_token_ids),
            pooling_params=None,
            mm_features=[],
            block_ids=([],),
            generator=None,
            num_computed_tokens=0,
            output_token_ids=[],
        )

    # Row 0 is constrained to a single token; row 1 is unconstrained.
    assert input_batch.add_request(_make_req(0, [allowed_token_id])) == 0
    assert input_batch.add_request(_make_req(1)) == 1

    mask = input_batch.allowed_token_ids_mask_cpu_tensor
    assert mask is not None
    assert int(mask[0].sum().item()) == VOCAB_SIZE - 1
    assert not mask[0][allowed_token_id].item()
    assert int(mask[1].sum().item()) == 0

    input_batch.swap_states(0, 1)

    # The constrained request now sits at row 1 and must keep its mask; the
    # unconstrained request now sits at row 0 and must stay open.
    assert int(mask[1].sum().item()) == VOCAB_SIZE - 1
    assert not mask[1][allowed_token_id].item()
    assert int(mask[0].sum().item()) == 0


def _construct_pooling_request(req_id_suffix: int, pooling_params=None):
    from vllm.pooling_params import PoolingParams

    prompt_token_ids = [
        np.random.randint(0, VOCAB_SIZE)
        for _ in range(np.random.randint(10, MAX_PROMPT_SIZE))
    ]
    return CachedRequestState(
        req_id=f"pool_req_{req_id_suffix}",
        prompt_token_ids=prompt_token_ids,
        sampling_params=None,
        pooling_params=pooling_params or PoolingParams(task="classify"),
        mm_features=[],
        block_ids=([],),
        generator=None,
        num_computed_tokens=0,
        output_token_ids=[],
    )


@pytest.mark.parametrize("device", DEVICES)
def test_pooling_prompt_lens_not_aliased(device: str):
    """Verify that prompt_lens in PoolingMetadata does not share memory
    with the internal num_prompt_tokens pinned buffer. Guards against possible
    non-determinism in pooling metadata due to mutations to the internal buffer.
    """
    batch_size = 4
    input_batch = InputBatch(
        max_num_reqs=batch_size * 2,
        max_model_len=MAX_PROMPT_SIZE + NUM_OUTPUT_TOKENS,
        max_num_batched_tokens=batch_size * (MAX_PROMPT_SIZE + NUM_OUTPUT_TOKENS),
        device=torch.device(device),
        vocab_size=VOCAB_SIZE,
        block_sizes=[16],
        max_num_blocks_per_req=[64],
        is_pooling_model=True,
    )

    reqs = []
    # Add requests
    for i in range(batch_size):
        req = _construct_pooling_request(i)
        input_batch.add_request(req)
        reqs.append(req)
    input_batch.refresh_metadata()

    # prompt_lens must be a snapshot
    metadata = input_batch.get_pooling_metadata()
    prompt_lens_snapshot = metadata.prompt_lens.clone()

    # Mutate the internal buffer (simulates next batch adding new requests)
    input_batch.num_prompt_tokens_cpu_tensor.fill_(999)

    # prompt_lens must be unaffected by the mutation
    assert torch.equal(metadata.prompt_lens, prompt_lens_snapshot), (
        "prompt_lens shares memory with internal pinned buffer; "
        "mutations to num_prompt_tokens_cpu_tensor corrupted prompt_lens. "
        f"Expected {prompt_lens_snapshot}, got {metadata.prompt_lens}"
    )


def test_placeholder_spec_token_ids_written_verbatim():
    input_batch = InputBatch(
        max_num_reqs=1,
        max_model_len=8,
        max_num_batched_tokens=8,
        device=torch.device("cpu"),
        vocab_size=VOCAB_SIZE,
        block_sizes=[16],
        max_num_blocks_per_req=[1],
    )
    req = CachedRequestState(
        req_id="req",
        prompt_token_ids=[10, 11],
        mm_features=[],
        sampling_params=SamplingParams(),
        block_ids=([],),
        generator=None,
        num_computed_tokens=3,
        output_token_ids=[12],
    )
    input_batch.add_request(req)

    input_batch.update_req_spec_token_ids(
        req,
        {"req": [13, -1, -1]},
    )

    # Placeholders (-1) are kept verbatim in both the spec_token_ids list and
    # the token buffer; they are clamped to 0 only at the embedding boundary
    # (GPUModelRunner._preprocess).
    assert input_batch.spec_token_ids[0] == [13, -1, -1]
    assert input_batch.token_ids_cpu[0, 3:6].tolist() == [13, -1, -1]


@pytest.mark.parametrize(
    ("pooling_params", "expect_cpu_prompt_token_ids"),
    [
        ({"task": "classify"}, False),
        ({"task": "classify", "requires_token_ids": True}, True),
    ],
)
def test_pooling_metadata_token_id_buffers(
    pooling_params: dict[str, object],
    expect_cpu_prompt_token_ids: bool,
):
    from vllm.pooling_params import PoolingParams

    input_batch = InputBatch(
        max_num_reqs=1,
        max_model_len=MAX_PROMPT_SIZE + NUM_OUTPUT_TOKENS,
        max_num_batched_tokens=MAX_PROMPT_SIZE + NUM_OUTPUT_TOKENS,
        device=torch.device("cpu"),
        vocab_size=VOCAB_SIZE,
        block_sizes=[16],
        max_num_blocks_per_req=[64],
        is_pooling_model=True,
    )
    req = _construct_pooling_request(0, PoolingParams(**pooling_params))
    input_batch.add_request(req)
    input_batch.refresh_metadata()

    metadata = input_batch.get_pooling_metadata()
    assert input_batch.sampling_metadata.prompt_token_ids is None
    assert metadata.prompt_token_ids is None

    if expect_cpu_prompt_token_ids:
        assert metadata.prompt_token_ids_cpu is not None
        assert metadata.get_prompt_token_ids_cpu()[0].tolist() == req.prompt_token_ids
    else:
        assert metadata.prompt_token_ids_cpu is None


PROMPT_EMBEDS_HIDDEN = 8
PROMPT_EMBEDS_LEN = 4


def _make_input_batch(is_pooling_model: bool = False) -> InputBatch:
    return InputBatch(
        max_num_reqs=2,
        max_model_len=MAX_PROMPT_SIZE + NUM_OUTPUT_TOKENS,
        max_num_batched_tokens=MAX_PROMPT_SIZE + NUM_OUTPUT_TOKENS,
        device=torch.device("cpu"),
        vocab_size=VOCAB_SIZE,
        block_sizes=[16],
        max_num_blocks_per_req=[64],
        is_pooling_model=is_pooling_model,
    )


def _make_embeds_request(req_id: str, pooling: bool = False) -> CachedRequestState:
    from vllm.pooling_params import PoolingParams

    return CachedRequestState(
        req_id=req_id,
        prompt_token_ids=None,
        prompt_embeds=torch.randn(PROMPT_EMBEDS_LEN, PROMPT_EMBEDS_HIDDEN),
        mm_features=[],
        sampling_params=None if pooling else SamplingParams(),
        pooling_params=PoolingParams(task="classify") if pooling else None,
        block_ids=([],),
        generator=None,
        num_computed_tokens=0,
        output_token_ids=[],
    )


def _make_token_request(req_id: str) -> CachedRequestState:
    return CachedRequestState(
        req_id=req_id,
        prompt_token_ids=[10, 11, 12, 13],
        mm_features=[],
        sampling_params=SamplingParams(),
        block_ids=([],),
        generator=None,
        num_computed_tokens=0,
        output_token_ids=[],
    )


def test_remove_request_releases_prompt_embeds():
    """A finished prompt-embeds request must not keep its tensor referenced by
    the persistent batch; an empty batch owns no prompt embeds."""
    input_batch = _make_input_batch()
    req = _make_embeds_request("embeds-req")
    input_batch.add_request(req)
    req_index = input_batch.req_id_to_index[req.req_id]
    assert req_index in input_batch.req_prompt_embeds

    input_batch.remove_request(req.req_id)
    input_batch.condense()

    assert req_index not in input_batch.req_prompt_embeds
    assert not input_batch.req_prompt_embeds


def test_reused_slot_does_not_retain_prompt_embeds():
    """Reusing a vacated slot with a token-id request must not keep the previous
    occupant's prompt-embeds tensor alive."""
    input_batch = _make_input_batch()
    embeds_req = _make_embeds_request("embeds-req")
    input_batch.add_request(embeds_req)
    slot = input_batch.req_id_to_index[embeds_req.req_id]

    input_batch.remove_request(embeds_req.req_id)
    input_batch.condense()

    token_req = _make_token_request("token-req")
    input_batch.add_request(token_req)
    assert input_batch.req_id_to_index[token_req.req_id] == slot
    assert slot not in input_batch.req_prompt_embeds


def test_pooling_model_releases_prompt_embeds():
    """The cleanup must run before remove_request's pooling-model early return."""
    input_batch = _make_input_batch(is_pooling_model=True)
    req = _make_embeds_request("pool-embeds-req", pooling=True)
    input_batch.add_request(req)
    req_index = input_batch.req_id_to_index[req.req_id]
    assert req_index in input_batch.req_prompt_embeds

    input_batch.remove_request(req.req_id)
    input_batch.condense()

    assert req_index not in input_batch.req_prompt_embeds
