"""Trencadis: one engine for vision-language models on Gaudi, NVIDIA GPUs and CPUs.

The import costs nothing: the public names are resolved on first use (PEP 562).
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "SamplingParams", "__version__"]

_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "core").is_dir() and (_ROOT / "pyproject.toml").is_file():
    # In a checkout the packages are siblings of this folder; an installed wheel has them below it.
    __path__.append(str(_ROOT))

_LAZY = {
    "LLM": ("trencadis.llm", "LLM"),
    "EngineConfig": ("trencadis.core.config", "EngineConfig"),
    "SamplingParams": ("trencadis.core.request", "SamplingParams"),
}

if TYPE_CHECKING:
    from trencadis.core.config import EngineConfig
    from trencadis.core.request import SamplingParams
    from trencadis.llm import LLM


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        module, attribute = _LAZY[name]
        return getattr(import_module(module), attribute)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
