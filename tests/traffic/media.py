"""Blocking calls of the media front ends and workers, for tests that run no event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trencadis.multimodal.decode_workers.worker_pool import Job, JobResult, WorkerPool
from trencadis.multimodal.images.image_frontend import ImageFrontend
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import NO_SCOPE, MediaPart, MediaScope
from trencadis.multimodal.processor_interface import PreparedImage


def prepare_now(
    front: ImageFrontend, parts: Sequence[MediaPart | tuple[Any, str]], scope: MediaScope = NO_SCOPE
) -> list[PreparedImage]:
    """``ImageFrontend.prepare`` in a thread with a loop of its own, so that a running loop may call it too."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(front.prepare(parts, scope))).result()


def run_now(pool: WorkerPool, job: Job, data: bytes | bytearray | memoryview) -> JobResult:
    """``WorkerPool.run``, blocking."""
    return pool.submit(job, data).future.result()
