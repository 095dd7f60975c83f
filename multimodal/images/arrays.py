"""Images as arrays, numpy's or torch's: what callers in this process pass; no request over HTTP holds one."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trencadis.core.errors import BadRequest

CHANNELS = (3, 4)
TAKEN = "[height, width, 3 or 4] or [3 or 4, height, width], of uint8 or of floats between 0 and 1"


def is_array(source: object) -> bool:
    """Whether ``source`` is an array or a tensor, of whatever library."""
    return hasattr(source, "ndim") and hasattr(source, "dtype")


def array_to_image(source: Any) -> Image.Image:
    """RGB, or RGBA, of an array or tensor; floats become the nearest of 256 levels.

    Where both ends could be channels, those of an array come last and those of a tensor first.

    Raises:
        BadRequest: another shape or type, or floats that are no levels.
    """
    array = _on_host(source)
    ends = (0, -1) if hasattr(source, "detach") else (-1, 0)
    axis = next((end for end in ends if array.ndim == 3 and array.size and array.shape[end] in CHANNELS), None)
    if axis is None or not (array.dtype == np.uint8 or np.issubdtype(array.dtype, np.floating)):
        raise BadRequest(f"An image as an array is {TAKEN}; this is {_shown(array)}. Embeddings are not supported.")
    if array.dtype != np.uint8:
        array = _levels(array)
    return Image.fromarray(np.ascontiguousarray(np.moveaxis(array, axis, -1)))


def array_to_frames(source: Any) -> list[Image.Image]:
    """The images of an array or tensor with one axis more.

    Raises:
        BadRequest: as ``image``.
    """
    if source.ndim != 4:
        raise BadRequest(f"An array of frames is [frames, ...], each {TAKEN}; this one is {_shown(source)}.")
    return [array_to_image(frame) for frame in source]


def _on_host(source: Any) -> NDArray[Any]:
    if hasattr(source, "detach"):  # a tensor; numpy knows no bfloat16
        source = source.detach().cpu()
        return (source.float() if source.is_floating_point() else source).numpy()  # type: ignore[no-any-return]
    return np.asarray(source)


def _levels(array: NDArray[Any]) -> NDArray[np.uint8]:
    if not bool(((array >= 0) & (array <= 1)).all()):  # NaN is neither
        raise BadRequest("An image of floats holds values between 0 and 1; convert levels of 0 to 255 to uint8.")
    levels: NDArray[np.uint8] = np.rint(array * 255).astype(np.uint8)
    return levels


def _shown(array: Any) -> str:
    return f"{str(array.dtype).removeprefix('torch.')} {list(array.shape)}"
