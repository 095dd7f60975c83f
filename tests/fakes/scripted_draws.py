"""A real engine whose drawn ids are replaced by those of scripts after each launch, for a server process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from benchmarks.speculation import ScriptedEngine
from trencadis.core.engine.engine import Engine
from trencadis.core.engine.engine_builder import create_engine
from trencadis.core.engine_config import EngineConfig
from trencadis.core.request import Request
from trencadis.server.text.checkpoint_tokenizer import Tokenizer

SCRIPTS = "TRENCADIS_TEST_SCRIPTS"
"""Environment variable: a JSON file with a list of texts. The seed of a request is the number of its answer."""

FLAGS = ("--engine", "tests.fakes.scripted_draws:create")


def create(config: EngineConfig, progress: Any) -> Engine:
    """An engine whose answers are the texts of ``SCRIPTS``, drafted and verified as any others."""
    engine = create_engine(config, progress)
    tokenizer = Tokenizer.from_checkpoint(Path(config.model))
    texts = json.loads(Path(os.environ[SCRIPTS]).read_text(encoding="utf-8"))
    eos = min(engine.scheduler.limits.eos)
    answers = [[*tokenizer.encode(text), eos] for text in texts]
    scripted, add = ScriptedEngine(engine), engine.add

    def add_scripted(request: Request) -> None:
        assert request.params.seed is not None
        scripted.answers[request.id] = answers[request.params.seed]
        add(request)

    engine.add = add_scripted  # type: ignore[method-assign]
    return engine
