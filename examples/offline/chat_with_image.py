"""An image and a question, by the bundled demo or the checkpoint that the command line names."""

from __future__ import annotations

import sys

from PIL import Image, ImageDraw

from trencadis import LLM, SamplingParams


def drawn() -> Image.Image:
    """An image to ask about."""
    image = Image.new("RGB", (300, 200), "white")
    ImageDraw.Draw(image).ellipse((90, 40, 210, 160), fill="red")
    return image


def main(model: str = "") -> str:
    """Prints the answer and returns it."""
    words = {"type": "text", "text": "What is in the picture?"}
    with LLM(model, max_model_len=1024) as llm:
        chat = [{"role": "user", "content": [{"type": "image", "image": drawn()}, words]}]
        (output,) = llm.chat(chat, SamplingParams(temperature=0, max_tokens=32))
    print(output.outputs[0].text)
    print(f"{output.num_image_tokens} of {len(output.prompt_token_ids)} prompt tokens are the image's")
    return output.outputs[0].text


if __name__ == "__main__":
    main(*sys.argv[1:])
