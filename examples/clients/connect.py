"""What every example needs: the server's address, the model's name, an image, a tool."""

from __future__ import annotations

import argparse
import base64
import json
import os
import urllib.request
from pathlib import Path

IMAGE = Path(__file__).resolve().parents[2] / "assets" / "demo_picture.png"
"""A red circle, a blue square and others; any image does."""


def options() -> argparse.Namespace:
    """The command line: ``base_url`` (with /v1), ``server`` (without), ``model``, ``key``."""
    parser = argparse.ArgumentParser()
    address = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
    parser.add_argument("base_url", nargs="?", default=address, help="of the server, with /v1 (OPENAI_BASE_URL)")
    parser.add_argument("--model", help="default: the first that the server names")
    parser.add_argument("--key", default=os.environ.get("OPENAI_API_KEY", "none"))
    found = parser.parse_args()
    found.base_url = found.base_url.rstrip("/")
    found.server = found.base_url.removesuffix("/v1")
    found.model = found.model or first_model(found.base_url, found.key)
    return found


def first_model(base_url: str, key: str) -> str:
    """The name that a server lists first."""
    request = urllib.request.Request(f"{base_url}/models", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(json.load(answer)["data"][0]["id"])


def image_base64() -> str:
    """The image's bytes in base64."""
    return base64.b64encode(IMAGE.read_bytes()).decode()


def image_url() -> str:
    """The image as a data URL."""
    return f"data:image/png;base64,{image_base64()}"


def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: its name.
    """
    return f"21 degrees and clear in {city}"
