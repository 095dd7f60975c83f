"""Figures of several processes as one server's: what they send, and the sums of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Sample

from trencadis.server.metrics.hidden import PACE

CREATED = "_created"
"""The end of a sample's name that is a time; of several the first counts."""
BETWEEN, OLD_BETWEEN = "vllm:inter_token_latency_seconds", f"vllm:{PACE}"


class SampleFigure(msgspec.Struct, frozen=True, array_like=True):
    """One sample: its name, its labels, its value."""

    name: str
    labels: dict[str, str]
    value: float


class FamilyFigures(msgspec.Struct, array_like=True):
    """One family of a registry; all that a process of several shows can be added up."""

    name: str
    text: str
    kind: str
    samples: list[SampleFigure]


def packed(registry: Collector) -> bytes:
    """All families of ``registry``."""
    return msgspec.msgpack.encode([of_metric(family) for family in registry.collect()])


def of_metric(family: Metric) -> FamilyFigures:
    """A family of the library."""
    samples = [SampleFigure(s.name, dict(s.labels), float(s.value)) for s in family.samples]
    return FamilyFigures(family.name, family.documentation, family.type, samples)


unpacked = msgspec.msgpack.Decoder(list[FamilyFigures]).decode


def added(parts: Iterable[Sequence[FamilyFigures]]) -> list[FamilyFigures]:
    """One family a name with the sums of its samples, in the order in which they first come."""
    kinds: dict[str, FamilyFigures] = {}
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
        FamilyFigures(
            name, kinds[name].text, kinds[name].kind,
            [SampleFigure(sample, dict(labels), value) for (sample, labels), value in found.items()],
        )
        for name, found in sums.items()
    ]  # fmt: skip


def lasting(part: Sequence[FamilyFigures]) -> list[FamilyFigures]:
    """What of a process's figures stays when it has ended: what was counted, and not what was held."""
    return [family for family in part if family.kind != "gauge"]


def text(families: Sequence[FamilyFigures]) -> bytes:
    """Prometheus' text format. The old name of the times between tokens shows their sums too, where it is there."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Shown(families))
    return generate_latest(registry)


class _Shown(Collector):
    """Families as the library takes them."""

    def __init__(self, families: Sequence[FamilyFigures]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """One family a name."""
        between = next((family for family in self._families if family.name == BETWEEN), None)
        for family in self._families:
            samples = family.samples
            if family.name == OLD_BETWEEN and between is not None:
                samples = [
                    SampleFigure(s.name.replace(BETWEEN, OLD_BETWEEN), s.labels, s.value) for s in between.samples
                ]
            made = Metric(family.name, family.text, family.kind)
            made.samples = [Sample(s.name, s.labels, s.value) for s in samples]
            yield made
