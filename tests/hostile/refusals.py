"""Checks the error of a refused source: it is typed and short, names the part and reveals nothing."""

from __future__ import annotations

import asyncio

import pytest

from trencadis.core.errors import TrencadisError

PARAM = "messages[0].content[1]"


def refusal(loader, source, status, *secrets):
    """The message of the typed error that ``source`` gets; it is short and repeats none of ``secrets``."""
    with pytest.raises(TrencadisError) as caught:
        asyncio.run(loader.load(source, PARAM))
    return judged(caught.value, status, *secrets)


def judged(error, status, *secrets):
    assert (error.status, error.param) == (status, PARAM), error
    assert 0 < len(error.message) < 200
    assert not [s for s in secrets if s and s in error.message]
    assert error.__suppress_context__ or error.__context__ is None
    return error.message
