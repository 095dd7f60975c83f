"""The server as an application of Ray Serve: flags, options, answers in pieces, when replicas come and go."""

from __future__ import annotations

import asyncio
import logging
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml

from tests.fakes.scripted_app import scripted_app
from tests.fakes.text_checkpoint import write_text_checkpoint
from trencadis.core.errors import StartupError
from trencadis.ray_serve import build
from trencadis.ray_serve.application import ROUTING_NOTE, ServedReplica
from trencadis.ray_serve.autoscaling_policy import DOWNSCALE_SECONDS, KV_USE, WAIT, WaitEstimator, scale
from trencadis.server.config.server_config import ServerConfig

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a stand-in for Ray Serve is told."""
    reported: dict[str, Any] = {}
    serve = ModuleType("ray.serve")

    def deployment(**options: Any) -> Any:
        reported.update(options)
        return lambda cls: SimpleNamespace(bind=lambda words: reported.update(words=words, cls=cls) or reported)

    serve.deployment = deployment  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.serve", serve)
    return reported


def test_flags_become_words_and_ranks_become_cards(made: dict[str, Any]) -> None:
    build({
        "model": "m", "device": "hpu", "tensor_parallel_size": 4, "enforce_eager": True, "threads": 1,
        "enable_prefix_caching": "false", "limit_mm_per_prompt": {"image": 2}, "deployment": {"num_replicas": 3},
    })  # fmt: skip
    assert made["words"] == [
        "--model", "m", "--device", "hpu", "--tensor-parallel-size", "4", "--enforce-eager", "--threads", "1",
        "--no-enable-prefix-caching", "--limit-mm-per-prompt", '{"image": 2}',
    ]  # fmt: skip
    assert made["ray_actor_options"] == {"num_cpus": 1, "resources": {"HPU": 4}}
    assert (made["num_replicas"], made["name"], made["cls"]) == (3, "trencadis", ServedReplica)
    build({"model": "m", "device": "cuda", "tensor-parallel-size": 2, "pipeline-parallel-size": 2})
    assert made["ray_actor_options"] == {"num_cpus": 1, "num_gpus": 4}


def test_one_line_says_that_ray_serve_knows_no_prefixes(made: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """It falls back to the shorter of two queues; with one replica there is nothing to choose."""
    caplog.set_level(logging.INFO, "trencadis.server")
    build({"model": "m", "device": "cpu"})
    assert not caplog.messages
    for options in ({"num_replicas": 2}, {"autoscaling_config": {"min_replicas": 1, "max_replicas": 3}}):
        caplog.clear()
        build({"model": "m", "device": "cpu", "deployment": options})
        assert (
            caplog.messages == [ROUTING_NOTE]
            and "the shorter queue of two at random" in ROUTING_NOTE
            and "\n" not in ROUTING_NOTE
        )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"modle": "m"}, "did you mean --model"),
        ({"distributed_executor_backend": "ray"}, "ranks in its own node"),
        ({"uds": "/tmp/x"}, "proxy has the port"),
    ],
)
def test_flags_that_do_not_fit_fail_the_build_and_not_a_replica(
    made: dict[str, Any], args: dict[str, Any], words: str
) -> None:
    with pytest.raises(StartupError, match=words):
        build({"device": "cpu", **args})


def test_the_manifest_of_kuberay_is_ours(made: dict[str, Any]) -> None:
    """What it imports, its flags, its policy; a token; and more patience than a replica that drains has."""
    spec = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "ray" / "rayservice.yaml").read_text())["spec"]
    (app,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    module, _, name = app["import_path"].partition(":")
    assert getattr(import_module(module), name) is build
    build(app["args"])
    module, _, name = made["autoscaling_config"]["policy"]["policy_function"].partition(":")
    assert getattr(import_module(module), name) is scale
    cluster = spec["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    pod = workers["template"]["spec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert pod["terminationGracePeriodSeconds"] > made["graceful_shutdown_timeout_s"] > ServerConfig().shutdown_timeout
    held = pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert int(held) == made["ray_actor_options"]["num_gpus"] and "/dev/shm" in str(
        pod["containers"][0]["volumeMounts"]
    )
    assert workers["maxReplicas"] >= made["autoscaling_config"]["max_replicas"]


def test_without_ray_serve_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    with pytest.raises(StartupError, match=r"pip install 'ray\[serve\]'"):
        build({})


def test_a_replica_passes_pieces_on_as_the_app_sends_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServedReplica, "__del__", lambda self: None)  # Ray Serve awaits it
    harness = scripted_app(write_text_checkpoint(tmp_path))
    replica = ServedReplica.__new__(ServedReplica)
    replica.app, replica._failed = harness.app(), ""
    replica.supervisor = harness.engine  # type: ignore[assignment]
    replica._drain_timeout = 1.0

    async def served(scope: Any, receive: Any, send: Any) -> None:
        from starlette.requests import Request

        answer = await replica(Request(scope, receive))
        await answer(scope, receive, send)

    async def body() -> None:
        transport = httpx.ASGITransport(served)
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
            assert (await client.get("/v1/models")).json()["object"] == "list"
            requested = {"model": "m", "prompt": "hello", "max_tokens": 3, "stream": True}
            streamed = await client.post("/v1/completions", json=requested)
            assert streamed.status_code == 200 and streamed.text.endswith("data: [DONE]\n\n")
            assert streamed.text.count("data: {") >= 3
            refused = await client.post("/v1/completions", json={"model": "m"})
            assert refused.status_code == 400

    asyncio.run(body())
    replica.check_health()
    harness.engine.failing = True
    with pytest.raises(RuntimeError, match="again and again"):
        replica.check_health()


def context(count: int, wait: float = 0.0, kv: float = 0.0, now: float = 1000.0, state: Any = None) -> Any:
    names = [f"r{i}" for i in range(count)]
    metrics = {WAIT: dict.fromkeys(names, wait), KV_USE: dict.fromkeys(names, kv)}
    return SimpleNamespace(
        current_time=now, current_num_replicas=count, capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=8, aggregated_metrics=metrics, policy_state=state,
    )  # fmt: skip


def test_replicas_come_with_waits_and_with_full_caches() -> None:
    assert scale(context(1, wait=0.9, kv=0.5))[0] == 1
    assert scale(context(2, wait=1.5))[0] == 3
    assert scale(context(2, kv=0.95))[0] == 3
    assert scale(context(3, wait=60.0))[0] == 6, "at most twice as many at a time"
    assert scale(context(7, wait=60.0))[0] == 8
    assert scale(SimpleNamespace(**{**vars(context(2)), "aggregated_metrics": None}))[0] == 2


def test_replicas_go_one_by_one_and_only_after_a_calm() -> None:
    found, state = scale(context(3, kv=0.1))
    assert found == 3
    found, state = scale(context(3, kv=0.1, now=1000 + DOWNSCALE_SECONDS - 1, state=state))
    assert found == 3
    found, again = scale(context(3, kv=0.1, now=1000 + DOWNSCALE_SECONDS, state=state))
    assert found == 2
    assert scale(context(2, kv=0.1, now=1001 + DOWNSCALE_SECONDS, state=again))[0] == 2
    assert scale(context(3, kv=0.6, now=1000 + DOWNSCALE_SECONDS, state=state)) == (3, {"calm_since": None})
    assert scale(context(2, kv=0.42, now=9000, state={"calm_since": 1.0}))[0] == 1, (
        "the other one has room for its share"
    )
    assert scale(context(1, now=9000, state={"calm_since": 1.0}))[0] == 1


def test_a_wait_is_predicted_from_who_waits_and_who_begins() -> None:
    gauge = WaitEstimator()
    assert gauge.estimate(0, 0, 1.0) == 0
    for second in range(2, 60):
        found = gauge.estimate(4 * second + 20, 20, float(second))
    assert found == pytest.approx(5.0, rel=0.05), "20 wait, and 4 begin a second"
    assert 0 < gauge.estimate(3, 3, 61.0) < 1, "an engine that was started again begins to count anew"
