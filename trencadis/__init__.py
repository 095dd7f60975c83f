"""Trencadis: one engine for vision-language models on Gaudi, NVIDIA GPUs and CPUs.

Importing it is cheap: the public names are resolved on first use (PEP 562).
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if sys.hexversion < 0x030B0000:
    sys.stderr.write(
        f"trencadis: Python {sys.version.split()[0]} is older than 3.11. Gaudi's ubuntu22.04 images carry 3.10: take "
        "the ubuntu24.04 image of the same release, which carries 3.12 (docs/hpu.md)\n"
    )
    raise SystemExit(2)

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineConfig",
    "FlatLogprobs",
    "FlexibleArgumentParser",
    "GuidedDecodingParams",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RepetitionDetectionParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StartupError",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "TrencadisError",
    "__version__",
    "load_chat_template",
]

_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "core").is_dir() and (_ROOT / "pyproject.toml").is_file():
    # In a checkout the packages are siblings of this folder; an installed wheel has them below it.
    __path__.append(str(_ROOT))

_NAMES = {
    "trencadis.async_llm": ("AsyncLLM", "AsyncLLMEngine"),
    "trencadis.core.engine_config": ("EngineConfig",),
    "trencadis.core.errors": ("StartupError", "TrencadisError"),
    "trencadis.core.output_constraints": (
        "GuidedDecodingParams", "RepetitionDetectionParams", "StructuredOutputsParams",
    ),
    "trencadis.core.request": ("RequestOutputKind", "SamplingParams"),
    "trencadis.engine_args": ("AsyncEngineArgs", "EngineArgs", "FlexibleArgumentParser", "load_chat_template"),
    "trencadis.llm": ("LLM",),
    "trencadis.llm_engine": ("LLMEngine",),
    "trencadis.offline_adapters": ("LoRARequest",),
    "trencadis.offline_beam_search": ("BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence"),
    "trencadis.outputs": (
        "ClassificationOutput", "ClassificationRequestOutput", "CompletionOutput", "EmbeddingOutput",
        "EmbeddingRequestOutput", "FlatLogprobs", "Logprob", "PoolingOutput", "PoolingRequestOutput",
        "RequestOutput", "ScoringOutput", "ScoringRequestOutput",
    ),
    "trencadis.prompt_inputs": ("PromptType", "TextPrompt", "TokensPrompt"),
    "trencadis.server.protocol.pooling_params": ("PoolingParams",),
}  # fmt: skip
"""Modules -> the public names that they have, which are imported at their first use."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

if TYPE_CHECKING:
    from trencadis.async_llm import AsyncLLM, AsyncLLMEngine
    from trencadis.core.engine_config import EngineConfig
    from trencadis.core.errors import StartupError, TrencadisError
    from trencadis.core.output_constraints import (
        GuidedDecodingParams,
        RepetitionDetectionParams,
        StructuredOutputsParams,
    )
    from trencadis.core.request import RequestOutputKind, SamplingParams
    from trencadis.engine_args import AsyncEngineArgs, EngineArgs, FlexibleArgumentParser, load_chat_template
    from trencadis.llm import LLM
    from trencadis.llm_engine import LLMEngine
    from trencadis.offline_adapters import LoRARequest
    from trencadis.offline_beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from trencadis.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        FlatLogprobs,
        Logprob,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from trencadis.prompt_inputs import PromptType, TextPrompt, TokensPrompt
    from trencadis.server.protocol.pooling_params import PoolingParams


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    if name[:1].isupper() or name == "initialize_ray_cluster":
        from trencadis.unsupported_vllm_names import UNSUPPORTED_CLASSES, make_unsupported_class

        if name in UNSUPPORTED_CLASSES:
            return make_unsupported_class(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
