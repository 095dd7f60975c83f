"""Where ranks go on a Ray cluster, and what is said where they cannot; Ray itself is not needed here."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.executor import ray_access_and_node_placement
from trencadis.core.executor.engine_process_launcher import make_child_environment
from trencadis.core.executor.ray_access_and_node_placement import ClusterAccess, ClusterNode, assign_nodes, connect
from trencadis.core.links.rank_placement import RAY, Topology, topology


def nodes(*free: int) -> list[ClusterNode]:
    return [ClusterNode(chr(97 + i), f"10.0.0.{i}", max(count, 2), count, not i) for i, count in enumerate(free)]


def names(found: Sequence[ClusterNode]) -> str:
    return "".join(node.id for node in found)


def test_groups_stay_on_a_node_and_the_first_is_here() -> None:
    assert names(assign_nodes(nodes(2), 1, 2, "HPU", False)) == "aa"
    assert names(assign_nodes(nodes(8, 8), 2, 8, "HPU", False)) == "a" * 8 + "b" * 8
    assert names(assign_nodes(nodes(2, 2, 4), 3, 2, "HPU", False)) == "aabbcc", "stages in the order of the nodes"
    assert names(assign_nodes(nodes(3, 2), 2, 2, "HPU", False)) == "aabb", "a card stays free where a group has no room"
    assert names(assign_nodes(nodes(1, 3), 1, 3, "HPU", True)) == "abb"


@pytest.mark.parametrize(
    ("free", "shape", "words"),
    [
        ((2, 1), (1, 4), r"4 ranks need 4 HPU, and the Ray cluster has 3 free of 4 \(10\.0\.0\.0 2 free of 2,"),
        ((3, 1), (1, 4), r"4 of them on one node .* the nodes have: 10\.0\.0\.0 3 free.*--allow-tp-over-nodes"),
        ((1, 4), (1, 2), r"2 of them on one node .*10\.0\.0\.1 4 free"),
        ((0, 4), (1, 2), r"the server's own node, and it has none free .*10\.0\.0\.1 4 free of 4.*start the server"),
    ],
)  # fmt: skip
def test_what_cannot_be_placed_is_refused_with_both_counts(free: Any, shape: Any, words: str) -> None:
    with pytest.raises(StartupError, match=words):
        assign_nodes(nodes(*free), shape[0], shape[1], "HPU", False)


def test_without_ray_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__
    monkeypatch.setitem(sys.modules, "ray", None)
    assert builtins.__import__ is real
    with pytest.raises(StartupError, match=r"needs Ray, of the cluster's version: pip install 'trencadis\[ray\]'"):
        connect({})


def test_a_cluster_that_does_not_answer_is_not_waited_for() -> None:
    with pytest.raises(StartupError, match=r"no Ray cluster answers at 127\.0\.0\.1:9 .*ray start --head"):
        ray_access_and_node_placement.check_reachable("127.0.0.1:9")
    ray_access_and_node_placement.check_reachable("auto")


@pytest.mark.parametrize("address", ["head", "10.0.0.1", "10.0.0.1:", ":6379", "ray://10.0.0.1:10001", "10.0.0.1:x"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(StartupError, match=r"^RAY_ADDRESS=.* is no host:port of a cluster's head, such as [^\n]*$"):
        ray_access_and_node_placement.check_reachable(address)


def test_a_public_cluster_asks_for_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reaches the ports of one that does not runs code on its nodes, whatever this process would show."""
    open_to_all: list[str] = []
    monkeypatch.setattr(ray_access_and_node_placement, "accepts_any_client", lambda address: address in open_to_all)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    public = ["93.184.216.34:6379", "[2606:2800:220:1::1]:6379"]
    inside = ["10.1.2.3:6379", "[::1]:6379", "localhost:6379", ""]
    for address in (*public, *inside):
        ray_access_and_node_placement.check_not_open(address)
    open_to_all += [*public, *inside]
    for address in inside:
        ray_access_and_node_placement.check_not_open(address)
    for address in public:
        with pytest.raises(StartupError, match=r"public address and asks for no token.*RAY_AUTH_MODE=token"):
            ray_access_and_node_placement.check_not_open(address)


def test_a_cluster_whose_answer_nobody_knows_counts_as_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "t")
    requested: list[Any] = []

    def ask(address: str, environ: Any) -> Any:
        requested.append(environ)
        return lambda: ClusterAccess(address, answers[len(requested) - 1])

    answers = [
        ray_access_and_node_placement.LET_IN,
        ray_access_and_node_placement.NO_TOKEN,
        ray_access_and_node_placement.UNKNOWN,
        ray_access_and_node_placement.REFUSED,
    ]
    monkeypatch.setattr(ray_access_and_node_placement, "probe_access", ask)
    assert [ray_access_and_node_placement.accepts_any_client("93.184.216.34:6379") for _ in answers] == [
        True,
        True,
        True,
        False,
    ]
    assert not any(name.startswith("RAY_AUTH") for environ in requested for name in environ)


@pytest.mark.parametrize(
    ("said", "shown", "words"),
    [
        (
            ray_access_and_node_placement.NO_TOKEN,
            {"RAY_AUTH_MODE": "token"},
            "RAY_AUTH_MODE=token and there is no token: set RAY_AUTH",
        ),
        (
            ray_access_and_node_placement.REFUSED,
            {"RAY_AUTH_MODE": "token"},
            "h:1 asks for another token than this process shows: set RAY",
        ),
        (
            ray_access_and_node_placement.REFUSED,
            {},
            "h:1 asks for a token, and this process shows none: set RAY_AUTH_MODE=token, and RAY_",
        ),
    ],
)
def test_who_shows_no_token_is_told_what_to_set(said: int, shown: dict[str, str], words: str) -> None:
    with pytest.raises(StartupError, match=words) as raised:
        ray_access_and_node_placement.check_token(ClusterAccess("h:1", said), shown)
    assert "\n" not in str(raised.value)
    ray_access_and_node_placement.check_token(ClusterAccess("h:1", ray_access_and_node_placement.LET_IN), shown)
    ray_access_and_node_placement.check_token(
        ClusterAccess("", ray_access_and_node_placement.UNKNOWN), shown
    )  # what Ray says of it is told


def test_the_engine_keeps_rays_token_and_no_other() -> None:
    environ = {"RAY_AUTH_TOKEN": "t", "OTHER_TOKEN": "o", "PATH": "/bin"}
    made = EngineConfig(device="cpu", tensor_parallel_size=2, distributed_executor_backend="ray", engine="test:make")
    assert topology(made, {}) == Topology(RAY, 2)
    found = make_child_environment(made, environ)
    assert found["RAY_AUTH_TOKEN"] == "t" and "OTHER_TOKEN" not in found
    assert "RAY_AUTH_TOKEN" not in make_child_environment(EngineConfig(device="cpu", engine="test:make"), environ)


def test_ray_is_imported_only_where_it_is_asked_for() -> None:
    assert "ray" not in sys.modules or sys.modules["ray"] is None
