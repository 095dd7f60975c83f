"""Requests that predict their answer, as the field ``prediction`` of the API has them. Imports no package but the
engine's: the kernels' tests run on machines that lack the others.
"""

from __future__ import annotations

from dataclasses import replace

from trencadis import LLM
from trencadis.core.request import Request
from trencadis.core.scheduling.draft_scheduler import DraftScheduler


def predict(llm: LLM, predicted: list[list[int]]) -> None:
    """Adds a prediction to each request, in order: ``predicted`` with every tenth id changed."""
    engine, texts = llm.engine, iter(predicted)
    scheduler, add = engine.scheduler, engine.add
    assert isinstance(scheduler.drafting, DraftScheduler)
    config = replace(scheduler.drafting.config, method="")
    scheduler.drafting = DraftScheduler(config, scheduler.limits, scheduler.totals)

    def add_predicted(request: Request) -> None:
        text = next(texts)
        add(replace(request, prediction=[id ^ 1 if at % 10 == 9 else id for at, id in enumerate(text)]))

    engine.add = add_predicted  # type: ignore[method-assign]
