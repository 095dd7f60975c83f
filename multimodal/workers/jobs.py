"""The jobs that decode workers know, by name.

A job is a function (data, options) -> (values, buffers): ``data`` is the file's bytes, ``options`` and ``values`` are
JSON objects, ``buffers`` raw bytes. It raises TrencadisError (400, 413 or 415) for what the sender of the bytes did
wrong, and may take as much memory and time as the caller granted. To add one: write the function in a module that
imports neither torch nor the server, name it in ``JOBS``, and call ``Pool.run(Job(name, options, ...), data)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

Values = dict[str, Any]
JobFunction = Callable[[bytearray, Values], tuple[Values, Sequence[memoryview]]]

JOBS = {
    "image": "trencadis.multimodal.images.jobs:prepare_image",
    "video": "trencadis.multimodal.videos.jobs:prepare_video",
}
"""Name to ``module:function``; the module is imported in the worker, when the job is first asked for."""


def load(name: str, more: Mapping[str, str]) -> JobFunction:
    """The function of a job; ``more`` stands beside the table.

    Raises:
        KeyError: no such job.
    """
    module, _, function = {**JOBS, **more}[name].partition(":")
    found: JobFunction = getattr(import_module(module), function)
    return found
