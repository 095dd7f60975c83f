"""A progress bar of an offline call's prompts, with their tokens per second."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from trencadis.outputs import RequestOutput

UseTqdm = bool | Callable[..., Any]
"""True to show a bar, or a callable that creates one instead of tqdm."""


class PromptProgressBar:
    """Shows the number of finished prompts and tokens per second.

    Args:
        use: True shows a bar for more than one prompt, a callable that creates a bar always shows one.
    """

    def __init__(self, total: int, use: UseTqdm) -> None:
        self._bar: Any = None
        if callable(use) or (use and total > 1):
            from tqdm.auto import tqdm

            make = use if callable(use) else tqdm
            self._bar = make(total=total, desc="Processed prompts", dynamic_ncols=True)
        self._start = time.perf_counter()
        self._in = self._out = 0

    def step(self, output: RequestOutput) -> None:
        """Counts one more finished prompt."""
        if self._bar is None:
            return
        self._in += len(output.prompt_token_ids)
        self._out += sum(len(o.token_ids) for o in output.outputs)
        seconds = max(time.perf_counter() - self._start, 1e-9)
        self._bar.set_postfix_str(f"in {self._in / seconds:.1f}, out {self._out / seconds:.1f} tokens/s", refresh=False)
        self._bar.update(1)

    def close(self) -> None:
        """Closes the bar."""
        if self._bar is not None:
            self._bar.close()
