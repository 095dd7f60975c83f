# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Unit tests for ECOutputAggregator."""

import pytest

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorWorkerMetadata
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorStats
from vllm.distributed.ec_transfer.ec_connector.utils import ECOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    ECConnectorOutput,
    KVConnectorOutput,
    ModelRunnerOutput,
)

pytestmark = pytest.mark.cpu_test


class FakeWorkerMeta(ECConnectorWorkerMetadata):
    """Records merge order. `aggregate` returns a new object, as the base class
    declares: an aggregator discarding the return value would lose the merge.
    """

    def __init__(self, saves: list[str]):
        self.saves = saves

    def aggregate(self, other: ECConnectorWorkerMetadata) -> "FakeWorkerMeta":
        assert isinstance(other, FakeWorkerMeta)
        return FakeWorkerMeta(self.saves + other.saves)


class FakeConnectorStats(ECConnectorStats):
    """Records merge order, mirroring FakeWorkerMeta above."""

    def __init__(self, saves: list[str]):
        self.saves = saves

    def aggregate(self, other: ECConnectorStats) -> "FakeConnectorStats":
        assert isinstance(other, FakeConnectorStats)
        return FakeConnectorStats(self.saves + other.saves)


def _worker_output(ec_output: ECConnectorOutput | None) -> ModelRunnerOutput:
    return ModelRunnerOutput(
        req_ids=[], req_id_to_index={}, ec_connector_output=ec_output
    )


def test_aggregate_folds_every_rank_onto_output_rank():
    """EC work done on any rank reaches the scheduler via output_rank's output.

    The middle rank reports no worker metadata or stats: it must neither seed
    nor clobber either accumulator.
    """
    outputs = [
        _worker_output(
            ECConnectorOutput(
                finished_sending={"mm0"},
                ec_connector_stats=FakeConnectorStats(["mm0"]),
                ec_connector_worker_meta=FakeWorkerMeta(["mm0"]),
            )
        ),
        _worker_output(ECConnectorOutput(finished_recving={"mm1"})),
        _worker_output(
            ECConnectorOutput(
                ec_connector_stats=FakeConnectorStats(["mm2"]),
                ec_connector_worker_meta=FakeWorkerMeta(["mm2"]),
            )
        ),
    ]

    result = ECOutputAggregator().aggregate(outputs, output_rank=2)

    assert result is outputs[2]
    ec_output = result.ec_connector_output
    assert ec_output is not None
    assert ec_output.finished_sending == {"mm0"}
    assert ec_output.finished_recving == {"mm1"}
    assert isinstance(ec_output.ec_connector_stats, FakeConnectorStats)
    assert ec_output.ec_connector_stats.saves == ["mm0", "mm2"]
    assert isinstance(ec_output.ec_connector_worker_meta, FakeWorkerMeta)
    assert ec_output.ec_connector_worker_meta.saves == ["mm0", "mm2"]


def test_aggregate_leaves_no_ec_output_when_no_worker_reported():
    """Empty per-worker reports must not reach the scheduler as an empty object."""
    outputs = [_worker_output(ECConnectorOutput()), _worker_output(ECConnectorOutput())]

    result = ECOutputAggregator().aggregate(outputs, output_rank=0)

    assert result is outputs[0]
    assert result.ec_connector_output is None
    assert ECOutputAggregator().aggregate([None], output_rank=0) is None


def test_aggregate_does_not_write_through_the_shared_empty_output():
    """A rank with nothing to report yields the shared empty output singleton.

    Folding another rank's metadata onto it must not write through to the
    module-level object, which every later step would then carry.
    """
    outputs = [
        _worker_output(
            ECConnectorOutput(ec_connector_worker_meta=FakeWorkerMeta(["mm0"]))
        ),
        EMPTY_MODEL_RUNNER_OUTPUT,
    ]

    result = ECOutputAggregator().aggregate(outputs, output_rank=1)

    assert EMPTY_MODEL_RUNNER_OUTPUT.ec_connector_output is None
    assert result is not EMPTY_MODEL_RUNNER_OUTPUT
    assert result is not None
    assert result.ec_connector_output is not None
    worker_meta = result.ec_connector_output.ec_connector_worker_meta
    assert isinstance(worker_meta, FakeWorkerMeta)
    assert worker_meta.saves == ["mm0"]


def test_chaining_with_kv_aggregator_preserves_both_outputs():
    """MultiprocExecutor chains both aggregators and keeps only the last result,
    so each must merge onto the same output_rank output rather than replace it.
    """
    outputs = [
        _worker_output(ECConnectorOutput(finished_sending={"mm0"})),
        _worker_output(None),
    ]
    outputs[1].kv_connector_output = KVConnectorOutput(invalid_block_ids={7})

    result = None
    for aggregator in (
        KVOutputAggregator(expected_finished_count=1),
        ECOutputAggregator(),
    ):
        result = aggregator.aggregate(outputs, output_rank=1)

    assert result is outputs[1]
    assert result.kv_connector_output is not None
    assert result.kv_connector_output.invalid_block_ids == {7}
    assert result.ec_connector_output is not None
    assert result.ec_connector_output.finished_sending == {"mm0"}
