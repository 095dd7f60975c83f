"""What every test has: the checkout on the path of child processes, interpreted kernels, small checkpoints."""

from __future__ import annotations

import argparse
import atexit
import functools
import gc
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Read when torch is loaded, here and in child processes: threads that wait for work sleep. Spinning, those of two
# engines on two CPUs take twenty times the CPU seconds of the work itself.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Measurements of this run alone: the processes that it starts share them, and earlier runs change nothing.
if "TRENCADIS_CACHE" not in os.environ:
    os.environ["TRENCADIS_CACHE"] = tempfile.mkdtemp(prefix="trencadis-tests-")
    atexit.register(shutil.rmtree, os.environ["TRENCADIS_CACHE"], ignore_errors=True)

from benchmarks.harness.vision_ops import usable_torchvision  # noqa: E402
from trencadis.core.process import log_setup  # noqa: E402
from trencadis.core.process.heap_trimmer import trim  # noqa: E402

pytest_plugins = ["tests.plugins.cpu_budget", "pytester"]


def _interpret_kernels() -> None:
    """Triton decides at its import whether kernels are interpreted; without a card there is nothing else to do.

    Nothing in the product imports Triton on a CPU, and what compiles ahead of time does it in a process of its own.
    """
    import torch

    os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")


def _hands_out_tests() -> bool:
    """Whether the tests run in processes that this one starts (pytest-xdist's ``-n``), so that it needs no torch."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-n", "--numprocesses", default="0")
    return "PYTEST_XDIST_WORKER" not in os.environ and parser.parse_known_args()[0].numprocesses != "0"


if not _hands_out_tests():
    _interpret_kernels()
    usable_torchvision()


TRIMMED_ABOVE = 1.2
"""GB of this process above which unused pages are returned after each file, which takes some 20 ms."""

_freeze, _unfreeze = gc.freeze, gc.unfreeze
FEW_OBJECTS = 100_000
"""A collection walks so many objects in about 5 ms."""
_frozen = 0


@functools.wraps(_freeze)
def _freeze_many() -> None:
    """Stands for ``gc.freeze``: freezes what exists if it is much, such as the modules that a test imported.

    Each start-up collects garbage ten to twenty times; with transformers' modules among the objects that it walks, a
    collection takes 150 ms instead of 2. Little is not frozen: a frozen engine that is held by cycles alone is found
    after the file's last test only.
    """
    global _frozen
    if len(gc.get_objects()) > FEW_OBJECTS:
        _freeze()
        _frozen += 1


def _leave_frozen() -> None:
    """Stands for ``gc.unfreeze``: the next start-up's collection would walk the objects of all imports again."""


pytest.MonkeyPatch().setattr(gc, "freeze", _freeze_many)
pytest.MonkeyPatch().setattr(gc, "unfreeze", _leave_frozen)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What imports and collection make stays: garbage is not looked for while they run, nor among it later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        _freeze()


SOURCE_TESTS = ("test_layers.py", "test_structure.py", "test_types.py", "test_words.py")
"""Files of this folder that read the trees of all source files, 0.5 GB."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the tests that hold the trees of all source files first, while this process holds little else."""
    items.sort(key=lambda item: item.path.name not in SOURCE_TESTS)


@pytest.fixture(scope="module", autouse=True)
def _collected(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ends what earlier files left in cycles, and leaves imports out of later collections: start-ups collect often.

    Pages between small objects that live on go back to the system: a process of many files would grow by them.
    """
    from tests.syntax import parse

    if request.path.name not in SOURCE_TESTS:
        parse.cache_clear()
    gc.collect()
    _freeze_many()
    before = _frozen
    yield
    if _frozen != before:  # what the file's fixtures made is frozen, too
        _unfreeze()
    gc.collect()
    if _frozen != before:
        _freeze()
    from tests.plugins.cpu_budget import resident_gb  # after pytest has registered it as a plug-in

    if resident_gb() > TRIMMED_ABOVE:
        trim()


@pytest.fixture(autouse=True)
def _same_logging() -> Iterator[None]:
    """Ends the logging that a command of ours set up in this process: its stream is the test's, and closed with it."""
    ours = logging.getLogger("trencadis")
    level = ours.level
    yield
    root = logging.getLogger()
    root.handlers[:] = [
        h for h in root.handlers if not isinstance(h.formatter, (log_setup.ShortNames, log_setup.JsonLines))
    ]
    ours.setLevel(level)


@pytest.fixture(autouse=True)
def _recipes_of_its_own() -> Iterator[None]:
    """An engine in this process names a folder of recipes for itself and its children; the next test has another."""
    name = "PT_HPU_RECIPE_CACHE_CONFIG"
    before = os.environ.get(name)
    yield
    if before is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = before


@pytest.fixture(scope="session")
def checkpoints() -> ModuleType:
    """The module that writes small random checkpoints."""
    from tests.fakes import checkpoints

    return checkpoints


@pytest.fixture(scope="session")
def checkpoint(checkpoints: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``checkpoint("qwen2_5_vl", tie_word_embeddings=True)``: a folder, written once per session and set of changes."""
    made: dict[str, Path] = {}

    def make(kind: str, **changes: object) -> Path:
        key = f"{kind} {sorted(changes.items())}"
        if key not in made:
            made[key] = getattr(checkpoints, kind)(tmp_path_factory.mktemp(kind), **changes)
        return made[key]

    return make


@pytest.fixture(scope="session")
def vl_checkpoint(checkpoint: Callable[..., Path]) -> Path:
    """A small Qwen2.5-VL with everything a server needs."""
    return checkpoint("qwen2_5_vl")


@pytest.fixture(scope="session")
def oracle() -> Callable[[Path], object]:
    """transformers' model of a checkpoint folder, in float32, loaded once."""
    from functools import cache

    from trencadis.core.checkpoint.config_reader import load_config

    @cache
    def load(path: Path) -> object:
        import torch
        import transformers

        config = load_config(path)
        vision = config.vision is not None
        if config.architecture == "Phi3VForCausalLM":
            from tests.vision.extra_families.phi3_v import Composed

            return Composed.read(path)
        auto = transformers.AutoModelForImageTextToText if vision else transformers.AutoModelForCausalLM
        return auto.from_pretrained(path, dtype=torch.float32).eval()

    return load
