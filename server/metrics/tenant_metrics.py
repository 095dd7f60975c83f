"""Metrics of use and refusals of each tenant of the key file; labels have names, never keys."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trencadis.server.tenants.tenant_registry import TenantRegistry

USED = {
    "requests_per_minute": ("tenant_requests", "admitted requests of a tenant"),
    "tokens_per_minute": ("tenant_tokens", "prompt and output tokens of a tenant"),
    "pixels_per_minute": ("tenant_pixels", "pixels of a tenant's media"),
}


class TenantCollector(Collector):
    """Collector of the current values of all tenants."""

    def __init__(self, tenants: TenantRegistry) -> None:
        self._tenants = tenants

    def collect(self) -> Iterator[Metric]:
        """Yields one sample per tenant; refusals by limit."""
        accounts = list(self._tenants.accounts.items())
        for field, (name, text) in USED.items():
            used = CounterMetricFamily(f"vllm:{name}", text, labels=("tenant",))
            for tenant, account in accounts:
                used.add_metric((tenant,), account.used[field])
            yield used
        inside = GaugeMetricFamily("vllm:tenant_inside", "choices of a tenant inside the server", labels=("tenant",))
        refused = CounterMetricFamily("vllm:tenant_rejected", "requests beyond a limit", labels=("tenant", "limit"))
        for tenant, account in accounts:
            inside.add_metric((tenant,), account.own)
            for limit, count in account.rejected.items():
                refused.add_metric((tenant, limit), count)
        yield inside
        yield refused
