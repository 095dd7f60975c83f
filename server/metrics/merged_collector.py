"""Merges the families of several engines: one family per name, with the samples of all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import Metric
from prometheus_client.registry import Collector


class MergedCollector(Collector):
    """Collector of the merged families of several collectors, since the text format allows each family only once."""

    def __init__(self, parts: Sequence[Collector]) -> None:
        self._collectors = parts

    def collect(self) -> Iterator[Metric]:
        """Yields one family per name, in the order of the first collector that has it."""
        if len(self._collectors) == 1:
            yield from self._collectors[0].collect()
            return
        found: dict[str, Metric] = {}
        for part in self._collectors:
            for family in part.collect():
                if family.name in found:
                    found[family.name].samples.extend(family.samples)
                else:
                    found[family.name] = family
        yield from found.values()
