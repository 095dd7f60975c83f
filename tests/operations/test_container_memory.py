"""Memory of containers: limits of control groups, budgets that follow them, and which process the kernel ends first."""

from __future__ import annotations

from pathlib import Path

import pytest

from trencadis.core import host_memory
from trencadis.server.config.server_config import ServerConfig
from trencadis.server.routes.app_state import HttpSettings
from trencadis.server.tenants.server_admission_and_byte_budgets import AnswerBudget

MIB = 1 << 20


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host_memory, "ROOT", tmp_path)
    monkeypatch.setattr(host_memory, "SELF", tmp_path / "self")
    return tmp_path


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_a_container_of_either_version_has_its_own_limit(groups: Path) -> None:
    write(groups, self="0::/", memory__max=600 * MIB, memory__current=100 * MIB,
          memory__stat=f"inactive_file {10 * MIB}\nactive_file {20 * MIB}")  # fmt: skip
    assert host_memory.total_host() == 600 * MIB and host_memory.free_host() == 530 * MIB
    write(groups, memory__max="max")
    assert host_memory.total_host() > 600 * MIB
    write(groups / "memory", memory__limit_in_bytes=700 * MIB, memory__usage_in_bytes=200 * MIB,
          memory__stat=f"total_inactive_file {50 * MIB}")  # fmt: skip
    write(groups, self="4:memory:/\n0::/")
    assert host_memory.total_host() == 700 * MIB and host_memory.free_host() == 550 * MIB
    write(groups / "memory", memory__limit_in_bytes=(1 << 63) - 4096)
    assert host_memory.total_host() > 700 * MIB


def test_every_group_above_the_process_counts(groups: Path) -> None:
    """A unit of systemd inside a slice, on a machine without a limit."""
    write(groups, self="0::/a.slice/b.service")
    write(groups / "a.slice", memory__max=800 * MIB, memory__current=500 * MIB)
    write(groups / "a.slice/b.service", memory__max=900 * MIB, memory__current=100 * MIB)
    assert host_memory.total_host() == 800 * MIB and host_memory.free_host() == 300 * MIB
    write(groups, self="4:memory:/x/y\n2:cpu:/")
    write(groups / "memory/x", memory__limit_in_bytes=500 * MIB, memory__usage_in_bytes=1 * MIB)
    assert host_memory.total_host() == 500 * MIB
    (groups / "self").unlink()
    assert host_memory.total_host() > 900 * MIB


def test_budgets_follow_the_limit(groups: Path) -> None:
    large = HttpSettings(ServerConfig()).bounds
    write(groups, self="0::/", memory__max=600 * MIB, memory__current=100 * MIB)
    assert AnswerBudget().total == 64 * MIB and AnswerBudget(1 << 20).total == 50 * MIB
    small = HttpSettings(ServerConfig()).bounds
    assert small.pixels * 6 <= 200 * MIB and small.body_bytes == 50 * MIB
    assert large.pixels >= small.pixels and large.body_bytes > small.body_bytes
    given = HttpSettings(ServerConfig(max_num_queued_pixels=1 << 30)).bounds
    assert given.pixels == 1 << 30, "a flag of the operator holds"


def test_a_process_volunteers_and_never_takes_it_back(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = groups / "oom_score_adj"
    monkeypatch.setattr(host_memory, "OOM_SCORE", written)
    for before, score, after in ((0, 500, "500"), (900, 500, "900"), (-100, 250, "250")):
        written.write_text(f"{before}\n")
        host_memory.volunteer_for_oom_kill(score)
        assert written.read_text() == after
    written.unlink()
    host_memory.volunteer_for_oom_kill(5)
    assert not written.exists()
