"""Ray Serve on two nodes of this machine: a chat about an image, and replicas that come and go under load."""

from __future__ import annotations

import base64
import os
import threading
import time
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.links import clusters
from tests.links.clusters import ray
from tests.links.test_same_tokens import free_port
from trencadis.ray_serve import build

serve: Any = pytest.importorskip("ray.serve", reason="pip install 'trencadis[ray-serve]'")
pytestmark = pytest.mark.long

PATIENCE = 300.0


@pytest.fixture
def url() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.getcwd())
        made = clusters.cluster(2, 2)
        try:
            ray.init(address=made.address, log_to_driver=False)
            port = free_port()
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            yield f"http://127.0.0.1:{port}"
            serve.shutdown()
        finally:
            ray.shutdown()
            made.shutdown()


def deployed(replicas: int) -> None:
    options = {"num_replicas": replicas, "health_check_timeout_s": 120}
    serve.run(build({
        "device": "cpu", "threads": 1, "max_model_len": 512, "kv_cache_memory_bytes": "32MiB", "deployment": options,
    }))  # fmt: skip


def running() -> int:
    (app,) = serve.status().applications.values()
    return sum(app.deployments["trencadis"].replica_states.values())


def make_image() -> str:
    file = BytesIO()
    Image.new("RGB", (56, 56), (200, 30, 30)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def test_replicas_answer_about_images_and_lose_no_request_as_they_come_and_go(url: str) -> None:
    deployed(1)
    name = httpx.get(url + "/v1/models", timeout=60).json()["data"][0]["id"]
    content = [{"type": "image_url", "image_url": {"url": make_image()}}, {"type": "text", "text": "What is it?"}]
    body = {"model": name, "messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
    first = httpx.post(url + "/v1/chat/completions", json=body, timeout=60)
    assert first.status_code == 200
    wanted = first.json()["choices"][0]["message"]["content"]
    codes: list[int] = []
    stop = threading.Event()

    def ask() -> None:
        with httpx.Client(timeout=120) as client:
            while not stop.is_set():
                said = client.post(url + "/v1/chat/completions", json=body)
                same = said.status_code == 200 and said.json()["choices"][0]["message"]["content"] == wanted
                codes.append(200 if same else said.status_code if said.status_code != 200 else -1)

    clients = [threading.Thread(target=ask) for _ in range(3)]
    for client in clients:
        client.start()
    try:
        for count in (3, 1):
            deployed(count)
            end = time.monotonic() + PATIENCE
            while running() != count:
                assert time.monotonic() < end, serve.status()
                time.sleep(0.5)
    finally:
        stop.set()
        for client in clients:
            client.join()
    print(f"\n1 -> 3 -> 1 replicas: {len(codes)} requests, {sum(c != 200 for c in codes)} lost")
    assert len(codes) > 10 and set(codes) == {200}
