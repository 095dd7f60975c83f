"""Processing options of a request's media, the server's options, and the content parts that carry them.

Options come from three places, most specific first: a content part (qwen-vl-utils' keys, on the part or inside its
``image_url``/``video_url`` object), its OpenAI ``detail``, the request's ``mm_processor_kwargs``. The server's settings
(``--mm-processor-kwargs``) apply where none of them is set. Torch-free and without numpy: ``trencadis plan``, the
engine and the API process all use these limits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

from trencadis.core.errors import BadRequest, StartupError
from trencadis.core.json_types import Json, JsonMapping, JsonObject

MAX_CLIP_FRAMES = 768
"""Default limit of the frames taken from a clip."""

MAX_CLIP_SECONDS = 3600.0
"""Default limit of a clip's duration in seconds."""

CLIP_TOKENS = 128_000
"""Most tokens of a video clip."""

LOW_DETAIL_PIXELS = 512 * 512
"""Most pixels of an image with detail ``low``, from OpenAI's documentation."""
DETAILS = ("low", "high", "auto")
MAX_NUMBER = 2**31 - 1
UUID_SIZE = 128


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """How to process one image or video. None keeps the server's setting.

    Args:
        min_pixels: least pixels after resizing (of each frame).
        max_pixels: most pixels after resizing (of each frame); at most the server's.
        resized_height: height in pixels to resize to, rounded as in ``smart_resize``; requires ``resized_width``.
        resized_width: width in pixels; requires ``resized_height``.
        detail: ``low`` caps max_pixels at 512 x 512, ``high`` and ``auto`` change nothing.
        num_crops: most tiles that an image is cut into, for models with this option.
        fps: frames to sample per second of video.
        nframes: frames to sample from a video; excludes ``fps``.
        min_frames: least frames that ``fps`` may give.
        max_frames: most frames that ``fps`` may give.
        total_pixels: most pixels of all frames of a video together.
        video_start: where to begin, in seconds.
        video_end: where to stop, in seconds.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    resized_height: int | None = None
    resized_width: int | None = None
    detail: str | None = None
    num_crops: int | None = None
    fps: float | None = None
    nframes: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    total_pixels: int | None = None
    video_start: float | None = None
    video_end: float | None = None

    def merge_over(self, base: MediaOptions) -> MediaOptions:
        """Returns these options; unset ones are taken from ``base``."""
        return self if base == NO_OPTIONS else self._merge_over(base)

    def _merge_over(self, base: MediaOptions) -> MediaOptions:
        given = self.given
        # fps and nframes exclude each other: one set here replaces the other in ``base``.
        for name, other in (("fps", "nframes"), ("nframes", "fps")):
            if getattr(self, name) is not None:
                given[other] = None
        return replace(base, **given)

    @property
    def given(self) -> JsonObject:
        """The options that are set, by name."""
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None}

    @property
    def key(self) -> str:
        """A string that is equal only for equal options.

        It is part of a video's digest; for images, the processor's fingerprint is used.
        """
        return ",".join(f"{name}={value!r}" for name, value in self.given.items())


NO_OPTIONS = MediaOptions()
_NAMES = {f.name: "float" in str(f.type) for f in fields(MediaOptions) if f.name != "detail"}
_PART_KEYS = frozenset({*_NAMES, "detail"})
VIDEO_NAMES = frozenset({"fps", "nframes", "min_frames", "max_frames", "total_pixels", "video_start", "video_end"})
_SIZE = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
_FIXED_VALUES: dict[str, tuple[Json, ...]] = {
    "do_resize": (True,), "do_rescale": (True,), "do_normalize": (True,), "do_convert_rgb": (True,),
    "resample": (3, "bicubic"), "return_tensors": ("pt", "np"), "use_fast": (True, False),
    "patch_size": (14,), "temporal_patch_size": (2,), "merge_size": (2,), "do_sample_frames": (True,),
    "default_to_square": (False,), "do_center_crop": (False,), "do_pad": (False,), "disable_grouping": (True, False),
    "return_metadata": (True, False), "device": ("cpu",), "data_format": ("channels_first", "first"),
    "cap_pixels_per_frame": (True,), "max_video_tokens": (CLIP_TOKENS,),
    "rescale_factor": (), "image_mean": (), "image_std": (), "input_data_format": (), "crop_size": (), "pad_size": (),
    "image_seq_length": (), "video_metadata": (),
}  # fmt: skip
"""Further keys of the reference processors, with the values that change nothing here; other values are refused."""
CHECKPOINT_KEYS = ("patch_size", "temporal_patch_size", "merge_size", "rescale_factor", "image_mean", "image_std")
"""Keys that the checkpoint fixes; the server checks that the values are equal."""
KNOWN_KEYS = sorted({*_NAMES, *_FIXED_VALUES, "size", "num_frames", "images_kwargs", "videos_kwargs"})
ACCEPTED_KEYS = [name for name in KNOWN_KEYS if _FIXED_VALUES.get(name, True) or name in CHECKPOINT_KEYS]
"""Keys for which at least one value is accepted."""


class MediaPart(NamedTuple):
    """One image or video of a prompt, before it is loaded. ``MediaPart(source, path)`` is enough.

    Args:
        source: a URL, the bytes of a file, a PIL image, an array or a list of frames; None: ``uuid`` identifies it.
        path: JSON path of the content part, for errors.
        options: the part's own options; ``MediaScope`` holds those of the whole request.
        kind: ``image`` or ``video``.
        uuid: the client's own name for the content.
        position: index among the prompt's media of this kind, which the frontends set.
    """

    source: object
    path: str
    options: MediaOptions = NO_OPTIONS
    kind: str = "image"
    uuid: str | None = None
    position: int = 0


def _no_charge(pixels: int) -> None:
    """Does nothing."""


def _ignore_fetch() -> None:
    """Does nothing: the default of ``MediaScope.on_fetch``."""


@dataclass(frozen=True, slots=True)
class MediaScope:
    """The sender of a request's media, with its options and limits.

    Args:
        salt: cache_salt; images are shared through a cache only under equal salts.
        tenant: digest of the API key; a uuid names media within (tenant, salt).
        options: options of the whole request; a part's own options win.
        charge: called with the number of resized pixels before they are decoded; raises QueueFull if the server is
            full.
        videos: options of the request's videos; None: ``options``.
        on_fetch: called before a download starts; until then the request uses only this process's time.
    """

    salt: str = ""
    tenant: str = ""
    options: MediaOptions = NO_OPTIONS
    charge: Callable[[int], None] = field(default=_no_charge, compare=False)
    videos: MediaOptions | None = None
    on_fetch: Callable[[], None] = field(default=_ignore_fetch, compare=False)

    @property
    def video_options(self) -> MediaOptions:
        """The options of the request's videos."""
        return self.options if self.videos is None else self.videos

    def with_kwargs(self, kwargs: JsonMapping) -> MediaScope:
        """Returns this scope with the options of the request's ``mm_processor_kwargs``.

        Raises:
            BadRequest: see ``request_options``.
        """
        images, videos = (request_options(kwargs, kind=kind) for kind in ("image", "video"))
        return replace(self, options=images, videos=videos)


NO_SCOPE = MediaScope()


def part_options(part: JsonMapping, path: str) -> MediaOptions:
    """Reads the options on a content part and inside its URL object; those on the part win. Ignores other keys.

    Raises:
        BadRequest: a value has the wrong type or range; ``param`` is its JSON path.
    """
    inner = next((v for k in ("image_url", "video_url", "image", "video") if isinstance(v := part.get(k), Mapping)), {})
    plain = _PART_KEYS.isdisjoint(part) and _PART_KEYS.isdisjoint(inner)
    return NO_OPTIONS if plain else _read_options(part, inner, path)


def _read_options(part: JsonMapping, inner: JsonMapping, path: str) -> MediaOptions:
    """Reads the options of a part that has some; ``inner`` is its URL object."""
    found: JsonObject = {}
    for place, where in ((inner, f"{path}.{_inner_name(part)}"), (part, path)):
        for name, real in _NAMES.items():
            if place.get(name) is not None:
                found[name] = _number(place[name], real, f"{where}.{name}")
        if place.get("detail") is not None:
            found["detail"] = _detail(place["detail"], f"{where}.detail")
    return _check_together(MediaOptions(**found), path) if found else NO_OPTIONS


def request_options(kwargs: JsonMapping | None, path: str = "mm_processor_kwargs", kind: str = "") -> MediaOptions:
    """Reads the request's ``mm_processor_kwargs``, with the keys of transformers' processors.

    ``images_kwargs`` and ``videos_kwargs`` hold the same keys for one kind of media; ``num_frames`` means ``nframes``;
    ``size`` holds shortest_edge and longest_edge, which mean min_pixels and max_pixels.

    Args:
        kind: ``image`` or ``video``: include only the options of that kind; "": include both.

    Raises:
        BadRequest: a key is unknown, or a value is invalid or not supported.
    """
    found: JsonObject = {}
    own: JsonObject = {}
    for name, value in (kwargs or {}).items():
        where = f"{path}.{name}"[:120]
        if value is None:
            continue
        if name in ("images_kwargs", "videos_kwargs"):
            inner = request_options(_object(value, where), where).given
            own |= inner if kind in ("", name.removesuffix("s_kwargs")) else {}
        elif name == "size":
            for edge, pixels in _object(value, where).items():
                if edge not in _SIZE:
                    raise BadRequest(f"size holds shortest_edge and longest_edge, not {edge[:40]!r}.", param=where)
                found[_SIZE[edge]] = _number(pixels, False, f"{where}.{edge}")
        elif name in _NAMES or name == "num_frames":
            found["nframes" if name == "num_frames" else name] = _number(value, _NAMES.get(name, False), where)
        elif name not in _FIXED_VALUES:
            raise BadRequest(f"mm_processor_kwargs has the unknown key {name[:40]!r}.", param=where)
        elif value not in _FIXED_VALUES[name]:
            raise BadRequest(f"This server cannot honour {name}={str(value)[:40]}.", param=where)
    found |= own
    return _check_together(MediaOptions(**found), path) if found else NO_OPTIONS


def media_scope(salt: str, kwargs: JsonMapping | None) -> MediaScope:
    """Returns the scope of an offline prompt with these ``mm_processor_kwargs``.

    Raises:
        BadRequest: see ``request_options``.
    """
    return MediaScope(salt).with_kwargs(kwargs) if kwargs else MediaScope(salt)


def part_uuid(part: JsonMapping, path: str) -> str | None:
    """Returns the ``uuid`` of a content part.

    Raises:
        BadRequest: it is not a string of 1 to 128 characters without NUL.
    """
    value = part.get("uuid")
    return None if value is None else _check_uuid(value, path)


def _check_uuid(value: Json, path: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= UUID_SIZE or "\0" in value:
        raise BadRequest(f"uuid must be a string of 1 to {UUID_SIZE} characters without NUL.", param=f"{path}.uuid")
    return value


def _inner_name(part: JsonMapping) -> str:
    return next((k for k in ("image_url", "video_url", "image", "video") if isinstance(part.get(k), Mapping)), "")


def _object(value: Json, where: str) -> JsonMapping:
    if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
        raise BadRequest(f"{where[:100]} must be an object.", param=where)
    return value


def _number(value: Json, real: bool, where: str) -> int | float:
    name = where.rpartition(".")[2]
    least = 0 if real else 1
    # A NaN fails both comparisons.
    good = isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= MAX_NUMBER
    if not good or (not real and value != int(value)):
        kind = "a number" if real else "a whole number"
        raise BadRequest(f"{name} must be {kind} from {least} to {MAX_NUMBER}.", param=where)
    return float(value) if real else int(value)


def _detail(value: Json, where: str) -> str:
    if value not in DETAILS:
        raise BadRequest(f"detail must be one of {', '.join(DETAILS)}.", param=where)
    return str(value)


def _check_together(options: MediaOptions, path: str) -> MediaOptions:
    o = options
    if (o.resized_height is None) != (o.resized_width is None):
        raise BadRequest("resized_height and resized_width must be given together.", param=f"{path}.resized_height")
    if o.min_pixels is not None and o.max_pixels is not None and o.min_pixels > o.max_pixels:
        raise BadRequest(f"min_pixels={o.min_pixels} is above max_pixels={o.max_pixels}.", param=f"{path}.min_pixels")
    if o.fps is not None and o.nframes is not None:
        raise BadRequest("fps and nframes exclude each other.", param=f"{path}.fps")
    return o


FLAG = "--mm-processor-kwargs"
REQUEST_ONLY_KEYS = ("resized_height", "resized_width", "video_start", "video_end")
"""Options that are valid only for single requests."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The options in ``--mm-processor-kwargs``.

    Args:
        pixels: min_pixels and max_pixels, if given.
        videos: defaults for the videos of every request.
        checkpoint: keys whose values the checkpoint fixes; the server checks that they are equal.
        tiles: num_crops, if given.
    """

    pixels: dict[str, int] = field(default_factory=dict)
    videos: MediaOptions = NO_OPTIONS
    checkpoint: JsonObject = field(default_factory=dict)
    tiles: int | None = None


def server_options(kwargs: JsonMapping) -> ServerOptions:
    """Reads ``--mm-processor-kwargs``, which accepts the keys of transformers' image and video processors.

    Raises:
        StartupError: a key is unknown (the message lists the accepted ones), or a value is not supported.
    """
    outer = {k: v for k, v in kwargs.items() if k not in ("images_kwargs", "videos_kwargs")}
    groups = [("", outer)]
    groups += [
        (f".{name}", kwargs[name]) for name in ("images_kwargs", "videos_kwargs") if kwargs.get(name) is not None
    ]
    fixed: JsonObject = {}
    found: dict[str, MediaOptions] = {}
    for key, some in groups:
        if not isinstance(some, Mapping):
            raise StartupError(f"{FLAG}{key} must be an object.")
        fixed |= {k: v for k, v in some.items() if k in CHECKPOINT_KEYS and v is not None}
        found[key] = _read_server_options({k: v for k, v in some.items() if k not in CHECKPOINT_KEYS}, f"{FLAG}{key}")
    both, for_images = found[""], found.get(".images_kwargs", NO_OPTIONS).merge_over(found[""])
    pixels = {name: value for name, value in for_images.given.items() if name in ("min_pixels", "max_pixels")}
    clips = MediaOptions(**{name: value for name, value in both.given.items() if name in VIDEO_NAMES})
    return ServerOptions(pixels, found.get(".videos_kwargs", NO_OPTIONS).merge_over(clips), fixed, for_images.num_crops)


def _read_server_options(kwargs: JsonMapping, where: str) -> MediaOptions:
    wrong = next((name for name in kwargs if name not in KNOWN_KEYS or name in REQUEST_ONLY_KEYS), None)
    if wrong is not None:
        what = "the key of a request" if wrong in REQUEST_ONLY_KEYS else "the unknown key"
        some = ", ".join(name for name in ACCEPTED_KEYS if name not in REQUEST_ONLY_KEYS)
        raise StartupError(f"{where} has {what} {wrong[:40]!r}; accepted are {some}")
    try:
        return request_options(kwargs, where)
    except BadRequest as error:
        raise StartupError(f"{where}: {error.message}") from None


def refuse_num_crops(tiles: int | None, param: str | None = None) -> None:
    """Raises an error if ``num_crops`` is given for a model that does not use it.

    Raises:
        BadRequest: it came from a request field, ``param``.
        StartupError: it came from the command line, which has no ``param``.
    """
    if tiles is None:
        return
    if param is None:
        raise StartupError(f"{FLAG}: num_crops does not apply, this model cuts no image by it")
    raise BadRequest("num_crops does not apply to this model.", param=f"{param}.num_crops")


def check_pixel_limits(least: int, most: int, factor: int) -> None:
    """Checks that some image fits the limits, in pixels; the sides of images are multiples of ``factor``.

    Raises:
        StartupError: no image fits.
    """
    if not 0 < least <= most or most < factor**2:
        raise StartupError(
            f"min_pixels={least} and max_pixels={most} contradict each other "
            f"(0 < min_pixels <= max_pixels, max_pixels >= {factor**2})"
        )
