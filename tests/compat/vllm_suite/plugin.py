"""A plugin of pytest for the process that runs vLLM's tests: ``-p vllm_suite.plugin``."""

from __future__ import annotations

import functools
import http.server
import importlib
import io
import os
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from . import remote_server, stub_package

REASONS: dict[str, dict[str, str]] = tomllib.loads((Path(__file__).parent / "reasons.toml").read_text())


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Puts the shim in the place of vLLM and of the tests' own helpers, before any file of theirs is imported."""
    stub_package.REAL["vllm.transformers_utils.repo_utils"] = {"hf_api": remote_server.HubFiles}
    stub_package.install()
    sys.path.insert(0, str(Path(os.environ["VLLM_SUITE"])))
    tests = importlib.import_module("tests")
    for name, module in (("utils", remote_server), ("conftest", _make_module("tests.conftest"))):
        sys.modules[f"tests.{name}"] = module
        setattr(tests, name, module)
    for name in ("models", "models.utils", "models.registry", "models.language", "models.language.pooling",
                 "models.language.pooling.embed_utils", "models.language.pooling_mteb_test",
                 "models.language.pooling_mteb_test.mteb_embed_utils", "v1", "v1.utils",
                 "models.language.pooling_mteb_test.mteb_score_utils"):  # fmt: skip
        sys.modules[f"tests.{name}"] = _make_module(f"tests.{name}")
    _use_checkpoints()


def pytest_configure(config: pytest.Config) -> None:
    """Declares the marks of vLLM's tests."""
    for mark in ("slow_test", "skip_global_cleanup", "core_model", "hybrid_model", "cpu_model", "cpu_test", "split",
                 "distributed", "optional"):  # fmt: skip
        config.addinivalue_line("markers", mark)


def _make_module(name: str) -> ModuleType:
    made = stub_package.StubFinder().create_module(importlib.machinery.ModuleSpec(name, None))
    made.__path__ = []
    return made


def _use_checkpoints() -> None:
    """Lets transformers read the checkpoint that stands for a model."""
    import transformers

    for kind in (transformers.AutoTokenizer, transformers.AutoConfig):
        load = kind.from_pretrained

        def read(name: str, *args: Any, _load: Any = load, **kwargs: Any) -> Any:
            return _load(remote_server.find_checkpoint(str(name)), *args, **kwargs)

        setattr(kind, "from_pretrained", staticmethod(functools.wraps(load)(read)))  # noqa: B010


def find_reason(nodeid: str) -> str:
    """Returns why a test is not run; empty: it is.

    A name of reasons.toml is a folder, a file without its ending, a function, or one of its cases.
    """
    nodeid = nodeid.replace(".py", "", 1)
    for kind, listed in REASONS.items():
        for name, why in listed.items():
            if nodeid == name or nodeid.startswith((f"{name}::", f"{name}[", f"{name}/")):
                return f"{kind}: {why}"
    return ""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files that no test of a server is in: they test vLLM's own code."""
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text(encoding="utf-8")
    fixtures = ("server", "client")
    reaches = "RemoteOpenAIServer" in text or any(f"conftest import {name}" in text for name in fixtures)
    return None if reaches or "sagemaker" in str(collection_path) else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what is listed."""
    for item in items:
        why = find_reason(item.nodeid)
        if why:
            item.add_marker(pytest.mark.skip(reason=why))


class _Images(http.server.BaseHTTPRequestHandler):
    """Serves an image of colours under any name."""

    def do_GET(self) -> None:
        from PIL import Image

        out = io.BytesIO()
        mode = "RGBA" if "RGBA" in self.path else "L" if "Grayscale" in self.path else "RGB"
        image = Image.effect_mandelbrot((128, 96), (-2, -1, 1, 1), 40).convert(mode)
        image.save(out, "JPEG" if self.path.endswith("jpg") else "PNG")
        self.send_response(200)
        self.send_header("Content-Length", str(len(out.getvalue())))
        self.end_headers()
        self.wfile.write(out.getvalue())

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""


class LocalAssetServer:
    """Images by HTTP on this machine, in place of those of the tests."""

    def __init__(self) -> None:
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Images)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def url_for(self, name: str) -> str:
        """The address of an image."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/{name}"

    def get_image_asset(self, name: str) -> Any:
        """An image."""
        import urllib.request

        from PIL import Image

        with urllib.request.urlopen(self.url_for(name)) as answer:
            return Image.open(io.BytesIO(answer.read()))

    def close(self) -> None:
        """Stops serving."""
        self._server.shutdown()


@pytest.fixture(scope="session")
def local_asset_server() -> Iterator[LocalAssetServer]:
    """Images by HTTP."""
    made = LocalAssetServer()
    yield made
    made.close()


@pytest.fixture
def image_url(request: pytest.FixtureRequest, local_asset_server: LocalAssetServer) -> str:
    """The address of the image that a test names."""
    return local_asset_server.url_for(request.param)


@pytest.fixture
def image_urls(request: pytest.FixtureRequest, local_asset_server: LocalAssetServer) -> list[str]:
    """The addresses of the images that a test names."""
    return [local_asset_server.url_for(name) for name in request.param]


@pytest.fixture(scope="session")
def hf_runner() -> None:
    """Theirs computes with a model of the hub."""
    pytest.skip("compares with weights that cannot be downloaded here")
