"""Names of vLLM's that are not built here: they can be imported, and an error says so when they are used."""

from __future__ import annotations

from typing import Any, NoReturn

from trencadis.core.errors import TrencadisError

CLASSES = {
    "LoRARequest": "LoRA adapters",
    "ModelRegistry": "models of other packages",
    "initialize_ray_cluster": "ranks over Ray",
}
"""Name -> what it needs."""
METHODS = {
    "sleep": "sleep mode",
    "wake_up": "sleep mode",
    "start_profile": "the profiler",
    "stop_profile": "the profiler",
    "collective_rpc": "calls into ranks",
    "apply_model": "calls into ranks",
    "add_lora": "LoRA adapters",
}
"""Methods of engines, likewise."""


class NotBuilt(TrencadisError, NotImplementedError):
    """Something of vLLM's interface that does not exist here."""

    status = 501
    type = "NotImplementedError"


def refuse(name: str, what: str) -> NoReturn:
    """Raises NotBuilt."""
    raise NotBuilt(f"{name} is not supported: {what}.")


class _NamedMeta(type):
    """Refuses instances and attributes of the classes that stand in for vLLM's."""

    what = ""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        refuse(cls.__name__, cls.what)

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        refuse(f"{cls.__name__}.{name}", cls.what)


def stand_in(name: str) -> type:
    """The class of that name of ``CLASSES``; its use raises NotBuilt."""
    return _NamedMeta(name, (), {"what": CLASSES[name], "__doc__": f"Not supported: {CLASSES[name]}."})


class NotBuiltMethods:
    """Gives an engine the methods of ``METHODS``; a call raises NotBuilt."""

    def __getattr__(self, name: str) -> Any:
        if name not in METHODS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def call(*args: Any, **kwargs: Any) -> NoReturn:
            refuse(f"{type(self).__name__}.{name}", METHODS[name])

        return call


def no_lora(lora_request: object) -> None:
    """Raises NotBuilt if a request names an adapter."""
    if lora_request:
        refuse("lora_request", "LoRA adapters")


def no_tokenization(tokenization_kwargs: object) -> None:
    """Raises NotBuilt if a request says how its text is tokenized."""
    if tokenization_kwargs:
        refuse("tokenization_kwargs", "other ways of reading text (SamplingParams.truncate_prompt_tokens cuts)")
