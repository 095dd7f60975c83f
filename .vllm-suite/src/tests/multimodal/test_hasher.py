# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import contextlib
import hashlib
import struct
import uuid
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageOps

from vllm.config.multimodal import MMHasherAlgorithm
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.media.base import MediaWithBytes
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.parse import MultiModalDataParser

pytestmark = pytest.mark.cpu_test

ASSETS_DIR = Path(__file__).parent / "assets"
assert ASSETS_DIR.exists()


@pytest.mark.parametrize("algorithm", ["sha256", "sha512"])
def test_hash_algorithm(algorithm: MMHasherAlgorithm):
    hasher = getattr(hashlib, algorithm)()
    for bytes_ in MultiModalHasher.iter_item_to_bytes("value", "test"):
        hasher.update(bytes_)

    assert MultiModalHasher.hash_kwargs(algorithm, value="test") == hasher.hexdigest()


def test_hash_algorithm_required():
    with pytest.raises(TypeError, match="algorithm"):
        MultiModalHasher.hash_kwargs(value="test")  # type: ignore[call-arg]


def test_hash_single_item_different_shape():
    x1 = torch.zeros(())
    x2 = torch.zeros((1,))

    hasher = MultiModalHasher
    assert hasher.hash_kwargs("blake3", x=x1) != hasher.hash_kwargs("blake3", x=x2)


def test_hash_key_order_invariant():
    x = torch.zeros((5, 10))
    y = torch.ones((5, 10))

    hasher = MultiModalHasher
    assert hasher.hash_kwargs("blake3", x=x, y=y) == hasher.hash_kwargs(
        "blake3", y=y, x=x
    )


# NOTE: Images that are the same visually are allowed to have the same hash
@pytest.mark.parametrize("mode_pair", [("1", "L"), ("RGBA", "CMYK")])
def test_hash_collision_image_mode(mode_pair):
    mode1, mode2 = mode_pair
    image1 = Image.new(mode1, size=(10, 10), color=1)
    image2 = Image.new(mode2, size=(10, 10), color=1)

    hasher = MultiModalHasher
    assert hasher.hash_kwargs("blake3", image=image1) != hasher.hash_kwargs(
        "blake3", image=image2
    )


def test_hash_collision_image_palette():
    # These images differ only in Image.palette._palette
    image1 = Image.open(ASSETS_DIR / "image1.png")
    image2 = Image.open(ASSETS_DIR / "image2.png")

    hasher = MultiModalHasher
    assert hasher.hash_kwargs("blake3", image=image1) != hasher.hash_kwargs(
        "blake3", image=image2
    )


def test_hash_collision_image_transpose():
    image1 = Image.new("1", size=(10, 20))
    ImageDraw.Draw(image1).line([(0, 0), (10, 0)])

    image2 = Image.new("1", size=(20, 10))
    ImageDraw.Draw(image2).line([(0, 0), (0, 10)])

    hasher = MultiModalHasher
    assert hasher.hash_kwargs("blake3", image=image1) != hasher.hash_kwargs(
        "blake3", image=image2
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hash_collision_tensor_shape(dtype):
    # The hash should be different though the data is the same when flattened
    arr1 = torch.zeros((5, 10, 20, 3), dtype=dtype)
    arr2 = torch.zeros((10, 20, 5, 3), dtype=dtype)

    hasher = MultiModalHasher
    assert hasher.hash_kwargs("blake3", data=arr1) != hasher.hash_kwargs(
        "blake3", data=arr2
    )


def test_hash_collision_array_shape():
    # The hash should be different though the data is the same when flattened
    arr1 = np.zeros((5, 10, 20, 3))
    arr2 = np.zeros((10, 20, 5, 3))

    hasher = MultiModalHasher
    assert hasher.hash_kwargs("blake3", data=arr1) != hasher.hash_kwargs(
        "blake3", data=arr2
    )


def test_hash_collision_video_num_frames():
    source = b"x" * 100

    def item_for_hash(num_frames: int):
        frames: np.ndarray = np.zeros((num_frames, 8, 8, 3), dtype=np.uint8)
        metadata = {
            "total_num_frames": 16,
            "fps": 2.0,
            "duration": 8.0,
            "video_backend": "opencv",
            "frames_indices": list(range(num_frames)),
            "do_sample_frames": False,
        }
        video = MediaWithBytes((frames, metadata), source)
        items = MultiModalDataParser()._parse_video_data([video])
        assert items is not None
        return items.get_all_items_for_hash()[0]

    hasher = MultiModalHasher
    assert hasher.hash_kwargs("blake3", video=item_for_hash(2)) != hasher.hash_kwargs(
        "blake3", video=item_for_hash(4)
    )


def test_hash_video_tensor_frames():
    """Videos holding tensor frames (e.g. NVDEC-decoded) hash like
    array-framed ones, from the original bytes without a D2H copy."""
    source = b"x" * 100

    def item_for_hash(frames):
        metadata = {
            "total_num_frames": 2,
            "fps": 2.0,
            "duration": 1.0,
            "video_backend": "torchcodec",
            "frames_indices": [0, 1],
            "do_sample_frames": False,
        }
        video = MediaWithBytes((frames, metadata), source)
        items = MultiModalDataParser()._parse_video_data([video])
        assert items is not None
        return items.get_all_items_for_hash()[0]

    np_frames = np.zeros((2, 8, 8, 3), dtype=np.uint8)
    torch_frames = torch.zeros((2, 8, 8, 3), dtype=torch.uint8)

    hasher = MultiModalHasher
    assert hasher.hash_kwargs("blake3", video=item_for_hash(np_frames)) == (
        hasher.hash_kwargs("blake3", video=item_for_hash(torch_frames))
    )


def test_hash_non_contiguous_array():
    arr = np.arange(24).reshape(4, 6).T
    assert not arr.flags.c_contiguous

    arr_c = np.ascontiguousarray(arr)
    assert arr_c.flags.c_contiguous

    hasher = MultiModalHasher
    # Both should be hashable and produce the same hashes
    assert hasher.hash_kwargs("blake3", data=arr) == hasher.hash_kwargs(
        "blake3", data=arr_c
    )


def test_hash_image_exif_id():
    # Test that EXIF ImageId tag can be used to store UUID
    # and the hasher will use that instead of the image data.
    image1 = image2 = Image.new("1", size=(10, 20))
    id = uuid.uuid4()
    image1.getexif()[Image.ExifTags.Base.ImageID] = id
    image2 = Image.open(ASSETS_DIR / "image1.png")
    image2.getexif()[Image.ExifTags.Base.ImageID] = "Not a UUID"
    image2a = Image.open(ASSETS_DIR / "image1.png")

    hasher = MultiModalHasher
    # first image has UUID in ImageID, so it should hash to that UUID
    assert hasher.hash_kwargs("blake3", image=image1) == hasher.hash_kwargs(
        "blake3", image=id.bytes
    )
    # second image has non-UUID in ImageID, so it should hash to the image data
    assert hasher.hash_kwargs("blake3", image=image2) == hasher.hash_kwargs(
        "blake3", image=image2a
    )


def test_hash_image_malformed_exif():
    # Test that images with malformed EXIF headers (e.g. invalid TIFF header)
    # do not raise an unhandled exception during hashing and fall back to image data.
    buf = BytesIO()
    Image.new("RGB", (64, 48)).save(buf, "JPEG")
    jpg = buf.getvalue()
    rest = jpg[2:]
    rest = rest[2 + struct.unpack(">H", rest[2:4])[0] :]
    payload = b"Exif\x00\x00XXXX\x00\x00\x00\x08" + bytes(32)
    data = b"\xff\xd8\xff\xe1" + struct.pack(">H", len(payload) + 2) + payload + rest

    image = Image.open(BytesIO(data))
    with contextlib.suppress(Exception):
        image = ImageOps.exif_transpose(image)
    image.load()

    hasher = MultiModalHasher
    # Should hash without raising SyntaxError or any other exception
    hash_val = hasher.hash_kwargs("blake3", image=image)
    assert isinstance(hash_val, str) and len(hash_val) > 0

    # Also verify MediaWithBytes wrapping the image with malformed EXIF
    media_item = MediaWithBytes(image, data)
    hash_media = hasher.hash_kwargs("blake3", image=media_item)
    assert isinstance(hash_media, str) and len(hash_media) > 0


def _rgba_png_bytes() -> bytes:
    image = Image.new("RGBA", (8, 8), (255, 0, 0, 128))
    buf = BytesIO()
    image.save(buf, format="PNG")
    return buf.getvalue()


def _rgb_trns_png_bytes() -> bytes:
    image = Image.new("RGB", (8, 8), (255, 0, 0))
    buf = BytesIO()
    image.save(buf, format="PNG", transparency=(255, 0, 0))
    return buf.getvalue()


@pytest.mark.parametrize("png_bytes", [_rgba_png_bytes, _rgb_trns_png_bytes])
def test_hash_collision_media_io_config(png_bytes):
    data = png_bytes()
    white = ImageMediaIO(rgba_background_color=(255, 255, 255)).load_bytes(data)
    black = ImageMediaIO(rgba_background_color=(0, 0, 0)).load_bytes(data)
    white2 = ImageMediaIO(rgba_background_color=(255, 255, 255)).load_bytes(data)
    keep = ImageMediaIO(image_mode=None).load_bytes(data)

    hasher = MultiModalHasher
    assert hasher.hash_kwargs("blake3", image=white) != hasher.hash_kwargs(
        "blake3", image=black
    )
    assert hasher.hash_kwargs("blake3", image=white) != hasher.hash_kwargs(
        "blake3", image=keep
    )
    assert hasher.hash_kwargs("blake3", image=white) == hasher.hash_kwargs(
        "blake3", image=white2
    )


def test_hash_media_io_noop_config_preserves_hash():
    image = Image.new("RGB", (8, 8), (0, 128, 255))
    buf = BytesIO()
    image.save(buf, format="PNG")
    data = buf.getvalue()

    loaded = ImageMediaIO().load_bytes(data)
    assert loaded.io_config is None

    plain = MediaWithBytes(loaded.media, data)
    hasher = MultiModalHasher
    assert hasher.hash_kwargs("blake3", image=loaded) == hasher.hash_kwargs(
        "blake3", image=plain
    )


# The digest input is a concatenation of byte chunks, so it has to be uniquely
# decodable. Each case below is a pair of distinct processor kwargs that used to
# serialize to the same bytes, which made two requests share an mm hash -- and
# therefore share both the processor cache entry and the prefix-cache block key.
IMAGE = b"\x89PNG\r\n\x1a\n"


def _hash(**mm_processor_kwargs: object) -> str:
    return MultiModalHasher.hash_kwargs(
        "blake3", model_id="m", image=IMAGE, **mm_processor_kwargs
    )


def test_hash_collision_kwargs_key_value_boundary():
    # Both used to flatten to b"ab" + b"c".
    assert _hash(**{"ab": "c"}) != _hash(**{"a": "bc"})


def test_hash_collision_nested_vs_flattened_key():
    nested = _hash(size={"shortest_edge": 224})
    flattened = _hash(**{"size.shortest_edge": 224})
    assert nested != flattened


def test_hash_collision_sequence_vs_mapping():
    assert _hash(fps=[2, 4]) != _hash(fps={"0": 2, "1": 4})


@pytest.mark.parametrize("empty", ["", b"", []])
def test_hash_collision_none_vs_empty(empty):
    assert _hash(video_pruning_rate=None) != _hash(video_pruning_rate=empty)


def test_hash_collision_empty_container_vs_omitted():
    omitted = _hash()
    assert _hash(size={}) != omitted
    assert _hash(size=[]) != omitted
    assert _hash(size={}) != _hash(size=[])
