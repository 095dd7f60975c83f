"""The asyncio side of one engine process: frames, open requests, pixels on demand, pings.

Formats the plan and the ledger as lines for the terminal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence

from trencadis.core.executor.spawn import EngineHandle, spawn_engine
from trencadis.core.host_memory import gib
from trencadis.core.process import engine_messages
from trencadis.core.process.child_process import StopWatch
from trencadis.core.process.engine_messages import GraphPlan
from trencadis.server.engine.request_link import STOPPED, RequestLink


def format_plan_lines(plan: GraphPlan) -> Iterator[str]:
    """Yields the lines of ledger, pools, buckets by stage and state, and advice."""
    yield f"{'memory':<26} {'':>12} {'':>7}"
    for name, count in plan.ledger:
        yield f"  {name:<26} {gib(count):>12} {100 * count / max(plan.total, 1):6.1f} %"
    yield f"  {'total':<26} {gib(plan.total):>12}  100.0 %"
    yield "graph pools"
    for pool, (budget, spent, lost) in plan.pools.items():
        kept = f", {gib(lost)} not returned" if lost else ""
        yield f"  {pool:<26} {gib(spent):>12} of {gib(budget)}{kept}"
    yield f"planned shapes, warm-up {plan.warmup}"
    counts: Counter[tuple[str, str]] = Counter((b.stage, b.state) for b in plan.buckets)
    for stage in dict.fromkeys(b.stage for b in plan.buckets):
        states = ", ".join(f"{n} {state}" for (s, state), n in sorted(counts.items()) if s == stage)
        yield f"  {stage:<26} {states}"
    for bucket in plan.buckets:
        if bucket.failed:
            yield f"  {bucket.name}: {bucket.failed}"
    yield from plan.advice


__all__ = ["STOPPED", "EngineHandle", "EngineLink", "spawn_engine"]

log = logging.getLogger("trencadis.server")

PING_INTERVAL = 1.0
MISSED_PONGS = 10
STALL_SECONDS = 60.0
STALL_FACTOR = 20.0
SLOW_PHASES = ("compiling", "capturing", "validating")


class EngineLink(RequestLink):
    """The connection to one engine process until it ends.

    Args:
        compile_timeout: limit in seconds of loading and of a step that compiles.
        on_stats: called with every message of counters.
        on_info: called once, when the engine accepts requests.
        vocabulary: see ``RequestLink``.
    """

    def __init__(
        self,
        handle: EngineHandle,
        compile_timeout: float = 1800.0,
        on_stats: Callable[[engine_messages.EngineStats], None] = lambda stats: None,
        on_info: Callable[[engine_messages.EngineInfo], None] = lambda info: None,
        vocabulary: Callable[[], Awaitable[bytes]] | None = None,
    ) -> None:
        super().__init__(vocabulary)
        self.handle = handle
        self.compile_timeout = compile_timeout
        self.on_stats = on_stats
        self.on_info = on_info
        self.info: engine_messages.EngineInfo | None = None
        self.stats = engine_messages.EngineStats()
        self.phase = "starting"
        self.progress: engine_messages.Phase | None = None
        self.plan: engine_messages.GraphPlan | None = None
        self.capturing = ""
        """Bucket that is being captured."""
        self.learn_requests = 0
        """Requests to learn shapes that were sent to this engine."""
        self.fatal: engine_messages.Fatal | None = None
        self.reason = ""
        self.pinged = self.ponged = 0
        self.born = time.monotonic()

    # --- life ---

    async def run(self) -> None:
        """Reads until the process has ended; then ends every open request with an error."""
        reader, self.writer = await asyncio.open_connection(sock=self.handle.sock)
        helpers = [asyncio.create_task(self.send_media()), asyncio.create_task(self.watch())]
        try:
            while True:
                size, _ = engine_messages.HEADER.unpack(await reader.readexactly(engine_messages.HEADER.size))
                await self.receive(engine_messages.decode_up(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            await self.close(helpers)

    async def close(self, helpers: Sequence[asyncio.Task[None]]) -> None:
        """Ends all requests; gives the process half a second to exit with its own code, then kills and reaps it."""
        self.alive = False
        self.fail_all()
        for task in helpers:
            task.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)
        if self.writer is not None:
            self.writer.transport.abort()
            with contextlib.suppress(OSError):
                await self.writer.wait_closed()
        for _ in range(50):
            if self.handle.process.poll() is not None:
                break
            await asyncio.sleep(0.01)
        self.handle.kill()

    def kill_engine(self, reason: str) -> None:
        """Kills the process, so that ``run`` ends with ``reason``."""
        self.reason = reason
        log.error("engine killed: %s", reason)
        self.handle.process.kill()

    # --- frames from the engine ---

    async def receive(self, message: engine_messages.Up) -> None:
        """Handles one frame."""
        match message:
            case engine_messages.Deltas(items, stats):
                await self.deliver_all(items)
                if stats is not None:
                    self.plan, self.stats = stats.plan or self.plan, stats
                    self.on_stats(stats)
            case engine_messages.NeedMedia(id, index):
                self.request_media(id, index)
            case engine_messages.Pong():
                self.check_step(message)
            case _:
                self.on_start_progress(message)

    def on_start_progress(
        self, message: engine_messages.Phase | engine_messages.Capture | engine_messages.Ready | engine_messages.Fatal
    ) -> None:
        """Handles a frame about the progress of the start or the warm-up."""
        match message:
            case engine_messages.Phase():
                self.phase, self.progress = message.name, message
                how_far = f" {message.fraction:.0%}" if message.fraction else ""
                detail = f" {message.detail}" if message.detail else ""
                log.info("engine: %s%s%s (%.1f s)", message.name, detail, how_far, message.seconds)
            case engine_messages.Capture(bucket, begun):
                self.capturing = bucket if begun else ""
            case engine_messages.Ready(info):
                self.info, self.phase, self.plan = info, "idle", info.graphs
                log_engine_info(info)
                self.on_info(info)
            case engine_messages.Fatal():
                self.fatal, self.reason = message, message.message

    def check_step(self, pong: engine_messages.Pong) -> None:
        """Records an answer to a ping; kills an engine whose step takes far too long; compiling has a limit of its
        own.
        """
        self.ponged = max(self.ponged, pong.n)
        self.phase = pong.phase
        limit = self.compile_timeout
        if self.info is not None and pong.phase not in SLOW_PHASES:
            limit = max(STALL_SECONDS, STALL_FACTOR * self.info.step_seconds)
        if pong.seconds > limit:
            self.kill_engine(f"{pong.phase}, step {pong.step}: {pong.seconds:.0f} s, limit {limit:.0f} s")

    # --- whether it lives ---

    async def watch(self) -> None:
        """Pings the engine. Counts unanswered pings, not seconds, so a blocked event loop here does not kill a healthy
        engine.

        While the engine loads, imports may block its reader thread, so only the time limit of loading applies. One that
        is stopped is killed at any time.
        """
        stops = StopWatch(self.handle.process)
        while True:
            if stops.look():
                self.kill_engine("no sign of life: its process is stopped")
            elif self.info is None:
                self.watch_start()
            elif self.pinged - self.ponged >= MISSED_PONGS:
                self.kill_engine(f"no sign of life for {self.pinged - self.ponged} s")
            self.pinged += 1
            self.write(engine_messages.Ping(self.pinged))
            await asyncio.sleep(PING_INTERVAL)

    def watch_start(self) -> None:
        """Kills an engine that takes too long to start; until then, unanswered pings do not count."""
        if time.monotonic() - self.born > self.compile_timeout:
            self.kill_engine(f"not ready after {self.compile_timeout:.0f} s")
        self.ponged = self.pinged


def log_engine_info(info: engine_messages.EngineInfo) -> None:
    """Logs the lines that start-up scripts look for."""
    tokens = info.num_blocks * info.block_size
    log.info("engine ready on %s, %s, after %.1f s", info.device, info.dtype, info.seconds)
    log.info("KV cache size: %s tokens", f"{tokens:,}")
    # In vLLM's words on every device; scripts parse the numbers.
    log.info("GPU KV cache size: %s tokens", f"{tokens:,}")
    log.info("# GPU blocks: %d, # CPU blocks: %d", info.num_blocks, info.host_blocks)
    if info.max_model_len:
        log.info(
            "Maximum concurrency for %s tokens per request: %.2fx",
            f"{info.max_model_len:,}",
            tokens / info.max_model_len,
        )
    for note in info.notes:
        log.info("engine: %s", note)
    if info.graphs is not None:
        for line in format_plan_lines(info.graphs):
            log.info("%s", line)
