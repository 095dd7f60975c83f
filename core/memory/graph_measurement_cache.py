"""Cache of measured bytes and seconds of graphs from earlier starts, as JSON for ``--graph-memory auto``. Torch-free.

There is one file per model, device, dtype, ranks and block size. An unreadable file counts as absent.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from trencadis.core import envs
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.checkpoint.model_config import ModelConfig

VERSION = 2


@dataclass(frozen=True)
class MeasurementKey:
    """The model and device for which measurements are valid."""

    model: str
    device: str
    dtype: str
    ranks: int
    block_size: int

    @property
    def file(self) -> str:
        """Name of the file."""
        text = json.dumps(asdict(self), sort_keys=True)
        return f"{self.device.replace(' ', '-')}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


@dataclass(frozen=True)
class Measurements:
    """Measured values by bucket: a graph's bytes without its inputs, seconds of compiling, peak bytes of a launch, and
    median seconds of a launch on the device.

    ``code``: the version of the code whose launches took these seconds (``digest_code``).
    """

    graphs: Mapping[Bucket, int] = field(default_factory=dict)
    seconds: Mapping[Bucket, float] = field(default_factory=dict)
    activations: Mapping[Bucket, int] = field(default_factory=dict)
    launches: Mapping[Bucket, float] = field(default_factory=dict)
    code: str = ""


LIBRARIES = ("torch", "triton", "flash-attn", "flash-attn-3", "flashinfer-python")
"""Packages whose version decides how long a launch takes."""

PLUGINS = "torch.backends"
"""The group of entry points by which torch loads plug-ins of devices: their versions count, too."""

PARTS = ("core.device", "core.launches", "core.lora", "core.models", "core.quant", "multimodal")
"""Parts of this package, beside the device's own, whose code runs in launches."""


def digest_code(device_module: str, *settings: object) -> str:
    """Returns a digest of all that decides how long a launch of a bucket takes, apart from a ``MeasurementKey``.

    Seconds of launches that another release, other kernels or other libraries took say nothing about this one.

    Args:
        device_module: name of a module of the device's backend; its package's files count.
        settings: settings that choose kernels, in a fixed order.
    """
    root = __name__.partition(".")[0]
    own = device_module.partition(f"{root}.")[2]
    device = ".".join(own.split(".")[:2]) if own else ""
    text = json.dumps([_digest_files((*PARTS, *([device] if device else []))), *settings], default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def _digest_files(parts: tuple[str, ...]) -> str:
    """Returns a digest of the versions of the libraries and the contents of the files of ``parts``."""
    root, found = __name__.partition(".")[0], hashlib.sha256()
    found.update(str(getattr(sys.modules[root], "__version__", "")).encode())
    for library in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found.update(f"{library} {metadata.version(library)}".encode())
    for plugin in sorted(metadata.entry_points(group=PLUGINS)):
        found.update(f"{plugin.name} {plugin.dist.version if plugin.dist else ''}".encode())
    for part in parts:
        spec = find_spec(f"{root}.{part}")
        for place in (spec.submodule_search_locations or ()) if spec is not None else ():
            for file in sorted(f for f in Path(place).rglob("*") if f.suffix in (".py", ".so")):
                found.update(file.name.encode())
                found.update(file.read_bytes())
    return found.hexdigest()


def fingerprint(model: ModelConfig, draft: ModelConfig | None = None) -> str:
    """Returns a digest of the model's sizes: checkpoints of equal shape share measurements, pipeline stages do not.

    ``draft``: a model that drafts for it, if one does.
    """
    parts = {"text": asdict(model.text), "vision": asdict(model.vision) if model.vision else None}
    if model.part is not None:
        parts["part"] = asdict(model.part)
    if model.encoder_data_parallel:
        parts["own towers"] = {}
    if draft is not None:
        parts["draft"] = asdict(draft.text)
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def folder(environ: Mapping[str, str] | None = None) -> Path:
    """Returns the folder of the files: in TRENCADIS_CACHE, else in the user's cache folder."""
    environ = os.environ if environ is None else environ
    named = envs.get("TRENCADIS_CACHE", environ)
    if named:
        return Path(named) / "measured"
    base = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "trencadis" / "measured"


def name_of(bucket: Bucket) -> str:
    """Returns a bucket's key in the file: its printed form."""
    return str(bucket)


def bucket_of(name: str) -> Bucket:
    """Parses the printed form of a bucket.

    Raises:
        ValueError: ``name`` is not the form of a bucket.
    """
    shape, _, variant = name.partition("/")
    stage, bracket, dims = shape.rstrip("]").partition("[")
    if not bracket or stage.upper() not in Stage.__members__:
        raise ValueError(name)
    return Bucket(Stage[stage.upper()], tuple(int(d) for d in dims.split("x")), variant)


def load(key: MeasurementKey, directory: Path) -> Measurements | None:
    """Returns the measurements stored under ``key``; None if there is no readable file."""
    found = _read(directory / key.file)
    return found[1] if found is not None and found[0] == key else None


def load_nearest(key: MeasurementKey, directory: Path) -> Measurements | None:
    """Returns ``load``'s result, else the newest file of a device whose name begins with ``key.device``.

    So a plan may name only the kind of the device.
    """
    files = {f: f.stat().st_mtime for f in directory.glob(f"{key.device}*.json")} if directory.is_dir() else {}
    for file in (directory / key.file, *sorted(files, key=lambda f: -files[f])):
        found = _read(file)
        if found is not None and replace(found[0], device=key.device) == key:
            return found[1]
    return None


def _read(file: Path) -> tuple[MeasurementKey, Measurements] | None:
    """Returns a file's key and content; None if it cannot be read."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        if raw["version"] != VERSION:
            return None
        graphs, held = ({bucket_of(n): int(v) for n, v in raw[k].items()} for k in ("graphs", "activations"))
        times = ({bucket_of(n): float(s) for n, s in raw.get(k, {}).items()} for k in ("seconds", "launches"))
        seconds, launches = times
        content = Measurements(graphs, seconds, held, launches, str(raw.get("code", "")))
        return MeasurementKey(**raw["key"]), content
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def merge_measurements(known: Measurements | None, new: Measurements, complete: bool) -> Measurements:
    """Returns ``known`` updated with ``new``.

    Unless ``new`` is ``complete``, the larger value of a bucket is kept: workspaces may not have grown to their full
    size yet, and if graphs share memory, a graph costs less once its stage holds others. Seconds of launches of other
    code are dropped.
    """
    if known is None:
        return new

    def larger(old: Mapping[Bucket, int], found: Mapping[Bucket, int]) -> dict[Bucket, int]:
        return {**old, **{b: count if complete else max(count, old.get(b, 0)) for b, count in found.items()}}

    graphs, held = larger(known.graphs, new.graphs), larger(known.activations, new.activations)
    launches = {**(known.launches if known.code == new.code else {}), **new.launches}
    return Measurements(graphs, {**known.seconds, **new.seconds}, held, launches, new.code)


def add_measurements(key: MeasurementKey, new: Measurements, directory: Path, complete: bool) -> None:
    """Merges ``new`` into the stored measurements; does nothing if the folder cannot be written."""
    with suppress(OSError):
        store(key, merge_measurements(load(key, directory), new, complete), directory)


def store(key: MeasurementKey, measured: Measurements, directory: Path) -> Path:
    """Writes ``measured`` atomically; returns the file's path."""
    directory.mkdir(parents=True, exist_ok=True)
    content = {
        "version": VERSION,
        "key": asdict(key),
        "graphs": {name_of(b): n for b, n in sorted(measured.graphs.items())},
        "seconds": {name_of(b): round(s, 4) for b, s in sorted(measured.seconds.items())},
        "activations": {name_of(b): n for b, n in sorted(measured.activations.items())},
        "launches": {name_of(b): float(f"{s:.4g}") for b, s in sorted(measured.launches.items())},
        "code": measured.code,
    }
    path = directory / key.file
    temporary = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.tmp")
    temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
    temporary.replace(path)
    return path
