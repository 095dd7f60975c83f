"""Counters of drafts in a scrape, in the throughput line, and in the closing line of a request."""

from __future__ import annotations

from trencadis.core.engine_stats import EngineStats
from trencadis.core.request import RequestStats
from trencadis.server.metrics.prometheus import ThroughputLog
from trencadis.server.metrics.request_record_logs_and_metrics import format_drafts, make_speculation_families

SOME = EngineStats(
    running=1, spec_drafts=10, spec_draft_tokens=40, spec_accepted=25, spec_accepted_at=[10, 8, 5, 2],
    generation_tokens=35,
)  # fmt: skip


def test_counters_have_vllms_names_and_positions() -> None:
    found = {
        (sample.name, sample.labels.get("position")): sample.value
        for family in make_speculation_families(("m", "0"), SOME)
        for sample in family.samples
    }
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    expected: dict[tuple[str, str | None], float] = {
        ("vllm:spec_decode_num_drafts_total", None): 10,
        ("vllm:spec_decode_num_draft_tokens_total", None): 40,
        ("vllm:spec_decode_num_accepted_tokens_total", None): 25,
    }
    expected.update({(name, str(at)): count for at, count in enumerate([10, 8, 5, 2])})
    assert found == expected


def test_the_throughput_line_has_acceptance_since_the_last_one() -> None:
    line = ThroughputLog()
    first = line.format_line(SOME)
    assert first is not None and first.endswith("Mean acceptance length: 3.50, Draft acceptance rate: 62.5%")
    again = line.format_line(SOME)
    assert again is not None and "acceptance" not in again


def test_a_closing_line_counts_the_drafts_of_all_choices() -> None:
    assert format_drafts([RequestStats(drafted=8, accepted=5), RequestStats(drafted=4)]) == ["drafts 12, 5 accepted"]
    assert format_drafts([RequestStats()]) == []
