"""Start-up checks for models with cross-attention to images (``TextConfig.cross_attention_layers``), and settings
that save memory.
"""

from __future__ import annotations

from trencadis.core.buckets import Policy
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.config import EngineConfig
from trencadis.core.errors import StartupError


def check_cross_attention(config: EngineConfig, model: ModelConfig, policy: Policy) -> None:
    """Raises StartupError if device or options do not support the model's cross-attention; one line."""
    if not model.text.cross_attention_layers:
        return
    name = model.architecture
    if not policy.cross_attention:
        raise StartupError(f"{name}: layers attend to images, which this backend does not implement; --device cpu does")
    if config.pipeline_parallel_size > 1:
        raise StartupError(
            f"{name}: layers of every pipeline stage attend to images, which the first one encodes; "
            "--tensor-parallel-size divides the model instead"
        )
    if model.encoder_data_parallel:
        raise StartupError(
            f"{name}: each rank keeps its share of an image's keys, so that --mm-encoder-tp-mode data does not apply; "
            "weights does"
        )
    if config.batch_invariant:
        raise StartupError(f"--batch-invariant: {name} attends to all images of a launch at once; leave the flag out")
    if config.cpu_offload_gb:
        raise StartupError(
            f"--cpu-offload-gb: a launch of {name} without images leaves layers out, so that none can be copied ahead"
        )
