"""OpenVINO GenAI's side of ``benchmarks.quantised --peer openvino``: runs under another Python, which has it.

PYTHON openvino_side.py FOLDER THREADS

The folder holds a model of ``optimum-cli export openvino``. A JSON object a line on standard input asks, one on
standard output answers; nothing of this repository is imported. In process, without HTTP.
{"prompts": [text, ...], "out": n} -> {"seconds": of all answers, each of n tokens}
{"image": side, "prompt": text, "out": n} -> {"seconds": ...}
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any


class Model:
    """A model that answers several prompts at once: continuous batching for texts, a pipeline of its own for images."""

    def __init__(self, path: str, threads: int) -> None:
        self.genai: Any = import_module("openvino_genai")
        self.path, self.threads = path, threads
        settings = self.genai.SchedulerConfig()
        settings.cache_size, settings.enable_prefix_caching = 1, False
        self.texts = self.genai.ContinuousBatchingPipeline(path, settings, "CPU", {"INFERENCE_NUM_THREADS": threads})
        self._images: Any = None

    def settings(self, out: int) -> Any:
        """Greedy answers of exactly ``out`` tokens."""
        made = self.genai.GenerationConfig()
        made.max_new_tokens = made.min_new_tokens = out
        made.ignore_eos, made.do_sample = True, False
        return made

    def images(self) -> Any:
        """The pipeline for images, loaded at its first use."""
        if self._images is None:
            self._images = self.genai.VLMPipeline(self.path, "CPU", INFERENCE_NUM_THREADS=self.threads)
        return self._images

    def answer(self, requested: dict[str, Any]) -> dict[str, Any]:
        """What a line asks."""
        settings = self.settings(requested["out"])
        if "image" not in requested:
            begun = time.perf_counter()
            self.texts.generate(requested["prompts"], [settings] * len(requested["prompts"]))
            return {"seconds": time.perf_counter() - begun}
        import numpy as np

        side, tensor = requested["image"], import_module("openvino").Tensor
        pixels = np.random.default_rng(requested["seed"]).integers(0, 256, (1, side, side, 3), dtype=np.uint8)
        pipeline = self.images()
        begun = time.perf_counter()
        pipeline.generate(requested["prompt"], images=[tensor(pixels)], generation_config=settings)
        return {"seconds": time.perf_counter() - begun}


def main() -> None:
    """Answers until standard input ends."""
    begun = time.perf_counter()
    if not Path(sys.argv[1], "config.json").is_file():
        raise SystemExit(f"{sys.argv[1]} holds no exported model")
    model = Model(sys.argv[1], int(sys.argv[2]))
    said = {"start": time.perf_counter() - begun, "version": version("openvino-genai")}
    print(json.dumps(said), flush=True)
    for line in sys.stdin:
        print(json.dumps(model.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
