# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Unit tests for NixlPushConnector (scheduler + worker).

These tests cover the end-to-end mechanics of the push design without
requiring a real NIXL agent or network:

* Scheduler stages D registrations on ``update_state_after_alloc`` and
  P finished blocks on ``request_finished``.
* ``build_connector_meta`` drains them onto
  ``meta.push_registrations`` / ``meta.push_finished_blocks``.
* ``has_pending_push_work`` reports True/False over the lifecycle.
* ``update_connector_output`` clears state on ``finished_sending`` and
  ``finished_recving``.
* The worker matches D registrations against P finished blocks (both
  scenario directions) and forwards non-PUSH_REG NIXL notifs to the main
  thread's ``_get_new_notifs``.
* ``get_transfer_results`` enqueues evictions for the writer.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import defaultdict
from concurrent.futures import Future
from typing import Any
from unittest.mock import MagicMock, patch

import msgspec
import pytest

from vllm.distributed.kv_transfer.kv_connector.utils import TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import (
    NixlBaseConnectorWorker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    PUSH_REG_NOTIF_PREFIX,
    NixlAgentMetadata,
    NixlConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import (
    NixlPushConnectorWorker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import (
    NixlKVConnectorStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import (
    ReadSpec,
    TPMapping,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import (
    get_base_request_id,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import KVConnectorOutput

from .utils import create_request, expand_strided_descs, make_nixl_push_scheduler

# ----------------------------------------------------------------- #
#  Helpers / fakes                                                   #
# ----------------------------------------------------------------- #


def _make_request(
    *,
    request_id: str,
    is_d_side: bool = True,
    remote_engine_id: str = "prefill-engine",
    remote_request_id: str | None = None,
    remote_host: str = "10.0.0.1",
    remote_port: int = 5601,
    tp_size: int = 1,
    finished: bool = True,
) -> MagicMock:
    """Build a minimal Request mock used by request_finished."""
    from vllm.v1.request import RequestStatus

    req = MagicMock()
    req.request_id = request_id
    req.num_computed_tokens = 64

    if is_d_side:
        # D-side request: do_remote_prefill=True -> prefill on a remote P.
        params: dict[str, Any] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": remote_engine_id,
            "remote_request_id": remote_request_id or f"prefill-{request_id}",
            "remote_host": remote_host,
            "remote_port": remote_port,
            "tp_size": tp_size,
        }
    else:
        # P-side request: do_remote_decode=True (we are the prefiller).
        params = {
            "do_remote_prefill": False,
            "do_remote_decode": True,
        }
    req.kv_transfer_params = params
    req.status = (
        RequestStatus.FINISHED_LENGTH_CAPPED if finished else RequestStatus.RUNNING
    )
    return req


class _BlocksMock:
    """Minimal stand-in for ``KVCacheBlocks`` used in update_state_after_alloc."""

    def __init__(self, block_ids: tuple[list[int], ...]):
        self._block_ids = block_ids

    def get_unhashed_block_ids_all_groups(self) -> tuple[list[int], ...]:
        return self._block_ids


def _stub_sw_clipping(scheduler) -> None:
    """Make ``get_exchange_clipped_blocks`` a passthrough so tests don't
    need the full sliding-window machinery."""
    scheduler.get_exchange_clipped_blocks = lambda block_ids, clip_ssm=True: block_ids


# ----------------------------------------------------------------- #
#  Scheduler-side tests                                              #
# ----------------------------------------------------------------- #


class TestPushScheduler:
    def test_p_side_mamba_truncates_before_cache_lookup(self):
        """Push mode normalizes P-side Mamba requests before cache lookup."""
        sched = make_nixl_push_scheduler(has_mamba=True)
        request = create_request(num_tokens=10, do_remote_decode=True)
        original_len = len(request.prompt_token_ids)

        sched.on_new_request(request)

        assert len(request.prompt_token_ids) == original_len - 1
        assert request.kv_transfer_params["_p_side_truncated"] is True

        with patch.object(
            sched,
            "_truncate_request_for_prefill",
            side_effect=AssertionError("must not truncate after cache lookup"),
        ):
            assert sched.get_num_new_matched_tokens(request, 0) == (0, False)

    def test_d_side_update_state_after_alloc_stages_registration(self):
        """D scheduler stashes registration data + arms watchdog deadline."""
        sched = make_nixl_push_scheduler()
        _stub_sw_clipping(sched)

        request = _make_request(request_id="req-d-1")
        blocks = _BlocksMock(block_ids=([10, 11, 12],))

        sched.update_state_after_alloc(request, blocks, num_external_tokens=48)

        assert request.request_id in sched._push_pending_registrations
        reg = sched._push_pending_registrations[request.request_id]
        # ``request_id`` is D's own vLLM request id; plus our own (D) coords.
        assert reg["request_id"] == request.request_id
        assert reg["decode_engine_id"] == sched.engine_id
        assert reg["decode_host"] == sched.side_channel_host
        assert reg["decode_port"] == sched.side_channel_port
        assert reg["local_block_ids"] == ([10, 11, 12],)
        assert reg["remote_engine_id"] == "prefill-engine"

        # Watchdog deadline set in the future.
        deadline = sched._push_registration_deadlines[request.request_id]
        assert deadline > time.perf_counter()
        # do_remote_prefill flipped off so the request isn't reprocessed.
        assert request.kv_transfer_params["do_remote_prefill"] is False
        # Tracked as awaiting a recv.
        assert request.request_id in sched._reqs_need_recv

    def test_p_side_request_finished_stages_blocks(self):
        """P scheduler pushes blocks into both _finished_request_blocks (lease)
        and _newly_finished_push_blocks (metadata for next step)."""
        sched = make_nixl_push_scheduler()
        _stub_sw_clipping(sched)

        request = _make_request(request_id="req-p-1", is_d_side=False)
        block_ids = ([20, 21, 22, 23],)

        delay, ret_params = sched.request_finished(request, block_ids)

        assert delay is True
        assert ret_params is not None
        assert ret_params["do_remote_prefill"] is True
        assert ret_params["do_remote_decode"] is False
        assert request.request_id in sched._finished_request_blocks
        assert request.request_id in sched._newly_finished_push_blocks
        assert request.request_id in sched._reqs_need_send  # lease armed

    def test_build_connector_meta_drains_both_sides(self):
        """meta.push_registrations and meta.push_finished_blocks are filled
        from the staging dicts and the staging dicts are cleared."""
        sched = make_nixl_push_scheduler()
        _stub_sw_clipping(sched)

        # Stage one D registration and one P finished entry.
        d_req = _make_request(request_id="req-d-9")
        sched.update_state_after_alloc(
            d_req, _BlocksMock(([1, 2, 3],)), num_external_tokens=48
        )
        p_req = _make_request(request_id="req-p-9", is_d_side=False)
        sched.request_finished(p_req, ([4, 5, 6],))

        scheduler_output = MagicMock()
        scheduler_output.scheduled_new_reqs = []
        scheduler_output.scheduled_cached_reqs = MagicMock(
            req_ids=[], resumed_req_ids=set()
        )

        # Patch parent build_connector_meta so we don't have to set up
        # all the base scheduler plumbing.
        with patch.object(
            sched.__class__.__mro__[1],
            "build_connector_meta",
            return_value=NixlConnectorMetadata(),
        ):
            meta = sched.build_connector_meta(scheduler_output)

        assert isinstance(meta, NixlConnectorMetadata)
        assert "req-d-9" in meta.push_registrations
        assert "req-p-9" in meta.push_finished_blocks
        # Staging dicts cleared.
        assert sched._push_pending_registrations == {}
        assert sched._newly_finished_push_blocks == {}
        # Lease bookkeeping kept until the WRITE completes.
        assert "req-p-9" in sched._finished_request_blocks

    def test_has_pending_push_work_lifecycle(self):
        sched = make_nixl_push_scheduler()
        _stub_sw_clipping(sched)

        assert sched.has_pending_push_work() is False

        # P finished blocks waiting for WRITE completion.
        p_req = _make_request(request_id="req-p-7", is_d_side=False)
        sched.request_finished(p_req, ([0, 1],))
        assert sched.has_pending_push_work() is True

        # Drain via build_connector_meta - lease still pending until WRITE.
        scheduler_output = MagicMock()
        scheduler_output.scheduled_new_reqs = []
        scheduler_output.scheduled_cached_reqs = MagicMock(
            req_ids=[], resumed_req_ids=set()
        )
        with patch.object(
            sched.__class__.__mro__[1],
            "build_connector_meta",
            return_value=NixlConnectorMetadata(),
        ):
            sched.build_connector_meta(scheduler_output)
        # Lease is pending until WRITE completes -> still True.
        assert sched.has_pending_push_work() is True

        # Simulate WRITE completion via update_connector_output.
        sched.update_connector_output(
            KVConnectorOutput(
                finished_sending={"req-p-7"},
                finished_recving=set(),
                invalid_block_ids=set(),
            )
        )
        assert sched.has_pending_push_work() is False

    def test_update_connector_output_clears_lease_and_watchdog(self):
        sched = make_nixl_push_scheduler()
        _stub_sw_clipping(sched)

        d_req = _make_request(request_id="req-d-x")
        sched.update_state_after_alloc(
            d_req, _BlocksMock(([1, 2],)), num_external_tokens=32
        )
        p_req = _make_request(request_id="req-p-x", is_d_side=False)
        sched.request_finished(p_req, ([3, 4],))

        sched.update_connector_output(
            KVConnectorOutput(
                finished_sending={"req-p-x"},
                finished_recving={"req-d-x"},
                invalid_block_ids=set(),
            )
        )
        assert "req-p-x" not in sched._finished_request_blocks
        assert "req-d-x" not in sched._push_registration_deadlines

    def test_registration_watchdog_expires(self, caplog):
        """Stale D registrations whose deadline has passed are dropped at
        ``build_connector_meta`` time."""
        # Watchdog logs a WARNING when it drops the stale entry; that's
        # what this test is verifying, so silence it in the test report.
        caplog.set_level(
            logging.CRITICAL,
            logger=("vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler"),
        )
        sched = make_nixl_push_scheduler()
        _stub_sw_clipping(sched)

        d_req = _make_request(request_id="req-d-stale")
        sched.update_state_after_alloc(
            d_req, _BlocksMock(([7, 8],)), num_external_tokens=32
        )
        # Force the deadline into the past.
        sched._push_registration_deadlines[d_req.request_id] = time.perf_counter() - 1.0

        scheduler_output = MagicMock()
        scheduler_output.scheduled_new_reqs = []
        scheduler_output.scheduled_cached_reqs = MagicMock(
            req_ids=[], resumed_req_ids=set()
        )
        with patch.object(
            sched.__class__.__mro__[1],
            "build_connector_meta",
            return_value=NixlConnectorMetadata(),
        ):
            meta = sched.build_connector_meta(scheduler_output)

        assert d_req.request_id not in sched._push_registration_deadlines
        assert d_req.request_id not in sched._push_pending_registrations
        assert d_req.request_id not in meta.push_registrations


# ----------------------------------------------------------------- #
#  Worker-side tests                                                 #
# ----------------------------------------------------------------- #


class _StubWriterWorker(NixlPushConnectorWorker):
    """Construct a worker without invoking ``__init__`` so we can drive
    the matching/notif logic without bringing up NIXL or torch."""

    @classmethod
    def fresh(cls) -> _StubWriterWorker:
        w = object.__new__(cls)

        # Push-specific state managed by NixlPushConnectorWorker.
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
            ReqId,
            TransferHandle,
        )

        w._sending_transfers = defaultdict[ReqId, list[TransferHandle]](list)
        w._send_failures = set()
        w._sending_transfers_lock = threading.Lock()
        w._push_finished_blocks = {}
        w._pending_d_registrations = {}
        w._reg_send_inbox = queue.Queue()
        w._finished_blocks_inbox = queue.Queue()
        w._pending_completion_notifs = queue.Queue()
        w._evict_finished_inbox = queue.Queue()
        w._deferred_push_inbox = queue.Queue()
        w._push_writer_wake = threading.Event()
        w._push_writer_stop = threading.Event()
        w._push_writer_thread = None

        # Base worker fields touched by start_load_kv / _get_new_notifs.
        w._recving_metadata = {}
        w._pending_recv_notifs = {}
        w._failed_recv_reqs = queue.Queue()
        w._recv_failures = set()
        w._recving_transfers = defaultdict(list)
        w._is_hma_required = False
        w.xfer_stats = NixlKVConnectorStats()
        w._has_packed_cache = False
        w._reqs_to_process = set()
        w._reqs_to_send = {}
        w.draft_tp_mappings = {}
        w._head_sharded_draft_kv_heads = None
        w._head_sharded_draft_regions = set()
        w.consumer_notification_counts_by_req = defaultdict(int)
        w.tp_rank = 0
        w.pcp_rank = 0
        w.pcp_dcp_sharded = False
        w.world_size = 1
        w.pp_size = 1
        w.engine_id = "test-decode-engine"
        w._remote_agents = {}
        w._failed_remote_engines = set()
        w._invalid_remote_engines = set()
        w._handshake_lock = threading.RLock()
        w._physical_blocks_per_logical_kv_block = 1
        w._uses_region_group_mapping = False
        w.region_group_ids = [0]
        w._transfer_layer_names = ()
        w._transfer_layer_region_indices = ()
        w._packed_member_layouts = {}
        w._transfer_layer_group_ids = ()
        w.dst_region_num_blocks = {}
        w.dst_region_group_ids = {}
        w.dst_uses_region_group_mapping = {}
        w.dst_region_mem_types = {}
        # Single non-hybrid attention group, matching the stub block id lists.
        w._has_mamba = False
        w._is_csa_linear = False
        w._group_spec_types = (FullAttentionSpec,)
        w._engine_ttl = 0.0
        w._engine_last_active = {}
        w._engine_by_address = {}

        # Track _do_start_push_kv invocations.
        calls: list[tuple[str, Any, dict[str, Any]]] = []
        w.start_push_calls = calls
        return w

    def _do_start_push_kv(
        self,
        request_id: str,
        local_block_ids,
        registration_data: dict[str, Any],
    ) -> None:  # pragma: no cover - exercised through tests
        # Track the call instead of issuing real WRITEs.
        self.start_push_calls.append((request_id, local_block_ids, registration_data))


def _registration_data(
    request_id: str,
    *,
    decode_engine_id: str = "decode-engine",
    decode_host: str = "10.0.0.2",
    decode_port: int = 5602,
    decode_tp_size: int = 1,
    local_block_ids=((100, 101, 102),),
    remote_engine_id: str = "prefill-engine",
    remote_host: str = "10.0.0.1",
    remote_port: int = 5601,
    remote_tp_size: int = 1,
) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "decode_engine_id": decode_engine_id,
        "decode_host": decode_host,
        "decode_port": decode_port,
        "decode_tp_size": decode_tp_size,
        "local_block_ids": local_block_ids,
        "remote_engine_id": remote_engine_id,
        "remote_host": remote_host,
        "remote_port": remote_port,
        "remote_tp_size": remote_tp_size,
    }


class TestPushWriterRegSend:
    """``_do_send_reg_notif``: the PUSH_REG goes to every handshaked agent of
    the P engine, and the agent map is read under ``_handshake_lock`` so the
    send can't race the handshake done-callback's insert or a concurrent
    stale-engine eviction (X1)."""

    def _reg_send_worker(self) -> tuple[_StubWriterWorker, list]:
        w = _StubWriterWorker.fresh()
        w.nixl_wrapper = MagicMock()
        failures: list = []
        w._handle_failed_transfer = lambda *a: failures.append(a)
        return w, failures

    def test_sends_to_all_agents_with_prefix_and_payload(self):
        w, failures = self._reg_send_worker()
        w._remote_agents["prefill-engine"] = {(0, 0): "agent-0", (0, 1): "agent-1"}
        rd = _registration_data("req-1")

        w._do_send_reg_notif("req-1", rd)

        assert failures == []
        calls = w.nixl_wrapper.send_notif.call_args_list
        assert len(calls) == 2
        assert {c.args[0] for c in calls} == {"agent-0", "agent-1"}
        for call in calls:
            notif = call.kwargs["notif_msg"]
            assert notif.startswith(PUSH_REG_NOTIF_PREFIX)
            # (Tuples decode back as lists, so compare identity fields.)
            decoded = msgspec.msgpack.decode(notif[len(PUSH_REG_NOTIF_PREFIX) :])
            assert decoded["request_id"] == "req-1"
            assert decoded["decode_engine_id"] == rd["decode_engine_id"]
            assert decoded["remote_engine_id"] == rd["remote_engine_id"]
            assert decoded["local_block_ids"] == [
                list(group) for group in rd["local_block_ids"]
            ]

    def test_queues_failed_request_when_engine_not_handshaked(self):
        w, failures = self._reg_send_worker()

        w._do_send_reg_notif("req-1", _registration_data("req-1"))

        assert failures == []
        assert w._failed_recv_reqs.get_nowait() == "req-1"
        assert w._failed_recv_reqs.empty()
        w.nixl_wrapper.send_notif.assert_not_called()

    def test_agent_read_is_serialized_with_handshake_lock(self):
        """While another thread holds ``_handshake_lock`` (as the handshake
        done-callback does while writing ``_remote_agents``), the writer's
        check-then-send must not run ahead of the critical section."""
        w, failures = self._reg_send_worker()
        w._remote_agents["prefill-engine"] = {(0, 0): "agent-0"}
        rd = _registration_data("req-1")

        w._handshake_lock.acquire()
        done = threading.Event()
        errors: list[BaseException] = []

        def _send():
            try:
                w._do_send_reg_notif("req-1", rd)
            except BaseException as e:  # pragma: no cover
                errors.append(e)
            finally:
                done.set()

        t = threading.Thread(target=_send)
        t.start()
        assert not done.wait(timeout=0.2)
        w.nixl_wrapper.send_notif.assert_not_called()
        assert failures == []

        w._handshake_lock.release()
        assert done.wait(timeout=2.0)
        t.join(timeout=2.0)
        assert errors == []
        assert failures == []
        assert w.nixl_wrapper.send_notif.call_count == 1


class TestPushWriterMatching:
    def test_handle_push_reg_matches_existing_finished_blocks(self):
        """PUSH_REG arrives second (P finished first): match + fire."""
        w = _StubWriterWorker.fresh()
        # P had already finished; its blocks were stashed via metadata.
        w._push_finished_blocks["req-A"] = ([200, 201, 202],)

        notif = PUSH_REG_NOTIF_PREFIX + msgspec.msgpack.encode(
            _registration_data("req-A")
        )
        w._handle_push_reg_notif(notif)

        assert len(w.start_push_calls) == 1
        rid, blocks, reg = w.start_push_calls[0]
        assert rid == "req-A"
        assert blocks == ([200, 201, 202],)
        assert reg["decode_engine_id"] == "decode-engine"
        # Finished blocks consumed.
        assert "req-A" not in w._push_finished_blocks
        assert w._pending_d_registrations == {}

    def test_handle_push_reg_stashes_when_no_finished_blocks_yet(self):
        """PUSH_REG arrives first (D registered first): stash, no fire."""
        w = _StubWriterWorker.fresh()

        notif = PUSH_REG_NOTIF_PREFIX + msgspec.msgpack.encode(
            _registration_data("req-B")
        )
        w._handle_push_reg_notif(notif)

        assert len(w.start_push_calls) == 0
        assert "req-B" in w._pending_d_registrations

    def test_handle_push_reg_matches_after_stripping_random_suffix(self):
        """P and D assign the same logical request the same
        ``cmpl-<uuid>-<index>`` but different per-engine random suffixes;
        the writer should still match P's finished blocks via the
        suffix-stripping fallback in ``_pop_matching_finished_blocks``.
        """
        w = _StubWriterWorker.fresh()
        # Same base id + completion index; differ only in the trailing
        # ``-<8 hex>`` randomization suffix.
        p_id = "cmpl-12345678-aaaa-bbbb-cccc-1234567890ab-0-aaaaaaaa"
        d_id = "cmpl-12345678-aaaa-bbbb-cccc-1234567890ab-0-bbbbbbbb"
        # Sanity: same base id under the helper used by the connector.
        assert get_base_request_id(p_id) == get_base_request_id(d_id)

        w._push_finished_blocks[p_id] = ([1, 2, 3],)
        notif = PUSH_REG_NOTIF_PREFIX + msgspec.msgpack.encode(_registration_data(d_id))
        w._handle_push_reg_notif(notif)

        # Suffix-stripped fallback matched and fired.
        assert len(w.start_push_calls) == 1
        assert w.start_push_calls[0][0] == p_id
        assert p_id not in w._push_finished_blocks

    def test_handle_push_reg_drops_malformed(self, caplog):
        # The writer logs WARNING/ERROR when it sees these bad payloads;
        # that's the desired behavior, so suppress the noise from test
        # output rather than letting it look like a failure.
        caplog.set_level(
            logging.CRITICAL,
            logger=("vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker"),
        )
        w = _StubWriterWorker.fresh()
        # Missing request_id -> should drop without raising.
        bad = PUSH_REG_NOTIF_PREFIX + msgspec.msgpack.encode({"decode_engine_id": "x"})
        w._handle_push_reg_notif(bad)
        assert w._pending_d_registrations == {}
        assert w.start_push_calls == []

        # Undecodable payload also dropped.
        w._handle_push_reg_notif(PUSH_REG_NOTIF_PREFIX + b"\xff\xff\xff")
        assert w.start_push_calls == []


class TestPushWriterStartLoadKv:
    def test_finished_blocks_inbox_matches_stashed_registration(self):
        """Run the writer-loop's finished-blocks drain against a
        pre-populated _pending_d_registrations entry."""
        w = _StubWriterWorker.fresh()
        w._pending_d_registrations["req-C"] = _registration_data("req-C")

        # Simulate start_load_kv enqueuing finished blocks.
        w._finished_blocks_inbox.put(("req-C", ([10, 11, 12],)))

        # Drain like the writer loop does.
        while True:
            try:
                rid, blocks = w._finished_blocks_inbox.get_nowait()
            except queue.Empty:
                break
            matched = w._pop_matching_registration(rid)
            if matched is not None:
                w._do_start_push_kv(rid, blocks, matched)
            else:
                w._push_finished_blocks[rid] = blocks

        assert len(w.start_push_calls) == 1
        assert w.start_push_calls[0][0] == "req-C"
        assert "req-C" not in w._pending_d_registrations

    def test_start_load_kv_enqueues_to_writer(self):
        """``start_load_kv`` should hand registrations + finished blocks
        to the writer queues without doing matching itself."""
        w = _StubWriterWorker.fresh()
        # Stub heartbeats to a no-op; tests don't exercise the heartbeat
        # path here.
        w._send_heartbeats = lambda metadata: None
        # Stub logical-to-kernel mapping used by reqs_to_recv.
        w._logical_to_kernel_block_ids = lambda x, ratio: x

        meta = NixlConnectorMetadata()
        meta.push_registrations = {
            "req-D": _registration_data("req-D"),
        }
        meta.push_finished_blocks = {
            "req-E": ([5, 6, 7],),
        }

        w.start_load_kv(meta)

        # Things are queued for the writer; nothing fires yet.
        assert w._reg_send_inbox.qsize() == 1
        assert w._finished_blocks_inbox.qsize() == 1
        assert w._push_writer_wake.is_set()
        assert w.start_push_calls == []

    @pytest.mark.parametrize("sharded", [False, True])
    def test_noncanonical_pcp_rank_only_pushes_distinct_shards(self, sharded):
        w = _StubWriterWorker.fresh()
        w.pcp_rank = 1
        w.pcp_dcp_sharded = sharded
        w._send_heartbeats = MagicMock()

        meta = NixlConnectorMetadata()
        meta.push_finished_blocks["req"] = ([1, 2],)
        meta.reqs_in_batch.add("req")
        meta.reqs_to_send["req"] = time.perf_counter() + 10

        w.start_load_kv(meta)

        assert w._finished_blocks_inbox.empty() is (not sharded)
        assert ("req" in w._reqs_to_process) is sharded
        assert ("req" in w._reqs_to_send) is sharded
        assert w._push_writer_wake.is_set() is sharded
        assert w._send_heartbeats.called is sharded


# The P→D handshake must run on the base worker's background executor, never
# blocking the writer thread: ``_do_start_push_kv`` defers the WRITE until the
# handshake resolves, then re-drives via ``_deferred_push_inbox``. These call
# the *real* ``_do_start_push_kv`` (the stub overrides it for matching tests).
def _real_do_start_push_kv(w, *args):
    return NixlPushConnectorWorker._do_start_push_kv(w, *args)


def test_do_start_push_kv_defers_then_writes_when_handshake_ready():
    """Full happy-path lifecycle: an in-flight handshake defers the WRITE (no
    NIXL op from the writer or the executor callback); once it resolves the
    request is re-queued on ``_deferred_push_inbox`` with the wake set; and on
    re-drive with the handshake ready the WRITE is issued with a correct
    ReqMeta."""
    w = _StubWriterWorker.fresh()
    w._logical_to_kernel_block_ids = lambda x, ratio: x
    xfer_calls: list[dict[str, Any]] = []
    w._xfer_blocks_for_req = lambda **kw: xfer_calls.append(kw)

    fut: Future = Future()
    w._ensure_handshake = lambda *a, **k: fut

    rd = _registration_data("req-hs", decode_engine_id="decode-engine")
    _real_do_start_push_kv(w, "req-hs", ([1, 2, 3],), rd)

    # Handshake pending -> nothing issued, nothing queued, no wake.
    assert xfer_calls == []
    assert w._deferred_push_inbox.qsize() == 0
    assert not w._push_writer_wake.is_set()

    # Handshake completes: request re-queued for the writer, wake set, but no
    # *direct* WRITE from the callback (wrong thread for NIXL ops).
    fut.set_result(({(0, 0): "agent"}, 0.0))
    assert xfer_calls == []
    assert w._push_writer_wake.is_set()
    rid, blocks, reg = w._deferred_push_inbox.get_nowait()
    assert (rid, blocks, reg) == ("req-hs", ([1, 2, 3],), rd)

    # Re-drive on the writer with the handshake now ready -> WRITE issued.
    w._ensure_handshake = lambda *a, **k: None
    _real_do_start_push_kv(w, rid, blocks, reg)
    assert len(xfer_calls) == 1
    assert xfer_calls[0]["req_id"] == "req-hs"
    meta = xfer_calls[0]["meta"]
    assert meta.remote is not None
    assert meta.remote.engine_id == "decode-engine"
    # RemoteMeta.request_id is D's request id from the registration.
    assert meta.remote.request_id == "req-hs"


def test_do_start_push_kv_drops_request_on_handshake_failure():
    """Handshake raises: the request is dropped (not re-queued, no WRITE) and
    the failure is logged. Blocks are reclaimed by the lease/watchdog, matching
    the old blocking behaviour."""
    w = _StubWriterWorker.fresh()
    w._logical_to_kernel_block_ids = lambda x, ratio: x
    xfer_calls: list[dict[str, Any]] = []
    w._xfer_blocks_for_req = lambda **kw: xfer_calls.append(kw)
    failures: list[dict[str, Any]] = []
    w._log_failure = lambda **kw: failures.append(kw)

    fut: Future = Future()
    w._ensure_handshake = lambda *a, **k: fut

    _real_do_start_push_kv(w, "req-fail", ([9],), _registration_data("req-fail"))
    fut.set_exception(RuntimeError("handshake boom"))

    assert w._deferred_push_inbox.qsize() == 0
    assert xfer_calls == []
    assert len(failures) == 1
    assert failures[0]["failure_type"] == "push_handshake_failed"
    # The handshake metric is counted once by _ensure_handshake's own
    # callback (stubbed out here); the push side must not double-record it.
    assert w.xfer_stats.data["num_failed_handshakes"] == []
    assert w.xfer_stats.data["num_failed_transfers"] == []


def test_writer_loop_drains_deferred_push_inbox():
    """The writer loop drains ``_deferred_push_inbox`` and re-drives
    ``_do_start_push_kv`` for each entry (event-driven, no polling)."""
    w = _StubWriterWorker.fresh()
    w.nixl_wrapper = MagicMock()
    w.nixl_wrapper.get_new_notifs.return_value = {}

    processed = threading.Event()

    def _tracked(rid, blocks, rd):
        w.start_push_calls.append((rid, blocks, rd))
        processed.set()

    w._do_start_push_kv = _tracked  # type: ignore[method-assign]

    w._deferred_push_inbox.put(
        ("req-retry", ([1, 2],), _registration_data("req-retry"))
    )
    w._push_writer_wake.set()

    t = threading.Thread(target=w._push_writer_loop, daemon=True)
    t.start()
    try:
        assert processed.wait(timeout=2.0), "writer did not drain deferred inbox"
    finally:
        w._push_writer_stop.set()
        w._push_writer_wake.set()
        t.join(timeout=2)

    assert len(w.start_push_calls) == 1
    assert w.start_push_calls[0][0] == "req-retry"


def _eviction_worker(engine_ttl: float) -> NixlPushConnectorWorker:
    """A push worker wired to drive the base ``_ensure_handshake`` eviction
    path (``_evict_stale_engines`` + ``_cleanup_remote_engine``)."""
    w = _StubWriterWorker.fresh()
    w._engine_ttl = engine_ttl
    w._engine_last_active = {}
    w._engine_clock_offset = {}
    w._handshake_lock = threading.RLock()
    # _cleanup_remote_engine touches these when reaping an engine.
    w.nixl_wrapper = MagicMock()
    w.dst_xfer_side_handles = {}
    w.kv_caches_base_addr = {}
    w.dst_num_blocks = {}
    w.tp_mappings = {}
    w.transfer_topo = None
    w._logical_to_kernel_block_ids = lambda blocks, ratio: blocks
    w.writes = []
    w._xfer_blocks_for_req = lambda req_id, meta: w.writes.append(req_id)
    return w


def test_active_push_refreshes_engine_last_active():
    """The base ``_ensure_handshake`` refreshes liveness only on a new
    handshake, so an active push to an already-connected engine must refresh
    ``_engine_last_active`` itself or it is reaped mid-stream (S1)."""
    w = _eviction_worker(engine_ttl=3600.0)
    # Already-connected D -> _ensure_handshake returns None, WRITE runs inline.
    w._remote_agents["decode-engine"] = {(0, 0): "agent-decode"}
    stale = time.perf_counter() - 5.0
    w._engine_last_active["decode-engine"] = stale

    _real_do_start_push_kv(w, "req", ([1, 2, 3],), _registration_data("req"))

    assert w._engine_last_active["decode-engine"] > stale
    assert w.writes == ["req"]


def test_stale_engine_evicted_on_push():
    """A push drives ``_ensure_handshake`` -> ``_evict_stale_engines``, so a D
    engine silent past its TTL is reaped -- no _remote_agents / NIXL agent leak
    across D scale up/down (S1)."""
    w = _eviction_worker(engine_ttl=30.0)
    w._remote_agents["D-old"] = {(0, 0): "agent-D-old"}
    w._engine_last_active["D-old"] = time.perf_counter() - 10_000.0
    # The engine being pushed to is already connected.
    w._remote_agents["decode-engine"] = {(0, 0): "agent-decode"}

    _real_do_start_push_kv(w, "req", ([1, 2, 3],), _registration_data("req"))

    assert "D-old" not in w._remote_agents
    assert "D-old" not in w._engine_last_active
    w.nixl_wrapper.remove_remote_agent.assert_called_once_with("agent-D-old")


def test_cleanup_remote_engine_pops_under_handshake_lock():
    """Regression (X1): eviction must not remove ``_remote_agents`` entries
    while another thread is inside the lock's critical section (e.g. the
    push writer reading the map to send a registration)."""
    w = _eviction_worker(engine_ttl=30.0)
    w._remote_agents["D-old"] = {(0, 0): "agent-D-old"}

    w._handshake_lock.acquire()
    done = threading.Event()

    def _cleanup():
        w._cleanup_remote_engine("D-old")
        done.set()

    t = threading.Thread(target=_cleanup)
    t.start()
    assert "D-old" in w._remote_agents

    w._handshake_lock.release()
    assert done.wait(timeout=2.0)
    t.join(timeout=2.0)
    assert "D-old" not in w._remote_agents
    w.nixl_wrapper.remove_remote_agent.assert_called_once_with("agent-D-old")


def _recv_metadata(remote_engine_id: str, req_id: str = "req") -> NixlConnectorMetadata:
    """Build metadata with a single ``reqs_to_recv`` entry pointing at
    ``remote_engine_id`` (the prefill remote D receives a push from)."""
    params = {
        "remote_block_ids": ([0],),
        "remote_engine_id": remote_engine_id,
        "remote_request_id": "p-req",
        "remote_host": "localhost",
        "remote_port": 1234,
        "tp_size": 1,
    }
    meta = NixlConnectorMetadata()
    meta.add_new_req_to_recv(req_id, ([0],), params)
    return meta


def test_start_load_kv_refreshes_engine_last_active_on_d_side():
    """D receiving a push refreshes ``_engine_last_active`` for the prefill
    remote, but only once that engine is connected (handshaked into
    ``_remote_agents`` via heartbeats), mirroring the P-side refresh which runs
    after ``_ensure_handshake``. Without it the prefill engine is reaped
    mid-stream once it passes its TTL."""
    w = _StubWriterWorker.fresh()
    w._send_heartbeats = lambda metadata: None
    w._logical_to_kernel_block_ids = lambda x, ratio: x
    # Connected prefill engine (already handshaked in).
    w._remote_agents["prefill-engine"] = {(0, 0): "agent-p"}

    stale = time.perf_counter() - 5.0
    w._engine_last_active["prefill-engine"] = stale

    w.start_load_kv(_recv_metadata("prefill-engine"))

    assert w._engine_last_active["prefill-engine"] > stale
    assert "req" in w._recving_metadata


def test_start_load_kv_skips_liveness_for_unconnected_engine():
    """If the prefill engine was never handshaked into ``_remote_agents`` (e.g.
    its heartbeat handshake never succeeded), the D-side refresh must NOT record
    an ``_engine_last_active`` entry -- otherwise a later eviction pass hits the
    ``_remote_agents`` invariant in ``_cleanup_remote_engine`` and crashes on
    the D node."""
    w = _eviction_worker(engine_ttl=30.0)
    w._send_heartbeats = lambda metadata: None

    w.start_load_kv(_recv_metadata("prefill-engine"))

    # Unconnected -> no orphaned liveness entry, so eviction has nothing to trip on.
    assert "prefill-engine" not in w._engine_last_active
    assert "prefill-engine" not in w._remote_agents

    w._evict_stale_engines()  # nothing to reap, must not raise


class TestPushWriterNotifs:
    def test_get_new_notifs_processes_forwarded_completion_notif(self):
        """Non-PUSH_REG notifs forwarded by the writer thread are drained
        on the engine main thread inside ``_get_new_notifs``."""
        w = _StubWriterWorker.fresh()
        # Pretend the writer thread already forwarded a completion notif
        # for a request whose KV is being received.
        request_id = "req-recv-1"
        w._recving_metadata[request_id] = MagicMock(pp_size=1)
        # Compose the standard completion notif: req_id:tp_size.
        notif_msg = f"{request_id}:1".encode()
        w._pending_completion_notifs.put(notif_msg)

        w._get_new_notifs()

        assert request_id in w._recving_transfers

    def test_get_transfer_results_evicts_completed_state(self):
        """Transfer completion should enqueue evictions and wake the writer."""
        w = _StubWriterWorker.fresh()

        with patch.object(
            NixlPushConnectorWorker.__mro__[1],
            "get_transfer_results",
            return_value=KVConnectorTransferResults(finished_sending={"req-done"}),
        ):
            results = w.get_transfer_results()

        assert results.finished_sending == {"req-done"}
        assert results.finished_recving == set()
        # Eviction enqueued for the writer.
        evicted = []
        while True:
            try:
                evicted.append(w._evict_finished_inbox.get_nowait())
            except queue.Empty:
                break
        assert evicted == ["req-done"]
        assert w._push_writer_wake.is_set()

    @staticmethod
    def _pollable_worker() -> _StubWriterWorker:
        """Stub worker with the extra base-worker state the real
        ``get_transfer_results`` needs to poll ``_sending_transfers``."""
        w = _StubWriterWorker.fresh()
        w.transfer_topo = MagicMock()
        w.nixl_wrapper = MagicMock()
        w.xfer_stats = MagicMock()
        w._log_failure = MagicMock()  # type: ignore[method-assign]
        w._invalid_block_ids = queue.Queue()
        w._pending_recv_notifs = {}
        w._replicated_pcp_done_sending = set()
        w.use_host_buffer = False
        return w

    def _make_sending_req(self, w: _StubWriterWorker) -> str:
        request_id = "req-send-1"
        w._sending_transfers[request_id] = [101, 102]
        w._reqs_to_send[request_id] = time.perf_counter() + 60
        w._reqs_to_process.add(request_id)
        return request_id

    def test_failed_push_send_is_not_reported_done_sending(self):
        """A failed P-side WRITE must not surface as finished sending.

        Reporting it would free P-side blocks as if the KV had been
        delivered while D still waits for the data; the request must be
        left to the lease / watchdog instead.
        """
        w = self._pollable_worker()
        request_id = self._make_sending_req(w)
        w.nixl_wrapper.check_xfer_state.side_effect = ["ERR", "DONE"]

        results = w.get_transfer_results()

        assert request_id not in results.finished_sending
        # Lease tracking is preserved so the watchdog can reschedule.
        assert request_id in w._reqs_to_send
        assert request_id in w._reqs_to_process
        # Both handles were still cleaned up.
        assert request_id not in w._sending_transfers

    @pytest.mark.parametrize(("pp_size", "is_hma"), [(1, False), (2, True)])
    def test_completed_push_send_releases_blocks_without_consumer_notif(
        self, pp_size, is_hma
    ):
        """All WRITEs completing lets P reclaim its blocks without a D ACK."""
        w = self._pollable_worker()
        w.pp_size = pp_size
        w._is_hma_required = is_hma
        request_id = self._make_sending_req(w)
        w.nixl_wrapper.check_xfer_state.side_effect = ["DONE", "PROC", "DONE"]

        results = w.get_transfer_results()

        assert request_id not in results.finished_sending
        assert request_id in w._reqs_to_send
        assert w._sending_transfers[request_id] == [102]
        assert w._evict_finished_inbox.empty()

        results = w.get_transfer_results()
        assert results.finished_sending == {request_id}
        assert request_id not in w._reqs_to_send
        assert request_id not in w._reqs_to_process
        assert w._evict_finished_inbox.get_nowait() == request_id
        assert w.get_transfer_results().finished_sending == set()
        assert w._evict_finished_inbox.empty()
        assert w.nixl_wrapper.release_xfer_handle.call_count == 2
        w.xfer_stats.record_kv_expired_req.assert_not_called()

    @pytest.mark.parametrize("sibling_state", ["ERR", "DONE"])
    def test_push_failure_survives_until_lease_expiry(self, sibling_state):
        """A later sibling completion must not turn a failed send into success."""
        w = self._pollable_worker()
        request_id = self._make_sending_req(w)
        w.nixl_wrapper.check_xfer_state.side_effect = ["ERR", "PROC", sibling_state]

        assert w.get_transfer_results().finished_sending == set()
        assert w._sending_transfers[request_id] == [102]
        assert w.get_transfer_results().finished_sending == set()
        assert request_id not in w._sending_transfers
        assert request_id in w._reqs_to_send
        assert w._evict_finished_inbox.empty()

        w.expected_consumer_notifications_by_req = {}
        w._reqs_to_send[request_id] = time.perf_counter() - 1
        assert w.get_transfer_results().finished_sending == {request_id}
        assert request_id not in w._send_failures
        assert w._evict_finished_inbox.get_nowait() == request_id

    @pytest.mark.parametrize("release_fails", [False, True])
    def test_push_submission_failure_is_remembered_after_sibling_success(
        self, release_fails
    ):
        """A submission error remains a failure even if later polls succeed."""
        w = self._pollable_worker()
        request_id = self._make_sending_req(w)
        w.transfer_topo.block_size_ratio.return_value = 1
        w._apply_prefix_caching = MagicMock(return_value=([[1]], [[1]]))
        w._compute_desc_ids = MagicMock(return_value=[0])
        w.dst_num_blocks = {w.engine_id: 8}
        w.dst_region_num_blocks[w.engine_id] = [8]
        w.dst_region_group_ids[w.engine_id] = [0]
        w.dst_uses_region_group_mapping[w.engine_id] = False
        w.nixl_wrapper.make_prepped_xfer.return_value = 101
        w.nixl_wrapper.transfer.side_effect = RuntimeError("submit")
        if release_fails:
            w.nixl_wrapper.release_xfer_handle.side_effect = [
                RuntimeError("release"),
                None,
                None,
            ]

        handle = w._xfer_blocks(
            read_spec=ReadSpec(0, [[1]], [[1]]),
            dst_engine_id=w.engine_id,
            request_id=request_id,
            remote_request_id="decode-request",
            local_xfer_side_handle=1,
            remote_xfer_side_handle=2,
        )
        assert handle == (101 if release_fails else None)
        w._sending_transfers[request_id] = [102]
        if handle is not None:
            w._sending_transfers[request_id].append(handle)
        w.nixl_wrapper.check_xfer_state.return_value = "DONE"

        assert w.get_transfer_results().finished_sending == set()
        assert request_id in w._reqs_to_send
        assert request_id not in w._sending_transfers
        assert w._evict_finished_inbox.empty()

    @pytest.mark.parametrize("first_state", ["ERR", "DONE"])
    def test_push_completion_after_expiry_is_not_reported_twice(self, first_state):
        """A WRITE finishing after lease expiry must not complete the request again."""
        w = self._pollable_worker()
        request_id = self._make_sending_req(w)
        w.nixl_wrapper.check_xfer_state.side_effect = [
            first_state,
            "PROC",
            "PROC",
            "DONE",
        ]
        assert w.get_transfer_results().finished_sending == set()

        w.expected_consumer_notifications_by_req = {}
        w._reqs_to_send[request_id] = time.perf_counter() - 1
        assert w.get_transfer_results().finished_sending == {request_id}
        assert w._evict_finished_inbox.get_nowait() == request_id

        assert w.get_transfer_results().finished_sending == set()
        assert request_id not in w._sending_transfers
        assert request_id not in w._send_failures
        assert w._evict_finished_inbox.empty()


# ----------------------------------------------------------------- #
#  Negative / error-path tests                                       #
# ----------------------------------------------------------------- #


class TestPushSchedulerNegative:
    """Failure / no-op paths on the scheduler side."""

    def test_update_state_after_alloc_no_kv_transfer_params_is_noop(self):
        """Requests without kv_transfer_params must not register anything."""
        sched = make_nixl_push_scheduler()
        _stub_sw_clipping(sched)

        request = MagicMock()
        request.request_id = "req-no-params"
        request.kv_transfer_params = None

        sched.update_state_after_alloc(
            request, _BlocksMock(([1, 2, 3],)), num_external_tokens=64
        )

        assert sched._push_pending_registrations == {}
        assert sched._push_registration_deadlines == {}
        assert sched._reqs_need_recv == {}

    def test_update_state_after_alloc_zero_external_tokens_does_not_register(self):
        """num_external_tokens=0 should not stage a D registration."""
        sched = make_nixl_push_scheduler()
        _stub_sw_clipping(sched)

        request = _make_request(request_id="req-zero-ext")
        sched.update_state_after_alloc(
            request, _BlocksMock(([1, 2, 3],)), num_external_tokens=0
        )

        assert sched._push_pending_registrations == {}
        assert sched._push_registration_deadlines == {}

    def test_request_finished_unfinished_status_does_not_stage(self):
        """If a request is still RUNNING, request_finished must not stash
        blocks for the worker (no push needed)."""
        sched = make_nixl_push_scheduler()
        _stub_sw_clipping(sched)

        request = _make_request(
            request_id="req-running", is_d_side=False, finished=False
        )

        delay, ret = sched.request_finished(request, ([1, 2, 3],))

        assert delay is False
        assert ret is None
        assert sched._finished_request_blocks == {}
        assert sched._newly_finished_push_blocks == {}

    def test_request_finished_empty_blocks_does_not_arm_lease(self):
        """Empty block-id groups should still complete cleanly without
        arming the lease/finished maps."""
        sched = make_nixl_push_scheduler()
        _stub_sw_clipping(sched)

        request = _make_request(request_id="req-empty", is_d_side=False)
        delay, ret = sched.request_finished(request, ((),))

        assert delay is False
        assert ret is not None
        assert "req-empty" not in sched._finished_request_blocks
        assert "req-empty" not in sched._newly_finished_push_blocks
        assert "req-empty" not in sched._reqs_need_send

    def test_update_connector_output_unknown_request_is_noop(self):
        """Idempotent cleanup: clearing a request that was never staged
        must not raise or mutate other state."""
        sched = make_nixl_push_scheduler()
        _stub_sw_clipping(sched)

        # Stage one real request to ensure it's NOT touched.
        live = _make_request(request_id="req-live", is_d_side=False)
        sched.request_finished(live, ([1],))

        sched.update_connector_output(
            KVConnectorOutput(
                finished_sending={"unknown-1"},
                finished_recving={"unknown-2"},
                invalid_block_ids=set(),
            )
        )

        # Live entry untouched.
        assert "req-live" in sched._finished_request_blocks


class TestPushWriterNegative:
    """Failure / drop / idempotence paths in the writer thread."""

    def test_pop_matching_registration_returns_none_when_empty(self):
        w = _StubWriterWorker.fresh()
        assert w._pop_matching_registration("nope") is None

    def test_pop_matching_finished_blocks_returns_none_when_empty(self):
        w = _StubWriterWorker.fresh()
        assert w._pop_matching_finished_blocks("nope") is None

    def test_pop_matching_registration_no_match_when_base_ids_differ(self):
        """A registration whose base id (after stripping the random suffix)
        does NOT match the lookup request_id must not be popped."""
        w = _StubWriterWorker.fresh()
        # Two unrelated requests: different base UUIDs, so stripping the
        # trailing ``-<8 hex>`` suffix still yields different base ids.
        unrelated_d = "cmpl-aaaaaaaa-aaaa-aaaa-aaaa-aaaaaaaaaaaa-0-11111111"
        lookup = "cmpl-bbbbbbbb-bbbb-bbbb-bbbb-bbbbbbbbbbbb-0-22222222"
        assert get_base_request_id(unrelated_d) != get_base_request_id(lookup)

        w._pending_d_registrations[unrelated_d] = _registration_data(unrelated_d)
        result = w._pop_matching_registration(lookup)
        assert result is None
        # Original entry untouched.
        assert unrelated_d in w._pending_d_registrations

    def test_handle_push_reg_with_non_dict_payload_is_dropped(self, caplog):
        """msgpack-encoded non-dict payload (e.g. a list) should be
        dropped without raising."""
        caplog.set_level(
            logging.CRITICAL,
            logger=("vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker"),
        )
        w = _StubWriterWorker.fresh()
        bad = PUSH_REG_NOTIF_PREFIX + msgspec.msgpack.encode([1, 2, 3])
        w._handle_push_reg_notif(bad)
        assert w._pending_d_registrations == {}
        assert w.start_push_calls == []

    def test_handle_push_reg_with_non_string_request_id_is_dropped(self, caplog):
        """request_id must be a str; integers, None, etc. must drop."""
        caplog.set_level(
            logging.CRITICAL,
            logger=("vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker"),
        )
        w = _StubWriterWorker.fresh()
        for bogus_rid in (123, None, 4.5, b"bytes-not-str"):
            payload = _registration_data("placeholder")
            payload["request_id"] = bogus_rid
            notif = PUSH_REG_NOTIF_PREFIX + msgspec.msgpack.encode(payload)
            w._handle_push_reg_notif(notif)
        assert w._pending_d_registrations == {}
        assert w.start_push_calls == []

    def test_handle_push_reg_idempotent_for_same_request_id(self):
        """Receiving the same PUSH_REG twice (e.g. P retries after a
        flake) keeps the entry staged exactly once and never fires."""
        w = _StubWriterWorker.fresh()
        notif = PUSH_REG_NOTIF_PREFIX + msgspec.msgpack.encode(
            _registration_data("req-dup")
        )
        w._handle_push_reg_notif(notif)
        w._handle_push_reg_notif(notif)
        assert "req-dup" in w._pending_d_registrations
        assert len(w._pending_d_registrations) == 1
        assert w.start_push_calls == []

    def test_get_transfer_results_enqueues_each_completed_request(self):
        """``get_transfer_results`` must enqueue every completed request
        in ``done_sending`` so the writer can drop stale matching state.
        Unlike the happy-path test, this verifies the *cardinality*: N
        completed requests -> N evictions, in order."""
        w = _StubWriterWorker.fresh()
        with patch.object(
            NixlPushConnectorWorker.__mro__[1],
            "get_transfer_results",
            return_value=KVConnectorTransferResults(
                finished_sending={"req-1", "req-2", "req-3"}
            ),
        ):
            results = w.get_transfer_results()
        assert results.finished_sending == {"req-1", "req-2", "req-3"}

        evicted: list[str] = []
        while True:
            try:
                evicted.append(w._evict_finished_inbox.get_nowait())
            except queue.Empty:
                break
        assert sorted(evicted) == ["req-1", "req-2", "req-3"]

    def test_empty_transfer_results_do_not_enqueue_eviction(self):
        """If there's nothing newly done, no eviction should be enqueued.
        The wake event IS still set because ``get_finished`` always wakes
        the writer to drain notifs."""
        w = _StubWriterWorker.fresh()
        with patch.object(
            NixlPushConnectorWorker.__mro__[1],
            "get_transfer_results",
            return_value=KVConnectorTransferResults(),
        ):
            results = w.get_transfer_results()
        assert results.finished_sending == set()
        assert results.finished_recving == set()
        assert w._evict_finished_inbox.qsize() == 0
        # Wake set so the writer drains NIXL notifs even when idle.
        assert w._push_writer_wake.is_set()

    def test_failed_push_transfer_does_not_evict_writer_state(self):
        w = _StubWriterWorker.fresh()
        w.nixl_wrapper = MagicMock()
        w.nixl_wrapper.check_xfer_state.return_value = "ERR"
        w.xfer_stats = MagicMock()
        w._log_failure = MagicMock()
        w._sending_transfers["req-failed"] = [17]
        w._reqs_to_send["req-failed"] = time.perf_counter() + 30
        w._reqs_to_process.add("req-failed")

        with patch.object(
            NixlPushConnectorWorker.__mro__[1],
            "get_transfer_results",
            return_value=KVConnectorTransferResults(),
        ):
            results = w.get_transfer_results()

        assert results.finished_sending == set()
        assert results.finished_recving == set()
        assert "req-failed" not in w._sending_transfers
        assert "req-failed" in w._reqs_to_send
        assert "req-failed" in w._reqs_to_process
        assert w._evict_finished_inbox.empty()
        w.nixl_wrapper.release_xfer_handle.assert_called_once_with(17)

    def test_get_new_notifs_unknown_request_is_logged_and_skipped(self, caplog):
        """A completion notif for a request the worker doesn't know
        about should be logged but not crash."""
        caplog.set_level(
            logging.CRITICAL,
            logger=("vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker"),
        )
        w = _StubWriterWorker.fresh()
        # Forward a completion notif for an unknown request_id.
        w._pending_completion_notifs.put(b"never-heard-of-you:1")

        w._get_new_notifs()
        # Did not register anywhere.
        assert "never-heard-of-you" not in w._recving_transfers
        assert w.xfer_stats.data["num_notifications_after_expiry"] == [1]

    def test_start_load_kv_with_empty_metadata_is_noop(self):
        """Empty metadata must not wake the writer or enqueue anything."""
        w = _StubWriterWorker.fresh()
        w._send_heartbeats = lambda metadata: None
        w._logical_to_kernel_block_ids = lambda x, ratio: x

        meta = NixlConnectorMetadata()
        w.start_load_kv(meta)

        assert w._reg_send_inbox.qsize() == 0
        assert w._finished_blocks_inbox.qsize() == 0
        # Wake should NOT be set if there was nothing to push.
        assert not w._push_writer_wake.is_set()

    def test_get_new_notifs_extends_lease_on_heartbeat(self):
        """``HB:`` notifs forwarded by the writer thread must extend the
        leases of tracked P-side requests on the engine main thread, and
        ignore request IDs that aren't being tracked."""
        w = _StubWriterWorker.fresh()
        # _handle_heartbeat reads ``self._lease_extension`` (set in the
        # real ``__init__``).
        w._lease_extension = 10

        # Tracked P-side requests with a lease about to expire.
        old_expiry = time.perf_counter() - 5.0
        w._reqs_to_send["req-a"] = old_expiry
        w._reqs_to_send["req-b"] = old_expiry

        # Forwarded heartbeat covers a tracked request, an unknown one,
        # and another tracked one.
        w._pending_completion_notifs.put(b"HB:req-a,req-unknown,req-b")

        w._get_new_notifs()

        # Tracked leases were renewed strictly forward in time.
        now = time.perf_counter()
        for rid in ("req-a", "req-b"):
            assert w._reqs_to_send[rid] > old_expiry
            # New expiry must be roughly now + _lease_extension.
            assert w._reqs_to_send[rid] >= now
        # Unknown request must not be inserted by the heartbeat path.
        assert "req-unknown" not in w._reqs_to_send


# ----------------------------------------------------------------- #
#  Pipeline-parallel producer (push-mode PP-disagg)                  #
# ----------------------------------------------------------------- #


class TestPushPipelineParallel:
    """PP-sharded producer: per-stage completion counting, pp_size plumbing,
    and remote-region slicing."""

    def test_completion_waits_for_one_notif_per_pp_stage(self):
        """Each PP stage WRITEs its own layers and sends one notif; D must
        collect pp_size notifs before reporting the recv done."""
        w = _StubWriterWorker.fresh()
        request_id = "req-pp-2"
        w._recving_metadata[request_id] = MagicMock(pp_size=2)
        notif = f"{request_id}:1".encode()

        # First stage: counted, not yet done.
        w._pending_completion_notifs.put(notif)
        w._get_new_notifs()
        assert request_id not in w._recving_transfers
        assert w.consumer_notification_counts_by_req[request_id] == 1

        # Second (final) stage: now reported done.
        w._pending_completion_notifs.put(notif)
        w._get_new_notifs()
        assert request_id in w._recving_transfers
        assert request_id not in w.consumer_notification_counts_by_req

    def test_req_meta_reads_pp_size_from_kv_transfer_params(self):
        """D learns the producer's pp_size from kv_transfer_params (forwarded
        by the proxy) and defaults to 1 when absent."""
        metadata = NixlConnectorMetadata()
        params = {
            "remote_block_ids": ([0],),
            "remote_engine_id": "p-engine",
            "remote_request_id": "p-req",
            "remote_host": "localhost",
            "remote_port": 1234,
            "tp_size": 1,
            "pp_size": 2,
        }
        metadata.add_new_req_to_recv("req", ([0],), params)
        assert metadata.reqs_to_recv["req"].pp_size == 2

        params.pop("pp_size")
        metadata.add_new_req_to_recv("req-default", ([0],), params)
        assert metadata.reqs_to_recv["req-default"].pp_size == 1

    def test_add_remote_agent_slices_remote_regions_to_local_pp_window(self):
        """With PP>1 the producer registered regions for the full model, but
        this worker holds only a contiguous layer slice; add_remote_agent
        trims the remote region list to [offset : offset + num_local_regions]
        before building descriptors. We stop right after the slice via a
        sentinel on the next collaborator call."""
        block_len = 4096 * 16
        w = _StubWriterWorker.fresh()  # seeds writer-thread state for teardown
        w.pp_size = 2
        w._remote_region_offset = 2  # this worker owns layers [2, 4)
        w.block_len_per_layer = [block_len, block_len]  # 2 local layers
        w.nixl_wrapper = MagicMock()

        class _StopAfterSlice(RuntimeError):
            pass

        w.transfer_topo = MagicMock()
        w.transfer_topo.register_remote_engine.side_effect = _StopAfterSlice()

        meta = NixlAgentMetadata(
            engine_id="p-engine",
            agent_metadata=b"agent",
            kv_caches_base_addr=[10, 11, 12, 13],  # full 4-layer model
            device_id=0,
            num_blocks=4,
            block_lens=[block_len] * 4,
            # Non-interleaved: consecutive blocks abut, so stride == block length.
            block_strides=[block_len] * 4,
            kv_cache_layout="HND",
            block_size=16,
            ssm_sizes=(0, 0),
            attn_backend_name="FLASH_ATTN",
            physical_blocks_per_logical_kv_block=1,
        )

        with pytest.raises(_StopAfterSlice):
            w.add_remote_agent(meta, remote_tp_rank=0, remote_tp_size=1)

        # Sliced down to this worker's layer window (regions [2:4]).
        assert meta.kv_caches_base_addr == [12, 13]
        assert meta.block_lens == [block_len, block_len]


class TestPushWriterMlaReplication:
    """MLA latent KV is replicated across D's TP ranks, so when D_TP > P_TP
    (``tp_ratio < 0``) the producer must *WRITE* the latent into every D rank
    it handshook -- not write one and merely notify the rest, which would
    leave the un-written ranks decoding against stale KV."""

    @staticmethod
    def _mla_worker_writing_to(d_ranks):
        from types import SimpleNamespace

        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import (
            TPMapping,
        )

        engine_id = "decode-engine"
        w = _StubWriterWorker.fresh()
        w.use_mla = True
        w.nixl_wrapper = MagicMock()
        w.transfer_topo = MagicMock()
        w.transfer_topo.get_engine_info.return_value = SimpleNamespace(
            remote_tp_size=len(d_ranks),
            remote_block_size=16,
            remote_physical_blocks_per_logical=1,
        )
        # D_TP > P_TP => negative ratio (one P rank feeds |ratio| D ranks).
        w.transfer_topo.tp_ratio.return_value = -len(d_ranks)
        # The tp-mapping collapses MLA to a single source rank (correct for
        # the pull/read direction); the push path must fan it back out.
        w.tp_mappings = {
            engine_id: TPMapping(
                source_ranks_per_group=((0,),),
                all_source_ranks=(0,),
                rank_to_attention_slot={0: 0},
                rank_offset_factor=0,
            )
        }
        w._logical_to_kernel_block_ids = lambda block_ids, ratio: block_ids
        w.dst_region_group_ids[engine_id] = [0]
        w.dst_xfer_side_handles = {engine_id: {r: 1000 + r for r in d_ranks}}
        w.src_xfer_handles_by_block_size = {16: 2000}
        w._remote_agents = {engine_id: {(0, r): f"agent-{r}" for r in d_ranks}}
        return w, engine_id

    def test_mla_hetero_tp_writes_every_d_rank(self):
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
            RemoteMeta,
            ReqMeta,
        )

        w, engine_id = self._mla_worker_writing_to(d_ranks=(0, 1))

        written: list[int] = []

        def _fake_xfer(**kw):
            rank = kw["read_spec"].remote_rank
            written.append(rank)
            return 1000 + rank  # in-flight handle, as the real method returns

        w._xfer_blocks = _fake_xfer

        meta = ReqMeta(
            local_block_ids=([100, 101],),
            local_physical_block_ids=([100, 101],),
            tp_size=1,
            remote=RemoteMeta(
                block_ids=([200, 201],),
                host="",
                port=0,
                engine_id=engine_id,
                request_id="d-req",
            ),
        )

        w._xfer_blocks_for_req(req_id="p-req", meta=meta)

        # Every handshook D rank must receive a real WRITE of the latent...
        assert sorted(written) == [0, 1]
        # ...and no rank may be fobbed off with a bare completion notif.
        assert w.nixl_wrapper.send_notif.call_count == 0
        # All of the request's WRITE handles must be tracked together, so the
        # engine thread never sees a partial set and double-frees the request.
        assert sorted(w._sending_transfers["p-req"]) == [1000, 1001]

    def test_csa_linear_writes_every_group_to_each_target(self):
        from types import SimpleNamespace

        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
            RemoteMeta,
            ReqMeta,
        )
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import (
            TPMapping,
        )

        engine_id = "decode-engine"
        w = _StubWriterWorker.fresh()
        w.world_size = 2
        w.use_mla = False
        w._has_mamba = True
        w._is_csa_linear = True
        w.nixl_wrapper = MagicMock()
        w.transfer_topo = MagicMock()
        w.transfer_topo.get_engine_info.return_value = SimpleNamespace(
            remote_tp_size=4,
            remote_block_size=16,
            remote_physical_blocks_per_logical=1,
        )
        w.transfer_topo.tp_ratio.return_value = -2
        w.transfer_topo.handshake_target_ranks.return_value = (0, 1)
        w.tp_mappings = {
            engine_id: TPMapping(
                source_ranks_per_group=((0,), (0,), (0, 1), (0, 1)),
                all_source_ranks=(0, 1),
                rank_to_attention_slot={0: 0, 1: 0},
                rank_offset_factor=0,
            )
        }
        w._logical_to_kernel_block_ids = lambda block_ids, ratio: block_ids
        w.region_group_ids = [0, 1, 2, 3]
        w.dst_region_group_ids[engine_id] = [0, 1, 2, 3]
        w.dst_xfer_side_handles = {engine_id: {0: 1000, 1: 1001}}
        w.src_xfer_handles_by_tp_ratio = {(-2, 16): [2000, 2001]}

        writes = []

        def _fake_xfer(**kwargs):
            writes.append(kwargs)
            return 3000 + kwargs["read_spec"].remote_rank

        w._xfer_blocks = _fake_xfer
        block_ids = ([10], [20], [30], [40])
        meta = ReqMeta(
            local_block_ids=block_ids,
            local_physical_block_ids=block_ids,
            tp_size=2,
            remote=RemoteMeta(
                block_ids=([50], [60], [70], [80]),
                host="",
                port=0,
                engine_id=engine_id,
                request_id="d-req",
            ),
        )

        w._xfer_blocks_for_req(req_id="p-req", meta=meta)

        assert [write["read_spec"].remote_rank for write in writes] == [0, 1]
        assert [write["read_spec"].local_block_ids for write in writes] == [
            list(block_ids),
            list(block_ids),
        ]
        assert [write["local_xfer_side_handle"] for write in writes] == [2000, 2001]
        assert sorted(w._sending_transfers["p-req"]) == [3000, 3001]


class TestPushPrefixCaching:
    """Partial prefix-cache hit on D: D preallocates only its *uncomputed*
    blocks, so on a partial hit it registers fewer blocks than P's full
    sequence. P must WRITE only the *tail* of its sequence into D's slots --
    mirroring pull-mode ``_apply_prefix_caching`` (end-trim), never a front-trim
    which would write P's cached prefix into D's uncomputed suffix slots.

    The trim runs inside ``_xfer_blocks``, so these tests drive the real
    ``_xfer_blocks_for_req`` path and stub only the NIXL WRITE. With one region
    and 1:1 ratios ``_compute_desc_ids`` is the identity map, so the descs
    captured from ``make_prepped_xfer`` are exactly the (trimmed) block IDs.
    """

    @staticmethod
    def _worker_driving_xfer(engine_id: str = "decode-engine"):
        from types import SimpleNamespace

        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import (
            TPMapping,
        )

        w = _StubWriterWorker.fresh()
        w._has_mamba = False
        w.use_mla = False
        w.block_size = 16
        w.num_regions = 1
        w._physical_blocks_per_logical_kv_block = 1

        w.transfer_topo = MagicMock()
        w.transfer_topo.get_engine_info.return_value = SimpleNamespace(
            remote_physical_blocks_per_logical=1,
            remote_block_size=16,
            remote_tp_size=1,
        )
        w.transfer_topo.tp_ratio.return_value = 1
        w.transfer_topo.block_size_ratio.return_value = 1
        w.tp_mappings = {
            engine_id: TPMapping(
                source_ranks_per_group=((0,),),
                all_source_ranks=(0,),
                rank_to_attention_slot={0: 0},
                rank_offset_factor=0,
            )
        }
        w.dst_num_blocks = {engine_id: 10_000, w.engine_id: 10_000}
        w.dst_region_num_blocks = {
            engine_id: [10_000],
            w.engine_id: [10_000],
        }
        w.dst_region_group_ids = {engine_id: [0], w.engine_id: [0]}
        w.dst_uses_region_group_mapping = {
            engine_id: False,
            w.engine_id: False,
        }
        w.dst_xfer_side_handles = {engine_id: {0: 5000}}
        w.src_xfer_handles_by_block_size = {16: 2000}

        # Stub only the NIXL WRITE; kernel expansion, prefix-cache trim, desc
        # computation and count assertions all run for real.
        w.nixl_wrapper = MagicMock()
        w.nixl_wrapper.make_prepped_xfer.return_value = 7
        w._ensure_handshake = lambda *a, **k: None
        w._logical_to_kernel_block_ids = lambda x, ratio: x
        return w, engine_id

    @staticmethod
    def _written_block_ids(w) -> tuple[list[int], list[int]]:
        """Return the (local, remote) block IDs handed to the NIXL WRITE."""
        args, _ = w.nixl_wrapper.make_prepped_xfer.call_args
        # ("WRITE", local_handle, local_descs, remote_handle, remote_descs)
        return list(args[2]), list(args[4])

    def test_partial_prefix_hit_end_trims_producer_blocks(self):
        """D registered only its 2 uncomputed suffix blocks; P finished the
        full 5-block sequence. P must WRITE its LAST 2 blocks into D's slots."""
        w, _ = self._worker_driving_xfer()
        reg = _registration_data("req-pc", local_block_ids=([500, 501],))

        NixlPushConnectorWorker._do_start_push_kv(
            w, "req-pc", ([10, 11, 12, 13, 14],), reg
        )

        local, remote = self._written_block_ids(w)
        # End-trim (suffix), NOT front-trim: [13, 14], not [10, 11].
        assert local == [13, 14]
        assert remote == [500, 501]

    def test_no_prefix_hit_leaves_blocks_untrimmed(self):
        """Equal counts (no prefix cache hit on D): nothing is trimmed."""
        w, _ = self._worker_driving_xfer()
        reg = _registration_data("req-full", local_block_ids=([500, 501, 502],))

        NixlPushConnectorWorker._do_start_push_kv(w, "req-full", ([10, 11, 12],), reg)

        local, remote = self._written_block_ids(w)
        assert local == [10, 11, 12]
        assert remote == [500, 501, 502]

    @pytest.mark.parametrize("layer_name_routing", [False, True])
    def test_different_region_groups_require_layer_routing(self, layer_name_routing):
        """A layer mapped to a pooled remote region can still receive its blocks."""
        w, engine_id = self._worker_driving_xfer()
        w.dst_region_group_ids[engine_id] = [-1]
        if layer_name_routing:
            w._transfer_layer_group_ids = (0,)
        reg = _registration_data("req-groups", local_block_ids=([500, 501],))

        if not layer_name_routing:
            with pytest.raises(NotImplementedError, match="cache-group layouts"):
                NixlPushConnectorWorker._do_start_push_kv(
                    w, "req-groups", ([10, 11],), reg
                )
            w.nixl_wrapper.make_prepped_xfer.assert_not_called()
            return

        NixlPushConnectorWorker._do_start_push_kv(w, "req-groups", ([10, 11],), reg)

        local, remote = self._written_block_ids(w)
        assert local == [10, 11]
        assert remote == [500, 501]


def _agent_metadata(
    region_layers: list[list[str]],
    base_addresses: list[int],
    block_lens: list[int],
    block_strides: list[int] | None = None,
) -> NixlAgentMetadata:
    return NixlAgentMetadata(
        engine_id="remote-engine",
        agent_metadata=b"agent",
        kv_caches_base_addr=base_addresses,
        device_id=7,
        num_blocks=2,
        block_lens=block_lens,
        block_strides=list(block_lens if block_strides is None else block_strides),
        kv_cache_layout="LBHNC",
        block_size=16,
        ssm_sizes=(0, 0),
        attn_backend_name="FLASH_ATTN",
        physical_blocks_per_logical_kv_block=1,
        region_members=region_layers,
    )


def _layer_routing_worker(
    region_layers: list[list[str]],
    group_by_layer: dict[str, int],
    pp_size: int = 2,
    is_hma: bool = True,
) -> _StubWriterWorker:
    worker = _StubWriterWorker.fresh()
    worker.pp_size = pp_size
    worker.dcp_size = 1
    worker.block_size = 16
    worker._has_mamba = False
    worker._is_hma_required = is_hma
    worker.kv_cache_config = MagicMock(transfer_group_index_by_layer=group_by_layer)
    worker.transfer_topo = MagicMock()
    worker._set_region_layers(region_layers)
    return worker


@pytest.mark.parametrize(
    ("region_num_blocks", "expected"),
    [(None, [1, 2, 15, 21, 22]), ([4, 7, 5], [1, 2, 9, 12, 13])],
)
def test_layer_group_ids_route_descriptor_blocks(region_num_blocks, expected):
    worker = _layer_routing_worker(
        [["a", "a.swa"], ["b"]], {"a": 0, "a.swa": 1, "b": 0}
    )
    desc_ids = worker._compute_desc_ids(
        block_ids=[[1, 2], [5]],
        dst_num_blocks=10,
        block_size_ratio=None,
        physical_blocks_per_logical=1,
        region_num_blocks=region_num_blocks,
    )
    assert desc_ids.tolist() == expected


def test_layer_metadata_round_trip():
    metadata = _agent_metadata([["L0", "L1"]], [0x10000], [256])
    metadata.region_num_blocks = [4]
    metadata.region_group_ids = [-1]
    metadata.region_names = ["L0"]
    metadata.region_mem_types = ["VRAM"]

    encoded = msgspec.msgpack.encode(metadata)
    assert msgspec.msgpack.Decoder(NixlAgentMetadata).decode(encoded) == metadata


@pytest.mark.parametrize(
    "layouts, error",
    [
        ({"L0": (-1, 64)}, "escapes its block"),
        ({"L0": (0, 0)}, "escapes its block"),
        ({"L0": (200, 64)}, "escapes its block"),
        ({"L1": (0, 64)}, "has no layout"),
        ({"L0": (0, 32)}, "page sizes must match"),
    ],
)
def test_packed_layer_alignment_rejects_invalid_page_layout(layouts, error):
    worker = _layer_routing_worker([["L0"]], {"L0": 0})
    worker.block_len_per_layer = [64]
    metadata = _agent_metadata([["L0", "L1"]], [0x10000], [256])
    metadata.packed_member_layouts = layouts
    with pytest.raises(AssertionError, match=error):
        worker._align_remote_regions_by_layer(metadata)


def test_layer_alignment_preserves_nonpacked_regions_alongside_packed_layers():
    worker = _layer_routing_worker([["a"], ["b"]], {"a": 0, "b": 1})
    worker.block_len_per_layer = [64, 128]
    metadata = _agent_metadata(
        [["a", "other"], ["b"]], [0x1000, 0x2000], [192, 128], [256, 128]
    )
    metadata.packed_member_layouts = {"a": (64, 64), "other": (128, 64)}

    worker._align_remote_regions_by_layer(metadata)

    assert metadata.kv_caches_base_addr == [0x1040, 0x2000]
    assert metadata.block_lens == [64, 128]
    assert metadata.block_strides == [256, 128]


def test_layer_identity_gate_preserves_the_non_hma_path():
    assert _layer_routing_worker([["a"]], {"a": 0})._transfer_layer_region_indices == (
        0,
    )

    # A base worker (pull) never routes by layer name.
    pull = object.__new__(NixlBaseConnectorWorker)
    pull.pp_size = 2
    pull._transfer_layer_names = ()
    pull._transfer_layer_region_indices = ()
    pull._transfer_layer_group_ids = ()
    pull._set_region_layers([["a"]])
    assert pull._transfer_layer_region_indices == ()

    # A non-HMA local layout does not require layer-name routing.
    assert (
        _layer_routing_worker(
            [["a"]], {"a": 0}, is_hma=False
        )._transfer_layer_region_indices
        == ()
    )

    # PP=1 has congruent local/remote regions and keeps the region route even
    # when its allocator is hybrid.
    assert (
        _layer_routing_worker(
            [["a"]], {"a": 0}, pp_size=1
        )._transfer_layer_region_indices
        == ()
    )


def test_layer_alignment_fails_loud_when_remote_omits_layers():
    # Falling back to region-index routing here would silently transfer stale
    # KV, so an unannounced peer must fail the handshake instead.
    worker = _layer_routing_worker([["a"]], {"a": 0})
    with pytest.raises(AssertionError, match="no region_members"):
        worker._align_remote_regions_by_layer(_agent_metadata([], [0xA000], [128]))


def test_layer_alignment_expands_pooled_regions():
    worker = _layer_routing_worker(
        [["a", "a.swa"], ["b"]], {"a": 0, "a.swa": 1, "b": 0}
    )
    assert worker._transfer_layer_names == ("a", "a.swa", "b")
    assert worker._transfer_layer_region_indices == (0, 0, 1)
    assert worker._transfer_layer_group_ids == (0, 1, 0)

    metadata = _agent_metadata([["a", "a.swa"], ["b"]], [0xA000, 0xB000], [128, 128])
    metadata.region_num_blocks = [4, 6]
    metadata.region_group_ids = [-1, 0]
    metadata.region_names = ["a", "b"]
    metadata.region_mem_types = ["VRAM", "VRAM"]
    worker._align_remote_regions_by_layer(metadata)

    assert metadata.kv_caches_base_addr == [0xA000, 0xA000, 0xB000]
    assert metadata.block_lens == [128, 128, 128]
    assert metadata.block_strides == [128, 128, 128]
    assert metadata.region_members == [["a"], ["a.swa"], ["b"]]
    assert metadata.region_num_blocks == [4, 4, 6]
    assert metadata.region_group_ids == [-1, -1, 0]
    assert metadata.region_names == ["a", "a.swa", "b"]
    assert metadata.region_mem_types == ["VRAM", "VRAM", "VRAM"]


def test_layer_alignment_filters_and_reorders_a_pp_stage():
    worker = _layer_routing_worker([["l2"], ["l3"]], {"l2": 0, "l3": 1})
    metadata = _agent_metadata(
        [["l2"], ["l0"], ["l3"], ["l1"]],
        [0xC000, 0xA000, 0xD000, 0xB000],
        [65536, 65536, 32768, 32768],
        [131072, 131072, 65536, 65536],
    )
    metadata.region_num_blocks = [4, 6, 8, 10]
    metadata.region_group_ids = [0, 0, 1, 1]
    metadata.region_names = ["l2", "l0", "l3", "l1"]
    metadata.region_mem_types = ["VRAM"] * 4

    worker._align_remote_regions_by_layer(metadata)

    assert worker._transfer_layer_region_indices == (0, 1)
    assert worker._transfer_layer_group_ids == (0, 1)
    assert metadata.kv_caches_base_addr == [0xC000, 0xD000]
    assert metadata.block_lens == [65536, 32768]
    assert metadata.block_strides == [131072, 65536]
    assert metadata.region_num_blocks == [4, 8]
    assert metadata.region_group_ids == [0, 1]
    assert metadata.region_names == ["l2", "l3"]
    assert metadata.region_mem_types == ["VRAM", "VRAM"]


@pytest.mark.parametrize(
    ("local_num_blocks", "remote_num_blocks"),
    [([4, 4], [4, 4, 4]), ([4, 6], [3, 5, 7])],
)
def test_layer_descriptors_pair_layers_across_asymmetric_pp_split(
    local_num_blocks, remote_num_blocks
):
    """A PP split can leave each stage a different mix of attention types.

    Stage 1 owns L3 (full) pooled with L4 (sliding) in region 0, and L5 (full)
    alone in region 1. The consumer holds every layer and pools them
    differently, so region indices cannot be paired positionally.
    """
    worker = _layer_routing_worker([["L3", "L4"], ["L5"]], {"L3": 0, "L4": 1, "L5": 0})
    worker.block_len_per_layer = [128, 128]
    worker.block_stride_per_layer = [256, 512]
    worker._region_is_mla = [False, False]
    worker.num_blocks = 4
    worker.region_num_blocks = local_num_blocks
    worker.device_id = 0

    consumer = _agent_metadata(
        [["L0", "L1"], ["L3", "L2"], ["L5", "L4"]],
        [0xA000, 0xB000, 0xC000],
        [128, 128, 128],
        [256, 512, 1024],
    )
    consumer.num_blocks = 4
    consumer.region_num_blocks = remote_num_blocks
    worker._align_remote_regions_by_layer(consumer)

    # L3 -> remote region 1, L4 -> 2, L5 -> 2. Pairing by index would have sent
    # L5 to region 1 and L4 to region 2's sibling.
    assert consumer.kv_caches_base_addr == [0xB000, 0xC000, 0xC000]

    plan = TPMapping(((0,), (0,)), (0,), {0: 0}, 0)
    # Builders emit one strided run per region; expand to per-block descriptors.
    local_descs = expand_strided_descs(
        worker._build_fa_local([0x1000, 0x2000], block_size_ratio=1)
    )
    remote_descs = expand_strided_descs(
        worker._build_fa_remote(plan, consumer, block_size_ratio=1)
    )
    local_counts = [local_num_blocks[i] for i in worker._transfer_layer_region_indices]
    local_ids = worker._compute_desc_ids(
        [[1, 2], [3]], 4, None, 1, region_num_blocks=local_counts
    )
    remote_ids = worker._compute_desc_ids(
        [[0, 1], [2]], 4, None, 1, region_num_blocks=consumer.region_num_blocks
    )
    assert len(local_descs) == sum(local_counts)
    assert len(remote_descs) == sum(consumer.region_num_blocks)

    # Each pair addresses the same layer's blocks despite different pooling
    # and strides. L3 and L5 use group 0; L4 uses group 1.
    assert local_descs[local_ids].tolist() == [
        [0x1100, 128, 0],
        [0x1200, 128, 0],
        [0x1300, 128, 0],
        [0x2200, 128, 0],
        [0x2400, 128, 0],
    ]
    assert remote_descs[remote_ids].tolist() == [
        [0xB000, 128, 7],
        [0xB200, 128, 7],
        [0xC800, 128, 7],
        [0xC000, 128, 7],
        [0xC400, 128, 7],
    ]


def test_layer_alignment_is_canonical_across_remote_orderings():
    local, groups = [["x"], ["y"]], {"x": 0, "y": 1}
    rank0 = _agent_metadata([["x"], ["y"]], [0x1000, 0x2000], [64, 128], [256, 512])
    rank1 = _agent_metadata([["y"], ["x"]], [0x2000, 0x1000], [128, 64], [512, 256])

    _layer_routing_worker(local, groups)._align_remote_regions_by_layer(rank0)
    _layer_routing_worker(local, groups)._align_remote_regions_by_layer(rank1)

    assert rank0.kv_caches_base_addr == rank1.kv_caches_base_addr == [0x1000, 0x2000]
    assert rank0.block_lens == rank1.block_lens == [64, 128]
    assert rank0.block_strides == rank1.block_strides == [256, 512]


def test_layer_alignment_is_idempotent():
    worker = _layer_routing_worker(
        [["a", "a.swa"], ["b"]], {"a": 0, "a.swa": 1, "b": 0}
    )
    metadata = _agent_metadata([["a", "a.swa"], ["b"]], [0xA000, 0xB000], [128, 128])
    metadata.region_num_blocks = [4, 6]
    metadata.region_group_ids = [-1, 0]
    metadata.region_names = ["a", "b"]
    metadata.region_mem_types = ["VRAM", "VRAM"]

    worker._align_remote_regions_by_layer(metadata)
    aligned = msgspec.msgpack.encode(metadata)
    worker._align_remote_regions_by_layer(metadata)

    assert msgspec.msgpack.encode(metadata) == aligned


def test_layer_alignment_rejects_missing_local_layer():
    worker = _layer_routing_worker([["l0"], ["l1"]], {"l0": 0, "l1": 1})
    metadata = _agent_metadata([["l0"]], [0xA000], [128])

    with pytest.raises(AssertionError, match="missing locally owned layers"):
        worker._align_remote_regions_by_layer(metadata)


def test_layer_alignment_rejects_duplicate_remote_layer():
    worker = _layer_routing_worker([["a"]], {"a": 0})
    metadata = _agent_metadata([["a"], ["a"]], [0xA000, 0xB000], [128, 128])

    with pytest.raises(AssertionError, match="in multiple regions"):
        worker._align_remote_regions_by_layer(metadata)


def test_layer_alignment_rejects_inconsistent_remote_metadata():
    worker = _layer_routing_worker([["a"]], {"a": 0})
    metadata = _agent_metadata([["a"], ["b"]], [0xA000], [128])

    with pytest.raises(AssertionError, match="lengths disagree"):
        worker._align_remote_regions_by_layer(metadata)


@pytest.mark.parametrize(
    "field",
    ["region_num_blocks", "region_group_ids", "region_names", "region_mem_types"],
)
def test_layer_alignment_rejects_inconsistent_region_geometry(field):
    worker = _layer_routing_worker([["a"]], {"a": 0})
    metadata = _agent_metadata([["a"], ["b"]], [0xA000, 0xB000], [128, 128])
    setattr(metadata, field, [])
    original = msgspec.msgpack.encode(metadata)

    with pytest.raises(AssertionError, match="lengths disagree"):
        worker._align_remote_regions_by_layer(metadata)
    assert msgspec.msgpack.encode(metadata) == original


def test_head_sharded_draft_push_rejects_heterogeneous_tp():
    """Push mode writes a head-sharded draft's KV under an MLA target only at
    equal TP; heterogeneous TP is the pull path's job."""
    w = _StubWriterWorker.fresh()
    w._head_sharded_draft_regions = {1}
    w.transfer_topo = MagicMock(tp_size=4)
    meta = MagicMock(spec=NixlAgentMetadata)
    with patch.object(
        NixlBaseConnectorWorker, "_validate_remote_agent_handshake", return_value=None
    ):
        w._validate_remote_agent_handshake(meta, remote_tp_size=4)
        with pytest.raises(NotImplementedError, match="push mode"):
            w._validate_remote_agent_handshake(meta, remote_tp_size=1)


def test_set_region_layers_rejects_duplicate_local_layer():
    with pytest.raises(AssertionError, match="spans multiple NIXL regions"):
        _layer_routing_worker([["a"], ["a"]], {"a": 0})


def test_set_region_layers_rejects_layer_outside_any_kv_group():
    with pytest.raises(AssertionError, match="outside any local group"):
        _layer_routing_worker([["a"], ["b"]], {"a": 0})


@pytest.mark.parametrize(
    ("local_block_size", "remote_block_size", "remote_tp_size", "error"),
    [
        (32, 16, 1, "identical P/D block sizes"),
        (16, 32, 1, "identical P/D block sizes"),
        (16, 16, 2, "decode TP greater"),
    ],
)
def test_layer_handshake_rejects_unsupported_geometry(
    local_block_size: int, remote_block_size: int, remote_tp_size: int, error: str
):
    """Reject unsupported peers without registering agents or transfer state."""
    metadata = _agent_metadata([["a"]], [0xA000], [128])
    metadata.block_size = remote_block_size
    worker = _layer_routing_worker([["a"]], {"a": 0})
    worker.block_size = local_block_size
    worker.block_len_per_layer = [128]
    worker.use_mla = False
    worker.nixl_wrapper = MagicMock()
    worker.kv_caches_base_addr = defaultdict(dict)
    worker.dst_num_blocks = {}
    worker.tp_mappings = {}
    worker.transfer_topo = TransferTopology(
        tp_rank=0,
        tp_size=1,
        block_size=local_block_size,
        engine_id=worker.engine_id,
        is_mla=False,
        is_mamba=False,
        total_num_kv_heads=8,
        attn_backends=[],
    )

    with pytest.raises(NotImplementedError, match=error):
        worker.add_remote_agent(metadata, remote_tp_size=remote_tp_size)
    worker.nixl_wrapper.add_remote_agent.assert_not_called()
    worker.nixl_wrapper.prep_xfer_dlist.assert_not_called()
    assert not worker.tp_mappings
    assert not worker.dst_num_blocks
    assert not worker.kv_caches_base_addr
    with pytest.raises(KeyError):
        worker.transfer_topo.get_engine_info(metadata.engine_id)
