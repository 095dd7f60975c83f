"""llama.cpp's side of ``benchmarks.quantised --peer llamacpp``: runs under another Python, which has llama-cpp-python.

PYTHON llamacpp_side.py FILE.gguf THREADS CONTEXT

A JSON object a line on standard input asks, one on standard output answers; nothing of this repository is imported.
{"prompt": [ids], "out": n} -> {"first": seconds to the first token, "rest": seconds of the n - 1 others, "ids": [...]}
{"prompt": [ids], "logits": true} -> {"logits": [...]} behind the last token
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from importlib import import_module
from importlib.metadata import version
from typing import Any


class Model:
    """A file, mapped, and one context that decodes one sequence; greedy, by the library's plain C functions."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        self.c: Any = import_module("llama_cpp")
        self._quiet = self.c.llama_log_callback(lambda level, text, data: None)
        self.c.llama_log_set(self._quiet, ctypes.c_void_p(0))
        self.c.llama_backend_init()
        self.model = self.c.llama_model_load_from_file(path.encode(), self.c.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        settings = self.c.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = context
        settings.n_threads = settings.n_threads_batch = threads
        self.context = self.c.llama_init_from_model(self.model, settings)
        self.vocab = self.c.llama_vocab_n_tokens(self.c.llama_model_get_vocab(self.model))

    def decode(self, ids: list[int]) -> Any:
        """Goes on by ``ids``; the logits behind the last of them, float32 [vocab], which the library owns."""
        import numpy as np

        held = (self.c.llama_token * len(ids))(*ids)
        if self.c.llama_decode(self.context, self.c.llama_batch_get_one(held, len(ids))):
            raise SystemExit("llama.cpp cannot decode")
        return np.ctypeslib.as_array(self.c.llama_get_logits_ith(self.context, -1), (self.vocab,))

    def forget(self) -> None:
        """Empties the cache."""
        self.c.llama_memory_clear(self.c.llama_get_memory(self.context), False)

    def answer(self, requested: dict[str, Any]) -> dict[str, Any]:
        """What a line asks."""
        self.forget()
        begun = time.perf_counter()
        logits = self.decode(requested["prompt"])
        if requested.get("logits"):
            return {"logits": [float(value) for value in logits]}
        ids = [int(logits.argmax())]
        first = time.perf_counter()
        while len(ids) < requested["out"]:
            ids.append(int(self.decode(ids[-1:]).argmax()))
        return {"first": first - begun, "rest": time.perf_counter() - first, "ids": ids}


def main() -> None:
    """Answers until standard input ends."""
    begun = time.perf_counter()
    model = Model(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    said = {"start": time.perf_counter() - begun, "version": version("llama-cpp-python")}
    print(json.dumps(said), flush=True)
    for line in sys.stdin:
        print(json.dumps(model.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
