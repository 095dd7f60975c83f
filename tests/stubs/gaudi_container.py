"""A folder that looks like a Gaudi container: a torch of a release's version, a stub of its plug-in, and cards.

The torch is this machine's under another version: a start is what such a container shows, not what its torch computes.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
STUB = ROOT / "tests" / "stubs" / "habana_frameworks"

PUBLISHED = {
    "2.5.1a0+git6fc067b": "1.19.0.561",
    "2.6.0+hpu_1.20.0-543.git4952fce": "1.20.0.543",
    "2.6.0+hpu_1.21.2-76.gitabf798b": "1.21.2.76",
    "2.7.1+hpu_1.22.0-740.git1a2b3c4": "1.22.0.740",
    "2.9.0+hpu_1.23.1-25.git8598e6d": "1.23.1.25",
    "2.11.0a0+git009b5f6": "1.24.1.482",
    "2.11.0+cpu": "1.24.1.482",
    "2.11.0": "1.24.1.482",
    "2.13.0+cpu": "1.24.2.31",
    "2.13.0": "1.24.2.31",
}
"""torch versions that Gaudi's containers and packages carry, and a plug-in of the same release."""


@dataclass
class Container:
    """Folders of one container.

    Args:
        site: what its Python's site-packages hold.
        machine: what stands for ``/`` where cards are looked for.
    """

    folder: Path
    torch: str | None
    plugin: str | None
    environ: dict[str, str] = field(default_factory=dict)

    @property
    def site(self) -> Path:
        return self.folder / "site"

    @property
    def machine(self) -> Path:
        return self.folder / "machine"

    def variables(self, **more: str) -> dict[str, str]:
        """The environment of a process in it."""
        clean = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("PT_HPU", "HABANA", "TRENCADIS_", "TORCH_", "FUSER_"))
        }
        paths = os.pathsep.join(map(str, (self.site, ROOT)))
        own = {
            "PYTHONPATH": paths, "TRENCADIS_MACHINE_ROOT": str(self.machine), "OMP_NUM_THREADS": "1",
            "TRENCADIS_CACHE": str(self.folder / "cache"),
        }  # fmt: skip
        return {**clean, **own, **self.environ, **more}


def make(
    folder: Path, version: str | None, plugin: str | None, built_for: str | None = None, cards: int = 1
) -> Container:
    """A container with torch ``version`` and plug-in ``plugin``; None: without.

    Args:
        built_for: the torch that the plug-in asks for; None: the same.
        cards: with their device files and modules.
    """
    made = Container(folder, version, plugin)
    made.site.mkdir(parents=True)
    if version is not None:
        put_torch(made.site, version)
    if plugin is not None:
        put_plugin(made.site, plugin, built_for or (version or "2.13.0").partition("+")[0])
    put_cards(made.machine, cards, driver=(plugin or "1.24.2").rpartition(".")[0] or "1.24.2")
    return made


def put_torch(site: Path, version: str) -> None:
    """This machine's torch as links, under ``version``."""
    real, fake = Path(torch.__file__).parent, site / "torch"
    fake.mkdir()
    for path in real.iterdir():
        if path.name not in ("version.py", "__pycache__"):
            (fake / path.name).symlink_to(path)
    text = (real / "version.py").read_text(encoding="utf-8").replace(torch.__version__, version)
    (fake / "version.py").write_text(text, encoding="utf-8")
    for name in ("torchgen", "functorch"):
        if (real.parent / name).is_dir():
            (site / name).symlink_to(real.parent / name)
    put_metadata(site, "torch", version)


def put_plugin(site: Path, version: str, built_for: str) -> None:
    """The stub as an installed package that torch finds by its entry point."""
    shutil.copytree(STUB, site / "habana_frameworks", ignore=shutil.ignore_patterns("__pycache__"))
    (site / "habana_frameworks" / "torch" / "required_version.txt").write_text(built_for, encoding="utf-8")
    entry = "[torch.backends]\ndevice_backend = habana_frameworks.autoload:__autoload\n"
    entry += "[torch_dynamo_backends]\nhpu_backend = habana_frameworks.torch.compiling:hpu_backend\n"
    put_metadata(site, "habana_torch_plugin", version, entry)


def put_metadata(site: Path, name: str, version: str, entry_points: str = "") -> None:
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    (folder / "RECORD").write_text("")
    (folder / "INSTALLER").write_text("container\n")
    if entry_points:
        (folder / "entry_points.txt").write_text(entry_points)


def put_cards(root: Path, count: int, nodes: int | None = None, driver: str = "1.24.1") -> None:
    """Cards as the kernel shows them, the first ``nodes`` of them (none named: all) with a device file."""
    root.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        put(root / f"sys/bus/pci/devices/0000:{number:02x}:00.0/vendor", "0x1da3\n")
    for number in range(count if nodes is None else nodes):
        put(root / f"dev/accel/accel{number}", "")
        put(root / f"sys/class/accel/accel{number}/device/module_id", f"{number}\n")
    if driver:
        put(root / "sys/module/habanalabs/version", f"{driver}\n")


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
