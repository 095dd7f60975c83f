"""Compile mode: compiles parts of a body, and compiles a part that Dynamo cannot trace again with graph breaks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trencadis.backends.hpu.bridge import Bridge
from trencadis.backends.hpu.hpu_settings import FULLGRAPH, HpuSettings
from trencadis.core.errors import StartupError

log = logging.getLogger("trencadis.engine")

Part = Callable[..., Any]


class RegionCompiler:
    """Makes functions of fixed shapes with the bridge's compiler.

    A part is compiled as one graph first. Where Dynamo fails and the settings allow it, a warning names the part and
    the line, and the part is compiled again with graph breaks (``fullgraph=False``), which costs time in each launch.

    Attributes:
        broken: names of the parts that are compiled with graph breaks.
    """

    def __init__(self, bridge: Bridge, settings: HpuSettings) -> None:
        self._bridge, self._settings = bridge, settings
        self.broken: set[str] = set()

    def compile(self, make: Callable[[], Part], name: str) -> Part:
        """Returns the compiled function of the part ``name``.

        Args:
            make: returns the function to compile, with a code object of its own at each call.
        """
        fullgraph = self._settings.fullgraph
        compiled = self._bridge.compile(make(), fullgraph=fullgraph)
        known: list[Part] = []

        def run(*args: Any) -> Any:
            if known:
                return known[0](*args)
            try:
                out = compiled(*args)
            except RuntimeError as error:
                if self._bridge.out_of_memory(error) or not is_dynamos(error):
                    raise
                known.append(self._with_breaks(make, name, error, fullgraph))
                return self._first(known[0], name, args)
            known.append(compiled)
            return out

        return run

    def _with_breaks(self, make: Callable[[], Part], name: str, error: Exception, fullgraph: bool) -> Part:
        """Returns the function compiled with graph breaks; raises StartupError where that is not allowed."""
        if not fullgraph or not self._settings.graph_breaks:
            raise StartupError(describe_failure(name, error)) from None
        self.broken.add(name)
        log.warning("%s; it is compiled with graph breaks, which cost time in each launch.",
                    describe_failure(name, error))  # fmt: skip
        return self._bridge.compile(make(), fullgraph=False)

    def _first(self, run: Part, name: str, args: tuple[Any, ...]) -> Any:
        """Runs the function with graph breaks for the first time; raises StartupError where Dynamo fails again."""
        try:
            return run(*args)
        except RuntimeError as error:
            if self._bridge.out_of_memory(error) or not is_dynamos(error):
                raise
            raise StartupError(describe_failure(name, error)) from None


def is_dynamos(error: BaseException) -> bool:
    """Returns True for an error of torch's compiler: a part that it cannot trace, or a failure of its backend."""
    from torch._dynamo.exc import TorchDynamoException  # loaded only where something was compiled

    return isinstance(error, TorchDynamoException)


def describe_failure(name: str, error: BaseException) -> str:
    """Returns one line: the part that cannot be compiled, the line of code, and Dynamo's reason."""
    lines = [text.strip() for text in str(error).splitlines() if text.strip()] or [type(error).__name__]
    context = [text.partition(": ")[2] for text in lines if text.startswith("Developer debug context")]
    reason = "; ".join([lines[0], *context])[:240]
    return f"hpu: {name} cannot be compiled as one graph at {line_of(error)} ({reason}); {FULLGRAPH}"


OWN = str(Path(__file__).resolve().parents[3])
"""Folder of the product, whose lines are named before those of the plug-in."""


def line_of(error: BaseException) -> str:
    """Returns ``folder/file:line`` of the innermost traced frame of the product, or of any frame; "" if unknown."""
    frames = list(getattr(error, "real_stack", None) or [])
    ours = [frame for frame in frames if os.path.realpath(frame.filename).startswith(OWN)]
    for frame in reversed(ours or frames):
        path = Path(frame.filename)
        return f"{path.parent.name}/{path.name}:{frame.lineno}"
    return "an unknown line"
