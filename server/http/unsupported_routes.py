"""Paths of OpenAI's API that this server does not have, with the reason that it answers."""

from __future__ import annotations

from trencadis.server.config.vllm_flags.parallel_flags import LORA_REASON

WHY = {
    "/v1/audio": "it reads and writes no audio",
    "/v1/realtime": "it reads and writes no audio",
    "/v1/images": "it reads images and makes none",
    "/v1/videos": "it reads videos and makes none",
    "/v1/moderations": "it has no moderation model",
    "/v1/files": "it keeps no files; media travel in the request",
    "/v1/uploads": "it keeps no files; media travel in the request",
    "/v1/batches": "it keeps no batches; /v1/chat/completions/batch takes several conversations at a time",
    "/v1/fine_tuning": "it does not train",
    "/v1/assistants": "it keeps no state",
    "/v1/threads": "it keeps no state",
    "/v1/vector_stores": "it keeps no files",
    "/v1/load_lora_adapter": LORA_REASON,
    "/v1/unload_lora_adapter": LORA_REASON,
}


def get_reason(path: str) -> str:
    """Returns why this server lacks a path of OpenAI's; empty for any other path."""
    return next((why for start, why in WHY.items() if path == start or path.startswith(start + "/")), "")


def describe_missing_path(path: str) -> str:
    """Returns one line for a path that does not exist."""
    shown, why = path[:80], get_reason(path)
    if not why:
        return f"No such path: {shown}"
    return f"This server has no {shown}: {why}. It serves chat and completions (GET /v1/models says of what)."
