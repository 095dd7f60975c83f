"""``trencadis models``: the families of models that can be served, with their inputs and origin."""

from __future__ import annotations

from collections.abc import Sequence

from trencadis.core.checkpoint import model_registry
from trencadis.core.checkpoint.family import CLASSIFY, GENERATE, Family
from trencadis.core.checkpoint.pooling_description import ALL
from trencadis.core.errors import StartupError
from trencadis.server.cli.subcommand_flag_parser import print_help_if_asked

USAGE = """\
usage: trencadis models

Lists the families of models that can be served: their architectures (config.json), what each is for, and where it comes
from. A package offers its own by the entry-point group trencadis.models.
"""


def main(words: Sequence[str]) -> int:
    """Runs the ``models`` command; returns the exit code."""
    if print_help_if_asked(words, USAGE):
        return 0
    if words:
        raise StartupError(f"models does not know {words[0]}; it takes nothing.")
    print("\n".join(list_families()))
    return 0


def list_families() -> list[str]:
    """Returns a line for each family and one for each of its architectures; a package that fails gets a line with
    the error.
    """
    lines: list[str] = []
    for origin, names in group_architectures().items():
        try:
            family = model_registry.family_of(names[0])
        except StartupError as error:
            lines += [f"{names[0]}: {error}"]
            continue
        lines += [f"{family.name} ({origin})", *(f"  {name:38} {describe_use(family, name)}" for name in names)]
    return lines


def group_architectures() -> dict[str, list[str]]:
    """Returns a family's origin, unique to it -> its architectures that can be requested."""
    found: dict[str, list[str]] = {}
    for name, target in model_registry.TABLE.items():
        found.setdefault(f"built in, {target.removesuffix(':FAMILY')}", []).append(name)
    for name, point in model_registry.installed_families().items():
        found.setdefault(f"{model_registry.source(point)}, {point.value}", []).append(name)
    return found


def _list_media(family: Family) -> list[str]:
    if family.vision is None:
        return []
    return ["images", "videos"] if "video_token_id" in family.vision.tokens else ["images"]


def describe_use(family: Family, architecture: str) -> str:
    """Returns what an architecture is used for."""
    kind = family.architectures[architecture]
    pools = ["embeddings", "scores"] if family.pooling is not None else []
    if kind == GENERATE:
        return ", ".join([*_list_media(family), "text", *pools])
    if architecture in family.heads and family.heads[architecture].kind == ALL:
        return "rewards of every token"
    return "classes, scores" if kind == CLASSIFY else "embeddings"
