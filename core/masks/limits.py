"""How much work one grammar may make."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

ROW_ITEMS = 10_000
"""Ways in which a text may go on at one place; an object with 500 optional properties has 2,000."""
LEXER_STATES = 40_000
"""States of the lexer, 1 to 2 kB each, which a matcher makes as its text grows."""


def limits() -> LLParserLimits:
    """The library's limits, for every matcher: a grammar passes the trial under those under which it runs."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_items_in_row=ROW_ITEMS, max_lexer_states=LEXER_STATES, verbose_errors=False)
