# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project

import copy
from unittest.mock import MagicMock, patch

import pytest
import torch
from transformers import PreTrainedConfig

from tests.models.utils import build_model_context
from vllm.config.ec_transfer import ECRole, ECTransferConfig
from vllm.config.kv_transfer import KVTransferConfig
from vllm.config.model import ModelConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.config.vllm import VllmConfig
from vllm.transformers_utils.model_arch_config_convertor import (
    ModelArchConfigConvertorBase,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum


@pytest.mark.parametrize(
    "model_id,limit_mm_per_prompt,expected",
    [
        ("Qwen/Qwen2-0.5B-Instruct", {}, False),
        ("Qwen/Qwen2.5-VL-3B-Instruct", {}, True),
        ("Qwen/Qwen2.5-VL-3B-Instruct", {"image": 0, "video": 0}, False),
        ("Qwen/Qwen2.5-VL-3B-Instruct", {"image": 0}, True),
    ],
)
@pytest.mark.core_model
def test_supports_multimodal_inputs(model_id, limit_mm_per_prompt, expected):
    """Test supports_multimodal_inputs returns correct boolean for various
    configs."""
    ctx = build_model_context(
        model_id,
        limit_mm_per_prompt=limit_mm_per_prompt,
    )
    assert ctx.model_config.supports_multimodal_inputs is expected


def test_mm_encoder_attn_backend_str_conversion():
    config = MultiModalConfig(mm_encoder_attn_backend="FLASH_ATTN")
    assert config.mm_encoder_attn_backend == AttentionBackendEnum.FLASH_ATTN


def test_mm_encoder_attn_backend_invalid():
    with pytest.raises(ValueError):
        MultiModalConfig(mm_encoder_attn_backend="not_a_backend")


def test_mm_hasher_algorithm_invalid():
    with pytest.raises(ValueError, match="mm_hasher_algorithm"):
        MultiModalConfig(mm_hasher_algorithm="md5")


def test_mm_encoder_attn_backend_hash_updates():
    base_hash = MultiModalConfig().compute_hash()
    overridden_hash = MultiModalConfig(
        mm_encoder_attn_backend=AttentionBackendEnum.FLASH_ATTN
    ).compute_hash()
    assert base_hash != overridden_hash


def test_language_model_only_does_not_affect_mm_hash():
    """language_model_only does not affect the ViT computation graph,
    so it should not change the multimodal config hash."""
    base_hash = MultiModalConfig().compute_hash()
    lm_only_hash = MultiModalConfig(language_model_only=True).compute_hash()
    assert base_hash == lm_only_hash


def test_language_model_only_affects_model_hash():
    """language_model_only affects the LM computation graph,
    so it should change the model config hash."""
    model = "llava-hf/llava-1.5-7b-hf"
    base_hash = ModelConfig(model).compute_hash()
    lm_only_hash = ModelConfig(model, language_model_only=True).compute_hash()
    assert base_hash != lm_only_hash


@pytest.mark.parametrize("backend_arg", ["video_backend", "backend"])
def test_use_gpu_video_backend_from_media_io_kwargs(backend_arg: str):
    config = MultiModalConfig(
        media_io_kwargs={"video": {backend_arg: "pynvvideocodec"}}
    )

    assert config.use_gpu_video_backend()


def test_mm_encoder_fp8_scale_path_requires_fp8():
    with pytest.raises(ValueError, match="mm_encoder_attn_dtype"):
        MultiModalConfig(mm_encoder_fp8_scale_path="/tmp/scales.json")


def test_mm_encoder_attn_dtype_hash_updates(tmp_path):
    scale_file = tmp_path / "scales.json"
    scale_file.write_text("{}")
    base_hash = MultiModalConfig().compute_hash()
    fp8_hash = MultiModalConfig(mm_encoder_attn_dtype="fp8").compute_hash()
    fp8_static_hash = MultiModalConfig(
        mm_encoder_attn_dtype="fp8",
        mm_encoder_fp8_scale_path=str(scale_file),
    ).compute_hash()
    assert base_hash != fp8_hash
    assert fp8_hash != fp8_static_hash


_MULTIMODAL_MODEL = "llava-hf/llava-1.5-7b-hf"
_TEXT_ONLY_MODEL = "TinyLlama/TinyLlama-1.1B-Chat-v1.0"


def _make_mm_prefix_model_config(
    model: str = _MULTIMODAL_MODEL,
    *,
    language_model_only: bool = False,
) -> ModelConfig:
    return ModelConfig(model, language_model_only=language_model_only)


def test_supports_multimodal_for_mm_prefix_before_multimodal_config():
    """A text-only model never builds a multimodal config, so the early
    return must neither clear mm_prefix nor write the sticky cache."""
    model_config = _make_mm_prefix_model_config(_TEXT_ONLY_MODEL)
    assert model_config.multimodal_config is None

    assert model_config._supports_multimodal_for_mm_prefix() is True
    assert not getattr(model_config, "_supports_multimodal_inputs_cache", None)


def test_language_model_only_disables_via_supports_multimodal_inputs():
    """language_model_only zeros all limits, so registry reports text-only."""
    model_config = _make_mm_prefix_model_config(language_model_only=True)

    assert model_config._supports_multimodal_for_mm_prefix() is False


def test_convertor_clears_mm_prefix_when_multimodal_disabled():
    hf_config = PreTrainedConfig(
        model_type="gemma3",
        architectures=["Gemma3ForConditionalGeneration"],
    )
    hf_config.is_mm_prefix_lm = True
    convertor = ModelArchConfigConvertorBase(hf_config, hf_config)

    assert convertor.is_mm_prefix_lm(supports_multimodal=True) is True
    assert convertor.is_mm_prefix_lm(supports_multimodal=False) is False

    enabled = convertor.convert(supports_multimodal=True)
    disabled = convertor.convert(supports_multimodal=False)
    assert enabled.is_mm_prefix_lm is True
    assert disabled.is_mm_prefix_lm is False


def test_sticky_cache_survives_text_subconfig_regeneration():
    """with_hf_config deepcopies the cached decision onto text submodules."""
    model_config = _make_mm_prefix_model_config()
    assert model_config._supports_multimodal_for_mm_prefix() is True

    # `with_hf_config` deep-copies this config and swaps `hf_config` for a
    # text-only submodule (e.g. Gemma4ForCausalLM).
    text_config = copy.deepcopy(model_config)
    text_config.hf_config = model_config.hf_text_config
    assert text_config._supports_multimodal_for_mm_prefix() is True

    # Without the copied cache the submodule architecture has no registered
    # multimodal processor, so re-querying the registry wrongly settles on
    # text-only and would clear mm_prefix.
    del text_config._supports_multimodal_inputs_cache
    assert text_config._supports_multimodal_for_mm_prefix() is False


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (None, None),
        ("cpu", "cpu"),
        ("cuda", "cuda"),
        # Callers compare against a bare device type, so an indexed device and a
        # torch.device must normalise to the same thing as "cuda".
        ("cuda:1", "cuda"),
        (torch.device("cuda", 1), "cuda"),
    ],
)
def test_mm_processor_device_type_normalizes(device: object, expected: str | None):
    kwargs = {} if device is None else {"device": device}
    config = MultiModalConfig(mm_processor_kwargs=kwargs)
    assert config.get_mm_processor_device_type() == expected


def test_merge_mm_processor_kwargs_scoped_precedence():
    configured = {
        "size": {
            "shortest_edge": 64,
            "longest_edge": 512,
        },
        "do_resize": True,
        "padding": False,
        "images_kwargs": {
            "size": {"longest_edge": 1024},
            "do_resize": False,
        },
        "videos_kwargs": {
            "size": {"longest_edge": 2048},
        },
    }
    inference = {
        "size": {"shortest_edge": 128},
        "do_resize": True,
        "images_kwargs": {
            "size": {"shortest_edge": 256},
        },
    }

    config = MultiModalConfig(
        mm_processor_kwargs=configured,
        mm_device_do_normalize=False,
    )

    assert config.merge_mm_processor_kwargs(inference) == {
        "size": {
            "shortest_edge": 128,
            "longest_edge": 512,
        },
        "do_resize": True,
        "padding": False,
        "images_kwargs": {
            "size": {
                "shortest_edge": 256,
                "longest_edge": 1024,
            },
            "do_resize": True,
        },
        "videos_kwargs": {
            "size": {
                "shortest_edge": 128,
                "longest_edge": 2048,
            },
        },
    }


def test_merge_mm_processor_kwargs_preserves_scoped_siblings_and_precedence():
    config = MultiModalConfig(
        mm_processor_kwargs={
            "size": {
                "shortest_edge": 100,
                "longest_edge": 1000,
            },
            "videos_kwargs": {
                "fps": 2,
                "size": {"longest_edge": 1200},
            },
        },
        mm_device_do_normalize=False,
    )

    assert config.merge_mm_processor_kwargs(
        {
            "size": {"longest_edge": 1800},
            "videos_kwargs": {
                "size": {"shortest_edge": 200},
            },
        }
    ) == {
        "size": {
            "shortest_edge": 100,
            "longest_edge": 1800,
        },
        "videos_kwargs": {
            "fps": 2,
            "size": {
                "shortest_edge": 200,
                "longest_edge": 1800,
            },
        },
    }


def test_merge_mm_processor_kwargs_mapping_vs_replacement():
    config = MultiModalConfig(
        mm_processor_kwargs={
            "size": {"shortest_edge": 64},
            "images_kwargs": {"size": {"longest_edge": 1024}},
        },
        mm_device_do_normalize=False,
    )

    assert config.merge_mm_processor_kwargs({"size": 7}) == {
        "size": 7,
        "images_kwargs": {"size": 7},
    }
    assert config.merge_mm_processor_kwargs({"size": {}}) == {
        "size": {"shortest_edge": 64},
        "images_kwargs": {
            "size": {
                "shortest_edge": 64,
                "longest_edge": 1024,
            },
        },
    }


_EMPTY_IMAGE_SCOPE_KWARGS: tuple[dict[str, object], ...] = (
    {},
    {"images_kwargs": None},
    {"images_kwargs": {}},
)


@pytest.mark.parametrize("configured", _EMPTY_IMAGE_SCOPE_KWARGS)
@pytest.mark.parametrize("inference", _EMPTY_IMAGE_SCOPE_KWARGS)
def test_merge_mm_processor_kwargs_empty_scopes_are_absent(
    configured: dict[str, object],
    inference: dict[str, object],
):
    config = MultiModalConfig(
        mm_processor_kwargs=configured,
        mm_device_do_normalize=False,
    )

    assert config.merge_mm_processor_kwargs(inference) == {}


@pytest.mark.parametrize("empty_inference", _EMPTY_IMAGE_SCOPE_KWARGS)
def test_merge_mm_processor_kwargs_empty_inference_scope_preserves_config_merge(
    empty_inference: dict[str, object],
):
    config = MultiModalConfig(
        mm_processor_kwargs={
            "images_kwargs": {
                "size": {
                    "shortest_edge": 64,
                    "longest_edge": 512,
                },
            },
        },
        mm_device_do_normalize=False,
    )
    inference = {
        "size": {"shortest_edge": 128},
        **empty_inference,
    }

    assert config.merge_mm_processor_kwargs(inference) == {
        "size": {"shortest_edge": 128},
        "images_kwargs": {
            "size": {
                "shortest_edge": 128,
                "longest_edge": 512,
            },
        },
    }


@pytest.mark.parametrize("empty_config", _EMPTY_IMAGE_SCOPE_KWARGS)
def test_merge_mm_processor_kwargs_empty_config_scope_allows_inference_merge(
    empty_config: dict[str, object],
):
    config = MultiModalConfig(
        mm_processor_kwargs={
            "size": {"longest_edge": 512},
            **empty_config,
        },
        mm_device_do_normalize=False,
    )

    assert config.merge_mm_processor_kwargs(
        {
            "size": {"shortest_edge": 128},
            "images_kwargs": {"size": {"longest_edge": 1024}},
        }
    ) == {
        "size": {
            "shortest_edge": 128,
            "longest_edge": 512,
        },
        "images_kwargs": {
            "size": {
                "shortest_edge": 128,
                "longest_edge": 1024,
            },
        },
    }


@pytest.mark.parametrize("non_mapping_scope", [False, 0, "", [], 123])
def test_merge_mm_processor_kwargs_falsey_non_mapping_scopes_are_not_empty(
    non_mapping_scope: object,
):
    config = MultiModalConfig(
        mm_processor_kwargs={"images_kwargs": non_mapping_scope},
        mm_device_do_normalize=False,
    )

    for empty_inference in _EMPTY_IMAGE_SCOPE_KWARGS:
        assert config.merge_mm_processor_kwargs(empty_inference) == {
            "images_kwargs": non_mapping_scope
        }


@pytest.mark.parametrize(
    ("configured_scope", "inference_scope", "expected_scope"),
    [
        (123, {"size": {"shortest_edge": 128}}, {"size": {"shortest_edge": 128}}),
        ({"size": {"shortest_edge": 64}}, 123, 123),
        (123, 456, 456),
    ],
)
def test_merge_mm_processor_kwargs_non_mapping_scope_precedence(
    configured_scope: object,
    inference_scope: object,
    expected_scope: object,
):
    config = MultiModalConfig(
        mm_processor_kwargs={"images_kwargs": configured_scope},
        mm_device_do_normalize=False,
    )

    merged = config.merge_mm_processor_kwargs({"images_kwargs": inference_scope})

    assert merged["images_kwargs"] == expected_scope


def test_merge_mm_processor_kwargs_none_leaf_is_explicit():
    config = MultiModalConfig(mm_device_do_normalize=False)

    assert config.merge_mm_processor_kwargs({"images_kwargs": {"do_resize": None}}) == {
        "images_kwargs": {"do_resize": None}
    }


def test_merge_mm_processor_kwargs_normalize_and_ownership():
    configured: dict[str, object] = {
        "images_kwargs": {
            "size": {"shortest_edge": 64},
        },
    }
    inference: dict[str, object] = {
        "do_normalize": True,
        "do_rescale": True,
        "images_kwargs": {
            "size": {"longest_edge": 1024},
        },
    }
    configured_before = copy.deepcopy(configured)
    inference_before = copy.deepcopy(inference)

    config = MultiModalConfig(
        mm_processor_kwargs=configured,
        mm_device_do_normalize=True,
    )
    merged = config.merge_mm_processor_kwargs(inference)

    assert merged["do_normalize"] is False
    assert merged["do_rescale"] is False
    assert configured == configured_before
    assert inference == inference_before
    assert config.mm_processor_kwargs == configured_before

    images_kwargs = merged["images_kwargs"]
    assert isinstance(images_kwargs, dict)
    size = images_kwargs["size"]
    assert isinstance(size, dict)
    size["shortest_edge"] = 999

    assert configured == configured_before
    assert inference == inference_before
    assert config.mm_processor_kwargs == configured_before


def _validate_mm_processor_device(*, device: str, ec_role: ECRole | None) -> None:
    ec_config = (
        None
        if ec_role is None
        # `is_ec_producer`/`is_ec_consumer` are False without a connector, so an
        # unset one would make every role look like "no EC role at all".
        else ECTransferConfig(ec_connector="ECExampleConnector", ec_role=ec_role)
    )
    MultiModalConfig(
        mm_processor_kwargs={"device": device}
    ).validate_mm_processor_device(ec_config)


@pytest.mark.parametrize("ec_role", [None, "ec_producer"])
def test_bad_mm_processor_device_rejected(ec_role: ECRole | None):
    """A bad device must fail during startup, not mid-request.

    Rejected for every role, and on a CPU-only platform too, so a typo can never
    silently fall through to running the processor somewhere unintended.
    """
    with (
        patch("vllm.platforms.current_platform.device_type", "cpu"),
        pytest.raises(ValueError, match='Invalid "device" in mm_processor_kwargs'),
    ):
        _validate_mm_processor_device(device="not-a-device", ec_role=ec_role)


@pytest.mark.parametrize("ec_role", [None, "ec_consumer", "ec_both"])
def test_accelerator_mm_processor_rejected_outside_encoder_instance(
    ec_role: ECRole | None,
):
    """Only an encode-only EPD instance has the device to itself.

    Every other role runs the language model in the same process, so frontend
    accelerator work would contend with the forward pass and allocate outside
    the memory profiled for the KV cache.
    """
    with (
        patch("vllm.platforms.current_platform.device_type", "cuda"),
        pytest.raises(ValueError, match="also runs the language model"),
    ):
        _validate_mm_processor_device(device="cuda", ec_role=ec_role)


def test_accelerator_mm_processor_allowed_on_encoder_instance():
    with patch("vllm.platforms.current_platform.device_type", "cuda"):
        _validate_mm_processor_device(device="cuda", ec_role="ec_producer")


def test_cpu_mm_processor_needs_no_ec_role():
    """The gate only applies to the accelerator, so CPU stays unrestricted."""
    with patch("vllm.platforms.current_platform.device_type", "cuda"):
        _validate_mm_processor_device(device="cpu", ec_role=None)


@pytest.mark.parametrize(
    ("flag", "kwargs", "expected"),
    [
        # "auto" is only settled once the EC role is known, so it must leave no
        # device behind for `VllmConfig` to mistake for an explicit request.
        ("auto", None, None),
        (None, None, None),
        ("cpu", None, "cpu"),
        ("cuda", None, "cuda"),
        # Any explicit value other than "cpu" means "whatever this platform
        # calls its accelerator".
        ("gpu", None, "cuda"),
        # An explicit device in the kwargs wins over the convenience flag.
        ("cpu", {"device": "cuda"}, "cuda"),
        ("cuda", {"device": "cpu"}, "cpu"),
    ],
)
def test_fold_mm_processor_device(
    flag: str | None, kwargs: dict | None, expected: str | None
):
    with patch("vllm.platforms.current_platform.device_type", "cuda"):
        folded = MultiModalConfig.fold_mm_processor_device(kwargs, flag)

    config = MultiModalConfig(mm_processor_kwargs=folded or {})
    assert config.get_mm_processor_device_type() == expected


def _resolve_mm_processor_device(
    *,
    ec_role: ECRole | None,
    mm_tensor_ipc: str = "torch_shm",
    device: str | None = None,
) -> str | None:
    """Run the `auto` resolution and report where the processor ended up."""
    mm_config = MultiModalConfig(
        mm_processor_kwargs={} if device is None else {"device": device},
        mm_tensor_ipc=mm_tensor_ipc,
    )
    model_config = MagicMock(spec=ModelConfig)
    model_config.multimodal_config = mm_config
    vllm_config = MagicMock(spec=VllmConfig)
    vllm_config.model_config = model_config
    vllm_config.ec_transfer_config = (
        None
        if ec_role is None
        else ECTransferConfig(ec_connector="ECExampleConnector", ec_role=ec_role)
    )

    with patch("vllm.platforms.current_platform.device_type", "cuda"):
        VllmConfig._resolve_mm_processor_device(vllm_config)
    return mm_config.get_mm_processor_device_type()


def test_auto_mm_processor_device_uses_accelerator_on_encoder_instance():
    """The one deployment that has the device to itself and can hand it over."""
    assert _resolve_mm_processor_device(ec_role="ec_producer") == "cuda"


@pytest.mark.parametrize("ec_role", [None, "ec_consumer", "ec_both"])
def test_auto_mm_processor_device_stays_on_cpu_off_encoder_instance(
    ec_role: ECRole | None,
):
    """Every other role runs the language model in the same process."""
    assert _resolve_mm_processor_device(ec_role=ec_role) is None


def test_auto_mm_processor_device_needs_a_device_capable_transport():
    """Other transports serialize host bytes, so the output is copied back."""
    assert (
        _resolve_mm_processor_device(ec_role="ec_producer", mm_tensor_ipc="direct_rpc")
        is None
    )


def test_auto_mm_processor_device_leaves_an_explicit_request_alone():
    assert _resolve_mm_processor_device(ec_role="ec_producer", device="cpu") == "cpu"


@pytest.mark.parametrize(
    ("ec_role", "expected"),
    [
        (None, False),
        ("ec_consumer", False),
        ("ec_both", False),
        ("ec_producer", True),
    ],
)
def test_ec_producer_only_enables_mm_encoder_only(
    ec_role: ECRole | None, expected: bool
):
    mm_config = MultiModalConfig()
    model_config = MagicMock(spec=ModelConfig)
    model_config.multimodal_config = mm_config
    vllm_config = MagicMock(spec=VllmConfig)
    vllm_config.model_config = model_config
    vllm_config.ec_transfer_config = (
        None
        if ec_role is None
        else ECTransferConfig(ec_connector="ECExampleConnector", ec_role=ec_role)
    )

    VllmConfig._resolve_mm_encoder_only(vllm_config)

    assert mm_config.mm_encoder_only is expected


@pytest.mark.parametrize(
    ("role", "language_model_only", "enable_mm_embeds", "expected"),
    [
        ("kv_consumer", False, False, True),
        # Text-only P/D decode: no MM infrastructure.
        ("kv_consumer", True, False, False),
        # EPD decode that skips the encoder but still takes embeddings.
        ("kv_consumer", True, True, True),
        ("ec_consumer", True, False, True),
    ],
)
def test_consumer_resolves_mm_embedding_inputs(
    role: str, language_model_only: bool, enable_mm_embeds: bool, expected: bool
):
    mm_config = MultiModalConfig(
        language_model_only=language_model_only, enable_mm_embeds=enable_mm_embeds
    )
    model_config = MagicMock(spec=ModelConfig)
    model_config.multimodal_config = mm_config
    vllm_config = MagicMock(spec=VllmConfig)
    vllm_config.model_config = model_config
    vllm_config.ec_transfer_config = (
        ECTransferConfig(ec_connector="ECExampleConnector", ec_role=role)
        if role == "ec_consumer"
        else None
    )
    vllm_config.kv_transfer_config = (
        KVTransferConfig(kv_connector="ExampleConnector", kv_role=role)
        if role == "kv_consumer"
        else None
    )

    VllmConfig._resolve_mm_embedding_inputs(vllm_config)

    assert mm_config.allow_missing_mm_embeddings is expected
    assert mm_config.enable_mm_embeds is expected


def test_vllm_config_runs_the_mm_processor_device_check():
    """Startup must reach the check; the rule itself is covered above.

    Guards the wiring, which no other test would notice going missing.
    """
    model_config = MagicMock(spec=ModelConfig)
    model_config.multimodal_config = MultiModalConfig(
        mm_processor_kwargs={"device": "cuda"}
    )
    vllm_config = MagicMock(spec=VllmConfig)
    vllm_config.model_config = model_config
    vllm_config.ec_transfer_config = None

    with (
        patch("vllm.platforms.current_platform.device_type", "cuda"),
        pytest.raises(ValueError, match="also runs the language model"),
    ):
        VllmConfig._validate_mm_processor_device(vllm_config)


def _resolve_mm_video_decode_device(
    *,
    ec_role: ECRole | None,
    mm_tensor_ipc: str = "torch_shm",
    device: str | None = None,
    video_kwargs: dict | None = None,
    torchcodec_available: bool = True,
) -> dict:
    """Run processor-device then video-decode-device resolution and report
    the resulting video media IO kwargs."""
    mm_config = MultiModalConfig(
        mm_processor_kwargs={} if device is None else {"device": device},
        mm_tensor_ipc=mm_tensor_ipc,
        media_io_kwargs={} if video_kwargs is None else {"video": dict(video_kwargs)},
    )
    model_config = MagicMock(spec=ModelConfig)
    model_config.multimodal_config = mm_config
    vllm_config = MagicMock(spec=VllmConfig)
    vllm_config.model_config = model_config
    vllm_config.ec_transfer_config = (
        None
        if ec_role is None
        else ECTransferConfig(ec_connector="ECExampleConnector", ec_role=ec_role)
    )

    with (
        patch("vllm.platforms.current_platform.device_type", "cuda"),
        patch(
            "vllm.utils.import_utils.check_torchcodec_available",
            side_effect=None if torchcodec_available else ImportError("torchcodec"),
        ),
    ):
        VllmConfig._resolve_mm_processor_device(vllm_config)
        VllmConfig._resolve_mm_video_decode_device(vllm_config)
    return mm_config.media_io_kwargs.get("video", {})


def test_auto_video_decode_uses_nvdec_on_encoder_instance():
    """The processor runs on the accelerator there, so decoded frames should
    stay on-device too."""
    assert _resolve_mm_video_decode_device(ec_role="ec_producer") == {
        "backend": "torchcodec",
        "device": "cuda",
    }


@pytest.mark.parametrize("ec_role", [None, "ec_consumer", "ec_both"])
def test_auto_video_decode_stays_on_cpu_off_encoder_instance(
    ec_role: ECRole | None,
):
    """The processor stays on CPU off encode-only instances, so video
    decoding should too."""
    assert _resolve_mm_video_decode_device(ec_role=ec_role) == {}


def test_auto_video_decode_follows_explicit_processor_device():
    assert _resolve_mm_video_decode_device(ec_role="ec_producer", device="cpu") == {}
    assert _resolve_mm_video_decode_device(ec_role="ec_producer", device="cuda") == {
        "backend": "torchcodec",
        "device": "cuda",
    }


def test_auto_video_decode_respects_explicit_media_io_kwargs():
    assert _resolve_mm_video_decode_device(
        ec_role="ec_producer", video_kwargs={"backend": "opencv"}
    ) == {"backend": "opencv"}
    assert _resolve_mm_video_decode_device(
        ec_role="ec_producer", video_kwargs={"device": "cpu"}
    ) == {"device": "cpu"}


def test_auto_video_decode_skipped_without_torchcodec():
    assert (
        _resolve_mm_video_decode_device(
            ec_role="ec_producer",
            torchcodec_available=False,
        )
        == {}
    )
