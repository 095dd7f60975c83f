# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from packaging.version import Version
from transformers import PreTrainedConfig
from transformers import __version__ as TRANSFORMERS_VERSION

from vllm.config.model import ModelDType, TokenizerMode


@dataclass(frozen=True)
class _HfExamplesInfo:
    default: str
    """The default model to use for testing this architecture."""

    extras: Mapping[str, str] = field(default_factory=dict)
    """Extra models to use for testing this architecture."""

    tokenizer: str | None = None
    """Set the tokenizer to load for this architecture."""

    tokenizer_mode: TokenizerMode | str = "auto"
    """Set the tokenizer type for this architecture."""

    speculative_model: str | None = None
    """
    The default model to use for testing this architecture, which is only used
    for speculative decoding.
    """

    speculative_method: str | None = None
    """
    The method to use for speculative decoding.
    """

    min_transformers_version: str | None = None
    """
    The minimum version of HF Transformers that is required to run this model.
    """

    max_transformers_version: str | None = None
    """
    The maximum version of HF Transformers that this model runs on.
    """

    transformers_version_reason: dict[Literal["vllm", "hf"], str] | None = None
    """
    The type and reason to skip test for the minimum/maximum version requirement.
    vllm: skip all vLLM tests if the version requirement is not met.
    hf: only skip tests that uses HF runner if the version requirement is not met.
    """

    require_embed_inputs: bool = False
    """
    If `True`, enables prompt and multi-modal embedding inputs while
    disabling tokenization.
    """

    dtype: ModelDType = "auto"
    """
    The data type for the model weights and activations.
    """

    enforce_eager: bool = False
    """
    Whether to enforce eager execution. If True, we will
    disable CUDA graph and always execute the model in eager mode.
    If False, we will use CUDA graph and eager execution in hybrid.
    """

    enable_prefix_caching: bool = True
    """
    Whether to enable prefix caching for the model. If True, we will test the model with
    prefix caching enabled. If False, we will test the model without prefix caching.
    """

    is_available_online: bool = True
    """
    Set this to `False` if the name of this architecture no longer exists on
    the HF repo. To maintain backwards compatibility, we have not removed them
    from the main model registry, so without this flag the registry tests will
    fail.
    """

    trust_remote_code: bool = False
    """The `trust_remote_code` level required to load the model."""

    hf_overrides: dict[str, Any] = field(default_factory=dict)
    """The `hf_overrides` required to load the model."""

    max_model_len: int | None = None
    """
    The maximum model length to use for this model. Some models default to a
    length that is too large to fit into memory in CI.
    """

    max_num_batched_tokens: int | None = None
    """
    The maximum number of tokens to be processed in a single batch.
    """

    revision: str | None = None
    """
    The specific revision (commit hash, tag, or branch) to use for the model.
    If not specified, the default revision will be used.
    """

    max_num_seqs: int | None = None
    """Maximum number of sequences to be processed in a single iteration."""

    use_original_num_layers: bool = False
    """
    If True, use the original number of layers from the model config
    instead of minimal layers for testing.
    """

    def check_transformers_version(
        self,
        *,
        on_fail: Literal["error", "skip", "return"],
        check_version_reason: Literal["vllm", "hf"] = "hf",
        check_min_version: bool = True,
        check_max_version: bool = True,
    ) -> str | None:
        """If the installed transformers version does not meet the requirements,
        perform the given action.
        """
        if (
            self.min_transformers_version is None
            and self.max_transformers_version is None
        ):
            return None

        current_version = TRANSFORMERS_VERSION
        cur_base_version = Version(current_version).base_version
        min_version = self.min_transformers_version
        max_version = self.max_transformers_version
        msg = f"`transformers=={current_version}` installed, but `transformers"
        # Only check the base version for the min/max version, otherwise preview
        # models cannot be run because `x.yy.0.dev0`<`x.yy.0`
        if min_version and Version(cur_base_version) < Version(min_version):
            is_version_valid = False
            should_check_version = check_min_version
            msg += f">={min_version}` is required to run this model."
        elif max_version and Version(cur_base_version) > Version(max_version):
            is_version_valid = False
            should_check_version = check_max_version
            msg += f"<={max_version}` is required to run this model."
        else:
            is_version_valid = True
            should_check_version = False

        # Reasons explain a known incompatibility with a violated version
        # bound. They should not skip models when the installed version is
        # already within the requested range.
        is_reason_applicable = (
            not is_version_valid
            and self.transformers_version_reason is not None
            and check_version_reason in self.transformers_version_reason
        )
        is_transformers_valid = is_version_valid or (
            not should_check_version and not is_reason_applicable
        )
        if is_transformers_valid:
            return None
        elif self.transformers_version_reason:
            for reason_type, reason in self.transformers_version_reason.items():
                msg += f" Reason({reason_type}): {reason}"

        if on_fail == "error":
            raise RuntimeError(msg)
        elif on_fail == "skip":
            pytest.skip(msg)

        return msg

    def check_available_online(
        self,
        *,
        on_fail: Literal["error", "skip"],
    ) -> None:
        """If the model is not available online, perform the given action."""
        if not self.is_available_online:
            msg = "Model is not available online"

            if on_fail == "error":
                raise RuntimeError(msg)
            else:
                pytest.skip(msg)


_TEXT_GENERATION_EXAMPLE_MODELS = {
    # [Decoder-only]
    "AfmoeForCausalLM": _HfExamplesInfo("arcee-ai/Trinity-Nano-Preview"),
    "AliceAIForCausalLM": _HfExamplesInfo(
        "yandex/AliceAI-Foundation-80B-A3B-Base",
        trust_remote_code=True,
    ),
    "ApertusForCausalLM": _HfExamplesInfo("swiss-ai/Apertus-8B-Instruct-2509"),
    "ArceeForCausalLM": _HfExamplesInfo("arcee-ai/AFM-4.5B-Base"),
    "AXK1ForCausalLM": _HfExamplesInfo("skt/A.X-K1", trust_remote_code=True),
    "BailingMoeForCausalLM": _HfExamplesInfo(
        "inclusionAI/Ling-lite-1.5", trust_remote_code=True
    ),
    "BailingMoeV2ForCausalLM": _HfExamplesInfo(
        "inclusionAI/Ling-mini-2.0", trust_remote_code=True
    ),
    "BailingMoeV2_5ForCausalLM": _HfExamplesInfo(
        "inclusionAI/Ring-2.5-1T", trust_remote_code=True
    ),
    "BailingMoeV3ForCausalLM": _HfExamplesInfo(
        "inclusionAI/Ling-3.0-flash", trust_remote_code=True
    ),
    "BeamForCausalLM": _HfExamplesInfo(
        "reflection/Beam-1.0-501B-A23B-NVFP4",
        is_available_online=False,
        # Include MoE in the reduced one-layer initialization test.
        hf_overrides={"mlp_layer_types": ["sparse"]},
    ),
    "BloomForCausalLM": _HfExamplesInfo(
        "bigscience/bloom-560m", {"1b": "bigscience/bloomz-1b1"}
    ),
    "ChatGLMModel": _HfExamplesInfo(
        "zai-org/chatglm3-6b", trust_remote_code=True, max_transformers_version="4.48"
    ),
    "ChatGLMForConditionalGeneration": _HfExamplesInfo(
        "thu-coai/ShieldLM-6B-chatglm3",
        trust_remote_code=True,
    ),
    "CohereForCausalLM": _HfExamplesInfo(
        "CohereLabs/c4ai-command-r-v01", trust_remote_code=True
    ),
    "Cohere2ForCausalLM": _HfExamplesInfo(
        "CohereLabs/c4ai-command-r7b-12-2024",
        trust_remote_code=True,
    ),
    "Cohere2MoeForCausalLM": _HfExamplesInfo("CohereLabs/North-Mini-Code-1.0"),
    "CwmForCausalLM": _HfExamplesInfo("facebook/cwm"),
    # FIXME: databricks/dbrx-instruct has been deleted
    "DbrxForCausalLM": _HfExamplesInfo(
        "databricks/dbrx-instruct", is_available_online=False
    ),
    "DeciLMForCausalLM": _HfExamplesInfo(
        "nvidia/Llama-3_3-Nemotron-Super-49B-v1",
        trust_remote_code=True,
    ),
    "DeepseekForCausalLM": _HfExamplesInfo(
        "deepseek-ai/deepseek-moe-16b-base",
        trust_remote_code=True,
    ),
    "DeepseekV2ForCausalLM": _HfExamplesInfo(
        "deepseek-ai/DeepSeek-V2-Lite-Chat",
        trust_remote_code=True,
    ),
    "DeepseekV3ForCausalLM": _HfExamplesInfo(
        "deepseek-ai/DeepSeek-V3",
        trust_remote_code=True,
    ),
    "DeepseekV32ForCausalLM": _HfExamplesInfo("deepseek-ai/DeepSeek-V3.2-Exp"),
    "DeepseekV4ForCausalLM": _HfExamplesInfo(
        "deepseek-ai/DeepSeek-V4-Flash", is_available_online=False
    ),
    "DomynEdgeForCausalLM": _HfExamplesInfo(
        "domyn/Domyn-Edge-Base",
        trust_remote_code=True,
        extras={"sft": "domyn/Domyn-Edge-SFT"},
    ),
    "DoryForCausalLM": _HfExamplesInfo(
        "nvidia/NVIDIA-Nemotron-Labs-Dory1.0-4B-BF16",
        use_original_num_layers=True,
        max_model_len=128,
        hf_overrides={
            "num_hidden_layers": 8,
            "n_input_layers": 2,
            "n_recurrent_layers": 4,
            "n_output_layers": 2,
            "n_recurrent_loops": 2,
            "layer_types": ["sliding_attention", "mlp"] * 3 + ["full_attention", "mlp"],
        },
    ),
    "Ernie4_5ForCausalLM": _HfExamplesInfo("baidu/ERNIE-4.5-0.3B-PT"),
    "Ernie4_5_MoeForCausalLM": _HfExamplesInfo("baidu/ERNIE-4.5-21B-A3B-PT"),
    "ExaoneForCausalLM": _HfExamplesInfo(
        "LGAI-EXAONE/EXAONE-3.0-7.8B-Instruct", trust_remote_code=True
    ),
    "Exaone4ForCausalLM": _HfExamplesInfo("LGAI-EXAONE/EXAONE-4.0-32B"),
    "ExaoneMoeForCausalLM": _HfExamplesInfo("LGAI-EXAONE/K-EXAONE-236B-A23B"),
    "ExaoneMoEForCausalLM": _HfExamplesInfo(
        "LGAI-EXAONE/K-EXAONE-236B-A23B",
        hf_overrides={"architectures": ["ExaoneMoEForCausalLM"]},
    ),
    "FalconForCausalLM": _HfExamplesInfo("tiiuae/falcon-7b"),
    "FalconH1ForCausalLM": _HfExamplesInfo("tiiuae/Falcon-H1-0.5B-Base"),
    "FlintForCausalLM": _HfExamplesInfo("RecursiveSI/flint", is_available_online=False),
    "FlexOlmoForCausalLM": _HfExamplesInfo("allenai/Flex-reddit-2x7B-1T"),
    "GemmaForCausalLM": _HfExamplesInfo("google/gemma-1.1-2b-it"),
    "Gemma2ForCausalLM": _HfExamplesInfo(
        "google/gemma-2-9b", extras={"tiny": "google/gemma-2-2b-it"}
    ),
    "Gemma3ForCausalLM": _HfExamplesInfo("google/gemma-3-1b-it"),
    "Gemma4ForCausalLM": _HfExamplesInfo(
        "google/gemma-4-E2B-it",
    ),
    "Gemma3nForCausalLM": _HfExamplesInfo("google/gemma-3n-E2B-it"),
    "GlmForCausalLM": _HfExamplesInfo("zai-org/glm-4-9b-chat-hf"),
    "Glm4ForCausalLM": _HfExamplesInfo("zai-org/GLM-4-9B-0414"),
    "Glm4MoeForCausalLM": _HfExamplesInfo("zai-org/GLM-4.5"),
    "Glm4MoeLiteForCausalLM": _HfExamplesInfo(
        "zai-org/GLM-4.7-Flash",
    ),
    "GlmMoeDsaForCausalLM": _HfExamplesInfo("zai-org/GLM-5", is_available_online=False),
    "Glm5NextForCausalLM": _HfExamplesInfo("zai-org/GLM-5.3-Flash"),
    "GPT2LMHeadModel": _HfExamplesInfo("openai-community/gpt2"),
    "GPTBigCodeForCausalLM": _HfExamplesInfo(
        "bigcode/starcoder",
        extras={
            "tiny": "bigcode/tiny_starcoder_py",
            "santacoder": "bigcode/gpt_bigcode-santacoder",
        },
    ),
    "GPTJForCausalLM": _HfExamplesInfo(
        "Milos/slovak-gpt-j-405M", {"6b": "EleutherAI/gpt-j-6b"}
    ),
    "GPTNeoXForCausalLM": _HfExamplesInfo(
        "EleutherAI/pythia-70m", {"1b": "EleutherAI/pythia-1.4b"}
    ),
    "GptOssForCausalLM": _HfExamplesInfo("lmsys/gpt-oss-20b-bf16"),
    "GraniteForCausalLM": _HfExamplesInfo("ibm/PowerLM-3b"),
    "GraniteMoeForCausalLM": _HfExamplesInfo("ibm/PowerMoE-3b"),
    "GraniteMoeHybridForCausalLM": _HfExamplesInfo(
        "ibm-granite/granite-4.0-tiny-preview"
    ),
    "GraniteMoeSharedForCausalLM": _HfExamplesInfo(
        "ibm-research/moe-7b-1b-active-shared-experts"
    ),
    "GraniteMoeSWAForCausalLM": _HfExamplesInfo("ibm-granite/granite-swash-3b-a600m"),
    "GraniteSWAForCausalLM": _HfExamplesInfo("ibm-granite/granite-swash-2b"),
    "HrmTextForCausalLM": _HfExamplesInfo(
        "sapientinc/HRM-Text-1B",
    ),
    "HunYuanDenseV1ForCausalLM": _HfExamplesInfo("tencent/Hunyuan-7B-Instruct"),
    "HunYuanMoEV1ForCausalLM": _HfExamplesInfo("tencent/Hunyuan-A13B-Instruct"),
    "HYV3ForCausalLM": _HfExamplesInfo("tencent/Hy3-preview", trust_remote_code=True),
    # Internal checkpoint, not publicly available yet.
    "HYV4ForCausalLM": _HfExamplesInfo("tencent/Hy4-preview", trust_remote_code=True),
    "HyperCLOVAXForCausalLM": _HfExamplesInfo(
        "naver-hyperclovax/HyperCLOVAX-SEED-Think-14B",
    ),
    "InklingForCausalLM": _HfExamplesInfo(
        "thinkingmachines/Inkling-NVFP4",
        tokenizer_mode="inkling",
        trust_remote_code=True,
        max_model_len=4096,
    ),
    "InternLM2ForCausalLM": _HfExamplesInfo(
        "internlm/internlm2-chat-7b", trust_remote_code=True
    ),
    "InternLM3ForCausalLM": _HfExamplesInfo(
        "internlm/internlm3-8b-instruct", trust_remote_code=True
    ),
    "IQuestCoderForCausalLM": _HfExamplesInfo(
        "IQuestLab/IQuest-Coder-V1-40B-Instruct", trust_remote_code=True
    ),
    "IQuestLoopCoderForCausalLM": _HfExamplesInfo(
        "IQuestLab/IQuest-Coder-V1-40B-Loop-Instruct", trust_remote_code=True
    ),
    "Jais2ForCausalLM": _HfExamplesInfo("inceptionai/Jais-2-8B-Chat"),
    "JambaForCausalLM": _HfExamplesInfo(
        "ai21labs/AI21-Jamba-1.5-Mini",
        extras={
            "tiny": "ai21labs/Jamba-tiny-dev",
            "random": "ai21labs/Jamba-tiny-random",
        },
    ),
    "K2HorizonForCausalLM": _HfExamplesInfo(
        "IFM/K2-Horizon-36B",
        trust_remote_code=True,
        is_available_online=False,
    ),
    "KimiLinearForCausalLM": _HfExamplesInfo(
        "moonshotai/Kimi-Linear-48B-A3B-Instruct", trust_remote_code=True
    ),
    "Kolibri1ForCausalLM": _HfExamplesInfo(
        "Aleph-Alpha/Kolibri-1", min_transformers_version="5.20.0"
    ),
    "LagunaForCausalLM": _HfExamplesInfo("poolside/Laguna-XS.2"),
    "Lfm2ForCausalLM": _HfExamplesInfo("LiquidAI/LFM2-1.2B"),
    "Lfm2MoeForCausalLM": _HfExamplesInfo(
        "LiquidAI/LFM2-8B-A1B",
        use_original_num_layers=True,
        # Initialize at least one MoE layer
        hf_overrides={"num_hidden_layers": 4},
    ),
    "LlamaForCausalLM": _HfExamplesInfo(
        "meta-llama/Llama-3.2-1B-Instruct",
        extras={
            "guard": "meta-llama/Llama-Guard-3-1B",
            "hermes": "NousResearch/Hermes-3-Llama-3.1-8B",
            "fp8": "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8",
            "fp8_1b": "RedHatAI/Llama-3.2-1B-Instruct-FP8",
            "tiny": "hmellor/tiny-random-LlamaForCausalLM",
        },
    ),
    "LLaMAForCausalLM": _HfExamplesInfo(
        "decapoda-research/llama-7b-hf", is_available_online=False
    ),
    "Llama4ForCausalLM": _HfExamplesInfo(
        "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    ),
    "LongcatFlashForCausalLM": _HfExamplesInfo("meituan-longcat/LongCat-Flash-Chat"),
    "LongcatFlashNgramForCausalLM": _HfExamplesInfo(
        "meituan-longcat/LongCat-Flash-Lite",
        # Shrink the ~62GB n-gram tables (ngram_vocab_size_ratio * vocab_size)
        # so the dummy-weight init test fits in CI memory.
        hf_overrides={"ngram_vocab_size_ratio": 1},
    ),
    "MambaForCausalLM": _HfExamplesInfo("state-spaces/mamba-130m-hf"),
    "Mamba2ForCausalLM": _HfExamplesInfo(
        "mistralai/Mamba-Codestral-7B-v0.1",
        extras={
            "random": "yujiepan/mamba2-codestral-v0.1-tiny-random",
        },
    ),
    "FalconMambaForCausalLM": _HfExamplesInfo("tiiuae/falcon-mamba-7b-instruct"),
    "MiniCPMForCausalLM": _HfExamplesInfo(
        "openbmb/MiniCPM-2B-sft-bf16", trust_remote_code=True
    ),
    "MiniCPM3ForCausalLM": _HfExamplesInfo(
        "openbmb/MiniCPM3-4B", trust_remote_code=True
    ),
    "MiniCPM4ForCausalLM": _HfExamplesInfo(
        "openbmb/MiniCPM4.1-8B",
        max_transformers_version="4.57",
        transformers_version_reason={
            "hf": "HF remote code imports removed `is_torch_fx_available`; "
            "the upstream compatibility shim request was closed as not planned: "
            "https://github.com/huggingface/transformers/issues/44561"
        },
        trust_remote_code=True,
    ),
    "MiniMaxM2ForCausalLM": _HfExamplesInfo(
        "MiniMaxAI/MiniMax-M2",
        trust_remote_code=True,
    ),
    "MiniMaxM3SparseForCausalLM": _HfExamplesInfo(
        "MiniMaxAI/MiniMax-M3",
        trust_remote_code=True,
        is_available_online=False,
    ),
    "Ministral3ForCausalLM": _HfExamplesInfo("mistralai/Ministral-3-3B-Instruct-2512"),
    "MistralForCausalLM": _HfExamplesInfo("mistralai/Mistral-7B-Instruct-v0.1"),
    "MistralLarge3ForCausalLM": _HfExamplesInfo(
        "mistralai/Mistral-Large-3-675B-Instruct-2512-NVFP4"
    ),
    "MixtralForCausalLM": _HfExamplesInfo(
        "mistralai/Mixtral-8x7B-Instruct-v0.1",
        {
            "tiny": "axolotl-ai-co/tiny-mixtral-30m",
            "tiny-random": "TitanML/tiny-mixtral",
        },
    ),
    "NemotronForCausalLM": _HfExamplesInfo("nvidia/Minitron-8B-Base"),
    "NemotronHForCausalLM": _HfExamplesInfo(
        "nvidia/Nemotron-H-8B-Base-8K", trust_remote_code=True
    ),
    "NemotronHPuzzleForCausalLM": _HfExamplesInfo(
        "",
        trust_remote_code=True,
        is_available_online=False,
    ),
    "NanbeigeForCausalLM": _HfExamplesInfo(
        "Nanbeige/Nanbeige4.2-3B",
        trust_remote_code=True,
    ),
    "OlmoForCausalLM": _HfExamplesInfo("allenai/OLMo-1B-hf"),
    "Olmo2ForCausalLM": _HfExamplesInfo("allenai/OLMo-2-0425-1B"),
    "Olmo3ForCausalLM": _HfExamplesInfo("allenai/Olmo-3-7B-Instruct"),
    "OlmoHybridForCausalLM": _HfExamplesInfo("allenai/Olmo-Hybrid-7B"),
    "OlmoeForCausalLM": _HfExamplesInfo("allenai/OLMoE-1B-7B-0924-Instruct"),
    "OPTForCausalLM": _HfExamplesInfo(
        "facebook/opt-125m",
        {"350m": "facebook/opt-350m", "1b": "facebook/opt-iml-max-1.3b"},
    ),
    "OrionForCausalLM": _HfExamplesInfo(
        "OrionStarAI/Orion-14B-Chat", trust_remote_code=True
    ),
    "PanguEmbeddedForCausalLM": _HfExamplesInfo(
        "FreedomIntelligence/openPangu-Embedded-7B-V1.1", trust_remote_code=True
    ),
    "PanguProMoEV2ForCausalLM": _HfExamplesInfo(
        "",
        trust_remote_code=True,
        is_available_online=False,
    ),
    "PanguUltraMoEForCausalLM": _HfExamplesInfo(
        "FreedomIntelligence/openPangu-Ultra-MoE-718B-V1.1",
        trust_remote_code=True,
        is_available_online=False,
    ),
    "Param2MoEForCausalLM": _HfExamplesInfo(
        "bharatgenai/Param2-17B-A2.4B-Thinking",
        trust_remote_code=True,
    ),
    "PhiForCausalLM": _HfExamplesInfo("microsoft/phi-2"),
    "Phi3ForCausalLM": _HfExamplesInfo("microsoft/Phi-3-mini-4k-instruct"),
    "PhiMoEForCausalLM": _HfExamplesInfo(
        "microsoft/Phi-3.5-MoE-instruct", trust_remote_code=True
    ),
    "Plamo3ForCausalLM": _HfExamplesInfo(
        "pfnet/plamo-3-nict-2b-base",
        trust_remote_code=True,
    ),
    "Qwen2ForCausalLM": _HfExamplesInfo(
        "Qwen/Qwen2-0.5B-Instruct",
        extras={
            "2.5": "Qwen/Qwen2.5-0.5B-Instruct",
            "2.5-1.5B": "Qwen/Qwen2.5-1.5B-Instruct",
        },
    ),
    "Qwen2MoeForCausalLM": _HfExamplesInfo("Qwen/Qwen1.5-MoE-A2.7B-Chat"),
    "Qwen3ForCausalLM": _HfExamplesInfo("Qwen/Qwen3-8B"),
    "Qwen3MoeForCausalLM": _HfExamplesInfo("Qwen/Qwen3-30B-A3B"),
    "Qwen3_5ForCausalLM": _HfExamplesInfo("codecho/Qwen3.5-0.8B-text-only"),
    "Qwen3_5MoeForCausalLM": _HfExamplesInfo(
        "codecho/Qwen3.5-35B-A3B-text-only",
        extras={"native-prefix": "imdatta0/small_qwen3_5_20b"},
        max_model_len=4096,
    ),
    "Qwen4ExpForCausalLM": _HfExamplesInfo("", is_available_online=False),
    "MellumForCausalLM": _HfExamplesInfo("JetBrains/Mellum2-12B-A2.5B-Base"),
    "Qwen3NextForCausalLM": _HfExamplesInfo(
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        extras={"tiny-random": "tiny-random/qwen3-next-moe"},
    ),
    "Rnj1ForCausalLM": _HfExamplesInfo(
        "EssentialAI/rnj-1-instruct",
        is_available_online=False,
    ),
    "SarvamMoEForCausalLM": _HfExamplesInfo(
        "sarvamai/sarvam-30b",
        trust_remote_code=True,
        max_model_len=4096,
        is_available_online=True,
    ),
    "SarvamMLAForCausalLM": _HfExamplesInfo(
        "sarvamai/sarvam-105b",
        trust_remote_code=True,
        max_model_len=4096,
        is_available_online=True,
        max_transformers_version="5.3",
        transformers_version_reason={
            "hf": (
                "Transformers v5.4 removed the ignore_keys param from "
                "validate_rope(); vLLM patches validate_rope() and is unaffected"
            )
        },
    ),
    "SeedOssForCausalLM": _HfExamplesInfo(
        "ByteDance-Seed/Seed-OSS-36B-Instruct",
        trust_remote_code=True,
    ),
    "SmolLM3ForCausalLM": _HfExamplesInfo("HuggingFaceTB/SmolLM3-3B"),
    "StableLmForCausalLM": _HfExamplesInfo("stabilityai/stablelm-3b-4e1t"),
    "Starcoder2ForCausalLM": _HfExamplesInfo("bigcode/starcoder2-3b"),
    "Step1ForCausalLM": _HfExamplesInfo(
        "stepfun-ai/Step-Audio-EditX", trust_remote_code=True
    ),
    "Step3p5ForCausalLM": _HfExamplesInfo(
        "stepfun-ai/Step-3.5-Flash",
        use_original_num_layers=True,
        # Initialize at least one MoE layer
        hf_overrides={"num_hidden_layers": 4},
    ),
    "Step3TextForCausalLM": _HfExamplesInfo("stepfun-ai/step3", trust_remote_code=True),
    "Step5ForCausalLM": _HfExamplesInfo(
        "stepfun-ai/Step-5-Preview",
        # Published checkpoints wrap the text model in Step5ForConditionalGeneration.
        is_available_online=False,
    ),
    "SolarForCausalLM": _HfExamplesInfo(
        "upstage/solar-pro-preview-instruct", trust_remote_code=True
    ),
    "TeleChat2ForCausalLM": _HfExamplesInfo(
        "Tele-AI/TeleChat2-3B", trust_remote_code=True
    ),
    "TeleChat3ForCausalLM": _HfExamplesInfo(
        "Tele-AI/TeleChat3-36B-Thinking", trust_remote_code=True
    ),
    "TeleFLMForCausalLM": _HfExamplesInfo(
        "CofeAI/FLM-2-52B-Instruct-2407", trust_remote_code=True
    ),
    "VaultGemmaForCausalLM": _HfExamplesInfo("google/vaultgemma-1b"),
    "Zamba2ForCausalLM": _HfExamplesInfo("Zyphra/Zamba2-7B-instruct"),
    "MiMoForCausalLM": _HfExamplesInfo("XiaomiMiMo/MiMo-7B-RL", trust_remote_code=True),
    "MiMoV2FlashForCausalLM": _HfExamplesInfo(
        "XiaomiMiMo/MiMo-V2-Flash", trust_remote_code=True
    ),
    "MiMoV2ForCausalLM": _HfExamplesInfo(
        "XiaomiMiMo/MiMo-V2.5-Pro", trust_remote_code=True
    ),
}

_EMBEDDING_EXAMPLE_MODELS = {
    # [Text-only]
    "BertModel": _HfExamplesInfo("BAAI/bge-base-en-v1.5"),
    "BertForMaskedLM": _HfExamplesInfo("google-bert/bert-base-uncased"),
    "BertSpladeSparseEmbeddingModel": _HfExamplesInfo(
        "naver/splade-v3",
        hf_overrides={"architectures": ["BertSpladeSparseEmbeddingModel"]},
    ),
    "BgeM3EmbeddingModel": _HfExamplesInfo("BAAI/bge-m3"),
    "DeepseekV3BidirectionalModel": _HfExamplesInfo(
        "ai-sage/Giga-Embeddings-instruct-10B-A1.8B-0826",
        trust_remote_code=True,
        hf_overrides={"model_type": "deepseek_v3", "auto_map": None},
    ),
    "EmbeddingGemma2Model": _HfExamplesInfo(
        "google/embeddinggemma-2",
        is_available_online=False,
    ),
    "Gemma2Model": _HfExamplesInfo("BAAI/bge-multilingual-gemma2"),
    "Gemma3TextModel": _HfExamplesInfo("google/embeddinggemma-300m"),
    "GteModel": _HfExamplesInfo(
        "Snowflake/snowflake-arctic-embed-m-v2.0", trust_remote_code=True
    ),
    "GteNewModel": _HfExamplesInfo(
        "Alibaba-NLP/gte-base-en-v1.5",
        trust_remote_code=True,
        hf_overrides={"architectures": ["GteNewModel"]},
    ),
    "JinaEmbeddingsV5Model": _HfExamplesInfo(
        "jinaai/jina-embeddings-v5-text-small",
        trust_remote_code=True,
    ),
    "Lfm2BidirectionalModel": _HfExamplesInfo(
        "LiquidAI/LFM2.5-Embedding-350M",
    ),
    "LlamaModel": _HfExamplesInfo("llama", is_available_online=False),
    "LlamaBidirectionalModel": _HfExamplesInfo(
        "nvidia/llama-nemotron-embed-1b-v2", trust_remote_code=True
    ),
    "MistralModel": _HfExamplesInfo("intfloat/e5-mistral-7b-instruct"),
    "ModernBertModel": _HfExamplesInfo(
        "Alibaba-NLP/gte-modernbert-base", trust_remote_code=True
    ),
    "NomicBertModel": _HfExamplesInfo(
        "nomic-ai/nomic-embed-text-v2-moe", trust_remote_code=True
    ),
    "Qwen2Model": _HfExamplesInfo("ssmits/Qwen2-7B-Instruct-embed-base"),
    "RobertaModel": _HfExamplesInfo("sentence-transformers/stsb-roberta-base-v2"),
    "RobertaForMaskedLM": _HfExamplesInfo("sentence-transformers/all-roberta-large-v1"),
    "VoyageQwen3BidirectionalEmbedModel": _HfExamplesInfo(
        "voyageai/voyage-4-nano", trust_remote_code=True
    ),
    "XLMRobertaModel": _HfExamplesInfo("intfloat/multilingual-e5-small"),
    # [Multimodal]
    "CLIPModel": _HfExamplesInfo("openai/clip-vit-base-patch32"),
    "LlamaNemotronVLModel": _HfExamplesInfo(
        "nvidia/llama-nemotron-embed-vl-1b-v2", trust_remote_code=True
    ),
    "LlavaNextForConditionalGeneration": _HfExamplesInfo("royokong/e5-v"),
    "Phi3VForCausalLM": _HfExamplesInfo(
        "TIGER-Lab/VLM2Vec-Full", trust_remote_code=True
    ),
    "Qwen2VLForConditionalGeneration": _HfExamplesInfo("MrLight/dse-qwen2-2b-mrl-v1"),
    "SiglipModel": _HfExamplesInfo("google/siglip-base-patch16-224"),
    "Terratorch": _HfExamplesInfo(
        "ibm-nasa-geospatial/Prithvi-EO-2.0-300M-TL-Sen1Floods11",
        dtype="float16",
        enforce_eager=True,
        require_embed_inputs=True,
        # This is to avoid the model going OOM in CI
        max_num_seqs=32,
    ),
}

_LATE_INTERACTION_EXAMPLE_MODELS = {
    # [Text-only]
    "HF_ColBERT": _HfExamplesInfo("answerdotai/answerai-colbert-small-v1"),
    "ColBERTModernBertModel": _HfExamplesInfo(
        "lightonai/GTE-ModernColBERT-v1",
        hf_overrides={"architectures": ["ColBERTModernBertModel"]},
    ),
    "ColBERTJinaRobertaModel": _HfExamplesInfo(
        "jinaai/jina-colbert-v2",
        trust_remote_code=True,
        hf_overrides={"architectures": ["ColBERTJinaRobertaModel"]},
    ),
    "ColBERTLfm2Model": _HfExamplesInfo(
        "LiquidAI/LFM2-ColBERT-350M",
        trust_remote_code=True,
        hf_overrides={"architectures": ["ColBERTLfm2Model"]},
    ),
    "JinaForRanking": _HfExamplesInfo("jinaai/jina-reranker-v3"),
    # [Multimodal]
    "ColModernVBertForRetrieval": _HfExamplesInfo(
        "ModernVBERT/colmodernvbert-merged",
    ),
    "ColUltraVBertForRetrieval": _HfExamplesInfo(
        "athrael-soju/ColUltraVBERT",
        # Later revisions declare the UltraVBertModel architecture instead.
        revision="509adbab61b71da0484b20f3baf718e15219d761",
    ),
    "ColPaliForRetrieval": _HfExamplesInfo("vidore/colpali-v1.3-hf"),
    "ModernVBertModel": _HfExamplesInfo("ModernVBERT/colmodernvbert-merged"),
    "ColQwen3": _HfExamplesInfo(
        "TomoroAI/tomoro-colqwen3-embed-4b", trust_remote_code=True
    ),
    "OpsColQwen3Model": _HfExamplesInfo(
        "OpenSearch-AI/Ops-Colqwen3-4B", trust_remote_code=True
    ),
    "ColQwen3_5": _HfExamplesInfo(
        "athrael-soju/colqwen3.5-4.5B-v3",
        trust_remote_code=True,
        max_model_len=4096,
    ),
    "Qwen3VLNemotronEmbedModel": _HfExamplesInfo(
        "nvidia/nemotron-colembed-vl-4b-v2",
    ),
}


_REWARD_EXAMPLE_MODELS = {
    "InternLM2ForRewardModel": _HfExamplesInfo(
        "internlm/internlm2-1_8b-reward", trust_remote_code=True
    ),
    "Qwen2ForRewardModel": _HfExamplesInfo(
        "Qwen/Qwen2.5-Math-RM-72B",
        max_transformers_version="4.53",
        transformers_version_reason={
            "hf": "HF model uses remote code that is not compatible with latest Transformers"  # noqa: E501
        },
    ),
    "Qwen2ForProcessRewardModel": _HfExamplesInfo(
        "Qwen/Qwen2.5-Math-PRM-7B",
        max_transformers_version="4.53",
        transformers_version_reason={
            "hf": "HF model uses remote code that is not compatible with latest Transformers"  # noqa: E501
        },
    ),
}

_TOKEN_CLASSIFICATION_EXAMPLE_MODELS = {
    "BertForTokenClassification": _HfExamplesInfo("boltuix/NeuroBERT-NER"),
    "ModernBertForTokenClassification": _HfExamplesInfo(
        "disham993/electrical-ner-ModernBERT-base"
    ),
    "OpenAIPrivacyFilterForTokenClassification": _HfExamplesInfo(
        "openai/privacy-filter",
    ),
    "RobertaForTokenClassification": _HfExamplesInfo(
        "Jean-Baptiste/roberta-large-ner-english"
    ),
    "XLMRobertaForTokenClassification": _HfExamplesInfo(
        "Davlan/xlm-roberta-base-ner-hrl"
    ),
}

_SEQUENCE_CLASSIFICATION_EXAMPLE_MODELS = {
    "BertForSequenceClassification": _HfExamplesInfo(
        "cross-encoder/ms-marco-MiniLM-L-6-v2"
    ),
    "D3ForSequenceClassification": _HfExamplesInfo(
        "vllm-sr/d3-edge",
        extras={
            "d3": "vllm-sr/d3",
            "d3-flash": "vllm-sr/d3-flash",
            "d3-mini": "vllm-sr/d3-mini",
            "d3-nano": "vllm-sr/d3-nano",
            "d3-lite": "vllm-sr/d3-lite",
        },
        max_model_len=4096,
    ),
    "GPT2ForSequenceClassification": _HfExamplesInfo(
        "nie3e/sentiment-polish-gpt2-small"
    ),
    "GteNewForSequenceClassification": _HfExamplesInfo(
        "Alibaba-NLP/gte-multilingual-reranker-base",
        trust_remote_code=True,
        hf_overrides={"architectures": ["GteNewForSequenceClassification"]},
    ),
    "JambaForSequenceClassification": _HfExamplesInfo("ai21labs/Jamba-tiny-reward-dev"),
    "LlamaBidirectionalForSequenceClassification": _HfExamplesInfo(
        "nvidia/llama-nemotron-rerank-1b-v2", trust_remote_code=True
    ),
    "LlamaNemotronVLForSequenceClassification": _HfExamplesInfo(
        "nvidia/llama-nemotron-rerank-vl-1b-v2", trust_remote_code=True
    ),
    "ModernBertForSequenceClassification": _HfExamplesInfo(
        "Alibaba-NLP/gte-reranker-modernbert-base"
    ),
    "RobertaForSequenceClassification": _HfExamplesInfo(
        "cross-encoder/quora-roberta-base"
    ),
    "XLMRobertaForSequenceClassification": _HfExamplesInfo("BAAI/bge-reranker-v2-m3"),
}

_AUTOMATIC_CONVERTED_MODELS = {
    # Use as_seq_cls_model for automatic conversion
    "GemmaForSequenceClassification": _HfExamplesInfo(
        "BAAI/bge-reranker-v2-gemma",
        hf_overrides={
            "architectures": ["GemmaForSequenceClassification"],
            "classifier_from_token": ["Yes"],
            "method": "no_post_processing",
        },
    ),
    "LlamaForSequenceClassification": _HfExamplesInfo(
        "Skywork/Skywork-Reward-V2-Llama-3.2-1B"
    ),
    "Qwen2ForSequenceClassification": _HfExamplesInfo("jason9693/Qwen2.5-1.5B-apeach"),
    "Qwen3ForSequenceClassification": _HfExamplesInfo(
        "tomaarsen/Qwen3-Reranker-0.6B-seq-cls"
    ),
    "Qwen3ForTokenClassification": _HfExamplesInfo("bd2lcco/Qwen3-0.6B-finetuned"),
    "Qwen3VLForSequenceClassification": _HfExamplesInfo(
        "Qwen/Qwen3-VL-Reranker-2B",
        is_available_online=False,
        hf_overrides={
            "architectures": ["Qwen3VLForSequenceClassification"],
            "classifier_from_token": ["no", "yes"],
            "is_original_qwen3_reranker": True,
        },
    ),
}

_MULTIMODAL_EXAMPLE_MODELS = {
    # [Decoder-only]
    "Alpamayo2Super": _HfExamplesInfo("nvidia/Alpamayo2-Super", max_model_len=8192),
    "AriaForConditionalGeneration": _HfExamplesInfo("rhymes-ai/Aria"),
    "AudioFlamingo3ForConditionalGeneration": _HfExamplesInfo(
        "nvidia/audio-flamingo-3-hf"
    ),
    "BagelForConditionalGeneration": _HfExamplesInfo("ByteDance-Seed/BAGEL-7B-MoT"),
    "BailingMoeV3VLForConditionalGeneration": _HfExamplesInfo(
        "inclusionAI/Ling-3.0-flash-VL",
        trust_remote_code=True,
        is_available_online=True,
        use_original_num_layers=True,
        hf_overrides={
            "text_config": {
                "num_hidden_layers": 6,
                "layer_types": ["linear_attention"] * 5 + ["full_attention"],
            }
        },
    ),
    "BeeForConditionalGeneration": _HfExamplesInfo(
        "Open-Bee/Bee-8B-RL",
        trust_remote_code=True,
    ),
    "Blip2ForConditionalGeneration": _HfExamplesInfo(
        "Salesforce/blip2-opt-2.7b",
        extras={"6b": "Salesforce/blip2-opt-6.7b"},
    ),
    "ClefFlashForJointSchema": _HfExamplesInfo(
        "Cloudflare/clef-flash",
        max_model_len=4096,
    ),
    "Cohere2VisionForConditionalGeneration": _HfExamplesInfo(
        "CohereLabs/command-a-vision-07-2025",
        extras={"command-a-plus": "CohereLabs/command-a-plus-05-2026-bf16"},
    ),
    "CohereCompassForConditionalGeneration": _HfExamplesInfo(
        "CohereLabs/North-Micro-Vision-Instruct",
    ),
    "Cosmos3ForConditionalGeneration": _HfExamplesInfo(
        "nvidia/Cosmos3-Nano",
        extras={"super": "nvidia/Cosmos3-Super"},
        max_model_len=4096,
    ),
    "Cosmos3EdgeForConditionalGeneration": _HfExamplesInfo(
        "nvidia/Cosmos3-Edge",
        max_model_len=4096,
    ),
    "DeepseekVLV2ForCausalLM": _HfExamplesInfo(
        "deepseek-ai/deepseek-vl2-tiny",
        extras={"fork": "Isotr0py/deepseek-vl2-tiny"},
        max_transformers_version="4.48",
        transformers_version_reason={"hf": "HF model is not compatible."},
    ),
    "DeepseekOCRForCausalLM": _HfExamplesInfo(
        "deepseek-ai/DeepSeek-OCR",
    ),
    "DeepseekOCR2ForCausalLM": _HfExamplesInfo(
        "deepseek-ai/DeepSeek-OCR-2",
    ),
    "DeepseekV4ForConditionalGeneration": _HfExamplesInfo(
        "deepseek-ai/DeepSeek-V4-Flash-Vision-Exp",
    ),
    "DeepseekV41ForCausalLM": _HfExamplesInfo(
        "deepseek-ai/DeepSeek-V4.1-Flash",
    ),
    "Dots3NoteForCausalLM": _HfExamplesInfo(
        "dots-studio/dots3-note-prev",
        is_available_online=False,
    ),
    "UnlimitedOCRForCausalLM": _HfExamplesInfo(
        "baidu/Unlimited-OCR",
    ),
    "DotsOCRForCausalLM": _HfExamplesInfo(
        "rednote-hilab/dots.ocr", trust_remote_code=True
    ),
    "Eagle2_5_VLForConditionalGeneration": _HfExamplesInfo(
        "nvidia/Eagle2.5-8B",
        trust_remote_code=True,
    ),
    "Emu3ForConditionalGeneration": _HfExamplesInfo("BAAI/Emu3-Chat-hf"),
    "Ernie4_5_VLMoeForConditionalGeneration": _HfExamplesInfo(
        "baidu/ERNIE-4.5-VL-28B-A3B-PT",
        trust_remote_code=True,
        revision="refs/pr/17",
    ),
    "Exaone4_5_ForConditionalGeneration": _HfExamplesInfo(
        "LGAI-EXAONE/EXAONE-4.5-33B",
    ),
    "FireRedASR2ForConditionalGeneration": _HfExamplesInfo(
        "allendou/FireRedASR2-LLM-vllm",
        trust_remote_code=True,
    ),
    "FunASRForConditionalGeneration": _HfExamplesInfo(
        "FunAudioLLM/Fun-ASR-Nano-2512-vllm",
        trust_remote_code=True,
    ),
    "FunAudioChatForConditionalGeneration": _HfExamplesInfo(
        "funaudiochat", is_available_online=False
    ),
    "Gemma3ForConditionalGeneration": _HfExamplesInfo("google/gemma-3-4b-it"),
    "DiffusionGemmaForBlockDiffusion": _HfExamplesInfo(
        "google/diffusiongemma-26B-A4B-it",
        trust_remote_code=True,
    ),
    "Gemma4ForConditionalGeneration": _HfExamplesInfo(
        "google/gemma-4-E2B-it",
    ),
    "Gemma4UnifiedForConditionalGeneration": _HfExamplesInfo(
        "google/gemma-4-12B-it",
        is_available_online=False,
    ),
    "Gemma3nForConditionalGeneration": _HfExamplesInfo("google/gemma-3n-E2B-it"),
    "GlmAsrForConditionalGeneration": _HfExamplesInfo(
        "zai-org/GLM-ASR-Nano-2512",
    ),
    "Granite4VisionForConditionalGeneration": _HfExamplesInfo(
        "ibm-granite/granite-vision-4.1-4b",
        is_available_online=False,
    ),
    "GraniteVision": _HfExamplesInfo("ibm-granite/granite-vision-3.3-2b"),
    "GraniteSpeechForConditionalGeneration": _HfExamplesInfo(
        "ibm-granite/granite-speech-3.3-2b",
        extras={"4.0-1b": "ibm-granite/granite-4.0-1b-speech"},
    ),
    "GraniteSpeechPlusForConditionalGeneration": _HfExamplesInfo(
        "ibm-granite/granite-speech-4.1-2b-plus",
    ),
    "GLM4VForCausalLM": _HfExamplesInfo(
        "zai-org/glm-4v-9b",
        trust_remote_code=True,
        hf_overrides={"architectures": ["GLM4VForCausalLM"]},
    ),
    "Glm4vForConditionalGeneration": _HfExamplesInfo(
        "zai-org/GLM-4.1V-9B-Thinking",
        extras={"4.6V": "zai-org/GLM-4.6V-Flash"},
    ),
    "Glm4vMoeForConditionalGeneration": _HfExamplesInfo("zai-org/GLM-4.5V"),
    "GlmOcrForConditionalGeneration": _HfExamplesInfo(
        "zai-org/GLM-OCR",
    ),
    "Glm5NextForConditionalGeneration": _HfExamplesInfo("zai-org/GLM-5.3-Flash"),
    "H2OVLChatModel": _HfExamplesInfo(
        "h2oai/h2ovl-mississippi-800m",
        trust_remote_code=True,
        extras={"2b": "h2oai/h2ovl-mississippi-2b"},
        max_transformers_version="4.48",
        transformers_version_reason={"hf": "HF model is not compatible."},
    ),
    "HCXVisionV2ForCausalLM": _HfExamplesInfo(
        "naver-hyperclovax/HyperCLOVAX-SEED-Think-32B",
        trust_remote_code=True,
        revision="a6cdfd3464d1b767259cad23e164eaf39d3e3960",
    ),
    "HunYuanVLForConditionalGeneration": _HfExamplesInfo(
        "tencent/HunyuanOCR",
    ),
    "Idefics3ForConditionalGeneration": _HfExamplesInfo(
        "HuggingFaceM4/Idefics3-8B-Llama3",
        extras={"tiny": "HuggingFaceTB/SmolVLM-256M-Instruct"},
    ),
    "InklingForConditionalGeneration": _HfExamplesInfo(
        "thinkingmachines/Inkling-NVFP4",
        tokenizer_mode="inkling",
        trust_remote_code=True,
        max_model_len=4096,
    ),
    "IsaacForConditionalGeneration": _HfExamplesInfo(
        "PerceptronAI/Isaac-0.1",
        trust_remote_code=True,
        extras={"0.2-2B-Preview": "PerceptronAI/Isaac-0.2-2B-Preview"},
        max_transformers_version="4.57",
        transformers_version_reason={
            "hf": (
                "Isaac's remote model and processor code import or configure "
                "APIs that changed in Transformers v5."
            ),
        },
    ),
    "InternS1ForConditionalGeneration": _HfExamplesInfo(
        "internlm/Intern-S1",
        trust_remote_code=True,
    ),
    "InternS1ProForConditionalGeneration": _HfExamplesInfo(
        "internlm/Intern-S1-Pro",
        trust_remote_code=True,
        max_transformers_version="5.14.1",
        transformers_version_reason={
            "hf": "Remote modeling code imports `OutputRecorder`, removed in v5."
        },
    ),
    "InternS2MobiusForConditionalGeneration": _HfExamplesInfo(
        "internlm/Intern-S2-Mobius",
        trust_remote_code=True,
        is_available_online=False,
    ),
    "InternS2PreviewForConditionalGeneration": _HfExamplesInfo(
        "internlm/Intern-S2-Preview",
        trust_remote_code=True,
        is_available_online=False,
    ),
    "InternVLChatModel": _HfExamplesInfo(
        "OpenGVLab/InternVL2-1B",
        extras={
            "2B": "OpenGVLab/InternVL2-2B",
            "3.0": "OpenGVLab/InternVL3-1B",
            "3.5-qwen3": "OpenGVLab/InternVL3_5-1B",
            "3.5-qwen3moe": "OpenGVLab/InternVL3_5-30B-A3B",
            "3.5-gptoss": "OpenGVLab/InternVL3_5-GPT-OSS-20B-A4B-Preview",
        },
        trust_remote_code=True,
    ),
    "InternVLForConditionalGeneration": _HfExamplesInfo("OpenGVLab/InternVL3-1B-hf"),
    "KananaVForConditionalGeneration": _HfExamplesInfo(
        "kakaocorp/kanana-1.5-v-3b-instruct",
        trust_remote_code=True,
    ),
    "KeyeForConditionalGeneration": _HfExamplesInfo(
        "Kwai-Keye/Keye-VL-8B-Preview",
        trust_remote_code=True,
    ),
    "KeyeVL1_5ForConditionalGeneration": _HfExamplesInfo(
        "Kwai-Keye/Keye-VL-1_5-8B",
        trust_remote_code=True,
    ),
    "MoonshotKimiaForCausalLM": _HfExamplesInfo(
        "moonshotai/Kimi-Audio-7B-Instruct",
        tokenizer_mode="kimi_audio",
        trust_remote_code=True,
    ),
    "KimiK25ForConditionalGeneration": _HfExamplesInfo(
        "moonshotai/Kimi-K2.5",
        trust_remote_code=True,
    ),
    "KimiK3ForConditionalGeneration": _HfExamplesInfo(
        "moonshotai/Kimi-K3",
        trust_remote_code=True,
    ),
    "KimiVLForConditionalGeneration": _HfExamplesInfo(
        "moonshotai/Kimi-VL-A3B-Instruct",
        extras={"thinking": "moonshotai/Kimi-VL-A3B-Thinking"},
        trust_remote_code=True,
        max_transformers_version="4.53.3",
        transformers_version_reason={
            "hf": (
                "HF model uses deprecated transformers API "
                "(PytorchGELUTanh, DynamicCache.seen_tokens, and more). See: "
                "https://huggingface.co/moonshotai/Kimi-VL-A3B-Instruct/discussions/31"
            )
        },
    ),
    "LightOnOCRForConditionalGeneration": _HfExamplesInfo(
        "lightonai/LightOnOCR-1B-1025"
    ),
    "Lfm2VlForConditionalGeneration": _HfExamplesInfo(
        "LiquidAI/LFM2-VL-450M",
    ),
    "Llama4ForConditionalGeneration": _HfExamplesInfo(
        "meta-llama/Llama-4-Scout-17B-16E-Instruct",
        max_model_len=10240,
        extras={"llama-guard-4": "meta-llama/Llama-Guard-4-12B"},
    ),
    "LlavaForConditionalGeneration": _HfExamplesInfo(
        "llava-hf/llava-1.5-7b-hf",
        extras={
            "mistral": "mistral-community/pixtral-12b",
            "mistral-fp8": "nm-testing/pixtral-12b-FP8-dynamic",
        },
    ),
    "LlavaNextForConditionalGeneration": _HfExamplesInfo(
        "llava-hf/llava-v1.6-mistral-7b-hf"
    ),
    "LlavaNextVideoForConditionalGeneration": _HfExamplesInfo(
        "llava-hf/LLaVA-NeXT-Video-7B-hf"
    ),
    "LlavaOnevision2ForConditionalGeneration": _HfExamplesInfo(
        "lmms-lab-encoder/LLaVA-OneVision-2-8B-Instruct",
        trust_remote_code=True,
        # Keep the init/schema harness eager (these tests never run forward).
        # NOTE: a separate H200-only hang exists in the core FA3 attention
        # construction (after `FlashAttentionImpl.__init__` logs the FA3
        # version, while building the Qwen3 backbone). enforce_eager does NOT
        # gate that path, so this flag is hygiene, not the fix -- tracked with
        # the maintainer.
        enforce_eager=True,
    ),
    "LlavaOnevisionForConditionalGeneration": _HfExamplesInfo(
        "llava-hf/llava-onevision-qwen2-0.5b-ov-hf"
    ),
    "MiDashengLMModel": _HfExamplesInfo(
        "mispeech/midashenglm-7b", trust_remote_code=True
    ),
    "MiMoV2OmniForCausalLM": _HfExamplesInfo(
        "XiaomiMiMo/MiMo-V2.5-Omni", trust_remote_code=True, is_available_online=False
    ),
    "MiniCPMO": _HfExamplesInfo(
        "openbmb/MiniCPM-o-2_6",
        trust_remote_code=True,
        max_transformers_version="4.57",
        transformers_version_reason={
            "hf": "Custom processor code is not compatible with Transformers v5."
        },
    ),
    "MiniCPMOcrForConditionalGeneration": _HfExamplesInfo(
        "openbmb/MiniCPM-OCR-1.0",
        min_transformers_version="5.19.0",
        is_available_online=False,
    ),
    "MiniCPMV": _HfExamplesInfo(
        "openbmb/MiniCPM-Llama3-V-2_5",
        extras={
            "2.6": "openbmb/MiniCPM-V-2_6",
            "4.0": "openbmb/MiniCPM-V-4",
            "4.5": "openbmb/MiniCPM-V-4_5",
        },
        trust_remote_code=True,
        max_transformers_version="4.57",
        transformers_version_reason={
            "hf": (
                "MiniCPMV.__init__ does not call self.post_init(), so "
                "`all_tied_weights_keys` is never set; Transformers v5 requires "
                "this attribute in _move_missing_keys_from_meta_to_device."
            )
        },
    ),
    "MiniCPMV4_6ForConditionalGeneration": _HfExamplesInfo(
        "openbmb/MiniCPM-V-4_6",
    ),
    "MiniCPMV4_7ForConditionalGeneration": _HfExamplesInfo(
        "openbmb/MiniCPM-V-4_7",
        min_transformers_version="5.18.0",
        is_available_online=False,
    ),
    "MiniMaxM3SparseForConditionalGeneration": _HfExamplesInfo(
        "MiniMaxAI/MiniMax-M3",
        trust_remote_code=True,
        is_available_online=False,
    ),
    "Mistral3ForConditionalGeneration": _HfExamplesInfo(
        "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
        extras={"fp8": "nm-testing/Mistral-Small-3.1-24B-Instruct-2503-FP8-dynamic"},
    ),
    "MolmoForCausalLM": _HfExamplesInfo(
        "allenai/Molmo-7B-D-0924",
        max_transformers_version="4.48",
        transformers_version_reason={
            "vllm": "Incorrectly-detected `tensorflow` import from processor."
        },
        extras={"olmo": "allenai/Molmo-7B-O-0924"},
        trust_remote_code=True,
    ),
    "Moondream3ForCausalLM": _HfExamplesInfo(
        "moondream/moondream3-preview",
        tokenizer="moondream/starmie-v1",
        trust_remote_code=True,
    ),
    "MossAudioModel": _HfExamplesInfo(
        "OpenMOSS-Team/MOSS-Audio-4B-Instruct",
        extras={
            "4b-thinking": "OpenMOSS-Team/MOSS-Audio-4B-Thinking",
            "8b-instruct": "OpenMOSS-Team/MOSS-Audio-8B-Instruct",
            "8b-thinking": "OpenMOSS-Team/MOSS-Audio-8B-Thinking",
        },
        trust_remote_code=True,
    ),
    "MossTranscribeDiarizeForConditionalGeneration": _HfExamplesInfo(
        "OpenMOSS-Team/MOSS-Transcribe-Diarize",
        trust_remote_code=True,
        is_available_online=False,
    ),
    "HfMoondream": _HfExamplesInfo(
        "moondream/moondream3-preview",
        tokenizer="moondream/starmie-v1",
        trust_remote_code=True,
    ),
    "Molmo2ForConditionalGeneration": _HfExamplesInfo(
        "allenai/Molmo2-8B",
        extras={"olmo": "allenai/Molmo2-O-7B"},
        trust_remote_code=True,
        # required by current PrefixLM implementation
        max_num_batched_tokens=31872,
    ),
    "MuseGlimmerForConditionalGeneration": _HfExamplesInfo(
        "meta-models/Muse-Glimmer-30B",
    ),
    "MuseGlimmerForCausalLM": _HfExamplesInfo(
        "meta-models/Muse-Glimmer-30B",
    ),
    "MuseSparkForConditionalGeneration": _HfExamplesInfo(
        "meta-models/Muse-Spark-Open-816B-A42B-NVFP4",
        is_available_online=False,
    ),
    "NVLM_D": _HfExamplesInfo("nvidia/NVLM-D-72B", trust_remote_code=True),
    "Llama_Nemotron_Nano_VL": _HfExamplesInfo(
        "nvidia/Llama-3.1-Nemotron-Nano-VL-8B-V1",
        trust_remote_code=True,
    ),
    "NemotronH_Nano_VL_V2": _HfExamplesInfo(
        "nvidia/NVIDIA-Nemotron-Nano-12B-v2-VL-BF16",
        max_model_len=4096,
        # NemotronH layers are constructed via `hybrid_override_pattern`
        use_original_num_layers=True,
        hf_overrides={
            "text_config": {"num_hidden_layers": 2, "hybrid_override_pattern": "M*"},
        },
        trust_remote_code=True,
    ),
    "NemotronH_Nano_Omni_Reasoning_V3": _HfExamplesInfo(
        "nvidia/Nemotron-3-Nano-Omni-30B-A3B-Reasoning-BF16",
        max_model_len=4096,
        # NemotronH layers are constructed via `hybrid_override_pattern`
        use_original_num_layers=True,
        hf_overrides={
            "vision_config": PreTrainedConfig(
                args={
                    "min_num_patches": 1,
                    "max_num_patches": 12,
                    "model": "vit_huge_patch16_224",
                },
                video_temporal_patch_size=2,
                # TODO(nhaber): This is `true` in the official `config.json`,
                # but this causes a processor exception in the tests due to a known bug
                # with mixed-resolution video when `true`. To be resolved.
                video_maintain_aspect_ratio=False,
            ),
            "text_config": {"num_hidden_layers": 2, "hybrid_override_pattern": "M*"},
        },
        trust_remote_code=True,
    ),
    "NemotronH_Super_Omni_Reasoning_V3": _HfExamplesInfo(
        "nvidia/Nemotron-3-Nano-Omni-30B-A3B-Reasoning-BF16", is_available_online=False
    ),
    # TODO: Change repo id once pertinent archs are public.
    "NemotronH_Omni_Reasoning_V3": _HfExamplesInfo(
        "nvidia/Nemotron-3-Nano-Omni-30B-A3B-Reasoning-BF16", is_available_online=False
    ),
    "OpenCUAForConditionalGeneration": _HfExamplesInfo(
        "xlangai/OpenCUA-7B",
        trust_remote_code=True,
        revision="refs/pr/10",
        max_transformers_version="4.57",
        transformers_version_reason={
            "hf": "Remote modeling code is not compatible with Transformers v5."
        },
    ),
    "OpenPanguVLForConditionalGeneration": _HfExamplesInfo(
        "FreedomIntelligence/openPangu-VL-7B",
        trust_remote_code=True,
        max_model_len=4096,
        enforce_eager=True,
        max_transformers_version="4.57",
        transformers_version_reason={
            "vllm": (
                "OpenPanguVLVideoProcessorInitKwargs does not specify total=False, "
                "making all kwargs required. See https://huggingface.co/FreedomIntelligence/openPangu-VL-7B/discussions/2"
            )
        },
    ),
    "OpenVLAForActionPrediction": _HfExamplesInfo(
        "openvla/openvla-7b",
        trust_remote_code=True,
    ),
    "Ovis": _HfExamplesInfo(
        "AIDC-AI/Ovis2-1B",
        trust_remote_code=True,
        max_transformers_version="4.53",
        transformers_version_reason={"hf": "HF model is not compatible"},
        extras={
            "1.6-llama": "AIDC-AI/Ovis1.6-Llama3.2-3B",
            "1.6-gemma": "AIDC-AI/Ovis1.6-Gemma2-9B",
        },
    ),
    "Ovis2_5": _HfExamplesInfo(
        "AIDC-AI/Ovis2.5-2B",
        trust_remote_code=True,
        max_transformers_version="4.57",
        transformers_version_reason={
            "hf": "HF remote code reads `is_parallelizable`, which was removed "
            "in Transformers v5."
        },
    ),
    "Ovis2_6ForCausalLM": _HfExamplesInfo(
        "AIDC-AI/Ovis2.6-2B", is_available_online=False, trust_remote_code=True
    ),
    "Ovis2_6_MoeForCausalLM": _HfExamplesInfo(
        "AIDC-AI/Ovis2.6-30B-A3B", trust_remote_code=True
    ),
    "PaddleOCRVLForConditionalGeneration": _HfExamplesInfo(
        "PaddlePaddle/PaddleOCR-VL",
        trust_remote_code=True,
    ),
    "PaliGemmaForConditionalGeneration": _HfExamplesInfo(
        "google/paligemma-3b-mix-224",
        extras={"v2": "google/paligemma2-3b-ft-docci-448"},
    ),
    "Phi3VForCausalLM": _HfExamplesInfo(
        "microsoft/Phi-3-vision-128k-instruct",
        trust_remote_code=True,
        max_transformers_version="4.48",
        transformers_version_reason={
            "hf": "HF model use deprecated imports which have been removed."
        },  # noqa: E501
        extras={"phi3.5": "microsoft/Phi-3.5-vision-instruct"},
    ),
    "Phi4ForCausalLMV": _HfExamplesInfo(
        "microsoft/Phi-4-reasoning-vision-15B",
        trust_remote_code=True,
        revision="refs/pr/8",
    ),
    "Phi4MMForCausalLM": _HfExamplesInfo(
        "microsoft/Phi-4-multimodal-instruct", trust_remote_code=True
    ),
    "PixtralForConditionalGeneration": _HfExamplesInfo(
        "mistralai/Pixtral-12B-2409",
        extras={
            "mistral-large-3": "mistralai/Mistral-Large-3-675B-Instruct-2512-NVFP4",
            "ministral-3": "mistralai/Ministral-3-3B-Instruct-2512",
        },
        tokenizer_mode="mistral",
    ),
    "QianfanOCRForConditionalGeneration": _HfExamplesInfo(
        "baidu/Qianfan-OCR",
    ),
    "Qwen2AudioForConditionalGeneration": _HfExamplesInfo(
        "Qwen/Qwen2-Audio-7B-Instruct"
    ),
    "Qwen2VLForConditionalGeneration": _HfExamplesInfo("Qwen/Qwen2-VL-2B-Instruct"),
    "Qwen2_5_VLForConditionalGeneration": _HfExamplesInfo(
        "Qwen/Qwen2.5-VL-3B-Instruct",
        max_model_len=4096,
    ),
    "Qwen2_5OmniModel": _HfExamplesInfo("Qwen/Qwen2.5-Omni-3B"),
    "Qwen2_5OmniForConditionalGeneration": _HfExamplesInfo("Qwen/Qwen2.5-Omni-7B-AWQ"),
    "Qwen3VLForConditionalGeneration": _HfExamplesInfo(
        "Qwen/Qwen3-VL-4B-Instruct",
        max_model_len=4096,
    ),
    "Qwen3VLMoeForConditionalGeneration": _HfExamplesInfo(
        "Qwen/Qwen3-VL-30B-A3B-Instruct",
        max_model_len=4096,
    ),
    "Qwen3_5ForConditionalGeneration": _HfExamplesInfo(
        "Qwen/Qwen3.5-0.8B",
        extras={"4b": "Qwen/Qwen3.5-4B"},
        max_model_len=4096,
    ),
    "Qwen3_5MoeForConditionalGeneration": _HfExamplesInfo(
        "Qwen/Qwen3.5-35B-A3B",
        max_model_len=4096,
    ),
    "Qwen4ExpForConditionalGeneration": _HfExamplesInfo(
        "",
        is_available_online=False,
    ),
    "Qwen3OmniMoeForConditionalGeneration": _HfExamplesInfo(
        "Qwen/Qwen3-Omni-30B-A3B-Instruct",
        max_model_len=4096,
    ),
    "ClefOmniForJointSchema": _HfExamplesInfo(
        "Cloudflare/clef-omni",
        max_model_len=4096,
    ),
    "Qwen3ASRForConditionalGeneration": _HfExamplesInfo(
        "Qwen/Qwen3-ASR-0.6B",
        max_model_len=4096,
    ),
    "Qwen3ASRRealtimeGeneration": _HfExamplesInfo(
        "Qwen/Qwen3-ASR-0.6B",
        max_model_len=4096,
        hf_overrides={"architectures": ["Qwen3ASRRealtimeGeneration"]},
    ),
    "Qwen3ASRForcedAlignerForTokenClassification": _HfExamplesInfo(
        "Qwen/Qwen3-ForcedAligner-0.6B",
        max_model_len=4096,
        hf_overrides={"architectures": ["Qwen3ASRForcedAlignerForTokenClassification"]},
    ),
    "RadioMBartPrefixForCausalLM": _HfExamplesInfo(
        "nvidia/Nemotron-3.5-Parse",
        trust_remote_code=True,
    ),
    "RForConditionalGeneration": _HfExamplesInfo("YannQi/R-4B", trust_remote_code=True),
    "SkyworkR1VChatModel": _HfExamplesInfo(
        "Skywork/Skywork-R1V-38B",
        trust_remote_code=True,
        max_transformers_version="4.57",
        transformers_version_reason={
            "hf": (
                "SkyworkChatModel.__init__ does not call self.post_init(), so "
                "`all_tied_weights_keys` is never set; Transformers v5 requires "
                "this attribute in _move_missing_keys_from_meta_to_device."
            )
        },
    ),
    "SmolVLMForConditionalGeneration": _HfExamplesInfo(
        "HuggingFaceTB/SmolVLM2-2.2B-Instruct",
        max_transformers_version="5.19",
        transformers_version_reason={
            "hf": "HF SmolVLM inputs_merger splits image features by patch_size in "
            "5.20, fixed by https://github.com/huggingface/transformers/pull/49725"
        },
    ),
    "Step3VLForConditionalGeneration": _HfExamplesInfo(
        "stepfun-ai/step3",
        trust_remote_code=True,
        max_transformers_version="5.3",
        transformers_version_reason={
            "hf": (
                "Transformers v5.4 removed the ignore_keys param from "
                "validate_rope(); vLLM has vendored the config and is unaffected"
            )
        },
    ),
    "StepVLForConditionalGeneration": _HfExamplesInfo(
        "stepfun-ai/Step3-VL-10B", trust_remote_code=True
    ),
    "Step3p7ForConditionalGeneration": _HfExamplesInfo(
        "stepfun-ai/Step-3.7-Flash",
        trust_remote_code=True,
        use_original_num_layers=True,
        # The MoE config lives in the nested ``text_config``, so the overrides
        # must be nested too. Use 4 layers to initialize at least one MoE layer
        # and shrink ``moe_num_experts`` (a non-standard key not handled by
        # ``dummy_hf_overrides``) to avoid OOM during init.
        hf_overrides={"text_config": {"num_hidden_layers": 4, "moe_num_experts": 8}},
    ),
    "Step5ForConditionalGeneration": _HfExamplesInfo(
        "stepfun-ai/Step-5-Preview",
        use_original_num_layers=True,
        max_model_len=4096,
        # Retain three SWA dense layers and the first DSA MoE layer.
        hf_overrides={
            "text_config": {
                "num_hidden_layers": 4,
                "moe_num_experts": 8,
                "moe_layer_list": [3],
                "moe_layers_enum": "3",
            },
        },
    ),
    "UltravoxModel": _HfExamplesInfo(
        "fixie-ai/ultravox-v0_5-llama-3_2-1b",
        trust_remote_code=True,
    ),
    "VibeVoiceAsrForConditionalGeneration": _HfExamplesInfo(
        "microsoft/VibeVoice-ASR-HF",
    ),
    "VoxtralForConditionalGeneration": _HfExamplesInfo(
        "mistralai/Voxtral-Mini-3B-2507",
        tokenizer_mode="mistral",
    ),
    "VoxtralRealtimeGeneration": _HfExamplesInfo(
        "mistralai/Voxtral-Mini-4B-Realtime-2602",
        enforce_eager=True,
        tokenizer_mode="mistral",
    ),
    # [Encoder-decoder]
    "CohereAsrForConditionalGeneration": _HfExamplesInfo(
        "CohereLabs/cohere-transcribe-03-2026", trust_remote_code=True
    ),
    "NemotronParseForConditionalGeneration": _HfExamplesInfo(
        "nvidia/NVIDIA-Nemotron-Parse-v1.2",
        extras={"2.0": "nvidia/NVIDIA-Nemotron-Parse-2.0"},
        trust_remote_code=True,
    ),
    "WhisperForConditionalGeneration": _HfExamplesInfo(
        "openai/whisper-large-v3-turbo",
        extras={"v3": "openai/whisper-large-v3"},
    ),
    # [Cross-encoder]
    "JinaVLForRanking": _HfExamplesInfo("jinaai/jina-reranker-m0"),
}


_SPECULATIVE_DECODING_EXAMPLE_MODELS = {
    # [DFlash]
    "DFlashDraftModel": _HfExamplesInfo(
        "Qwen/Qwen3-4B",
        speculative_model="z-lab/Qwen3-4B-DFlash-b16",
        use_original_num_layers=True,  # Need all layers since DFlash has >1 layer,
        max_model_len=8192,  # Reduce max len to ensure test runs in low-VRAM CI env
        max_num_seqs=32,
    ),
    # LiLiCorr checkpoints are not published yet.
    "LiLiCorrDraftModel": _HfExamplesInfo(
        "Qwen/Qwen3-8B",
        speculative_model="LiLiCorrDraftModel",
        is_available_online=False,
        use_original_num_layers=True,
    ),
    "DFlash2DraftModel": _HfExamplesInfo(
        "Qwen/Qwen3.8-27B",
        speculative_model="z-lab/Qwen3.8-27B-DFlash2",
        is_available_online=False,
        use_original_num_layers=True,
        max_model_len=8192,
        max_num_seqs=32,
    ),
    "DFlash2BeamDraftModel": _HfExamplesInfo(
        "reflection/Beam-1.0-501B-A23B-NVFP4",
        speculative_model="reflection/Beam-1.0-501B-A23B-DFlash2",
        is_available_online=False,
        use_original_num_layers=True,
    ),
    "DFlashLagunaForCausalLM": _HfExamplesInfo(
        "poolside/Laguna-XS-2.1-NVFP4",
        speculative_model="poolside/Laguna-XS-2.1-DFlash-NVFP4",
        use_original_num_layers=True,
        max_model_len=8192,  # Reduce max len to ensure test runs in low-VRAM CI env
        max_num_seqs=32,
    ),
    "DFlashQwen3NextDraftModel": _HfExamplesInfo(
        "Qwen/Qwen3-Coder-Next",
        speculative_model="z-lab/Qwen3-Coder-Next-DFlash",
        use_original_num_layers=True,  # DFlash requires all layers
        max_model_len=8192,  # Reduce for CI
        max_num_seqs=32,
    ),
    "MuseGlimmerAssistantModel": _HfExamplesInfo(
        "meta-models/Muse-Glimmer-30B",
        speculative_model="meta-models/Muse-Glimmer-30B-assistant",
        max_model_len=8192,  # Reduce max len to ensure test runs in low-VRAM CI env
        max_num_seqs=32,
    ),
    "DFlashMuseGlimmerAssistantModel": _HfExamplesInfo(
        "meta-models/Muse-Glimmer-30B",
        speculative_model="meta-models/Muse-Glimmer-30B-assistant",
        max_model_len=8192,  # Reduce max len to ensure test runs in low-VRAM CI env
        max_num_seqs=32,
    ),
    # [XPress]
    "Qwen3XPressModel": _HfExamplesInfo(
        "Qwen/Qwen3-8B",
        speculative_model="UIUC-SSAIL/Qwen3-8B-XPress-b16",
        use_original_num_layers=True,  # The refiner reads aux hidden states
        max_num_seqs=16,  # XPress sizes a [max_num_seqs * block, vocab] scratch
    ),
    "DFlashQwen3XPressModel": _HfExamplesInfo(
        "Qwen/Qwen3-8B",
        speculative_model="UIUC-SSAIL/Qwen3-8B-XPress-b16",
        use_original_num_layers=True,  # The refiner reads aux hidden states
        max_num_seqs=16,  # XPress sizes a [max_num_seqs * block, vocab] scratch
    ),
    # [DSpark]
    "DSparkDraftModel": _HfExamplesInfo(
        "deepseek-ai/DeepSeek-V4-Pro-DSpark",
        speculative_model="deepseek-ai/DeepSeek-V4-Pro-DSpark",  # draft in mtp.*
        is_available_online=False,
        use_original_num_layers=True,  # DSpark has >1 draft block
    ),
    "DSparkV41DraftModel": _HfExamplesInfo(
        "deepseek-ai/DeepSeek-V4.1-Flash",
        speculative_model="deepseek-ai/DeepSeek-V4.1-Flash",  # draft in mtp.*
        is_available_online=False,
        use_original_num_layers=True,  # DSpark has >1 draft block
    ),
    "K3DSparkModel": _HfExamplesInfo(
        "moonshotai/Kimi-K3",
        speculative_model="Inferact/Kimi-K3-DSpark",
        use_original_num_layers=True,  # DSpark has >1 draft block
        trust_remote_code=True,
        # FIXME: Investigate the NVML failure in CI.
        is_available_online=False,
    ),
    "MuseSparkDSparkModel": _HfExamplesInfo(
        "meta-models/Muse-Spark-Open-816B-A42B-NVFP4",
        speculative_model="Inferact/Muse-Spark-Open-DSpark",
        is_available_online=False,
    ),
    "Qwen3DSparkModel": _HfExamplesInfo(
        "Qwen/Qwen3-8B",
        speculative_model="deepseek-ai/dspark_qwen3_8b_block7",
        is_available_online=False,
        use_original_num_layers=True,  # DSpark backbone requires all layers
    ),
    "Qwen3OmniDSparkModel": _HfExamplesInfo(
        "Qwen/Qwen3-Omni-30B-A3B-Instruct",
        speculative_model="Qwen/Qwen3-Omni-30B-A3B-DSpark",
        is_available_online=False,
        use_original_num_layers=True,
    ),
    "Gemma4DSparkModel": _HfExamplesInfo(
        "google/gemma-4-12B-it",
        speculative_model="deepseek-ai/dspark_gemma4_12b_block7",
        is_available_online=False,
        use_original_num_layers=True,
    ),
    # [Eagle]
    "EagleCohereForCausalLM": _HfExamplesInfo(
        "/host/engines/cohere-moe",
        speculative_model="/host/engines/cohere-moe/eagle",
        tokenizer="/host/engines/cohere-moe",
        trust_remote_code=True,
        is_available_online=False,
    ),
    "EagleDeepSeekMTPModel": _HfExamplesInfo(
        "eagle618/deepseek-v3-random",
        speculative_model="eagle618/eagle-deepseek-v3-random",
        trust_remote_code=True,
    ),
    "EagleLlamaForCausalLM": _HfExamplesInfo(
        "meta-llama/Meta-Llama-3-8B-Instruct",
        trust_remote_code=True,
        speculative_model="yuhuili/EAGLE-LLaMA3-Instruct-8B",
        tokenizer="meta-llama/Meta-Llama-3-8B-Instruct",
    ),
    "Eagle3DeepseekV2ForCausalLM": _HfExamplesInfo(
        "moonshotai/Kimi-K2.5",
        trust_remote_code=True,
        speculative_model="AQ-MedAI/Kimi-K25-eagle3",
        tokenizer="moonshotai/Kimi-K2.5",
    ),
    "Eagle3DeepseekV3ForCausalLM": _HfExamplesInfo(
        "moonshotai/Kimi-K2.5",
        trust_remote_code=True,
        speculative_model="AQ-MedAI/Kimi-K25-eagle3",
        tokenizer="moonshotai/Kimi-K2.5",
    ),
    "Eagle3LlamaForCausalLM": _HfExamplesInfo(
        "meta-llama/Llama-3.1-8B-Instruct",
        trust_remote_code=True,
        speculative_model="yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
        tokenizer="meta-llama/Llama-3.1-8B-Instruct",
        use_original_num_layers=True,
        max_model_len=10240,
    ),
    "Eagle3MiniMaxM2ForCausalLM": _HfExamplesInfo(
        "MiniMaxAI/MiniMax-M2",
        trust_remote_code=True,
        speculative_model="yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
        tokenizer="MiniMaxAI/MiniMax-M2",
    ),
    "EagleMistralForCausalLM": _HfExamplesInfo(
        "mistralai/Mistral-Medium-3.5-128B",
        speculative_model="mistralai/Mistral-Medium-3.5-128B-EAGLE",
        is_available_online=False,
    ),
    "EagleMistralLarge3ForCausalLM": _HfExamplesInfo(
        "mistralai/Mistral-Large-3-675B-Instruct-2512",
        speculative_model="mistralai/Mistral-Large-3-675B-Instruct-2512-Eagle",
    ),
    "LlamaForCausalLMEagle3": _HfExamplesInfo(
        "Qwen/Qwen3-8B",
        trust_remote_code=True,
        speculative_model="AngelSlim/Qwen3-8B_eagle3",
        tokenizer="Qwen/Qwen3-8B",
        use_original_num_layers=True,
    ),
    "EagleLlama4ForCausalLM": _HfExamplesInfo(
        "morgendave/EAGLE-Llama-4-Scout-17B-16E-Instruct",
        trust_remote_code=True,
        speculative_model="morgendave/EAGLE-Llama-4-Scout-17B-16E-Instruct",
        tokenizer="meta-llama/Llama-4-Scout-17B-16E-Instruct",
    ),
    "EagleMiniCPMForCausalLM": _HfExamplesInfo(
        "openbmb/MiniCPM-2B-sft-bf16",
        trust_remote_code=True,
        speculative_model="openbmb/MiniCPM-2B-sft-bf16",
        speculative_method="eagle",
        tokenizer="openbmb/MiniCPM-2B-sft-bf16",
    ),
    "Eagle3Qwen2_5vlForCausalLM": _HfExamplesInfo(
        "Qwen/Qwen2.5-VL-7B-Instruct",
        speculative_model="Rayzl/qwen2.5-vl-7b-eagle3-sgl",
    ),
    "Eagle3Qwen3vlForCausalLM": _HfExamplesInfo(
        "Qwen/Qwen3-VL-8B-Instruct",
        speculative_model="taobao-mnn/Qwen3-VL-8B-Instruct-Eagle3",
    ),
    "Eagle3Qwen3ForCausalLM": _HfExamplesInfo(
        "Qwen/Qwen3-8B",
        trust_remote_code=True,
        speculative_model=(
            "inference-optimization/"
            "Qwen3-8B-from-Qwen3-8B_regen-speculators.eagle3-qwen3arch-ckpt1"
        ),
        tokenizer="Qwen/Qwen3-8B",
        use_original_num_layers=True,
    ),
    # [PEagle]
    "PEagleDraftModel": _HfExamplesInfo(
        "Qwen/Qwen3-8B",
        trust_remote_code=True,
        speculative_model="nm-testing/qwen3-8b-peagle-speculators",
        tokenizer="Qwen/Qwen3-8B",
        use_original_num_layers=True,
    ),
    "PeagleLlamaForCausalLM": _HfExamplesInfo(
        "Qwen/Qwen3-8B",
        trust_remote_code=True,
        speculative_model="nm-testing/qwen3-8b-peagle-speculators",
        tokenizer="Qwen/Qwen3-8B",
        use_original_num_layers=True,
    ),
    "PeagleQwen3ForCausalLM": _HfExamplesInfo(
        "Qwen/Qwen3-8B",
        trust_remote_code=True,
        speculative_model=(
            "inference-optimization/Qwen3-8B-speculators.peagle-qwen3arch-ckpt4"
        ),
        tokenizer="Qwen/Qwen3-8B",
        use_original_num_layers=True,
    ),
    # [MTP]
    "BailingMoeV25MTPModel": _HfExamplesInfo(
        "inclusionAI/Ring-2.5-1T",
        speculative_model="inclusionAI/Ring-2.5-1T",
        trust_remote_code=True,
        is_available_online=False,
    ),
    "BailingMoeV3MTPModel": _HfExamplesInfo(
        "inclusionAI/Ling-3.0-flash",
        speculative_model="inclusionAI/Ling-3.0-flash",
        trust_remote_code=True,
    ),
    "DeepSeekMTPModel": _HfExamplesInfo(
        "luccafong/deepseek_mtp_main_random",
        speculative_model="luccafong/deepseek_mtp_draft_random",
        trust_remote_code=True,
    ),
    "DeepseekV32MTPModel": _HfExamplesInfo(
        "nvidia/DeepSeek-V3.2-NVFP4",
        speculative_model="nvidia/DeepSeek-V3.2-NVFP4",
        is_available_online=False,
    ),
    "DeepSeekV4MTPModel": _HfExamplesInfo(
        "deepseek-ai/DeepSeek-V4-Flash",
        speculative_model="deepseek-ai/DeepSeek-V4-Flash",
        trust_remote_code=True,
        is_available_online=False,
    ),
    "Dots3NoteMTPModel": _HfExamplesInfo(
        "dots-studio/dots3-note-prev",
        speculative_model="dots-studio/dots3-note-prev",
        is_available_online=False,
    ),
    "Gemma4MTPModel": _HfExamplesInfo(
        "google/gemma-4-E4B-it",
        speculative_model="google/gemma-4-E4B-it-assistant",
        trust_remote_code=True,
    ),
    "ErnieMTPModel": _HfExamplesInfo(
        "baidu/ERNIE-4.5-21B-A3B-PT",
        trust_remote_code=True,
        speculative_model="baidu/ERNIE-4.5-21B-A3B-PT",
    ),
    "ExaoneMoeMTP": _HfExamplesInfo(
        "LGAI-EXAONE/K-EXAONE-236B-A23B",
        speculative_model="LGAI-EXAONE/K-EXAONE-236B-A23B",
        enable_prefix_caching=False,
    ),
    "Exaone4_5_MTP": _HfExamplesInfo(
        "LGAI-EXAONE/EXAONE-4.5-33B",
        speculative_model="LGAI-EXAONE/EXAONE-4.5-33B",
    ),
    "ExtractHiddenStatesModel": _HfExamplesInfo(
        "Qwen/Qwen3-8B",
        speculative_method="extract_hidden_states",
    ),
    "Glm4MoeMTPModel": _HfExamplesInfo(
        "zai-org/GLM-4.5",
        speculative_model="zai-org/GLM-4.5",
    ),
    "Glm4MoeLiteMTPModel": _HfExamplesInfo(
        "zai-org/GLM-4.7-Flash",
        speculative_model="zai-org/GLM-4.7-Flash",
    ),
    "GlmOcrMTPModel": _HfExamplesInfo(
        "zai-org/GLM-OCR",
        speculative_model="zai-org/GLM-OCR",
    ),
    "Glm5NextMTPModel": _HfExamplesInfo(
        "zai-org/GLM-5.3-Flash",
        speculative_model="zai-org/GLM-5.3-Flash",
    ),
    "HYV3MTPModel": _HfExamplesInfo(
        "tencent/Hy3-preview",
        speculative_model="tencent/Hy3-preview",
    ),
    # Internal checkpoint, not publicly available yet.
    "HYV4MTPModel": _HfExamplesInfo(
        "tencent/Hy4-preview",
        speculative_model="tencent/Hy4-preview",
    ),
    "InklingMTPModel": _HfExamplesInfo(
        "thinkingmachines/Inkling-NVFP4",
        speculative_model="thinkingmachines/Inkling-NVFP4",
        tokenizer_mode="inkling",
        trust_remote_code=True,
        max_model_len=4096,
    ),
    "InternS2MobiusMTP": _HfExamplesInfo(
        "internlm/Intern-S2-Mobius",
        trust_remote_code=True,
        speculative_model="internlm/Intern-S2-Mobius",
        is_available_online=False,
    ),
    "KimiK3MTPModel": _HfExamplesInfo(
        "moonshotai/Kimi-K3",
        speculative_model="moonshotai/Kimi-K3",
        trust_remote_code=True,
        is_available_online=False,
    ),
    "LongCatFlashMTPModel": _HfExamplesInfo(
        "meituan-longcat/LongCat-Flash-Chat",
        speculative_model="meituan-longcat/LongCat-Flash-Chat",
    ),
    "MiMoMTPModel": _HfExamplesInfo(
        "XiaomiMiMo/MiMo-7B-RL",
        trust_remote_code=True,
        speculative_model="XiaomiMiMo/MiMo-7B-RL",
    ),
    "MiMoV2MTPModel": _HfExamplesInfo(
        "XiaomiMiMo/MiMo-V2.5-Pro",
        trust_remote_code=True,
        speculative_model="XiaomiMiMo/MiMo-V2.5-Pro",
        is_available_online=False,
    ),
    "MiMoV2OmniMTPModel": _HfExamplesInfo(
        "XiaomiMiMo/MiMo-V2.5-Omni",
        trust_remote_code=True,
        speculative_model="XiaomiMiMo/MiMo-V2.5-Omni",
        is_available_online=False,
    ),
    "MiniMaxM3MTP": _HfExamplesInfo(
        "MiniMaxAI/MiniMax-M3",
        trust_remote_code=True,
        is_available_online=False,
    ),
    "NemotronHMTPModel": _HfExamplesInfo(
        "nvidia/Nemotron-Super-Placeholder",
        speculative_model="nvidia/Nemotron-Super-Placeholder",
        is_available_online=False,
    ),
    "OpenPanguMTPModel": _HfExamplesInfo(
        "FreedomIntelligence/openPangu-Ultra-MoE-718B-V1.1",
        trust_remote_code=True,
        is_available_online=False,
    ),
    "ParseAuxMTPModel": _HfExamplesInfo(
        "nvidia/Nemotron-3.5-Parse",
        speculative_model="nvidia/Nemotron-3.5-Parse",
        speculative_method="mtp",
        trust_remote_code=True,
    ),
    "Qwen3NextMTP": _HfExamplesInfo("Qwen/Qwen3-Next-80B-A3B-Instruct"),
    "Qwen3_5MTP": _HfExamplesInfo(
        "Qwen/Qwen3.5-0.8B",
        speculative_model="Qwen/Qwen3.5-0.8B",
    ),
    "Qwen3_5MoeMTP": _HfExamplesInfo(
        "Qwen/Qwen3.5-35B-A3B",
        speculative_model="Qwen/Qwen3.5-35B-A3B",
    ),
    "Qwen4ExpMTP": _HfExamplesInfo("", is_available_online=False),
    "Step3p5MTP": _HfExamplesInfo(
        "stepfun-ai/Step-3.5-Flash",
        speculative_model="stepfun-ai/Step-3.5-Flash",
        use_original_num_layers=True,
        # Initialize at least one MoE layer
        hf_overrides={"num_hidden_layers": 4},
        is_available_online=False,
    ),
    "Step5MTP": _HfExamplesInfo(
        "stepfun-ai/Step-5-Preview",
        speculative_model="stepfun-ai/Step-5-Preview",
        speculative_method="mtp",
        is_available_online=False,
    ),
}

_TRANSFORMERS_BACKEND_MODELS = {
    "TransformersEmbeddingModel": _HfExamplesInfo("BAAI/bge-base-en-v1.5"),
    "TransformersForSequenceClassification": _HfExamplesInfo(
        "papluca/xlm-roberta-base-language-detection",
    ),
    "TransformersForCausalLM": _HfExamplesInfo(
        "hmellor/Ilama-3.2-1B", trust_remote_code=True
    ),
    "TransformersMultiModalForCausalLM": _HfExamplesInfo("BAAI/Emu3-Chat-hf"),
    "TransformersMoEForCausalLM": _HfExamplesInfo("allenai/OLMoE-1B-7B-0924"),
    "TransformersForMTP": _HfExamplesInfo(
        "zai-org/GLM-4.5",
        speculative_model="zai-org/GLM-4.5",
        speculative_method="mtp",
        # TODO: Use a dense model once one opts into the Transformers MTP standard
        is_available_online=False,
    ),
    "TransformersMoEForMTP": _HfExamplesInfo(
        "zai-org/GLM-4.5",
        speculative_model="zai-org/GLM-4.5",
        speculative_method="mtp",
    ),
    "TransformersMultiModalMoEForCausalLM": _HfExamplesInfo(
        "Qwen/Qwen3-VL-30B-A3B-Instruct"
    ),
    "TransformersMoEEmbeddingModel": _HfExamplesInfo("Qwen/Qwen3-30B-A3B"),
    "TransformersMoEForSequenceClassification": _HfExamplesInfo("Qwen/Qwen3-30B-A3B"),
    "TransformersMultiModalEmbeddingModel": _HfExamplesInfo("google/gemma-3-4b-it"),
    "TransformersMultiModalForSequenceClassification": _HfExamplesInfo(
        "google/gemma-3-4b-it"
    ),
}

_EXAMPLE_MODELS = {
    **_TEXT_GENERATION_EXAMPLE_MODELS,
    **_EMBEDDING_EXAMPLE_MODELS,
    **_LATE_INTERACTION_EXAMPLE_MODELS,
    **_REWARD_EXAMPLE_MODELS,
    **_TOKEN_CLASSIFICATION_EXAMPLE_MODELS,
    **_SEQUENCE_CLASSIFICATION_EXAMPLE_MODELS,
    **_MULTIMODAL_EXAMPLE_MODELS,
    **_SPECULATIVE_DECODING_EXAMPLE_MODELS,
    **_TRANSFORMERS_BACKEND_MODELS,
}


class HfExampleModels:
    def __init__(self, hf_models: Mapping[str, _HfExamplesInfo]) -> None:
        super().__init__()

        self.hf_models = hf_models

    def get_supported_archs(self) -> Set[str]:
        return self.hf_models.keys()

    def get_hf_info(self, model_arch: str) -> _HfExamplesInfo:
        try:
            return self.hf_models[model_arch]
        except KeyError:
            raise ValueError(
                f"No example model defined for {model_arch}; please update this file."
            ) from None

    def find_hf_info(self, model_id: str) -> _HfExamplesInfo:
        for info in self.hf_models.values():
            if info.default == model_id:
                return info

        # Fallback to extras
        for info in self.hf_models.values():
            if any(extra == model_id for extra in info.extras.values()):
                return info

        raise ValueError(
            f"No example model defined for {model_id}; please update this file."
        )


HF_EXAMPLE_MODELS = HfExampleModels(_EXAMPLE_MODELS)
AUTO_EXAMPLE_MODELS = HfExampleModels(_AUTOMATIC_CONVERTED_MODELS)
