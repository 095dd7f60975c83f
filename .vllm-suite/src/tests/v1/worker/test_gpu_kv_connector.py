# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import vllm.v1.worker.gpu.kv_connector as kv_connector_module
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector


def _make_connector(
    monkeypatch: pytest.MonkeyPatch,
    events: list[str],
) -> ActiveKVConnector:
    backend = Mock()
    backend.handle_preemptions.side_effect = lambda _: events.append("handle")
    backend.bind_connector_metadata.side_effect = lambda _: events.append("bind")
    backend.start_load_kv.side_effect = lambda *_args, **_kwargs: events.append("start")
    backend.wait_for_save.side_effect = lambda: events.append("wait")

    def get_transfer_results(_finished_req_ids):
        events.append("results")
        return KVConnectorTransferResults()

    backend.get_transfer_results.side_effect = get_transfer_results
    backend.get_block_ids_with_load_errors.return_value = set()
    backend.get_kv_connector_stats.return_value = None
    backend.get_kv_connector_kv_cache_events.return_value = None
    backend.build_connector_worker_meta.return_value = None
    backend.clear_connector_metadata.side_effect = lambda: events.append("clear")
    monkeypatch.setattr(kv_connector_module, "get_kv_transfer_group", lambda: backend)
    monkeypatch.setattr(
        kv_connector_module, "is_forward_context_available", lambda: True
    )
    monkeypatch.setattr(kv_connector_module, "get_forward_context", object)

    kv_config = KVTransferConfig(
        kv_connector="NixlConnector",
        kv_role="kv_consumer",
        kv_buffer_device="cpu",
    )
    connector = ActiveKVConnector(SimpleNamespace(kv_transfer_config=kv_config), {})
    events.clear()
    return connector


def _scheduler_output(has_sync_kv_loads: bool) -> SimpleNamespace:
    return SimpleNamespace(
        kv_connector_metadata=object(),
        finished_req_ids=set(),
        has_sync_kv_loads=has_sync_kv_loads,
    )


@pytest.mark.parametrize("has_sync_kv_loads", [False, True])
def test_load_start_phase(
    monkeypatch: pytest.MonkeyPatch,
    has_sync_kv_loads: bool,
):
    events: list[str] = []
    connector = _make_connector(monkeypatch, events)
    output = _scheduler_output(has_sync_kv_loads)

    request_indices = torch.tensor([3, 1])
    request_ids = ["first", "second"]
    input_batch = SimpleNamespace(
        idx_mapping=request_indices, req_ids=request_ids, num_tokens=5
    )
    attn_metadata = {"layer": object()}
    connector.pre_forward(output, input_batch, attn_metadata=attn_metadata)
    assert events == (
        ["handle", "bind", "start"] if has_sync_kv_loads else ["handle", "bind"]
    )

    connector.post_forward(set())
    assert events == ["handle", "bind", "start", "wait", "results", "clear"]

    start_load_kv = connector.kv_connector.start_load_kv
    assert isinstance(start_load_kv, Mock)
    kwargs = start_load_kv.call_args.kwargs
    assert kwargs["request_state_indices"] is request_indices
    assert kwargs["request_ids"] is request_ids
    assert kwargs["num_tokens"] == 5
    assert kwargs["scheduler_output"] is output
    assert kwargs["attn_metadata"] is attn_metadata

    # A subsequent step without a forward must not reuse the prior batch.
    connector.no_forward(_scheduler_output(False))
    assert start_load_kv.call_count == 2
    assert start_load_kv.call_args.kwargs == {}


def test_no_forward_starts_deferred_load_once(monkeypatch: pytest.MonkeyPatch):
    events: list[str] = []
    connector = _make_connector(monkeypatch, events)

    connector.no_forward(_scheduler_output(False))

    assert events == ["handle", "bind", "start", "wait", "results", "clear"]


def test_deferred_finalize_collects_results_before_saving(
    monkeypatch: pytest.MonkeyPatch,
):
    """With a drafter, the transfer results are collected right after the
    target forward, and the saves and metadata are finalized after the
    drafter writes its KV."""
    events: list[str] = []
    connector = _make_connector(monkeypatch, events)
    connector.pre_forward(_scheduler_output(False))

    connector.post_forward(set(), defer_finalize=True)
    assert events == ["handle", "bind", "start", "results"]

    connector.finalize_step()
    assert events == ["handle", "bind", "start", "results", "wait", "clear"]
