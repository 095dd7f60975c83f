"""Names of vLLM that are not supported: they can be imported, and raise an error when used."""

from __future__ import annotations

from typing import Any, NoReturn

from trencadis.core.errors import TrencadisError

UNSUPPORTED_CLASSES = {
    "ModelRegistry": "models of other packages",
    "initialize_ray_cluster": "ranks over Ray",
}
"""Name -> missing feature."""
UNSUPPORTED_METHODS = {
    "sleep": "sleep mode",
    "wake_up": "sleep mode",
    "start_profile": "the profiler",
    "stop_profile": "the profiler",
    "collective_rpc": "calls into ranks",
    "apply_model": "calls into ranks",
    "add_lora": "LoRA adapters outside of requests; lora_request of a prompt loads one",
}
"""Methods of engines -> missing feature."""


class UnsupportedFeature(TrencadisError, NotImplementedError):
    """Error for parts of vLLM's interface that are not implemented."""

    status = 501
    type = "NotImplementedError"


def raise_unsupported(name: str, what: str) -> NoReturn:
    """Raises UnsupportedFeature."""
    raise UnsupportedFeature(f"{name} is not supported: {what}.")


class _UnsupportedMeta(type):
    """Metaclass of the stand-ins for vLLM's classes.

    Creating an instance or reading an attribute raises UnsupportedFeature.
    """

    what = ""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise_unsupported(cls.__name__, cls.what)

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise_unsupported(f"{cls.__name__}.{name}", cls.what)


def make_unsupported_class(name: str) -> type:
    """Returns the class of that name of ``UNSUPPORTED_CLASSES``; its use raises UnsupportedFeature."""
    return _UnsupportedMeta(
        name, (), {"what": UNSUPPORTED_CLASSES[name], "__doc__": f"Not supported: {UNSUPPORTED_CLASSES[name]}."}
    )


class UnsupportedMethods:
    """Mixin that gives an engine the methods of ``UNSUPPORTED_METHODS``; a call raises UnsupportedFeature."""

    def __getattr__(self, name: str) -> Any:
        if name not in UNSUPPORTED_METHODS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def call(*args: Any, **kwargs: Any) -> NoReturn:
            raise_unsupported(f"{type(self).__name__}.{name}", UNSUPPORTED_METHODS[name])

        return call


def refuse_tokenization_kwargs(tokenization_kwargs: object) -> None:
    """Raises UnsupportedFeature if a request sets how its text is tokenized."""
    if tokenization_kwargs:
        raise_unsupported(
            "tokenization_kwargs", "other ways of reading text (SamplingParams.truncate_prompt_tokens cuts)"
        )
