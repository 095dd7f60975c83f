"""The row of a vLLM flag: it has no effect here, means the same as a flag of ours, or stops the start.

Conversions of values of vLLM's flags to values of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from trencadis.core.engine_config import (
    ATTENTION,
    ATTENTION_LIBRARIES,
    OLDER_ATTENTION,
    OWN_ATTENTION,
    OWN_ATTENTION_NAMES,
)
from trencadis.core.errors import StartupError
from trencadis.core.flag_declaration import FlagValue
from trencadis.server.config import value_parsers

Values = Mapping[str, FlagValue]
"""Values of flags by name."""

Meaning = Callable[[FlagValue, Values], Values]
"""Conversion of a value, given the values of our other flags, to values of our flags."""

FRAMES = (("video", "num_frames"), ("video", "fps"))
USUAL = (("image", "image_mode", "RGB"), ("video", "video_backend", "opencv"))
"""Media options of vLLM whose value describes what this server does anyway."""


def set_when_on(name: str, value: FlagValue) -> Meaning:
    """Returns a conversion that sets our flag to ``value`` if the switch is on."""
    return lambda given, now: {name: value} if given else {}


def set_opposite(name: str) -> Meaning:
    """Returns a conversion that sets our switch to the opposite of vLLM's."""
    return lambda given, now: {name: not given}


def copy_unless_given(name: str) -> Meaning:
    """Returns a conversion to our flag with the same values; if that is given too, it wins."""
    return lambda given, now: {} if name in now else {name: given}


def take_smaller(name: str) -> Meaning:
    """Returns a conversion to our flag with the same meaning as a bound: the smaller value wins."""

    def to(given: FlagValue, now: Values) -> Values:
        other = now.get(name)
        return {name: given if other is None else min(given, other)}

    return to


def convert_async_scheduling(given: FlagValue, now: Values) -> Values:
    """Converts ``--async-scheduling``: one step in flight beyond the one that is scheduled."""
    return {"async_depth": int(bool(given))}


def forbid_media(given: FlagValue, now: Values) -> Values:
    """Sets the limits of images and videos per request to 0."""
    return {"limit_mm_per_prompt": {"image": 0, "video": 0}} if given else {}


def disable_graphs_at(*least: FlagValue) -> Meaning:
    """Returns a conversion of values that disable graphs; other values, which tune graph capture, have no effect."""
    return lambda given, now: {"enforce_eager": True} if str(given).upper() in map(str, least) else {}


def convert_attention_backend(given: FlagValue, now: Values) -> Values:
    """Converts ``--attention-config.backend``.

    Raises:
        StartupError: the value names no attention backend.
    """
    word = str(given).upper().removesuffix(OLDER_ATTENTION)
    if word in ATTENTION:
        return {"attention_backend": ""}
    if word in (OWN_ATTENTION, *OWN_ATTENTION_NAMES):
        return {"attention_backend": OWN_ATTENTION}
    if word not in ATTENTION_LIBRARIES:
        known = " and ".join(ATTENTION_LIBRARIES)
        raise StartupError(f"--attention-config.backend: {str(given)[:60]!r} is no attention; libraries are {known}")
    return {"attention_backend": word}


def convert_video_frames(given: FlagValue, now: Values) -> Values:
    """Converts ``{"video": {"num_frames": 32, "fps": 2}}`` to options of videos.

    Raises:
        StartupError: there is another key.
    """
    if not isinstance(given, Mapping):
        raise StartupError(f"--media-io-kwargs: {str(given)[:60]!r} is not a JSON object.")
    videos: dict[str, FlagValue] = {}
    for kind, options in given.items():
        if not isinstance(options or {}, Mapping):
            raise StartupError(f"--media-io-kwargs.{kind[:60]}: {str(options)[:60]} is not a JSON object.")
        for name, value in (options or {}).items():
            if (kind, name) in FRAMES and value != -1:
                videos[name] = value
            elif (kind, name, value) not in USUAL and (kind, name) not in FRAMES:
                raise StartupError(
                    f"--media-io-kwargs.{kind}.{name} is refused: it takes video.num_frames and video.fps; "
                    "--mm-processor-kwargs has more options of images and videos."
                )
    own = dict(now.get("mm_processor_kwargs", {}))
    return {"mm_processor_kwargs": own | {"videos_kwargs": videos | own.get("videos_kwargs", {})}} if videos else {}


def convert_log_level(given: FlagValue, now: Values) -> Values:
    """Converts to a level of ``--log-level``, which wins if it is given."""
    return {} if "log_level" in now else {"log_level": str(given).upper()}


FREE, MEANS, REFUSED = "no effect", "means", "refused"
"""Verdicts.

FREE: it tunes speed, requests what is always done, or belongs to a feature that does not exist here: no answer
and no limit depends on it. MEANS: flags of ours do it. REFUSED: it would change something.
"""

ABSENT = (
    "n-gram embeddings", "hyper-connections", "late interaction", "diffusion",
)  # fmt: skip
"""Parts of models that no family of the registry has; ``FlagRow.absent`` names one. tests/cli/test_reasons.py holds
them against the registry."""

NOTHING: tuple[FlagValue, ...] = (None, False, "", "none", "null", "false", {}, [])
"""Values that request nothing, for any flag."""


@dataclass(frozen=True, slots=True, eq=False)
class FlagRow:
    """One flag of vLLM.

    Args:
        verdict: FREE, MEANS or REFUSED.
        kind: bool, int, float, str, list (any number of words) or json, as that server reads it.
        why: FREE: why it does nothing here. MEANS: our flag. REFUSED: what is so instead, and which flag serves.
        neutral: values beside ``NOTHING`` that describe what happens anyway; they are taken in silence.
        to: MEANS: the values of our flags.
        keys: rows for keys of a JSON value; keys without one have the verdict of the whole.
        absent: the part of models (``ABSENT``) whose absence is the reason; "": the reason is another.
    """

    name: str
    verdict: str
    kind: str
    why: str
    neutral: tuple[FlagValue, ...] = ()
    to: Meaning | None = None
    keys: tuple[FlagRow, ...] = field(default=())
    absent: str = ""

    @property
    def written(self) -> str:
        """The flag as users write it."""
        return "--" + self.name.replace("_", "-")

    @property
    def takes(self) -> str:
        """Number of values that follow: "" (none), "one" or "many"."""
        return {"bool": "", "list": "many"}.get(self.kind, "one")

    def parse(self, text: str) -> FlagValue:
        """Parses ``text``; "none" and the like are None.

        Raises:
            StartupError: the text is not of this kind.
        """
        if text.strip().lower() in ("none", "null", ""):
            return None
        if self.kind == "json" and not text.lstrip().startswith("{"):
            return text
        return value_parsers.PARSERS[self.kind](text, self.written)

    def convert(self, value: FlagValue) -> FlagValue:
        """Converts a YAML or Python value; texts go through ``parse``."""
        return self.parse(value) if isinstance(value, str) else value

    def has_no_effect(self, value: FlagValue) -> bool:
        """Returns True if ``value`` requests nothing, or only what happens anyway."""
        if isinstance(value, list) and value:
            return all(self.has_no_effect(one) for one in value)
        if self.verdict == MEANS:
            usual = self.neutral
        elif self.kind == "bool":
            usual = self.neutral or (False,)
        else:
            usual = (*NOTHING, *self.neutral)
        low = value.strip().lower() if isinstance(value, str) else value
        return value is None or any(_is_same(low, one) for one in usual)


def _is_same(value: FlagValue, other: FlagValue) -> bool:
    """Returns True if the values are equal; True does not equal 1."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def make_free_row(name: str, kind: str, why: str, *neutral: FlagValue, keys: tuple[FlagRow, ...] = ()) -> FlagRow:
    """Returns a row of verdict FREE."""
    return FlagRow(name, FREE, kind, why, neutral, keys=keys)


def make_absent_row(name: str, kind: str, absent: str, *neutral: FlagValue) -> FlagRow:
    """A row of verdict FREE: the flag tunes a part that no model has that is served."""
    return FlagRow(name, FREE, kind, f"no model that is served has {absent}", neutral, absent=absent)


def make_means_row(name: str, kind: str, why: str, to: Meaning, *neutral: FlagValue) -> FlagRow:
    """Returns a row of verdict MEANS."""
    return FlagRow(name, MEANS, kind, why, neutral, to)


def make_refused_row(name: str, kind: str, why: str, *neutral: FlagValue, keys: tuple[FlagRow, ...] = ()) -> FlagRow:
    """Returns a row of verdict REFUSED."""
    return FlagRow(name, REFUSED, kind, why, neutral, keys=keys)


@dataclass(slots=True)
class ConvertedFlags:
    """Result of converting vLLM's flags: values of our flags, and notes about those without effect."""

    values: dict[str, FlagValue] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def convert_flags(given: Mapping[str, FlagValue], rows: Mapping[str, FlagRow], own: Values) -> ConvertedFlags:
    """Converts vLLM flags to values of this server's flags, with a note for each that has no effect.

    Raises:
        StartupError: one of them is refused; the message says why, and what to use instead.
    """
    found = ConvertedFlags()
    for name, value in given.items():
        for row, one in _split_keys(rows[name], value):
            _convert_flag(row, one, own, found)
    return found


def _split_keys(row: FlagRow, value: FlagValue) -> Iterator[tuple[FlagRow, FlagValue]]:
    """Yields the flag itself, or the keys of its value."""
    if not row.keys or not isinstance(value, dict):
        yield row, value
        return
    inner = {one.name: one for one in row.keys}
    for key, one in value.items():
        of_key = inner.get(key) or FlagRow(key, row.verdict, "json", row.why)
        yield FlagRow(f"{row.name}.{key}", of_key.verdict, of_key.kind, of_key.why, of_key.neutral, of_key.to), one


def _convert_flag(row: FlagRow, value: FlagValue, own: Values, found: ConvertedFlags) -> None:
    if row.has_no_effect(value):
        return
    if row.verdict == FREE:
        found.notes.append(f"{row.written} has no effect: {row.why}.")
    elif row.verdict == REFUSED:
        raise StartupError(f"{row.written}{_format_value(row, value)} is refused: {row.why}.")
    elif row.to is not None:
        found.values.update(row.to(value, {**own, **found.values}))


def _format_value(row: FlagRow, value: FlagValue) -> str:
    if row.kind == "bool" and value is True:
        return ""
    if isinstance(value, bool):
        return f" {value}".lower()
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return f" {text[:60]}"
