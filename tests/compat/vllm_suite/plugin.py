"""A plugin of pytest for the process that runs vLLM's tests: ``-p vllm_suite.plugin``."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from . import hf_models, media, remote_server, stub_package

REASONS: dict[str, dict[str, str]] = tomllib.loads((Path(__file__).parent / "reasons.toml").read_text())


ASSETS = media.LocalAssetServer()
"""Serves images and videos while the tests run."""


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Puts the shim in the place of vLLM and of the tests' own helpers, before any file of theirs is imported."""
    stub_package.REAL["vllm.transformers_utils.repo_utils"] = {"hf_api": remote_server.HubFiles}
    stub_package.REAL["vllm.assets.base"] = {"VLLM_S3_BUCKET_URL": ASSETS.url}
    stub_package.REAL["tests.v1.utils"] = {"check_request_balancing": check_request_balancing}
    stub_package.REAL["tests.conftest"] = {"HfRunner": hf_models.HfRunner, "LocalAssetServer": media.LocalAssetServer}
    stub_package.install()
    sys.path.insert(0, str(Path(os.environ["VLLM_SUITE"])))
    tests = importlib.import_module("tests")
    for name, module in (("utils", remote_server), ("conftest", _make_module("tests.conftest"))):
        sys.modules[f"tests.{name}"] = module
        setattr(tests, name, module)
    for name in ("models.registry", "models.language.pooling_mteb_test", "v1", "v1.utils",
                 "models.language.pooling_mteb_test.mteb_embed_utils",
                 "models.language.pooling_mteb_test.mteb_score_utils"):  # fmt: skip
        sys.modules[f"tests.{name}"] = _make_module(f"tests.{name}")
    _use_checkpoints()


def pytest_configure(config: pytest.Config) -> None:
    """Declares the marks of vLLM's tests."""
    for mark in ("slow_test", "skip_global_cleanup", "core_model", "hybrid_model", "cpu_model", "cpu_test", "split",
                 "distributed", "optional"):  # fmt: skip
        config.addinivalue_line("markers", mark)


def check_request_balancing(server: remote_server.RemoteOpenAIServer, dp_size: int) -> None:
    """Skips a test of several engines, which runs with DP_SIZE in the environment alone."""
    if dp_size > 1:
        pytest.skip("compares the engines' counts of requests")


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


@pytest.fixture(scope="session")
def local_asset_server() -> Iterator[media.LocalAssetServer]:
    """Images by HTTP."""
    yield ASSETS


@pytest.fixture
def image_url(request: pytest.FixtureRequest, local_asset_server: media.LocalAssetServer) -> str:
    """The address of the image that a test names."""
    return local_asset_server.url_for(request.param)


@pytest.fixture
def image_urls(request: pytest.FixtureRequest, local_asset_server: media.LocalAssetServer) -> list[str]:
    """The addresses of the images that a test names."""
    return [local_asset_server.url_for(name) for name in request.param]


@pytest.fixture(scope="session")
def hf_runner() -> type[hf_models.HfRunner]:
    """A model of transformers with the weights that the server has."""
    return hf_models.HfRunner
