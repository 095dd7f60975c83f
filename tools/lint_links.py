"""Builds .lint/trencadis/{core,...} and .lint/{tests,...} as links, so that type checkers see the import names."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("core", "backends", "multimodal", "server", "assets")
BESIDE = ("tests", "benchmarks", "deploy", "tools")


def main() -> None:
    """Replaces all links; safe to run at any time."""
    base = ROOT / ".lint" / "trencadis"
    base.mkdir(parents=True, exist_ok=True)
    for path in (ROOT / "trencadis").iterdir():
        if path.name != "__pycache__":
            _link(base / path.name, path)
    for name in PACKAGES:
        _link(base / name, ROOT / name)
    for name in BESIDE:
        _link(base.parent / name, ROOT / name)


def _link(link: Path, target: Path) -> None:
    if link.is_symlink() or link.exists():
        link.unlink()
    link.symlink_to(target)


if __name__ == "__main__":
    main()
