"""Finds or downloads the model that the user names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from trencadis.core import envs
from trencadis.core.checkpoint.config_reader import GGUF, GGUF_HINT, load_config
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import FilesNotFound, StartupError
from trencadis.core.operator_files import expand_path

TEXT = ["*.json", "*.jinja", "*.txt", "tokenizer.model"]
"""Patterns of files of configuration, tokenizer and templates."""
PATTERNS = [*TEXT, "*.safetensors"]
"""Patterns including weights in safetensors; never code."""
BIN = [*TEXT, "pytorch_model.bin", "pytorch_model-*.bin"]
"""Patterns including weights written by torch.save, for repositories without safetensors."""
ADAPTER = ["adapter_config.json", "adapter_model.safetensors"]
"""Files of a LoRA adapter."""
COPIES = ["original/*", "consolidated*", "onnx/*", "*.gguf", "*/flax_model*"]
"""Patterns of copies of the same model in other formats."""

_NAME = r"\w(?:[\w.-]{0,94}\w)?"
_HUB_ID = re.compile(rf"{_NAME}(?:/{_NAME})?", re.ASCII)
"""Pattern of hub ids; the oldest, such as gpt2, have no owner."""


def find_model_folder(config: EngineConfig) -> Path:
    """Returns the folder of the model. For a hub id, downloads weights only after config.json shows a supported model.

    Raises:
        StartupError: see ``resolve`` and ``load_config``.
    """
    if not expand_path(config.model).is_dir():
        first = _resolve(config, config.model, ["config.json"])
        try:
            load_config(first, overrides=config.hf_overrides)
        except StartupError as error:
            raise StartupError(str(error).replace(str(first), config.model)) from None
    found = _resolve(config, config.model, BIN if config.load_format == "pt" else PATTERNS)
    if config.load_format == "auto" and not any(found.glob("*.safetensors")):
        found = _resolve(config, config.model, BIN)
    return found


def find_tokenizer_folder(config: EngineConfig) -> Path:
    """Returns the folder of the tokenizer that ``get_tokenizer_name`` names. ``--revision`` applies to the model only.

    Raises:
        StartupError: see ``resolve``.
    """
    return resolve(get_tokenizer_name(config), config.tokenizer_revision, config.hf_token, config.download_dir, TEXT)


def get_tokenizer_name(config: EngineConfig) -> str:
    """Returns ``--tokenizer``, or the model if its tokenizer has a revision of its own; "": it is in the model's
    folder.
    """
    return config.tokenizer or (config.model if config.tokenizer_revision else "")


def _resolve(config: EngineConfig, name: str, patterns: Sequence[str]) -> Path:
    return resolve(name, config.revision, config.hf_token, config.download_dir, patterns)


def resolve(
    model: str, revision: str = "", token: str = "", download_dir: str = "", patterns: Sequence[str] = PATTERNS
) -> Path:
    """Returns the folder of ``model``; downloads the files of a hub id that match ``patterns``.

    Raises:
        StartupError: there is no such folder, no such repository, or no network; one line.
    """
    path = expand_path(model)
    if path.is_dir():
        return path.resolve()
    if path.exists():
        if path.suffix == ".gguf":
            raise StartupError(f"{model} is {GGUF}; {GGUF_HINT}.")
        raise StartupError(f"{model} is a file; name the folder of a checkpoint.")
    if not _HUB_ID.fullmatch(model) or "--" in model or ".." in model:
        raise StartupError(f"There is no model folder {model}, and a hub id would be owner/name or a bare name.")
    return _download(model, revision or None, token or None, download_dir or None, patterns)


def find_adapter_folder(config: EngineConfig, name: str) -> Path:
    """Returns the folder of a LoRA adapter; downloads its files if ``name`` is a hub id.

    Raises:
        StartupError: see ``resolve``.
    """
    if not expand_path(name).exists() and not _HUB_ID.fullmatch(name):
        raise FilesNotFound(f"There is no folder {name[:200]} of an adapter, and a hub id would be owner/name.")
    return resolve(name, "", config.hf_token, config.download_dir, ADAPTER)


def _download(
    model: str, revision: str | None, token: str | None, download_dir: str | None, patterns: Sequence[str]
) -> Path:
    offline = envs.get_bool("HF_HUB_OFFLINE")
    import huggingface_hub
    from huggingface_hub import errors

    try:
        found = huggingface_hub.snapshot_download(
            model,
            revision=revision,
            token=token,
            cache_dir=download_dir,
            allow_patterns=list(patterns),
            ignore_patterns=COPIES,
            local_files_only=offline,
        )
    except errors.GatedRepoError:
        raise StartupError(f"{model} is gated: ask for access on the hub and give --hf-token.") from None
    except errors.RepositoryNotFoundError:
        raise FilesNotFound(f"There is no folder {model} here and no such repository on the hub.") from None
    except errors.RevisionNotFoundError:
        raise StartupError(f"{model} has no revision {revision}.") from None
    except errors.LocalEntryNotFoundError:
        where = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
        raise FilesNotFound(f"There is no folder {model} here, {where}, and its cache lacks this model.") from None
    except (OSError, ValueError, RuntimeError) as error:
        line = str(error).strip().splitlines() or [type(error).__name__]
        raise StartupError(f"{model} could not be downloaded: {line[0][:200]}") from None
    return Path(found)
