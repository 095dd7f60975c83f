"""Expansion of image tokens and the spans that come with it."""

import numpy as np
import pytest

from trencadis.core.media_spans import MediaSpan
from trencadis.multimodal.placeholders import expand_placeholders
from trencadis.multimodal.processor_interface import PreparedImage

IMAGE = 99


def fake(tokens, digest):
    return PreparedImage(
        digest, np.zeros((tokens * 4, 1176), np.uint8), (1, 2, tokens * 2), tokens, 64, (28, 28 * tokens)
    )


def test_only_the_given_places_grow():
    tokens = [1, IMAGE, 2, IMAGE, IMAGE, 3]
    out, spans = expand_placeholders(tokens, IMAGE, [fake(3, "a"), fake(2, "b")], [1, 4])
    assert out == [1, IMAGE, IMAGE, IMAGE, 2, IMAGE, IMAGE, IMAGE, 3]
    assert spans == [MediaSpan(1, 3, "a", (1, 2, 6), 64), MediaSpan(6, 2, "b", (1, 2, 4), 64)]


def test_no_images_leave_typed_ids_alone():
    assert expand_placeholders([IMAGE, 5], IMAGE, [], []) == ([IMAGE, 5], [])


@pytest.mark.parametrize("places", [[0], [3, 1], [1, 1], [1, 9], [1], [-1, 1]])
def test_wrong_places_are_refused(places):
    with pytest.raises(ValueError, match="place"):
        expand_placeholders([1, IMAGE, 2, IMAGE], IMAGE, [fake(1, "a"), fake(1, "b")], places)
