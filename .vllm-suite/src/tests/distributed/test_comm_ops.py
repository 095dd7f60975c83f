# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test the communication operators.

Run `pytest tests/distributed/test_comm_ops.py`.
"""

from collections import deque
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import ray
import torch

from vllm.distributed import (
    broadcast_tensor_dict,
    get_pp_group,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
    tensor_model_parallel_reduce_scatter,
)
from vllm.distributed.device_communicators import flashinfer_all_reduce
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator
from vllm.distributed.parallel_state import GroupCoordinator, TensorMetadata
from vllm.v1.worker.gpu_worker import AsyncIntermediateTensors

from ..utils import (
    init_test_distributed_environment,
    multi_gpu_test,
    multi_process_parallel,
)


@ray.remote(num_gpus=1, max_calls=1)
def all_reduce_test_worker(
    monkeypatch: pytest.MonkeyPatch,
    tp_size: int,
    pp_size: int,
    rank: int,
    distributed_init_port: str,
):
    # it is important to delete the CUDA_VISIBLE_DEVICES environment variable
    # so that each worker can see all the GPUs
    # they will be able to set the device to the correct GPU
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    device = torch.device(f"cuda:{rank}")
    torch.accelerator.set_device_index(device)
    init_test_distributed_environment(tp_size, pp_size, rank, distributed_init_port)
    num_elements = 8
    all_tensors = [
        torch.arange(num_elements, dtype=torch.float32, device="cuda") * (r + 1)
        for r in range(tp_size)
    ]
    expected = torch.sum(torch.stack(all_tensors, dim=0), dim=0)
    t = all_tensors[rank % tp_size]
    t = tensor_model_parallel_all_reduce(t)
    torch.testing.assert_close(t, expected)


@ray.remote(num_gpus=1, max_calls=1)
def reduce_scatter_test_worker(
    monkeypatch: pytest.MonkeyPatch,
    tp_size: int,
    pp_size: int,
    rank: int,
    distributed_init_port: str,
):
    # it is important to delete the CUDA_VISIBLE_DEVICES environment variable
    # so that each worker can see all the GPUs
    # they will be able to set the device to the correct GPU
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    device = torch.device(f"cuda:{rank}")
    torch.accelerator.set_device_index(device)
    init_test_distributed_environment(tp_size, pp_size, rank, distributed_init_port)

    num_elements = 8
    all_tensors = [
        torch.arange(num_elements, dtype=torch.float32, device="cuda") * (r + 1)
        for r in range(tp_size)
    ]

    index = rank % tp_size
    partition_size = num_elements // tp_size
    all_reduce = torch.sum(torch.stack(all_tensors, dim=0), dim=0)
    expected = all_reduce[index * partition_size : (index + 1) * partition_size]
    t = all_tensors[index]
    t = tensor_model_parallel_reduce_scatter(t, 0)
    torch.testing.assert_close(t, expected)


@ray.remote(num_gpus=1, max_calls=1)
def all_gather_test_worker(
    monkeypatch: pytest.MonkeyPatch,
    tp_size: int,
    pp_size: int,
    rank: int,
    distributed_init_port: str,
):
    # it is important to delete the CUDA_VISIBLE_DEVICES environment variable
    # so that each worker can see all the GPUs
    # they will be able to set the device to the correct GPU
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    device = torch.device(f"cuda:{rank}")
    torch.accelerator.set_device_index(device)
    init_test_distributed_environment(tp_size, pp_size, rank, distributed_init_port)
    num_dimensions = 3
    tensor_size = list(range(2, num_dimensions + 2))
    total_size = 1
    for s in tensor_size:
        total_size *= s
    for all_gather_dimension in range(num_dimensions):
        all_tensors = [
            torch.arange(total_size, dtype=torch.float32, device="cuda").reshape(
                tensor_size
            )
            * (r + 1)
            for r in range(tp_size)
        ]
        expected = torch.cat(all_tensors, dim=all_gather_dimension)
        t = all_tensors[rank % tp_size]
        t = tensor_model_parallel_all_gather(t, all_gather_dimension)
        torch.testing.assert_close(t, expected)


@ray.remote(num_gpus=1, max_calls=1)
def broadcast_tensor_dict_test_worker(
    monkeypatch: pytest.MonkeyPatch,
    tp_size: int,
    pp_size: int,
    rank: int,
    distributed_init_port: str,
):
    # it is important to delete the CUDA_VISIBLE_DEVICES environment variable
    # so that each worker can see all the GPUs
    # they will be able to set the device to the correct GPU
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    device = torch.device(f"cuda:{rank}")
    torch.accelerator.set_device_index(device)
    init_test_distributed_environment(tp_size, pp_size, rank, distributed_init_port)
    test_dict = {
        # device tensor
        "a": torch.arange(8, dtype=torch.float32, device="cuda"),
        # CPU tensor
        "b": torch.arange(16, dtype=torch.int8, device="cpu"),
        "c": "test",
        "d": [1, 2, 3],
        "e": {"a": 1, "b": 2},
        # empty tensor
        "f": torch.tensor([], dtype=torch.float32, device="cuda"),
    }

    if (rank % tp_size) == 0:
        broadcast_tensor_dict(test_dict, src=0)
    else:
        recv_dict = broadcast_tensor_dict(src=0)
        assert len(recv_dict) == len(test_dict)
        torch.testing.assert_close(recv_dict["a"], test_dict["a"])
        torch.testing.assert_close(recv_dict["b"], test_dict["b"])
        assert recv_dict["c"] == test_dict["c"]
        assert recv_dict["d"] == test_dict["d"]
        assert recv_dict["e"] == test_dict["e"]
        torch.testing.assert_close(recv_dict["f"], test_dict["f"])


@ray.remote(num_gpus=1, max_calls=1)
def send_recv_tensor_dict_test_worker(
    monkeypatch: pytest.MonkeyPatch,
    tp_size: int,
    pp_size: int,
    rank: int,
    distributed_init_port: str,
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    device = torch.device(f"cuda:{rank}")
    torch.accelerator.set_device_index(device)
    init_test_distributed_environment(tp_size, pp_size, rank, distributed_init_port)

    test_dict = {
        # device tensor
        "a": torch.arange(8, dtype=torch.float32, device="cuda"),
        # CPU tensor
        "b": torch.arange(16, dtype=torch.int8, device="cpu"),
        "c": "test",
        "d": [1, 2, 3],
        "e": {"a": 1, "b": 2},
        # empty tensor
        "f": torch.tensor([], dtype=torch.float32, device="cuda"),
    }

    if not get_pp_group().is_first_rank:
        recv_dict = get_pp_group().recv_tensor_dict()

    if not get_pp_group().is_last_rank:
        get_pp_group().send_tensor_dict(test_dict)

    if not get_pp_group().is_first_rank:
        assert len(recv_dict) == len(test_dict)
        torch.testing.assert_close(recv_dict["a"], test_dict["a"])
        torch.testing.assert_close(recv_dict["b"], test_dict["b"])
        assert recv_dict["c"] == test_dict["c"]
        assert recv_dict["d"] == test_dict["d"]
        assert recv_dict["e"] == test_dict["e"]
        torch.testing.assert_close(recv_dict["f"], test_dict["f"])


class _DummyWork:
    def __init__(self) -> None:
        self.wait_calls = 0
        self.completed = False

    def wait(self) -> None:
        self.wait_calls += 1
        self.completed = True

    def is_completed(self) -> bool:
        return self.completed


class _DummyAllGatherGroup:
    def __init__(self, world_size: int, rank_in_group: int) -> None:
        self.world_size = world_size
        self.rank_in_group = rank_in_group

    def all_gather(self, t: torch.Tensor, dim: int = 0) -> torch.Tensor:
        # duplicate local slice across ranks.
        assert dim == 0
        return torch.cat([t for _ in range(self.world_size)], dim=0)


def _make_group_for_unit_test(
    rank_in_group: int = 0, world_size: int = 2
) -> GroupCoordinator:
    # avoid running GroupCoordinator.__init__ (it wires up real process groups).
    g = GroupCoordinator.__new__(GroupCoordinator)
    g.world_size = world_size
    g.rank_in_group = rank_in_group
    g.ranks = list(range(world_size))
    g.use_cpu_custom_send_recv = False
    g.device_group = None
    g.cpu_group = None
    g._pending_isends = deque()
    return g


def test_irecv_tensor_dict_send_allgather_postprocess_binds_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fake_irecv(t: torch.Tensor, *args: Any, **kwargs: Any) -> _DummyWork:
        t.fill_(1)
        return _DummyWork()

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "irecv", fake_irecv)

    g = _make_group_for_unit_test(rank_in_group=0, world_size=2)
    # 2 tensors so we can catch late-binding bugs in postprocess closures.
    metadata_list = [
        ("a", TensorMetadata("cpu", torch.int32, torch.Size([4]))),
        ("b", TensorMetadata("cpu", torch.int32, torch.Size([4]))),
    ]
    g.recv_object = lambda src=None: metadata_list  # type: ignore[method-assign]

    ag = _DummyAllGatherGroup(world_size=2, rank_in_group=0)
    td, handles, postprocess = g.irecv_tensor_dict(all_gather_group=ag)

    assert td is not None
    assert len(handles) == 2
    assert len(postprocess) == 2

    # before postprocess, dict holds the TP slice (shape 2).
    assert td["a"].shape == torch.Size([2])
    assert td["b"].shape == torch.Size([2])

    # simulate worker-side "defer wait": wait + postprocess later.
    for handle in handles:
        handle.wait()
    for fn in postprocess:
        fn()

    # after postprocess, dict values are reconstructed to full shape (shape 4),
    # and each key should be updated independently
    assert td["a"].shape == torch.Size([4])
    assert td["b"].shape == torch.Size([4])
    torch.testing.assert_close(td["a"], torch.ones(4, dtype=torch.int32))
    torch.testing.assert_close(td["b"], torch.ones(4, dtype=torch.int32))


@pytest.mark.parametrize("aliased", [False, True])
def test_cuda_communicator_checkpoints_flashinfer_workspaces(
    monkeypatch: pytest.MonkeyPatch,
    aliased: bool,
) -> None:
    group = object()
    normal_workspace = Mock()
    quant_workspace = normal_workspace if aliased else Mock()
    unique_workspaces = (
        [normal_workspace] if aliased else [normal_workspace, quant_workspace]
    )

    monkeypatch.setattr(flashinfer_all_reduce, "_fi_ar_workspace", normal_workspace)
    monkeypatch.setattr(
        flashinfer_all_reduce, "_fi_ar_quant_workspace", quant_workspace
    )
    monkeypatch.setattr(
        flashinfer_all_reduce,
        "_fi_ar_workspace_groups",
        {id(workspace): group for workspace in unique_workspaces},
    )
    monkeypatch.setattr(
        flashinfer_all_reduce, "TorchDistBackend", lambda group: group, raising=False
    )

    communicator = CudaCommunicator.__new__(CudaCommunicator)
    communicator.cpu_group = group
    communicator.fi_ar_comm = None
    communicator.all2all_manager = None
    communicator.checkpoint_prepare()
    communicator.checkpoint_restore()

    for workspace in unique_workspaces:
        workspace.checkpoint_prepare.assert_called_once_with()
        workspace.checkpoint_restore.assert_called_once_with(group)


def _fi_ar_communicator(
    monkeypatch: pytest.MonkeyPatch, group: object, normal: Mock, quant: Mock
) -> CudaCommunicator:
    monkeypatch.setattr(flashinfer_all_reduce, "_fi_ar_workspace", normal)
    monkeypatch.setattr(flashinfer_all_reduce, "_fi_ar_quant_workspace", quant)
    monkeypatch.setattr(
        flashinfer_all_reduce,
        "_fi_ar_workspace_groups",
        {id(normal): group, id(quant): group},
    )
    monkeypatch.setattr(
        flashinfer_all_reduce, "TorchDistBackend", lambda group: group, raising=False
    )
    communicator = CudaCommunicator.__new__(CudaCommunicator)
    communicator.cpu_group = group
    communicator.pynccl_comm = Mock()
    communicator.all2all_manager = None
    return communicator


def _symm_mem_workspace() -> Mock:
    workspace = Mock()
    workspace.checkpoint_prepare.side_effect = NotImplementedError
    workspace.checkpoint_restore.side_effect = NotImplementedError
    return workspace


@pytest.mark.parametrize("symm_mem", [False, True], ids=["mnnvl", "symm-mem+mnnvl"])
def test_cuda_communicator_suspend_detaches_flashinfer_workspaces(
    monkeypatch: pytest.MonkeyPatch,
    symm_mem: bool,
) -> None:
    group = object()
    workspaces = (_symm_mem_workspace() if symm_mem else Mock(), Mock())
    communicator = _fi_ar_communicator(monkeypatch, group, *workspaces)
    communicator.suspend()
    communicator.resume()

    for workspace in workspaces:
        workspace.checkpoint_prepare.assert_called_once_with()
        workspace.checkpoint_restore.assert_called_once_with(group)
    communicator.pynccl_comm.suspend.assert_called_once_with()
    communicator.pynccl_comm.resume.assert_called_once_with()


def test_cuda_communicator_checkpoint_rejects_symm_mem_workspace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    communicator = _fi_ar_communicator(
        monkeypatch, object(), _symm_mem_workspace(), Mock()
    )
    with pytest.raises(NotImplementedError):
        communicator.checkpoint_prepare()
    with pytest.raises(NotImplementedError):
        communicator.checkpoint_restore()


def test_cuda_communicator_resume_retries_failed_restore(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workspace = Mock()
    workspace.checkpoint_restore.side_effect = [RuntimeError("cuMemCreate"), None]
    communicator = _fi_ar_communicator(monkeypatch, object(), workspace, Mock())
    communicator.suspend()
    with pytest.raises(RuntimeError):
        communicator.resume()
    communicator.resume()

    assert workspace.checkpoint_restore.call_count == 2


@pytest.mark.parametrize(
    ("backend", "capability", "world_size", "nodes", "expected"),
    [
        ("mnnvl", 100, 8, 1, 128 * flashinfer_all_reduce.MiB),
        ("mnnvl", 100, 8, 2, 128 * flashinfer_all_reduce.MiB),
        ("mnnvl", 103, 4, 1, 80 * flashinfer_all_reduce.MiB),
        ("mnnvl", 103, 8, 2, 128 * flashinfer_all_reduce.MiB),
        ("mnnvl", 103, 16, 4, 8 * flashinfer_all_reduce.MiB),
        ("mnnvl", 103, 2, 1, None),
        ("mnnvl", 103, 12, 3, None),
        ("mnnvl", 103, 8, 1, 128 * flashinfer_all_reduce.MiB),
        ("trtllm", 103, 8, 2, None),
        ("mnnvl", 90, 8, 2, None),
    ],
)
def test_flashinfer_standalone_size_tuning(
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    capability: int,
    world_size: int,
    nodes: int,
    expected: int | None,
) -> None:
    monkeypatch.setattr(
        flashinfer_all_reduce,
        "current_platform",
        Mock(get_device_capability=lambda: Mock(to_int=lambda: capability)),
    )
    monkeypatch.setattr(flashinfer_all_reduce, "_node_count", lambda _: nodes)

    assert (
        flashinfer_all_reduce._get_tuned_standalone_max_size(
            world_size, backend, Mock()
        )
        == expected
    )


@pytest.mark.parametrize(
    ("enabled", "hidden_dim", "expected"),
    [(True, 7168, 9362), (True, 4096, 16384), (False, 4096, 128)],
)
def test_flashinfer_standalone_workspace_size(
    monkeypatch: pytest.MonkeyPatch, enabled: bool, hidden_dim: int, expected: int
) -> None:
    create_workspace = Mock(return_value=Mock(backend="mnnvl"))
    monkeypatch.setattr(
        flashinfer_all_reduce.envs, "VLLM_ALLREDUCE_USE_FLASHINFER", enabled
    )
    monkeypatch.setattr(flashinfer_all_reduce, "_fi_ar_workspace", None)
    monkeypatch.setattr(flashinfer_all_reduce, "_fi_ar_quant_workspace", None)
    monkeypatch.setattr(
        flashinfer_all_reduce,
        "_resolve_fi_ar_backend",
        Mock(return_value=("mnnvl", False)),
    )
    monkeypatch.setattr(
        flashinfer_all_reduce,
        "_get_tuned_standalone_max_size",
        Mock(return_value=128 * flashinfer_all_reduce.MiB),
    )
    monkeypatch.setattr(flashinfer_all_reduce, "_create_workspace", create_workspace)

    flashinfer_all_reduce.get_fi_ar_workspace(
        8, 0, 128, hidden_dim, torch.bfloat16, Mock()
    )

    assert create_workspace.call_args.args[3] == expected


@pytest.mark.parametrize(
    ("node_count", "is_blackwell", "expected"),
    [
        (1, False, ("mnnvl", True)),
        (1, True, ("mnnvl", True)),
        (2, False, (None, False)),
        (2, True, ("mnnvl", False)),
    ],
)
def test_flashinfer_auto_backend_uses_group_topology(
    monkeypatch: pytest.MonkeyPatch,
    node_count: int,
    is_blackwell: bool,
    expected: tuple[str | None, bool],
) -> None:
    monkeypatch.setattr(
        flashinfer_all_reduce.envs, "VLLM_FLASHINFER_ALLREDUCE_BACKEND", "auto"
    )
    monkeypatch.setattr(flashinfer_all_reduce, "_node_count", lambda _: node_count)
    monkeypatch.setattr(
        flashinfer_all_reduce.current_platform,
        "has_device_capability",
        lambda capability: is_blackwell,
    )

    assert flashinfer_all_reduce._resolve_fi_ar_backend(Mock()) == expected


def test_flashinfer_workspace_failure_is_not_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Creation is collective; retrying it per all-reduce desyncs ranks."""
    create_workspace = Mock(return_value=None)
    monkeypatch.setattr(flashinfer_all_reduce, "_fi_ar_workspace", None)
    monkeypatch.setattr(flashinfer_all_reduce, "_fi_ar_quant_workspace", None)
    monkeypatch.setattr(flashinfer_all_reduce, "_fi_ar_workspace_failed", False)
    monkeypatch.setattr(
        flashinfer_all_reduce,
        "_resolve_fi_ar_backend",
        Mock(return_value=("mnnvl", True)),
    )
    monkeypatch.setattr(
        flashinfer_all_reduce, "_get_tuned_standalone_max_size", Mock(return_value=None)
    )
    monkeypatch.setattr(flashinfer_all_reduce, "_create_workspace", create_workspace)
    args = (2, 0, 128, 4096, torch.bfloat16, Mock())

    assert flashinfer_all_reduce.get_fi_ar_workspace(*args) is None
    assert flashinfer_all_reduce.get_fi_ar_workspace(*args) is None
    # One mnnvl attempt plus one trtllm fallback, never repeated.
    assert create_workspace.call_count == 2

    flashinfer_all_reduce.destroy_fi_ar_workspace()
    flashinfer_all_reduce.get_fi_ar_workspace(*args)
    assert create_workspace.call_count == 4


def test_flashinfer_all_reduce_precedes_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    output = torch.empty(2)
    fi_ar_comm = Mock(disabled=False)
    fi_ar_comm.should_use_fi_ar.return_value = True
    fi_ar_comm.all_reduce.return_value = output
    communicator = CudaCommunicator.__new__(CudaCommunicator)
    communicator.fi_ar_comm = fi_ar_comm
    communicator.fi_pcie_ipc_ar_comm = None
    communicator.pynccl_comm = Mock(world_size=8)
    communicator.qr_comm = None
    nccl_selector = Mock(return_value=True)
    monkeypatch.setattr(
        "vllm.distributed.device_communicators.cuda_communicator."
        "should_nccl_symm_mem_allreduce",
        nccl_selector,
    )

    assert communicator.all_reduce(torch.empty(1)) is output
    nccl_selector.assert_not_called()


def test_aiter_all_gather_precedes_pynccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ensure can use aiter all_gather if available even if pynccl is not available."""
    output = torch.empty(2)
    aiter_comm = Mock()
    aiter_comm.should_custom_ag.return_value = True
    aiter_comm.custom_all_gather.return_value = output
    communicator = CudaCommunicator.__new__(CudaCommunicator)
    communicator.world_size = 2
    communicator.aiter_ar_comm = aiter_comm
    communicator.pynccl_comm = Mock(disabled=True)
    monkeypatch.setattr(communicator, "_can_use_aiter_ag_rs", Mock(return_value=True))

    assert communicator.all_gatherv(torch.empty(1)) is output


def test_isend_object_posts_size_then_object_and_releases_on_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    posted: list[tuple[torch.Tensor, _DummyWork]] = []

    def fake_isend(t: torch.Tensor, *args: Any, **kwargs: Any) -> _DummyWork:
        w = _DummyWork()
        posted.append((t, w))
        return w

    monkeypatch.setattr(torch.distributed, "isend", fake_isend)

    g = _make_group_for_unit_test(rank_in_group=0, world_size=2)
    handle = g.isend_object({"k": [1, 2, 3]}, dst=1)

    # two sends, in size-then-object order (preserves gloo FIFO).
    assert len(posted) == 2
    assert posted[0][0].dtype == torch.long
    assert posted[0][0].shape == torch.Size([1])
    assert posted[0][0].item() == posted[1][0].numel()
    assert posted[1][0].dtype == torch.uint8

    # retain holds both source tensors until wait.
    assert handle._retained == (posted[0][0], posted[1][0])

    handle.wait()

    # both underlying works drained, retain dropped.
    assert all(w.wait_calls == 1 for _, w in posted)
    assert handle._retained == ()

    # wait is idempotent: gloo Work.wait() is single-shot for p2p sends (a
    # second wait blocks forever), and both the lazy FIFO reap in
    # ``_reap_completed_isends`` and any explicit isend caller may wait the
    # same metadata handle.
    handle.wait()
    assert all(w.wait_calls == 1 for _, w in posted)
    assert handle._retained == ()


def test_isend_tensor_dict_includes_metadata_handle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    posted: list[torch.Tensor] = []

    def fake_isend(t: torch.Tensor, *args: Any, **kwargs: Any) -> _DummyWork:
        posted.append(t)
        return _DummyWork()

    monkeypatch.setattr(torch.distributed, "isend", fake_isend)

    g = _make_group_for_unit_test(rank_in_group=0, world_size=2)
    td = {"a": torch.arange(4, dtype=torch.float32, device="cpu")}
    handles = g.isend_tensor_dict(td, dst=1)

    # size + object (metadata) + one tensor send.
    assert len(posted) == 3
    assert posted[0].dtype == torch.long
    assert posted[1].dtype == torch.uint8
    assert posted[2].dtype == torch.float32

    # composite metadata handle + one tensor handle.
    assert len(handles) == 2

    for handle in handles:
        handle.wait()
    assert handles[0]._retained == ()


def test_isend_tensor_dict_self_retains_for_fire_and_forget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    works: list[_DummyWork] = []

    def fake_isend(t: torch.Tensor, *args: Any, **kwargs: Any) -> _DummyWork:
        w = _DummyWork()
        works.append(w)
        return w

    monkeypatch.setattr(torch.distributed, "isend", fake_isend)

    g = _make_group_for_unit_test(rank_in_group=0, world_size=2)
    td = {"a": torch.arange(4, dtype=torch.float32, device="cpu")}

    # fire-and-forget: the returned handles are dropped by the caller, so the
    # group must self-retain the handles and the source tensor.
    g.isend_tensor_dict(td, dst=1)
    assert len(g._pending_isends) == 1
    handles0, tensors0 = g._pending_isends[0]
    assert len(handles0) == 2  # metadata composite + one tensor send
    assert tensors0 == [td["a"]]

    # the first send is still in flight, so the next call's reap keeps it.
    g.isend_tensor_dict(td, dst=1)
    assert len(g._pending_isends) == 2

    # metadata-only send (no tensors) is dropped best-effort on the next
    # reap, since it has no reliable completion signal.
    g.isend_tensor_dict({"meta": "no-tensors"}, dst=1)
    assert len(g._pending_isends) == 3

    # complete every posted work; the next call reaps all three old entries
    # (the metadata-only one unconditionally) and keeps only its own.
    for w in works:
        w.completed = True
    g.isend_tensor_dict(td, dst=1)
    assert len(g._pending_isends) == 1
    # reaped entries had their metadata handles waited as a backstop.
    assert handles0[0]._retained == ()


def test_send_tensor_dict_sync_path_does_not_self_retain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fake_isend(t: torch.Tensor, *args: Any, **kwargs: Any) -> _DummyWork:
        return _DummyWork()

    monkeypatch.setattr(torch.distributed, "isend", fake_isend)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(GroupCoordinator, "send_object", lambda self, obj, dst: None)

    g = _make_group_for_unit_test(rank_in_group=0, world_size=2)
    td = {"a": torch.arange(4, dtype=torch.float32, device="cpu")}
    g.send_tensor_dict(td, dst=1)

    # the sync path waited every handle, so no retention entry may leak.
    assert len(g._pending_isends) == 0


def test_async_intermediate_tensors_lazy_wait() -> None:
    work = _DummyWork()
    post_calls = {"n": 0}

    def post() -> None:
        post_calls["n"] += 1

    it = AsyncIntermediateTensors(
        {"x": torch.tensor([1])},
        comm_handles=[work],
        comm_postprocess=[post],
    )

    # accessing non-tensor attributes should not trigger wait.
    assert it._comm_handles is not None
    assert work.wait_calls == 0
    assert post_calls["n"] == 0

    # first access of `.tensors` triggers wait + postprocess.
    _ = it.tensors
    assert work.wait_calls == 1
    assert post_calls["n"] == 1

    # subsequent access should not re-wait.
    _ = it.tensors
    assert work.wait_calls == 1
    assert post_calls["n"] == 1


@ray.remote(num_gpus=1, max_calls=1)
def send_recv_test_worker(
    monkeypatch: pytest.MonkeyPatch,
    tp_size: int,
    pp_size: int,
    rank: int,
    distributed_init_port: str,
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    device = torch.device(f"cuda:{rank}")
    torch.accelerator.set_device_index(device)
    init_test_distributed_environment(tp_size, pp_size, rank, distributed_init_port)

    size = 64
    test_tensor = torch.arange(64, dtype=torch.float32, device="cuda")

    if not get_pp_group().is_first_rank:
        recv_tensor = get_pp_group().recv(size, dtype=torch.float32)

    if not get_pp_group().is_last_rank:
        get_pp_group().send(test_tensor)

    if not get_pp_group().is_first_rank:
        torch.testing.assert_close(test_tensor, recv_tensor)


@multi_gpu_test(num_gpus=2)
@pytest.mark.parametrize("tp_size", [2])
@pytest.mark.parametrize(
    "test_target",
    [all_reduce_test_worker, all_gather_test_worker, broadcast_tensor_dict_test_worker],
)
def test_multi_process_tensor_parallel(
    monkeypatch: pytest.MonkeyPatch,
    tp_size: int,
    test_target: Callable[..., Any],
):
    multi_process_parallel(monkeypatch, tp_size, 1, test_target)


@multi_gpu_test(num_gpus=2)
@pytest.mark.parametrize("pp_size", [2])
@pytest.mark.parametrize(
    "test_target", [send_recv_test_worker, send_recv_tensor_dict_test_worker]
)
def test_multi_process_pipeline_parallel(
    monkeypatch: pytest.MonkeyPatch,
    pp_size: int,
    test_target: Callable[..., Any],
):
    multi_process_parallel(monkeypatch, 1, pp_size, test_target)


@multi_gpu_test(num_gpus=4)
@pytest.mark.parametrize("tp_size", [2])
@pytest.mark.parametrize("pp_size", [2])
@pytest.mark.parametrize(
    "test_target",
    [
        send_recv_test_worker,
        send_recv_tensor_dict_test_worker,
        all_reduce_test_worker,
        all_gather_test_worker,
        broadcast_tensor_dict_test_worker,
    ],
)
def test_multi_process_tensor_parallel_pipeline_parallel(
    tp_size: int,
    pp_size: int,
    test_target: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
):
    multi_process_parallel(monkeypatch, tp_size, pp_size, test_target)
