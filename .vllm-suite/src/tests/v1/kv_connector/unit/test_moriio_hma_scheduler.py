# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Pure-CPU unit tests for the MoRIIO hybrid (attention + mamba/KDA) scheduler
and the KDA offset-template cache.

These exercise the highest-risk, otherwise-untested scheduler logic without a
GPU or the ``mori`` runtime: per-group block-id splitting, the READ/WRITE
``N-1`` token accounting, P-side prompt truncation, and offset-template cache
wiring.
"""

import importlib
from dataclasses import asdict
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

moriio_connector = importlib.import_module(
    "vllm.distributed.kv_transfer.kv_connector.v1.moriio.moriio_connector"
)
moriio_layout = importlib.import_module(
    "vllm.distributed.kv_transfer.kv_connector.v1.moriio.moriio_layout"
)
ssm_conv_transfer_utils = importlib.import_module(
    "vllm.distributed.kv_transfer.kv_connector.v1.ssm_conv_transfer_utils"
)
MambaConvSplitInfo = ssm_conv_transfer_utils.MambaConvSplitInfo
MoRIIOMode = moriio_connector.MoRIIOMode
moriio_common = importlib.import_module(
    "vllm.distributed.kv_transfer.kv_connector.v1.moriio.moriio_common"
)
get_role = moriio_common.get_role
set_role = moriio_common.set_role


@pytest.fixture
def restore_moriio_role():
    """Undo the process-global role a full scheduler construction leaves behind."""
    role = get_role()
    yield
    set_role(role)


class _FakeScheduler(moriio_connector.MoRIIOConnectorScheduler):  # type: ignore[name-defined]
    """Constructs a scheduler without the heavy real ``__init__``; only the
    attributes read by the method under test are set."""

    def __init__(self, **attrs):
        self.mode = MoRIIOMode.READ
        self._mamba_group_ids: list[int] = []
        self._attn_group_ids: list[int] = [0]
        self._num_ssm_scratch_blocks = 0
        self._is_hma_required = False
        self.kv_cache_config = SimpleNamespace(
            kv_cache_groups=[None, None],
            select_transfer_block_ids=lambda block_ids: tuple(block_ids),
        )
        for k, v in attrs.items():
            setattr(self, k, v)


class _FakeConnector(moriio_connector.MoRIIOConnector):  # type: ignore[name-defined]
    def __init__(self, connector_scheduler):
        self.connector_scheduler = connector_scheduler


class _FakeWorker(moriio_connector.MoRIIOConnectorWorker):  # type: ignore[name-defined]
    def __init__(self, **attrs):
        for k, v in attrs.items():
            setattr(self, k, v)


class _FakeBlocks:
    def __init__(self, all_groups):
        self._all_groups = all_groups

    def get_block_ids(self):
        return self._all_groups


def _slot_strided(num_slots, per_slot_shape, slot_stride, dtype=torch.bfloat16):
    inner = 1
    for d in per_slot_shape:
        inner *= d
    assert slot_stride >= inner
    backing = torch.zeros(num_slots * slot_stride, dtype=dtype)
    inner_strides: list[int] = []
    acc = 1
    for d in reversed(per_slot_shape):
        inner_strides.insert(0, acc)
        acc *= d
    return backing.as_strided(
        (num_slots, *per_slot_shape), (slot_stride, *inner_strides)
    )


def _gdn_split_info(conv_rows=3, key_dim=4, value_dim=8, dtype_size=2):
    conv_dim = 2 * key_dim + value_dim
    conv_state_bytes = conv_dim * conv_rows * dtype_size
    ssm_state_bytes = 64
    return MambaConvSplitInfo(
        conv_rows=conv_rows,
        local_proj_dims=(key_dim, key_dim, value_dim),
        conv_dtype_size=dtype_size,
        ssm_sizes=(conv_state_bytes, ssm_state_bytes),
    )


def _mamba_spec(num_states: int = 2, *, num_speculative_blocks: int = 0):
    shapes = tuple((1, 1) for _ in range(num_states))
    return moriio_connector.MambaSpec(
        block_size=16,
        shapes=shapes,
        dtypes=(torch.float32,) * num_states,
        mamba_cache_mode="align",
        num_speculative_blocks=num_speculative_blocks,
    )


def _spec_config(method: str):
    return SimpleNamespace(method=method, use_dspark=lambda: method == "dspark")


def _gate_vllm_config(
    *,
    read_mode: bool = True,
    speculative_config=None,
    block_size: int = 16,
    num_lookahead_tokens: int = 0,
    num_speculative_tokens: int = 0,
    mamba_cache_mode: str = "align",
    dcp_size: int = 1,
):
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={
                "read_mode": read_mode,
                "host_ip": "127.0.0.1",
                "handshake_port": 6001,
                "notify_port": 6002,
            },
            kv_role="kv_consumer",
        ),
        speculative_config=speculative_config,
        cache_config=SimpleNamespace(
            block_size=block_size,
            mamba_cache_mode=mamba_cache_mode,
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        num_lookahead_tokens=num_lookahead_tokens,
        num_speculative_tokens=num_speculative_tokens,
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            decode_context_parallel_size=dcp_size,
            data_parallel_rank=0,
            data_parallel_size_local=1,
            data_parallel_size=1,
        ),
    )


# --------------------------------------------------------------------------
# split_block_groups
# --------------------------------------------------------------------------
def test_split_block_groups_separates_attention_and_mamba():
    sched = _FakeScheduler(_has_mamba=True, _attn_group_ids=[0], _mamba_group_ids=[1])
    block_ids = ([1, 2], [99])
    attn, mamba = sched.split_block_groups(block_ids)
    assert attn == [1, 2]
    assert mamba == [[99]]


def test_split_block_groups_ignores_transfer_disabled_group():
    mamba_spec = moriio_connector.MambaSpec(
        block_size=16,
        shapes=((1, 1),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
    )
    config = SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(enable_kv_transfer=True, kv_cache_spec=object()),
            SimpleNamespace(enable_kv_transfer=False, kv_cache_spec=object()),
            SimpleNamespace(enable_kv_transfer=True, kv_cache_spec=mamba_spec),
        ],
    )
    config.transfer_groups = tuple(
        group for group in config.kv_cache_groups if group.enable_kv_transfer
    )
    config.select_transfer_block_ids = lambda block_ids: tuple(
        block_ids[group_id]
        for group_id, group in enumerate(config.kv_cache_groups)
        if group.enable_kv_transfer
    )
    attn_groups, mamba_groups = moriio_connector._split_kv_cache_group_kinds(config)
    assert attn_groups == [0]
    assert mamba_groups == [1]

    sched = _FakeScheduler(
        _has_mamba=True,
        _attn_group_ids=attn_groups,
        _mamba_group_ids=mamba_groups,
        kv_cache_config=config,
    )
    assert sched.split_block_groups(([1, 2], [70, 71], [99])) == (
        [1, 2],
        [[99]],
    )


def test_exchange_blocks_ignore_transfer_disabled_group():
    config = SimpleNamespace(
        kv_cache_groups=[None, None, None],
        select_transfer_block_ids=lambda block_ids: (block_ids[0], block_ids[2]),
    )
    sched = _FakeScheduler(
        kv_cache_config=config,
        _is_hma_required=True,
        blocks_per_sw=[0, 2],
    )

    assert sched.get_exchange_clipped_blocks(([1, 2], [70, 71], [90, 91, 92])) == [
        [1, 2],
        [91, 92],
    ]


def test_scheduler_rejects_multiple_attention_groups_with_mamba():
    """A drafter owning its own transfer group is refused, with a hint."""
    config = SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(enable_kv_transfer=True, kv_cache_spec=object()),
            SimpleNamespace(enable_kv_transfer=True, kv_cache_spec=object()),
            SimpleNamespace(enable_kv_transfer=True, kv_cache_spec=_mamba_spec()),
        ],
    )
    config.transfer_groups = tuple(config.kv_cache_groups)

    with pytest.raises(moriio_common.MoRIIOError, match="separate attention group"):
        moriio_connector.MoRIIOConnectorScheduler(_gate_vllm_config(), "engine", config)


def test_split_block_groups_preserves_multiple_mamba_groups():
    sched = _FakeScheduler(
        _has_mamba=True,
        _attn_group_ids=[0],
        _mamba_group_ids=[1, 2],
    )

    assert sched.split_block_groups(([1, 2], [40], [70])) == (
        [1, 2],
        [[40], [70]],
    )


def test_scheduler_rejects_incompatible_mamba_groups():
    incompatible = _mamba_spec()
    object.__setattr__(incompatible, "page_size_padded", 4096)
    config = SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(enable_kv_transfer=True, kv_cache_spec=object()),
            SimpleNamespace(enable_kv_transfer=True, kv_cache_spec=_mamba_spec()),
            SimpleNamespace(enable_kv_transfer=True, kv_cache_spec=incompatible),
        ]
    )
    config.transfer_groups = tuple(config.kv_cache_groups)

    with pytest.raises(moriio_common.MoRIIOError, match="same cache spec"):
        moriio_connector.MoRIIOConnectorScheduler(_gate_vllm_config(), "engine", config)


def test_scheduler_rejects_mamba_group_without_two_states():
    config = SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(enable_kv_transfer=True, kv_cache_spec=object()),
            SimpleNamespace(enable_kv_transfer=True, kv_cache_spec=_mamba_spec(1)),
        ],
    )
    config.transfer_groups = tuple(config.kv_cache_groups)

    with pytest.raises(moriio_common.MoRIIOError, match="exactly two Mamba states"):
        moriio_connector.MoRIIOConnectorScheduler(_gate_vllm_config(), "engine", config)


@pytest.mark.parametrize("read_mode", [True, False])
def test_scheduler_rejects_non_dspark_speculative_hybrid(read_mode):
    config = SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(enable_kv_transfer=True, kv_cache_spec=object()),
            SimpleNamespace(enable_kv_transfer=True, kv_cache_spec=_mamba_spec()),
        ],
    )
    config.transfer_groups = tuple(config.kv_cache_groups)

    with pytest.raises(moriio_common.MoRIIOError, match="speculative decoding"):
        moriio_connector.MoRIIOConnectorScheduler(
            _gate_vllm_config(
                read_mode=read_mode, speculative_config=_spec_config("ngram")
            ),
            "engine",
            config,
        )


def _dspark_wrapped_attention_config(*, dcp_sharded: bool = True):
    """Mamba first, so a wrapped full-attention group at index 1 has to be found.

    A bare ``isinstance(FullAttentionSpec)`` misses the wrapper and leaves
    ``_full_attn_group_idx`` at its initial 0, which is the Mamba group.
    """
    full = FullAttentionSpec(
        block_size=4,
        num_kv_heads=1,
        head_size=1,
        dtype=torch.float32,
        dcp_sharded=dcp_sharded,
    )
    config = SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(
                enable_kv_transfer=True,
                kv_cache_spec=_mamba_spec(num_speculative_blocks=2),
            ),
            SimpleNamespace(
                enable_kv_transfer=True,
                kv_cache_spec=UniformTypeKVCacheSpecs(
                    block_size=4, kv_cache_specs={"target": full, "draft": full}
                ),
            ),
        ],
    )
    config.transfer_groups = tuple(config.kv_cache_groups)
    return config


@pytest.mark.usefixtures("restore_moriio_role")
@pytest.mark.parametrize("read_mode", [True, False])
@pytest.mark.parametrize(
    "dcp_size,dcp_sharded,expected_tail", [(1, True, 4), (4, True, 1), (4, False, 4)]
)
def test_scheduler_accepts_dspark_with_wrapped_full_attention(
    dcp_size, dcp_sharded, expected_tail, read_mode
):
    config = _dspark_wrapped_attention_config(dcp_sharded=dcp_sharded)
    vllm_config = _gate_vllm_config(
        read_mode=read_mode,
        speculative_config=_spec_config("dspark"),
        block_size=4,
        num_lookahead_tokens=7,
        num_speculative_tokens=7,
        dcp_size=dcp_size,
    )
    scheduler = moriio_connector.MoRIIOConnectorScheduler(vllm_config, "engine", config)

    assert scheduler._full_attn_group_idx == 1
    assert scheduler._num_ssm_scratch_blocks == 2
    assert scheduler._max_decode_tail_blocks == expected_tail

    # A first decode step reserves padded target rows AND drafter lookahead.
    spec = config.transfer_groups[1].kv_cache_spec
    manager = FullAttentionManager(
        spec,
        block_pool=BlockPool(32, enable_caching=False, hash_block_size=4),
        enable_caching=False,
        kv_cache_group_id=1,
        scheduler_block_size=16,
        dcp_world_size=dcp_size,
    )
    imported_tokens = manager.block_size
    target_tokens = 1 + vllm_config.num_speculative_tokens
    manager.allocate_new_blocks(
        "decode",
        num_tokens=imported_tokens + target_tokens + vllm_config.num_lookahead_tokens,
        num_tokens_main_model=imported_tokens + target_tokens,
    )
    local = [b.block_id for b in manager.req_to_blocks["decode"]]
    remote = [100]
    assert scheduler._align_read_blocks(
        local, remote, scheduler._max_decode_tail_blocks
    ) == (local[:1], remote)
    with pytest.raises(ValueError, match="tail"):
        scheduler._align_read_blocks(
            local + [99], remote, scheduler._max_decode_tail_blocks
        )


@pytest.mark.usefixtures("restore_moriio_role")
def test_hybrid_write_clamps_attention_and_excludes_scratch_slots():
    config = _dspark_wrapped_attention_config()
    config.select_transfer_block_ids = lambda blocks: tuple(blocks)
    sched = moriio_connector.MoRIIOConnectorScheduler(
        _gate_vllm_config(read_mode=False, dcp_size=2), "engine", config
    )
    assert sched._clamp_to_prompt_blocks(
        SimpleNamespace(num_prompt_tokens=9), [[10, 11, 12, 13], [1, 2, 3, 4]]
    ) == [[11], [1, 2]]


@pytest.mark.usefixtures("restore_moriio_role")
def test_hybrid_write_resolves_current_state_instead_of_cached_block_ids():
    config = _dspark_wrapped_attention_config()
    config.select_transfer_block_ids = lambda blocks: tuple(blocks)
    sched = moriio_connector.MoRIIOConnectorScheduler(
        _gate_vllm_config(read_mode=False, dcp_size=2), "engine", config
    )
    state = KVConnectorBlockState(
        req_ids={"req"},
        resolve_block_ids=lambda _: ([0, 51, 52, 53], [31, 32, 33]),
        boundary_state_offloads={},
    )
    assert sched._get_write_blocks(
        SimpleNamespace(request_id="req", num_prompt_tokens=9),
        [[10, 11, 12], [1]],
        SimpleNamespace(kv_connector_block_state=state),
    ) == [[51], [31, 32]]


@pytest.mark.usefixtures("restore_moriio_role")
@pytest.mark.parametrize("external_tokens", [0, 9])
def test_hybrid_write_notifies_grouped_slots_or_releases_a_complete_local_hit(
    external_tokens,
):
    config = _dspark_wrapped_attention_config()
    config.select_transfer_block_ids = lambda blocks: tuple(blocks)
    sched = moriio_connector.MoRIIOConnectorScheduler(
        _gate_vllm_config(read_mode=False), "engine", config
    )
    sched.send_notify_block = Mock()
    sched._send_transfer_release = Mock()
    req = _mk_request(
        list(range(10)),
        params={
            "do_remote_prefill": True,
            "transfer_id": "tx",
            "remote_host": "127.0.0.2",
            "remote_notify_port": 7000,
        },
    )
    req.request_id = "req"
    sched.update_state_after_alloc(
        req, _FakeBlocks(([10, 11, 12], [1, 2, 3])), external_tokens
    )
    if external_tokens:
        sched.send_notify_block.assert_called_once_with(
            req_id="req",
            transfer_id="tx",
            block_notify_list=[[10], [1, 2, 3]],
            host="127.0.0.2",
            port=7000,
        )
        sched._send_transfer_release.assert_not_called()
    else:
        sched.send_notify_block.assert_not_called()
        sched._send_transfer_release.assert_called_once_with("tx", "127.0.0.2", 7000)
    assert not req.kv_transfer_params["do_remote_prefill"]


@pytest.mark.usefixtures("restore_moriio_role")
def test_hybrid_write_keeps_separate_draft_groups_and_their_block_spans():
    config = _dspark_wrapped_attention_config()
    # A disabled cache is absent from the wire. Target and draft may have
    # different token spans, and neither can borrow the other's block IDs.
    draft = SimpleNamespace(
        enable_kv_transfer=True,
        kv_cache_spec=FullAttentionSpec(
            block_size=4,
            num_kv_heads=1,
            head_size=2,
            dtype=torch.float32,
            dcp_sharded=False,
        ),
    )
    disabled = SimpleNamespace(enable_kv_transfer=False, kv_cache_spec=object())
    config.kv_cache_groups.insert(1, disabled)
    config.kv_cache_groups.append(draft)
    config.transfer_groups = tuple(
        g for g in config.kv_cache_groups if g.enable_kv_transfer
    )
    config.select_transfer_block_ids = lambda blocks: (blocks[0], blocks[2], blocks[3])
    sched = moriio_connector.MoRIIOConnectorScheduler(
        _gate_vllm_config(
            read_mode=False, dcp_size=2, speculative_config=_spec_config("dspark")
        ),
        "engine",
        config,
    )
    req = _mk_request(
        list(range(9)),
        params={
            "do_remote_decode": True,
            "transfer_id": "tx",
        },
    )
    req.request_id = "req"
    req.status = moriio_connector.RequestStatus.FINISHED_LENGTH_CAPPED
    blocks = ([10, 11, 12, 13], [99], [20, 21, 22], [30, 31, 32, 33])
    expected = [[11], [20, 21], [30, 31, 32]]
    assert sched._clamp_to_prompt_blocks(req, blocks) == expected
    # Exercise the connector entry point too: completion must not flatten
    # a multi-group WRITE payload through READ's single-attention helper.
    delay_free, params = _FakeConnector(sched).request_finished_all_groups(req, blocks)
    assert delay_free
    assert params["remote_block_ids"] == expected


@pytest.mark.usefixtures("restore_moriio_role")
@pytest.mark.parametrize(
    "blocks,delay_free",
    [(([0, 51, 52, 53], [31, 32, 33]), True), (([], []), False)],
)
def test_hybrid_write_request_finished_defers_free_only_with_blocks_to_send(
    blocks, delay_free
):
    config = _dspark_wrapped_attention_config()
    config.select_transfer_block_ids = lambda blocks: tuple(blocks)
    sched = moriio_connector.MoRIIOConnectorScheduler(
        _gate_vllm_config(read_mode=False, dcp_size=2), "engine", config
    )
    sched.is_producer = True
    req = _mk_request(
        list(range(9)), params={"do_remote_decode": True, "transfer_id": "tx"}
    )
    req.request_id = "req"
    req.status = moriio_connector.RequestStatus.FINISHED_LENGTH_CAPPED

    assert sched.request_finished(req, blocks)[0] is delay_free
    # The WRITE ACK, not the READ watchdog, releases the deferred blocks.
    if delay_free:
        assert sched._deferred_send_deadlines["req"][1] == "tx"
    else:
        assert "req" not in sched._deferred_send_deadlines


@pytest.mark.usefixtures("restore_moriio_role")
def test_hybrid_write_build_meta_saves_current_state_on_the_final_chunk():
    """Chunked prefill must not ship block ids cached at admission: align-mode
    state slots move between chunks without appending a block."""
    config = _dspark_wrapped_attention_config()
    config.select_transfer_block_ids = lambda blocks: tuple(blocks)
    sched = moriio_connector.MoRIIOConnectorScheduler(
        _gate_vllm_config(read_mode=False, dcp_size=2), "engine", config
    )
    sched.is_producer = True
    set_role(moriio_common.ROLE.PRODUCER)
    params = {
        "do_remote_decode": True,
        "transfer_id": "tx",
        "remote_engine_id": "decode",
        "remote_block_ids": [],
        "remote_host": "127.0.0.1",
        "remote_handshake_port": 6000,
        "remote_notify_port": 6001,
    }
    req = _mk_request(list(range(9)), params=params)
    req.request_id = "req"
    req.num_computed_tokens = 0
    sched._reqs_need_save["req"] = (req, [[10, 11, 12], [1]])
    sched._req_kv_params["req"] = dict(params)

    def _output(cached_req_ids, new_block_ids, num_scheduled):
        return SimpleNamespace(
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=cached_req_ids, new_block_ids=new_block_ids
            ),
            num_scheduled_tokens={"req": num_scheduled},
            new_block_ids_to_zero=None,
            kv_connector_block_state=KVConnectorBlockState(
                req_ids={"req"},
                resolve_block_ids=lambda _: ([0, 51, 52, 53], [31, 32, 33]),
                boundary_state_offloads={},
            ),
        )

    # First chunk: not final, so nothing is saved yet.
    meta = sched.build_connector_meta(_output([], [], 4))
    assert not meta.reqs_to_save
    assert "req" in sched._reqs_need_pending_save

    # Final chunk: stale cached ids plus new ids are ignored in favour of
    # the scheduler's current table, clamped to the prompt.
    req.num_computed_tokens = 4
    meta = sched.build_connector_meta(_output(["req"], [([77], [78])], 5))
    assert meta.reqs_to_save["req"].local_block_ids == [[51], [31, 32]]
    assert "req" not in sched._reqs_need_pending_save


@pytest.mark.parametrize(
    "mode,deadlines,expected",
    [
        (MoRIIOMode.WRITE, {"req": (0.0, "tx")}, True),
        (MoRIIOMode.WRITE, {}, False),
        (MoRIIOMode.READ, {"req": (0.0, "tx")}, False),
    ],
)
def test_has_pending_push_work_tracks_write_deferred_frees(mode, deadlines, expected):
    connector = _FakeConnector(_FakeScheduler(_deferred_send_deadlines=deadlines))
    connector.mode = mode
    assert connector.has_pending_push_work() is expected


def test_has_pending_push_work_is_false_on_worker_role():
    connector = _FakeConnector(None)
    connector.mode = MoRIIOMode.WRITE
    assert connector.has_pending_push_work() is False


def test_loaded_kv_cache_groups_are_every_transfer_group():
    # The connector restores the request's own blocks, not a hash-addressed
    # prefix, so a transfer-enabled Mamba group counts as loaded too.
    connector = _FakeConnector(None)
    connector._kv_cache_config = SimpleNamespace(
        transfer_group_ids=(0, 2), prefix_cacheable_group_ids=(0,)
    )
    assert connector.get_loaded_kv_cache_group_ids(SimpleNamespace()) == (0, 2)


def test_split_block_groups_rejects_non_hybrid_use():
    sched = _FakeScheduler(_has_mamba=False)

    with pytest.raises(moriio_common.MoRIIOError, match="non-hybrid"):
        sched.split_block_groups(([5, 6, 7],))


def test_split_block_groups_accepts_empty_abort_payload():
    sched = _FakeScheduler(_has_mamba=True)

    assert sched.split_block_groups(()) == ([], [])


def test_split_block_groups_keeps_only_running_state():
    sched = _FakeScheduler(
        _has_mamba=True,
        _attn_group_ids=[0],
        _mamba_group_ids=[1],
    )
    assert sched.split_block_groups(([1], [40, 41])) == ([1], [[41]])


@pytest.mark.parametrize(
    "blocks,expected",
    [
        # The running state is picked only after the scratch slots are gone.
        ([40, 41, 42, 43], [41]),
        # Never empty: a list shorter than the scratch count keeps one state.
        ([40], [40]),
        ([], []),
    ],
)
def test_split_block_groups_strips_dspark_scratch_slots(blocks, expected):
    sched = _FakeScheduler(
        _has_mamba=True,
        _attn_group_ids=[0],
        _mamba_group_ids=[1],
        _num_ssm_scratch_blocks=2,
    )

    assert sched.split_block_groups(([1], blocks)) == ([1], [expected])


# --------------------------------------------------------------------------
# request_finished_all_groups
# --------------------------------------------------------------------------
def test_request_finished_all_groups_carries_attn_and_mamba_in_one_field():
    seen = {}

    def _fake_request_finished(request, attn_block_ids, mamba_block_groups):
        seen["attn"] = list(attn_block_ids)
        seen["mamba"] = [list(group) for group in mamba_block_groups]
        return True, {
            "do_remote_prefill": True,
            "remote_block_ids": [attn_block_ids, *mamba_block_groups],
        }

    sched = _FakeScheduler(_has_mamba=True, _attn_group_ids=[0], _mamba_group_ids=[1])
    sched.request_finished = _fake_request_finished
    conn = _FakeConnector(sched)

    request = SimpleNamespace(request_id="r0")
    block_ids = ([10, 11], [42])
    delay_free, params = conn.request_finished_all_groups(request, block_ids)

    assert delay_free is True
    # Attention ids drive request_finished; the mamba slot rides the SAME
    # remote_block_ids channel as [attn, *mamba_groups], so the proxy/router
    # needs no KDA-specific field.
    assert seen["attn"] == [10, 11]
    assert seen["mamba"] == [[42]]
    assert params["remote_block_ids"] == [[10, 11], [42]]
    assert "remote_mamba_block_ids" not in params


def test_request_finished_all_groups_pure_attention_stays_grouped():
    def _fake_request_finished(request, block_ids):
        return True, {"remote_block_ids": block_ids}

    sched = _FakeScheduler(_has_mamba=False, _mamba_group_ids=[])
    sched.request_finished = _fake_request_finished
    conn = _FakeConnector(sched)

    delay_free, params = conn.request_finished_all_groups(
        SimpleNamespace(request_id="r1"), ([7, 8],)
    )
    # Main's HMA contract keeps pure-attention block ids grouped.
    assert params["remote_block_ids"] == ([7, 8],)
    assert "remote_mamba_block_ids" not in params


def test_connector_supports_divergent_local_hybrid_hits():
    connector = _FakeConnector(None)
    connector._transfers_mamba_state = True
    connector.mode = MoRIIOMode.READ
    assert connector.supports_divergent_local_hybrid_hits is True
    connector.mode = MoRIIOMode.WRITE
    assert connector.supports_divergent_local_hybrid_hits is False

    connector.mode = MoRIIOMode.READ
    connector._transfers_mamba_state = False
    assert connector.supports_divergent_local_hybrid_hits is False


def _make_read_scheduler():
    return _FakeScheduler(
        is_producer=False,
        mode=MoRIIOMode.READ,
        _has_mamba=True,
        _attn_group_ids=[0],
        _mamba_group_ids=[1],
        request_id_to_transfer_id={},
        transfer_id_to_request_id={},
        _reqs_need_recv={},
        _reqs_need_save={},
        _reqs_need_send={},
        _req_kv_params={},
        _max_decode_tail_blocks=1,
    )


def _make_read_request(remote_block_ids):
    return SimpleNamespace(
        request_id="req",
        kv_transfer_params={
            "do_remote_prefill": True,
            "transfer_id": "tx",
            "remote_engine_id": "prefill",
            "remote_block_ids": remote_block_ids,
            "remote_host": "127.0.0.1",
            "remote_handshake_port": 6000,
            "remote_notify_port": 6001,
        },
    )


@pytest.mark.parametrize("external_tokens", [0, 256])
@pytest.mark.parametrize("has_mamba", [False, True])
@pytest.mark.parametrize("zero_ids", [None, [], [101], [101, 102, 202, 999]])
def test_update_state_drops_decode_recompute_tail_block(
    external_tokens, has_mamba, zero_ids
):
    """Only full hybrid READ destinations skip zeroing; local tails still zero."""
    sched = _make_read_scheduler()
    sched._has_mamba = has_mamba
    remote_blocks = [[10, 11], [91]] if has_mamba else [[10, 11]]
    request = _make_read_request(remote_blocks)
    blocks = _FakeBlocks(
        all_groups=([100, 101, 102], [200, 201, 202])
        if has_mamba
        else ([100, 101, 102],),
    )

    sched.update_state_after_alloc(request, blocks, num_external_tokens=external_tokens)

    expected_blocks = [[100, 101] if external_tokens else []]
    if has_mamba:
        expected_blocks.append([202])
    assert sched._reqs_need_recv["req"][1] == expected_blocks
    assert sched._req_kv_params["req"]["remote_block_ids"] == remote_blocks

    output = SchedulerOutput.make_empty()
    output.new_block_ids_to_zero = None if zero_ids is None else list(zero_ids)
    before = asdict(output)
    meta = sched.build_connector_meta(output)
    assert meta.reqs_to_recv["req"].local_block_ids == expected_blocks
    if zero_ids and has_mamba and external_tokens:
        before["new_block_ids_to_zero"] = zero_ids[1:]
    assert asdict(output) == before

    # A later local allocation of the same pages must still be zeroed.
    output.new_block_ids_to_zero = [100, 101, 102]
    meta = sched.build_connector_meta(output)
    assert not meta.reqs_to_recv
    assert output.new_block_ids_to_zero == [100, 101, 102]


def test_update_state_pairs_shorter_local_blocks_with_remote_suffix():
    sched = _make_read_scheduler()
    request = _make_read_request([[10, 11, 12], [92]])
    blocks = _FakeBlocks(
        all_groups=([102], [202]),
    )

    sched.update_state_after_alloc(request, blocks, num_external_tokens=64)

    assert sched._reqs_need_recv["req"][1] == [[102], [202]]
    assert sched._req_kv_params["req"]["remote_block_ids"] == [[12], [92]]


def test_update_state_pairs_trimmed_mamba_state_with_remote_state():
    """The DSpark shape end to end: scratch slots are stripped, the running
    state is then selected, and the attention list loses its lookahead tail."""
    sched = _make_read_scheduler()
    sched._num_ssm_scratch_blocks = 2
    sched._max_decode_tail_blocks = 2
    request = _make_read_request([[10, 11], [90]])
    # Mamba group: [null, running state, scratch, scratch].
    blocks = _FakeBlocks(all_groups=([100, 101, 102, 103], [200, 201, 202, 203]))

    sched.update_state_after_alloc(request, blocks, num_external_tokens=256)

    assert sched._reqs_need_recv["req"][1] == [[100, 101], [201]]
    assert sched._req_kv_params["req"]["remote_block_ids"] == [[10, 11], [90]]


def test_update_state_full_attention_hit_still_carries_mamba_state():
    sched = _make_read_scheduler()
    request = _make_read_request([[10], [90]])

    sched.update_state_after_alloc(
        request,
        _FakeBlocks(all_groups=([100], [200])),
        num_external_tokens=0,
    )

    assert sched._reqs_need_recv["req"][1] == [[], [200]]


def test_update_state_preserves_each_mamba_group():
    sched = _make_read_scheduler()
    sched._mamba_group_ids = [1, 2]
    request = _make_read_request([[10], [90], [80]])

    sched.update_state_after_alloc(
        request,
        _FakeBlocks(all_groups=([100], [200], [300])),
        num_external_tokens=64,
    )

    assert sched._reqs_need_recv["req"][1] == [[100], [200], [300]]
    assert sched._req_kv_params["req"]["remote_block_ids"] == [
        [10],
        [90],
        [80],
    ]


def test_align_read_blocks_allows_configured_lookahead_tail():
    assert moriio_connector.MoRIIOConnectorScheduler._align_read_blocks(
        [100, 101, 102], [10], max_decode_tail_blocks=2
    ) == ([100], [10])
    with pytest.raises(ValueError, match="allowed local tail"):
        moriio_connector.MoRIIOConnectorScheduler._align_read_blocks(
            [100, 101, 102], [10], max_decode_tail_blocks=1
        )


def test_update_state_aligns_attention_only_decode_tail():
    sched = _make_read_scheduler()
    sched._has_mamba = False
    sched._mamba_group_ids = []
    request = _make_read_request([[10, 11]])

    sched.update_state_after_alloc(
        request,
        _FakeBlocks(all_groups=([100, 101, 102],)),
        num_external_tokens=256,
    )

    assert sched._reqs_need_recv["req"][1] == [[100, 101]]
    assert sched._req_kv_params["req"]["remote_block_ids"] == [[10, 11]]


def test_read_producer_does_not_queue_write_only_save_state():
    sched = _FakeScheduler(
        is_producer=True,
        mode=MoRIIOMode.READ,
        _has_mamba=True,
        _attn_group_ids=[0],
        _mamba_group_ids=[1],
        request_id_to_transfer_id={},
        transfer_id_to_request_id={},
        _reqs_need_save={},
        _req_kv_params={},
    )
    request = SimpleNamespace(
        request_id="req",
        kv_transfer_params={"do_remote_decode": True, "transfer_id": "tx"},
    )

    sched.update_state_after_alloc(
        request,
        _FakeBlocks(all_groups=([100, 101], [200])),
        num_external_tokens=0,
    )

    assert sched._reqs_need_save == {}
    assert sched._req_kv_params == {}


def test_write_producer_queues_grouped_attention_blocks():
    sched = _FakeScheduler(
        is_producer=True,
        mode=MoRIIOMode.WRITE,
        _has_mamba=False,
        _attn_group_ids=[0],
        _mamba_group_ids=[],
        request_id_to_transfer_id={},
        transfer_id_to_request_id={},
        _reqs_need_save={},
        _req_kv_params={},
    )
    request = SimpleNamespace(
        request_id="req",
        kv_transfer_params={"do_remote_decode": True, "transfer_id": "tx"},
    )

    sched.update_state_after_alloc(
        request,
        _FakeBlocks(all_groups=([100, 101],)),
        num_external_tokens=0,
    )

    assert sched._reqs_need_save["req"][1] == ([100, 101],)
    assert sched._req_kv_params["req"] == request.kv_transfer_params


def test_session_build_rejects_per_layer_region_count_mismatch():
    worker = _FakeWorker(
        built_write_session={},
        layer_name_to_local_kv_cache_metadata={"kda.0": ["conv", "ssm"]},
        layer_name_to_remote_kv_cache_metadata={"prefill": {"kda.0": ["conv"]}},
    )

    with pytest.raises(moriio_common.MoRIIOError, match="registered 1 region"):
        worker._get_built_session("prefill")


def test_register_kv_caches_rejects_invalid_hybrid_write_state_layout():
    worker = _FakeWorker(
        mode=MoRIIOMode.WRITE,
        _transfer_layer_names={"kda.0"},
        layer_to_spec={"kda.0": _mamba_spec(1)},
    )
    worker._is_mamba_layer = lambda _layer_name: True

    with pytest.raises(moriio_common.MoRIIOError, match="exactly two Mamba states"):
        worker.register_kv_caches({"kda.0": object()})


def test_register_kv_caches_rejects_no_transfer_enabled_layers():
    worker = _FakeWorker(mode=MoRIIOMode.READ, _transfer_layer_names=set())

    with pytest.raises(moriio_common.MoRIIOError, match="no transfer-enabled"):
        worker.register_kv_caches({"disabled.0": object()})


def test_worker_rejects_incompatible_mamba_specs_before_registration():
    incompatible = _mamba_spec()
    object.__setattr__(incompatible, "page_size_padded", 4096)
    worker = _FakeWorker(
        mode=MoRIIOMode.READ,
        world_size=1,
        _transfer_layer_names={"kda.0", "kda.1"},
        layer_to_spec={"kda.0": _mamba_spec(), "kda.1": incompatible},
    )

    with pytest.raises(moriio_common.MoRIIOError, match="same cache spec"):
        worker.register_kv_caches({"kda.0": object(), "kda.1": object()})


def _make_register_worker(caches, geoms, *, disable_hma: bool = True):
    worker = _FakeWorker(
        mode=MoRIIOMode.READ,
        _transfer_layer_names=set(caches),
        block_size=16,
        engine_id="e0",
        dst_num_blocks={},
        block_lens={},
        layer_name_to_local_kv_cache_metadata={},
        kv_caches_base_addr={},
        kv_layer_mr_offset={},
        local_kv_cache_size=[],
        block_window_per_layer=[],
        moriio_wrapper=SimpleNamespace(
            register_local_tensor=lambda _t: b"m",
            get_agent_metadata=lambda: b"a",
            async_wait_reqid=lambda: None,
        ),
        world_size=1,
        layer_to_spec={},
        backend_name="TRITON_ATTN",
        side_channel_port=6301,
        tp_rank=0,
        dp_rank=0,
        is_producer=False,
        vllm_config=SimpleNamespace(
            model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="x")),
            scheduler_config=SimpleNamespace(
                disable_hybrid_kv_cache_manager=disable_hma
            ),
        ),
    )
    worker._is_mamba_layer = lambda _n: False
    worker._is_mla_cache_layer = lambda _n: False
    worker._get_layer_transfer_geometry = lambda n, remote_num_blocks=None: geoms[n]
    worker._iter_layer_registration_regions = lambda n: [(caches[n], caches[n].nbytes)]
    worker._moriio_handshake_listener = (
        lambda _m, ready_event, *_a, **_k: ready_event.set()
    )
    return worker


def test_register_kv_caches_allows_hybrid_divergent_block_len():
    """GLM-5.2 / MiniMax HMA: divergent per-layer block_len is allowed."""
    Geom = moriio_layout.LayerTransferGeometry
    caches = {
        "layer0": torch.zeros(2, 4, 16, 1, 8, dtype=torch.float16),
        "layer1": torch.zeros(2, 4, 16, 1, 8, dtype=torch.float16),
    }
    # Same tokens-per-block (16); different bytes-per-block (2112 vs 9216).
    geoms = {
        "layer0": Geom(4, 16, 2112, 132, 2112, None, None, 1, 1, False),
        "layer1": Geom(4, 16, 9216, 576, 9216, None, None, 1, 1, False),
    }
    worker = _make_register_worker(caches, geoms)
    worker.register_kv_caches(caches)

    assert worker.block_lens == {"layer0": 2112, "layer1": 9216}
    assert worker.block_len == 9216


def test_register_kv_caches_rejects_divergent_block_size():
    """Without HMA, block_size (tokens/page) must stay uniform."""
    Geom = moriio_layout.LayerTransferGeometry
    caches = {
        "layer0": torch.zeros(2, 4, 16, 1, 8, dtype=torch.float16),
        "layer1": torch.zeros(2, 4, 16, 1, 8, dtype=torch.float16),
    }
    geoms = {
        "layer0": Geom(4, 16, 2112, 132, 2112, None, None, 1, 1, False),
        "layer1": Geom(4, 32, 2112, 66, 2112, None, None, 1, 1, False),
    }
    worker = _make_register_worker(caches, geoms, disable_hma=True)
    with pytest.raises(ValueError, match="block size mismatch"):
        worker.register_kv_caches(caches)


def test_register_kv_caches_rejects_divergent_block_size_even_if_block_len_differs():
    """Without HMA, size+len both differing must still raise."""
    Geom = moriio_layout.LayerTransferGeometry
    caches = {
        "layer0": torch.zeros(2, 4, 16, 1, 8, dtype=torch.float16),
        "layer1": torch.zeros(2, 4, 16, 1, 8, dtype=torch.float16),
    }
    # Previously buggy: size+len both differ → registration continued.
    geoms = {
        "layer0": Geom(4, 16, 2112, 132, 2112, None, None, 1, 1, False),
        "layer1": Geom(4, 32, 9216, 288, 9216, None, None, 1, 1, False),
    }
    worker = _make_register_worker(caches, geoms, disable_hma=True)
    with pytest.raises(ValueError, match="block size mismatch"):
        worker.register_kv_caches(caches)


def test_register_kv_caches_allows_hma_divergent_block_size():
    """Gemma4 HMA (#53721): SWA vs full-attn may differ in tokens/page."""
    Geom = moriio_layout.LayerTransferGeometry
    caches = {
        "layer0": torch.zeros(2, 4, 16, 1, 8, dtype=torch.float16),
        "layer1": torch.zeros(2, 4, 16, 1, 8, dtype=torch.float16),
    }
    geoms = {
        "layer0": Geom(4, 16, 2112, 132, 2112, None, None, 1, 1, False),
        "layer1": Geom(4, 32, 4224, 132, 4224, None, None, 1, 1, False),
    }
    worker = _make_register_worker(caches, geoms, disable_hma=False)
    worker.register_kv_caches(caches)
    assert worker.block_lens == {"layer0": 2112, "layer1": 4224}
    assert worker.block_len == 4224


# --------------------------------------------------------------------------
# _truncate_mamba_request_for_prefill
# --------------------------------------------------------------------------
def _mk_request(prompt, max_tokens=64, params=None):
    return SimpleNamespace(
        kv_transfer_params={} if params is None else params,
        num_prompt_tokens=len(prompt),
        prompt_token_ids=list(prompt),
        prompt_embeds=None,
        _all_token_ids=list(prompt),
        max_tokens=max_tokens,
    )


def test_truncate_mamba_request_pops_last_token_and_caps_tokens():
    sched = _FakeScheduler()
    req = _mk_request([10, 11, 12, 13, 14])
    sched._truncate_mamba_request_for_prefill(req)

    assert req.prompt_token_ids == [10, 11, 12, 13]  # last token popped
    assert req._all_token_ids == [10, 11, 12, 13]
    assert req.num_prompt_tokens == 4  # N-1 accounting
    assert req.max_tokens == 1
    assert req.kv_transfer_params["_p_side_truncated"] is True


def test_truncate_mamba_request_is_idempotent_across_reschedule():
    sched = _FakeScheduler()
    req = _mk_request([10, 11, 12])
    sched._truncate_mamba_request_for_prefill(req)
    assert req.num_prompt_tokens == 2
    # A second call (e.g. after a preemption) must not truncate again.
    sched._truncate_mamba_request_for_prefill(req)
    assert req.num_prompt_tokens == 2
    assert req.prompt_token_ids == [10, 11]


def test_truncate_mamba_request_noop_for_single_token_prompt():
    sched = _FakeScheduler()
    req = _mk_request([10])
    sched._truncate_mamba_request_for_prefill(req)
    assert req.num_prompt_tokens == 1
    assert req.prompt_token_ids == [10]
    assert "_p_side_truncated" not in req.kv_transfer_params


# --------------------------------------------------------------------------
# get_num_new_matched_tokens  (hybrid N-1 accounting)
# --------------------------------------------------------------------------
@pytest.mark.parametrize(
    "params,expected",
    [
        (None, (0, False)),
        ({}, (0, False)),
        ({"do_remote_prefill": False}, (0, False)),
        ({"do_remote_prefill": True}, (31, False)),
    ],
)
def test_read_matches_only_requests_with_pending_remote_prefill(params, expected):
    scheduler = _FakeScheduler(is_producer=False, mode=MoRIIOMode.READ)
    request = SimpleNamespace(num_prompt_tokens=32, kv_transfer_params=params)

    assert scheduler.get_num_new_matched_tokens(request, 0) == expected


@pytest.mark.parametrize(
    "has_mamba,expected", [(False, (32, True)), (True, (31, True))]
)
def test_write_consumer_matches_full_prompt_unless_hybrid(has_mamba, expected):
    """Without a mamba group (attention-only, or HMA disabled) prefill pushed
    KV for all N tokens; with one it pushed h(N-1)."""
    scheduler = _FakeScheduler(
        is_producer=False, mode=MoRIIOMode.WRITE, _has_mamba=has_mamba
    )
    request = SimpleNamespace(
        num_prompt_tokens=32, kv_transfer_params={"do_remote_prefill": True}
    )

    assert scheduler.get_num_new_matched_tokens(request, 0) == expected


@pytest.mark.parametrize(
    "is_producer,has_mamba,expected_prompt_len",
    [(True, True, 4), (True, False, 5), (False, True, 5)],
)
def test_on_new_request_truncates_only_hybrid_producers(
    is_producer, has_mamba, expected_prompt_len
):
    """Attention-only prefill (including models run with HMA disabled)
    computes all N prompt tokens; only a hybrid producer drops the last."""
    scheduler = _FakeScheduler(is_producer=is_producer, _has_mamba=has_mamba)
    request = _mk_request([10, 11, 12, 13, 14], params={"do_remote_decode": True})

    scheduler.on_new_request(request)

    assert request.num_prompt_tokens == expected_prompt_len
    assert len(request.prompt_token_ids) == expected_prompt_len


def test_read_rematch_after_alloc_keeps_queued_transfer():
    """Clearing the flag blocks another external hit, not the queued READ."""
    sched = _make_read_scheduler()
    request = _make_read_request([[10, 11], [91]])
    request.num_prompt_tokens = 32
    assert sched.get_num_new_matched_tokens(request, 0) == (31, False)

    sched.update_state_after_alloc(
        request, _FakeBlocks(all_groups=([100, 101], [200])), num_external_tokens=31
    )

    assert sched._reqs_need_recv["req"][1] == [[100, 101], [200]]
    assert request.kv_transfer_params["do_remote_prefill"] is False

    meta = sched.build_connector_meta(SchedulerOutput.make_empty())
    queued = meta.reqs_to_recv["req"]
    assert queued.transfer_id == "tx"
    assert queued.local_block_ids == [[100, 101], [200]]
    assert queued.remote_block_ids == [[10, 11], [91]]
    assert sched.get_num_new_matched_tokens(request, 0) == (0, False)


def test_get_num_new_matched_tokens_read_recomputes_last_token():
    sched = _FakeScheduler(is_producer=False, mode=MoRIIOMode.READ, _has_mamba=True)
    req = SimpleNamespace(
        num_prompt_tokens=10,
        prompt_token_ids=list(range(10)),
        kv_transfer_params={"do_remote_prefill": True},
    )
    n, is_async = sched.get_num_new_matched_tokens(req, num_computed_tokens=0)
    # READ always recomputes the final token locally: N-1 - computed.
    assert n == 9
    assert is_async is False


def test_get_num_new_matched_tokens_write_plain_keeps_all_tokens():
    sched = _FakeScheduler(is_producer=False, mode=MoRIIOMode.WRITE, _has_mamba=False)
    req = SimpleNamespace(
        num_prompt_tokens=10,
        prompt_token_ids=list(range(10)),
        kv_transfer_params={"do_remote_prefill": True},
    )
    n, is_async = sched.get_num_new_matched_tokens(req, num_computed_tokens=2)
    # Pure-attention WRITE: no N-1 drop; full length minus already-computed.
    assert n == 8
    assert is_async is True


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}])
def test_write_does_not_wait_again_after_receive_or_for_local_requests(params):
    sched = _FakeScheduler(is_producer=False, mode=MoRIIOMode.WRITE, _has_mamba=True)
    req = _mk_request(list(range(10)))
    req.kv_transfer_params = params
    assert sched.get_num_new_matched_tokens(req, 0) == (0, False)


def test_write_never_declares_an_empty_async_load():
    sched = _FakeScheduler(is_producer=False, mode=MoRIIOMode.WRITE, _has_mamba=False)
    req = _mk_request(list(range(10)), params={"do_remote_prefill": True})
    assert sched.get_num_new_matched_tokens(req, 10) == (0, False)


@pytest.mark.parametrize(
    "prompt_len,computed,expected", [(16, 0, 15), (17, 16, 0), (1, 0, 0)]
)
def test_hybrid_write_advertises_only_the_state_computed_by_prefill(
    prompt_len, computed, expected
):
    sched = _FakeScheduler(is_producer=False, mode=MoRIIOMode.WRITE, _has_mamba=True)
    req = _mk_request(list(range(prompt_len)), params={"do_remote_prefill": True})
    assert sched.get_num_new_matched_tokens(req, computed) == (expected, expected > 0)


@pytest.mark.parametrize(
    ("mode", "num_computed_tokens", "expected", "is_async"),
    [
        (MoRIIOMode.READ, 0, 9, False),
        (MoRIIOMode.READ, 10, 0, False),
        (MoRIIOMode.WRITE, 2, 7, True),
    ],
)
def test_get_num_new_matched_tokens_supports_embeds_only_prompts(
    mode, num_computed_tokens, expected, is_async
):
    sched = _FakeScheduler(is_producer=False, mode=mode, _has_mamba=True)
    req = SimpleNamespace(
        num_prompt_tokens=10,
        prompt_token_ids=None,
        prompt_embeds=object(),
        kv_transfer_params={"do_remote_prefill": True},
    )

    assert sched.get_num_new_matched_tokens(req, num_computed_tokens) == (
        expected,
        is_async,
    )


def test_get_num_new_matched_tokens_producer_returns_zero():
    sched = _FakeScheduler(is_producer=True, mode=MoRIIOMode.WRITE, _has_mamba=True)
    req = _mk_request(list(range(5)), params={"do_remote_decode": True})
    n, is_async = sched.get_num_new_matched_tokens(req, num_computed_tokens=0)
    assert (n, is_async) == (0, False)
    # The producer never truncates here: the scheduler has already measured the
    # prefix-cache hit against the full prompt by this point.
    assert req.num_prompt_tokens == 5


def test_on_new_request_truncates_producer_prompt():
    sched = _FakeScheduler(is_producer=True, mode=MoRIIOMode.WRITE, _has_mamba=True)
    req = _mk_request(list(range(5)), params={"do_remote_decode": True})
    sched.on_new_request(req)
    # Producer stops at h(N-1): the last prompt token was dropped.
    assert req.num_prompt_tokens == 4
    assert req.max_tokens == 1
    assert req.kv_transfer_params["_p_side_truncated"] is True


def test_on_new_request_is_noop_without_mamba_or_on_decode():
    plain = _FakeScheduler(is_producer=True, mode=MoRIIOMode.WRITE, _has_mamba=False)
    req = _mk_request(list(range(5)), params={"do_remote_decode": True})
    plain.on_new_request(req)
    assert req.num_prompt_tokens == 5

    decode_side = _FakeScheduler(
        is_producer=False, mode=MoRIIOMode.WRITE, _has_mamba=True
    )
    req2 = _mk_request(list(range(5)), params={"do_remote_prefill": True})
    decode_side.on_new_request(req2)
    assert req2.num_prompt_tokens == 5


# --------------------------------------------------------------------------
# Offset-template cache
# --------------------------------------------------------------------------
_SAMPLE_SLOT_SETS = [
    ([1, 2], [1, 2]),
    ([0], [3]),
    ([3, 0, 2], [3, 0, 2]),
    ([2, 2], [5, 5]),
    ([], []),
]


def test_worker_compute_mamba_offsets_caches_and_matches_template():
    split = _gdn_split_info()
    conv_dim = sum(split.local_proj_dims)
    conv_shape = (conv_dim, split.conv_rows)
    ssm_shape = (2, 4, 4)
    page_bytes = 256
    pages = torch.zeros((8, 1, 1, page_bytes), dtype=torch.uint8)
    spec = moriio_connector.MambaSpec(
        block_size=1,
        shapes=(conv_shape, ssm_shape),
        dtypes=(torch.bfloat16, torch.bfloat16),
        page_size_padded=page_bytes,
    )
    conv, ssm = moriio_layout.kda_conv_ssm(pages, spec)

    worker = _FakeWorker(
        kv_caches={"kda.0": pages},
        layer_to_spec={"kda.0": spec},
        _conv_decomp=split,
        _mamba_offset_templates={},
        tp_rank=0,
        world_size=1,
    )

    cached_template = None
    for local_slots, remote_slots in _SAMPLE_SLOT_SETS:
        lo, ro, sz, n_conv = worker._compute_mamba_transfer_offsets(
            "kda.0", local_slots, remote_slots
        )
        template = moriio_layout.build_mamba_offset_template(
            conv, ssm, split, tp_ratio=1
        )
        expected = moriio_layout.apply_mamba_offset_template(
            template, local_slots, remote_slots
        )
        assert (lo, ro, sz) == expected
        assert n_conv == moriio_layout.compute_mamba_conv_split_count(
            local_slots, split
        )

        current_template = worker._mamba_offset_templates["kda.0"]
        if cached_template is None:
            cached_template = current_template
        else:
            assert current_template is cached_template

    assert "kda.0" in worker._mamba_offset_templates


@pytest.mark.parametrize("remote_tp_size", [1, None])
def test_mamba_tp_ratio_accepts_only_equal_tp(remote_tp_size):
    worker = _FakeWorker(world_size=1)
    assert worker._mamba_tp_ratio(remote_tp_size) == 1


@pytest.mark.parametrize("remote_tp_size", [2, 3])
def test_mamba_tp_ratio_rejects_heterogeneous_tp(remote_tp_size):
    worker = _FakeWorker(world_size=1)
    with pytest.raises(NotImplementedError, match="heterogeneous-TP"):
        worker._mamba_tp_ratio(remote_tp_size)


def test_worker_selects_each_mamba_layers_own_block_group():
    worker = _FakeWorker(_mamba_payload_index_by_layer={"kda.0": 1, "kda.1": 2})
    groups = ([10], [40], [70])

    assert worker._mamba_blocks_for_layer("kda.0", groups) == [40]
    assert worker._mamba_blocks_for_layer("kda.1", groups) == [70]


def test_worker_rejects_missing_mamba_block_group():
    worker = _FakeWorker(_mamba_payload_index_by_layer={"kda.0": 2})

    with pytest.raises(moriio_common.MoRIIOError, match="no block group"):
        worker._mamba_blocks_for_layer("kda.0", ([10], [40]))
