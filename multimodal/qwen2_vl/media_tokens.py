"""Media tokens of Qwen2-VL and Qwen2.5-VL: keys of config.json, their defaults, and names in the tokenizers."""

from __future__ import annotations

from trencadis.core.checkpoint.json_fields import JsonFields

TOKEN_NAMES = {
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>", "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}  # fmt: skip
DEFAULT_IDS = {
    "image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
}  # fmt: skip


def read_media_tokens(root: JsonFields, vocab: int) -> dict[str, int]:
    """Returns ids by key; -1 if a key is missing and the default is beyond the vocabulary."""
    media = {key: _read_token(root, key, default, vocab) for key, default in DEFAULT_IDS.items()}
    if media["image_token_id"] == media["video_token_id"]:
        root.refuse("image_token_id", "it must differ from video_token_id")
    return media


def _read_token(root: JsonFields, key: str, default: int, vocab: int) -> int:
    if key in root.values:
        return root.integer(key, 0, vocab - 1)
    return default if default < vocab else -1
