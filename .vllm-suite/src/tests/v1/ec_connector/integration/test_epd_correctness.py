# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""EPD Correctness Test.

Tests that EPD (Encoder-Prefill-Decode) disaggregation produces the same
outputs as a baseline single instance.

Usage:
    # Baseline mode (saves outputs):
    python test_epd_correctness.py \
        --service_url http://localhost:8000 \
        --model_name Qwen/Qwen2.5-VL-3B-Instruct \
        --mode baseline \
        --baseline_file .vllm_epd_baseline.txt

    # Disagg mode (compares outputs):
    python test_epd_correctness.py \
        --service_url http://localhost:8000 \
        --model_name Qwen/Qwen2.5-VL-3B-Instruct \
        --mode disagg \
        --baseline_file .vllm_epd_baseline.txt
"""

import argparse
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import openai
import requests

from vllm.assets.image import ImageAsset
from vllm.multimodal.utils import encode_image_url

if TYPE_CHECKING:
    from vllm.v1.worker.mm_encoder_model_runner import MMEncoderModelRunner


class EncoderGraphTestWorkerExtension:
    """Expose encoder replay evidence through the existing test RPC endpoint."""

    model_runner: "MMEncoderModelRunner"

    def encoder_graph_stats(self):
        from vllm.v1.worker.mm_encoder_model_runner import MMEncoderModelRunner

        runner = self.model_runner
        assert isinstance(runner, MMEncoderModelRunner)
        manager = runner.model_state.encoder_runner.cudagraph_manager
        if manager is None:
            return {"is_captured": False, "graph_hits": 0, "graph_misses": 0}
        return {"is_captured": manager.is_captured(), **manager.get_cumulative_stats()}


MAX_OUTPUT_LEN = 256

# Sample prompts with multimodal content
image_1 = ImageAsset("stop_sign").pil_image.resize((1280, 720))
image_2 = ImageAsset("cherry_blossom").pil_image.resize((1280, 720))

image_local_path = f"{os.path.dirname(os.path.abspath(__file__))}/hato.jpg"

SAMPLE_PROMPTS_MM: list[dict] = [
    {
        "messages": [
            {
                "role": "user",
                "content": [
                    {
                        "type": "image_url",
                        "image_url": {"url": encode_image_url(image_1)},
                    },
                    {"type": "text", "text": "What's in this image?"},
                ],
            }
        ],
        "description": "Single image query",
    },
    {
        "messages": [
            {
                "role": "user",
                "content": [
                    {
                        "type": "image_url",
                        "image_url": {"url": encode_image_url(image_2)},
                    },
                    {
                        "type": "image_url",
                        "image_url": {"url": f"file://{image_local_path}"},
                    },
                    {"type": "text", "text": "Describe these 2 images in detail."},
                ],
            }
        ],
        "description": "2 images with detailed query",
    },
]

# Text-only prompts for mixed testing
SAMPLE_PROMPTS_TEXT: list[dict] = [
    {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "description": "Simple text-only query",
    },
    {
        "messages": [
            {"role": "user", "content": "Explain quantum computing in simple terms."}
        ],
        "description": "Text-only explanation request",
    },
]


def check_vllm_server(url: str, timeout=5, retries=10) -> bool:
    """Check if the vLLM server is ready.

    Args:
        url: The URL to check (usually /health or /healthcheck endpoint)
        timeout: Timeout in seconds for each request
        retries: Number of retries if the server is not ready

    Returns:
        True if the server is ready, False otherwise

    """
    for attempt in range(retries):
        try:
            response = requests.get(url, timeout=timeout)
            if response.status_code == 200:
                print(f"Server is ready at {url}")
                return True
            else:
                print(
                    f"Attempt {attempt + 1}/{retries}: Server returned "
                    f"status code {response.status_code}"
                )
        except requests.exceptions.RequestException as e:
            print(f"Attempt {attempt + 1}/{retries}: Error connecting: {e}")
        time.sleep(2)  # Wait before retrying
    return False


def run_chat_completion(
    base_url: str,
    model_name: str,
    messages: list,
    max_tokens: int = MAX_OUTPUT_LEN,
) -> str:
    """Run a chat completion request.

    Args:
        base_url: Base URL of the vLLM server
        model_name: Name of the model
        messages: Messages for chat completion
        max_tokens: Maximum tokens to generate

    Returns:
        Generated text content

    """
    with openai.OpenAI(
        api_key="EMPTY", base_url=base_url, timeout=120, max_retries=0
    ) as client:
        completion = client.chat.completions.create(
            model=model_name,
            messages=messages,
            max_tokens=max_tokens,
            temperature=0.0,
            seed=42,
        )

    content = completion.choices[0].message.content
    assert content, "Expected a nonempty completion"
    return content


def main():
    """Main test function."""
    parser = argparse.ArgumentParser(
        description="EPD correctness test - compare disagg vs baseline"
    )

    parser.add_argument(
        "--service_url",
        type=str,
        required=True,
        help="The vLLM service URL (e.g., http://localhost:8000)",
    )

    parser.add_argument(
        "--model_name",
        type=str,
        required=True,
        help="Model name",
    )

    parser.add_argument(
        "--mode",
        type=str,
        default="baseline",
        choices=["baseline", "baseline_pd", "disagg"],
        help="Mode: baseline/baseline_pd (saves outputs) or disagg (compares outputs)",
    )

    parser.add_argument(
        "--baseline_file",
        type=str,
        default=".vllm_epd_baseline.txt",
        help="File to save/load baseline outputs",
    )

    parser.add_argument(
        "--use_mm_prompts",
        action="store_true",
        help="Use multimodal prompts (default: use text-only for quick testing)",
    )

    parser.add_argument(
        "--skip_two_image_prompt",
        action="store_true",
        help="Skip the two-image multimodal prompt",
    )

    parser.add_argument(
        "--mm_smoke_test",
        action="store_true",
        help="Use three short, fixed-answer image cases, including duplicate images",
    )
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=1)

    args = parser.parse_args()
    if args.concurrency < 1 or args.repeat < 1:
        parser.error("--concurrency and --repeat must be positive")
    if args.mm_smoke_test and (not args.use_mm_prompts or args.skip_two_image_prompt):
        parser.error("--mm_smoke_test requires all multimodal prompts")

    print(f"Service URL: {args.service_url}")
    print(f"Model: {args.model_name}")
    print(f"Mode: {args.mode}")
    print(f"Output file: {args.baseline_file}")
    print(f"Use MM prompts: {args.use_mm_prompts}")

    # Determine health check endpoint
    if args.mode == "baseline":
        health_check_url = f"{args.service_url}/health"
    elif args.mode == "baseline_pd":
        # Nixl toy proxy use /healthcheck
        health_check_url = f"{args.service_url}/healthcheck"
    else:
        # Disagg EPD proxy uses /health
        health_check_url = f"{args.service_url}/health"
        if not os.path.exists(args.baseline_file):
            raise ValueError(
                f"In disagg mode, the output file {args.baseline_file} from "
                "baseline does not exist. Run baseline mode first."
            )

    # Check if server is ready
    if not check_vllm_server(health_check_url):
        raise RuntimeError(f"vLLM server at {args.service_url} is not ready!")

    # Select prompts to use
    if args.use_mm_prompts:
        test_prompts = (
            SAMPLE_PROMPTS_MM[:1] if args.skip_two_image_prompt else SAMPLE_PROMPTS_MM
        )
        print("Using multimodal prompts")
    else:
        test_prompts = SAMPLE_PROMPTS_TEXT
        print("Using text-only prompts for quick testing")

    if args.mm_smoke_test:
        image = SAMPLE_PROMPTS_MM[0]["messages"][0]["content"][0]
        image_pair = SAMPLE_PROMPTS_MM[1]["messages"][0]["content"][:2]
        cases = [
            (
                "Single image",
                [image],
                "What word is on the red road sign? Reply with only that word "
                "in uppercase.",
                "STOP",
            ),
            (
                "Two different images",
                image_pair,
                "Do these pictures contain both flowers and birds? "
                "Reply with only YES or NO.",
                "YES",
            ),
            (
                "Same image twice",
                [image, image],
                "Read the red road sign in each image, in image order. Reply "
                "with only the two uppercase words separated by a comma and a space.",
                "STOP, STOP",
            ),
        ]
        test_prompts = [
            {
                "description": description,
                "expected": expected,
                "messages": [
                    {
                        "role": "user",
                        "content": [*images, {"type": "text", "text": question}],
                    }
                ],
            }
            for description, images, question, expected in cases
        ]

    # Run completions
    service_url = f"{args.service_url}/v1"
    output_strs = {}

    def complete(prompt_data):
        output = run_chat_completion(
            base_url=service_url,
            model_name=args.model_name,
            messages=prompt_data["messages"],
            max_tokens=16 if args.mm_smoke_test else MAX_OUTPUT_LEN,
        )
        if args.mm_smoke_test:
            output = output.strip()
            assert output == prompt_data["expected"], (
                f"{prompt_data['description']}: expected {prompt_data['expected']!r}, "
                f"got {output!r}"
            )
        return output

    # Each round includes concurrent requests sharing image hashes; later rounds
    # exercise reuse after previous requests have finished.
    with ThreadPoolExecutor(max_workers=args.concurrency) as executor:
        for repeat in range(args.repeat):
            outputs = executor.map(complete, test_prompts)
            for prompt_data, output_str in zip(test_prompts, outputs):
                key = prompt_data["description"]
                if args.repeat > 1:
                    key = f"{key} (round {repeat + 1})"
                output_strs[key] = output_str
                print(f"{key}: {output_str}")

    if args.mode in ("baseline", "baseline_pd"):
        # Baseline mode: Save outputs
        print(f"\nSaving baseline outputs to {args.baseline_file}")
        try:
            with open(args.baseline_file, "w") as json_file:
                json.dump(output_strs, json_file, indent=4)
            print("✅ Baseline outputs saved successfully")
        except OSError as e:
            print(f"Error writing to file: {e}")
            raise
    else:
        # Disagg mode: Load and compare outputs
        print(f"\nLoading baseline outputs from {args.baseline_file}")
        baseline_outputs = None
        try:
            with open(args.baseline_file) as json_file:
                baseline_outputs = json.load(json_file)
        except OSError as e:
            print(f"Error reading from file: {e}")
            raise

        # Verify outputs match
        print("\nComparing disagg outputs with baseline...")
        assert isinstance(baseline_outputs, dict), "Baseline outputs should be a dict"
        assert len(baseline_outputs) == len(output_strs), (
            f"Length mismatch: baseline has {len(baseline_outputs)}, "
            f"disagg has {len(output_strs)}"
        )

        all_match = True
        for key, baseline_output in baseline_outputs.items():
            assert key in output_strs, f"{key} not in disagg outputs"

            disagg_output = output_strs[key]
            if baseline_output == disagg_output:
                print(f"✅ {key}: MATCH")
            else:
                print(f"❌ {key}: MISMATCH")
                print(f"  Baseline: {baseline_output}")
                print(f"  Disagg:   {disagg_output}")
                all_match = False

        assert all_match, "❌❌Disagg outputs do not match baseline!❌❌"
        if all_match:
            print("\n✅ All outputs match! Test PASSED")


if __name__ == "__main__":
    main()
