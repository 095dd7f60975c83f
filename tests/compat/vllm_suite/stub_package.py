"""A package ``vllm`` whose every module and name exists: what a server test needs works, the rest skips its test.

A test that calls vLLM's own code judges that code and no server.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import socket
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import pytest

from . import media

VERSION = "0.33.0"


class _Uses(type):
    """Type of stand-ins: an attribute is one more of them, a call skips the test."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return make_stand_in(f"{cls.__qualname__}.{name}")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        pytest.skip(f"calls vLLM's own code: {cls.__qualname__}", allow_module_level=True)

    def __iter__(cls) -> Any:
        return iter(())


def make_stand_in(name: str) -> Any:
    """Returns the stand-in of one of vLLM's classes, functions or values."""
    return _Uses(name, (), {})


class AnswerFields(dict[str, Any]):
    """A response as an object with its fields, as vLLM's models of responses are."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        value = self[name]
        if isinstance(value, list):
            return [AnswerFields(v) if isinstance(v, dict) else v for v in value]
        return AnswerFields(value) if isinstance(value, dict) else value

    def model_dump(self, exclude: Iterable[str] = (), **_: Any) -> dict[str, Any]:
        """Returns the fields, but those of ``exclude``, as a plain object."""
        left_out = set(exclude)
        return {name: value for name, value in self.items() if name not in left_out}

    @classmethod
    def model_validate(cls, value: Any) -> AnswerFields:
        """Returns the fields of a response."""
        return cls(value)


class Platform:
    """A CPU."""

    device_type = "cpu"

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: False


def find_open_port() -> int:
    """Returns a port that nothing listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def load_tokenizer(tokenizer_name: str, *args: Any, **kwargs: Any) -> Any:
    """Returns the tokenizer of the checkpoint that stands for a model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_name)


class VllmError(Exception):
    """Stands for all of vLLM's exceptions, which no server raises in the process of a test."""


REAL: dict[str, dict[str, Any]] = {
    "vllm": {"__version__": VERSION},
    "vllm.version": {"__version__": VERSION, "_prev_minor_version": lambda: "0.32"},
    "vllm.platforms": {"current_platform": Platform()},
    "vllm.tokenizers": {"get_tokenizer": load_tokenizer},
    "vllm.utils.network_utils": {"get_open_port": find_open_port},
    "vllm.multimodal.utils": {
        "encode_image_url": media.encode_image_url, "encode_video_url": media.encode_video_url,
        "fetch_image": media.fetch_image, "fetch_video": media.fetch_video,
    },
    "vllm.multimodal.media": {"fetch_image": media.fetch_image},
}  # fmt: skip
"""Module -> what works in it."""


STANDS_IN = (
    "vllm",
    "openai_harmony",
    "soundfile",
    "lm_eval",
    "rapidfuzz",
    "schemathesis",
    "librosa",
    "datasets",
    "mteb",
    "jiwer",
)
"""Packages that are not installed: vLLM's, and those of tests about audio, gpt-oss and long evaluations."""


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.__name__ == "vllm.exceptions":
            return VllmError
        if name.startswith("MAX_N") or name.endswith("_N_SEQUENCES"):
            return 16384
        if name.endswith("_URL"):
            return "https://assets.invalid"
        if name.endswith("Response"):
            return AnswerFields
        return make_stand_in(f"{self.__name__}.{name}")


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module below ``vllm``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See ``importlib``."""
        if fullname.partition(".")[0] not in STANDS_IN:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """See ``importlib``."""
        module = _Module(spec.name)
        module.__path__ = []
        vars(module).update(REAL.get(spec.name, {}))
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: the module has no code."""


def install() -> None:
    """Puts the package before any that is installed."""
    sys.meta_path.insert(0, StubFinder())
