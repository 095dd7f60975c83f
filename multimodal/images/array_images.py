"""Images given as numpy arrays or torch tensors by callers in this process; HTTP requests cannot contain them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trencadis.core.errors import BadRequest

CHANNELS = (3, 4)
ACCEPTED_SHAPES = "[height, width, 3 or 4] or [3 or 4, height, width], of uint8 or of floats between 0 and 1"


def is_array(source: object) -> bool:
    """Returns True if ``source`` is an array or tensor of any library."""
    return hasattr(source, "ndim") and hasattr(source, "dtype")


def array_to_image(source: Any) -> Image.Image:
    """Converts an array or tensor to an RGB or RGBA image; floats are rounded to 256 levels.

    Args:
        source: [height, width, channels] or [channels, height, width] with 3 or 4 channels; uint8, or floats between 0
            and 1. If both ends could be channels, an array's are last and a tensor's first.

    Raises:
        BadRequest: another shape or dtype, or floats outside [0, 1].
    """
    array = _to_numpy(source)
    ends = (0, -1) if hasattr(source, "detach") else (-1, 0)
    axis = next((end for end in ends if array.ndim == 3 and array.size and array.shape[end] in CHANNELS), None)
    if axis is None or not (array.dtype == np.uint8 or np.issubdtype(array.dtype, np.floating)):
        raise BadRequest(
            f"An image as an array is {ACCEPTED_SHAPES}; this is {_describe_array(array)}. Embeddings are not "
            f"supported."
        )
    if array.dtype != np.uint8:
        array = _to_uint8(array)
    return Image.fromarray(np.ascontiguousarray(np.moveaxis(array, axis, -1)))


def array_to_frames(source: Any) -> list[Image.Image]:
    """Converts [frames, ...] to one image per frame with ``array_to_image``.

    Raises:
        BadRequest: there are not four axes, or ``array_to_image`` refuses a frame.
    """
    if source.ndim != 4:
        raise BadRequest(
            f"An array of frames is [frames, ...], each {ACCEPTED_SHAPES}; this one is {_describe_array(source)}."
        )
    return [array_to_image(frame) for frame in source]


def _to_numpy(source: Any) -> NDArray[Any]:
    if hasattr(source, "detach"):  # a torch tensor; numpy has no bfloat16
        source = source.detach().cpu()
        return (source.float() if source.is_floating_point() else source).numpy()  # type: ignore[no-any-return]
    return np.asarray(source)


def _to_uint8(array: NDArray[Any]) -> NDArray[np.uint8]:
    if not bool(((array >= 0) & (array <= 1)).all()):  # NaN fails both comparisons
        raise BadRequest("An image of floats holds values between 0 and 1; convert levels of 0 to 255 to uint8.")
    levels: NDArray[np.uint8] = np.rint(array * 255).astype(np.uint8)
    return levels


def _describe_array(array: Any) -> str:
    return f"{str(array.dtype).removeprefix('torch.')} {list(array.shape)}"
