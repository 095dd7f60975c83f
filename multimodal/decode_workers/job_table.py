"""The table of jobs that decode workers run.

A job is a function (data, options) -> (values, buffers): ``data`` is the file's bytes, ``options`` and ``values`` are
JSON objects, ``buffers`` raw bytes. It raises TrencadisError (400, 413 or 415) if the media is at fault, and may use as
much memory and time as the caller granted. To add one: write the function in a module that imports neither torch nor
the server, name it in ``JOBS``, and call ``WorkerPool.run(Job(name, options, ...), data)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

Values = dict[str, Any]
JobFunction = Callable[[bytearray, Values], tuple[Values, Sequence[memoryview]]]

JOBS = {
    "image": "trencadis.multimodal.images.image_job:prepare_image",
    "video": "trencadis.multimodal.videos.video_job:prepare_video",
}
"""Name -> ``module:function``; the worker imports the module when it first runs the job."""


def load_job(name: str, more: Mapping[str, str]) -> JobFunction:
    """Imports the function of job ``name``, from the table or from ``more``.

    Raises:
        KeyError: there is no such job.
    """
    module, _, function = {**JOBS, **more}[name].partition(":")
    found: JobFunction = getattr(import_module(module), function)
    return found
