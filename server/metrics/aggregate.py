"""Combines the metrics of several processes into one server's: the messages, and their sums. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Sample

from trencadis.server.metrics.deprecated_metrics import PACE

CREATED = "_created"
"""Suffix of samples whose value is a time; of several processes the first counts."""
BETWEEN, OLD_BETWEEN = "vllm:inter_token_latency_seconds", f"vllm:{PACE}"


class SampleValue(msgspec.Struct, frozen=True, array_like=True):
    """One sample: its name, its labels, its value."""

    name: str
    labels: dict[str, str]
    value: float


class FamilySamples(msgspec.Struct, array_like=True):
    """One metric family of a registry; all families of API processes can be summed."""

    name: str
    text: str
    kind: str
    samples: list[SampleValue]


def pack_registry(registry: Collector) -> bytes:
    """Encodes all families of ``registry``."""
    return msgspec.msgpack.encode([from_metric(family) for family in registry.collect()])


def from_metric(family: Metric) -> FamilySamples:
    """Converts a family of the library."""
    samples = [SampleValue(s.name, dict(s.labels), float(s.value)) for s in family.samples]
    return FamilySamples(family.name, family.documentation, family.type, samples)


unpack_registry = msgspec.msgpack.Decoder(list[FamilySamples]).decode


def aggregate(parts: Iterable[Sequence[FamilySamples]]) -> list[FamilySamples]:
    """Returns one family per name with the sums of its samples, in the order of first occurrence."""
    kinds: dict[str, FamilySamples] = {}
    sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for part in parts:
        for family in part:
            kinds.setdefault(family.name, family)
            found = sums.setdefault(family.name, {})
            for sample in family.samples:
                key = sample.name, tuple(sample.labels.items())
                if key not in found:
                    found[key] = sample.value
                elif sample.name.endswith(CREATED):
                    found[key] = min(found[key], sample.value)
                else:
                    found[key] += sample.value
    return [
        FamilySamples(
            name, kinds[name].text, kinds[name].kind,
            [SampleValue(sample, dict(labels), value) for (sample, labels), value in found.items()],
        )
        for name, found in sums.items()
    ]  # fmt: skip


def keep_counters(part: Sequence[FamilySamples]) -> list[FamilySamples]:
    """Returns the counters of a process's metrics, which outlive it; gauges are dropped."""
    return [family for family in part if family.kind != "gauge"]


def format_text(families: Sequence[FamilySamples]) -> bytes:
    """Returns Prometheus' text format. If the old name of the times between tokens is exported, it has the sums too."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_FamilyCollector(families))
    return generate_latest(registry)


class _FamilyCollector(Collector):
    """Collector of summed families for the library."""

    def __init__(self, families: Sequence[FamilySamples]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """Yields one family per name."""
        between = next((family for family in self._families if family.name == BETWEEN), None)
        for family in self._families:
            samples = family.samples
            if family.name == OLD_BETWEEN and between is not None:
                samples = [
                    SampleValue(s.name.replace(BETWEEN, OLD_BETWEEN), s.labels, s.value) for s in between.samples
                ]
            made = Metric(family.name, family.text, family.kind)
            made.samples = [Sample(s.name, s.labels, s.value) for s in samples]
            yield made
