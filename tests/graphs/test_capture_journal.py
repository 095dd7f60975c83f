"""The journal of captures: each stage's buckets, and a bucket whose capture killed a rank is not tried again."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from trencadis.core.engine_config import EngineConfig
from trencadis.core.executor.engine_process_launcher import EngineHandle
from trencadis.core.graphs.graph_capture_within_memory_budget import CaptureJournal
from trencadis.core.process import engine_messages
from trencadis.server.engine.supervisor import Supervisor


def test_later_stages_name_their_buckets_apart() -> None:
    reported: list[tuple[str, bool]] = []
    first, second = (
        CaptureJournal(
            ["stage 1 decode[4]", "decode[8]"], lambda bucket, begun: reported.append((bucket, begun)), stage
        )
        for stage in (0, 1)
    )
    assert [first.skips("decode[4]"), second.skips("decode[4]")] == [False, True]
    assert [first.skips("decode[8]"), second.skips("decode[8]")] == [True, False]
    with second.capture("decode[2]"):
        pass
    assert reported == [("stage 1 decode[2]", True), ("stage 1 decode[2]", False)]


class Ended:
    """In place of an engine's process."""

    returncode: int | None = 1
    pid = 0

    def poll(self) -> int | None:
        return 1

    def kill(self) -> None:
        pass

    def wait(self, timeout: float | None = None) -> int:
        return 1


def test_a_rank_that_dies_in_a_capture_costs_that_bucket_and_not_the_server() -> None:
    configs: list[EngineConfig] = []
    fatal: list[str] = []

    def failing(config: EngineConfig) -> EngineHandle:
        configs.append(config)
        ours, reference = socket.socketpair()
        captures = ["stage 1 decode[4]", "prefill[8x1]", ""]
        with reference:
            capture = captures[len(configs) - 1]
            reference.sendall(
                engine_messages.frame(engine_messages.Fatal("RankDied: rank 1 died: killed by SIGSEGV", 1, capture))
            )
        handle: Any = EngineHandle(Ended(), ours, failing)
        return handle

    async def body() -> None:
        supervisor = Supervisor(
            EngineConfig(device="cpu"), failing(EngineConfig(device="cpu")), backoff=0.01,
            on_fatal=lambda message, code: fatal.append(message),
        )  # fmt: skip
        supervisor.start()
        assert supervisor.task is not None
        await asyncio.wait_for(supervisor.task, 10)

    asyncio.run(body())
    assert configs[-1].skip_captures == ["stage 1 decode[4]", "prefill[8x1]"]
    assert len(configs) == 3 and len(fatal) == 1, "without a capture to blame, the first start has failed"
