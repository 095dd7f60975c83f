"""How much background warm-up may take: the share under load, and the pause between two steps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trencadis.core.startup_progress_and_warmup_pacing import WarmupPacing

PIECES = st.lists(st.floats(0.001, 2), min_size=1, max_size=60)


@given(PIECES, st.floats(0.001, 0.3), st.floats(0, 0.5), st.floats(0, 1))
def test_steps_wait_for_one_piece_or_one_slice(pieces: list[float], step: float, stall: float, pause: float) -> None:
    """Simulated steps under load: time is kept here, so nothing depends on the machine."""
    pace, left, longest = WarmupPacing(stall, pause), list(pieces), 0.0
    for _ in range(3000):
        waited = 0.0
        more = bool(left) and pace.allows(True)
        while more:
            piece = left.pop(0)
            taken_for = pace.longest
            waited, longest = waited + piece, max(longest, piece)
            pace.add_work(piece, True)
            assert waited <= max(piece, pause + max(piece - taken_for, 0)) + 1e-9
            more = bool(left) and pace.allows_another(waited, True)
        pace.add_loaded_time(step + waited)
        assert pace.spent <= stall * pace.loaded + longest + 1e-9
    assert stall < 0.05 or not left or stall * pace.loaded < pace.spent + 2 * longest


def test_a_pause_holds_one_piece_unless_a_slice_is_given() -> None:
    for slice_, fits in ((0.0, False), (0.05, True)):
        pace = WarmupPacing(0.1, slice_)
        pace.add_work(0.02, False)
        assert pace.allows_another(0.02, False) is fits
        assert not pace.allows_another(0.04, False)


def test_idle_times_are_free_and_a_stall_of_nothing_leaves_the_rest() -> None:
    pace = WarmupPacing(0.0)
    pace.add_loaded_time(100)
    assert pace.allows(False) and not pace.allows(True)
