"""Makes docs/configuration.md, and the tables of docs/migrating-from-vllm.md and docs/models.md, from the code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from trencadis.core.checkpoint import model_registry
from trencadis.core.envs import FALSE, IGNORED, READ, REFUSED, TABLE, TRUE, Env
from trencadis.core.flag_declaration import MOST, YEAR
from trencadis.server.cli.list_models import describe_use
from trencadis.server.config import vllm_flag_row_and_value_conversion as flag_rows
from trencadis.server.config.flag_table_and_lookup import Flag, get_flag_table, get_flag_variables
from trencadis.server.config.help_formatter import GROUPS, USAGE
from trencadis.server.config.vllm_flag_and_env_table import ROWS, SHORT, read_variables

HEAD = f"""\
# Configuration

Made by `tools/gen_flags.py` from the fields of `EngineConfig` and `ServerConfig` and from `core/envs.py`; do not edit.
A flag wins over the file of `--config`, the file over the environment, the environment over the default. Flags that
only vLLM has are listed in [Migrating from vLLM](migrating-from-vllm.md#flags-of-vllm).

## Flags

```
{USAGE}```

`trencadis.LLM` takes the flags of the engine as keywords: `--max-model-len 4k` is `max_model_len=4000` or
`max_model_len="4k"`. A file of `--config` holds the same names. Numbers outside their bounds are refused.
"""


def make_configuration_page() -> str:
    """Returns docs/configuration.md: all flags by group, then all environment variables."""
    return make_flags_section() + "\n" + make_variables_section(_list_flag_variables(), read_variables().values())


def make_flags_section() -> str:
    """Returns the head of docs/configuration.md and its tables of flags."""
    lines = [HEAD]
    for owner, title in GROUPS.items():
        lines += [
            f"### {title}",
            "",
            "| flag | value | default | bounds | variable | meaning |",
            "|---|---|---|---|---|---|",
        ]
        lines += [_format_row(flag) for flag in get_flag_table().values() if flag.owner == owner and not flag.hidden]
        lines.append("")
    return "\n".join(lines)


VLLM_FLAGS_HEAD = """\
## Flags of vLLM

Written by `tools/gen_flags.py` from the rows of `server/config/vllm_flag_and_env_table.py`; do not edit from here on.

These are the flags of vLLM 0.6 to 0.33 that are not in [Flags](configuration.md#flags). None is ignored in silence: a
flag without effect prints one line that says why, and a flag that would change something stops the start, unless its
value describes what happens anyway (as a rule vLLM's default). `--help=FLAG` prints its row.
"""
BEGIN, END = "<!-- made by tools/gen_flags.py -->", "<!-- end of the table -->"
VERDICTS = {
    flag_rows.MEANS: ("Done by flags of ours", "our flag"),
    flag_rows.FREE: ("Without effect", "why it changes no answer and no limit"),
    flag_rows.REFUSED: ("Refused", "what is so instead"),
}


def make_migration_page(text: str) -> str:
    """Returns ``text``, which is docs/migrating-from-vllm.md, with its table of vLLM's flags made anew."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{make_vllm_flags_section()}\n{END}{rest.partition(END)[2]}"


def make_vllm_flags_section() -> str:
    """Returns the tables of vLLM's flags: done by flags of ours, without effect, refused."""
    lines = [VLLM_FLAGS_HEAD]
    for verdict, (title, column) in VERDICTS.items():
        rows = [part for row in ROWS.values() for part in _list_keys(row) if part.verdict == verdict]
        lines += [f"### {title}", "", f"| flag | value | {column} | taken in silence |", "|---|---|---|---|"]
        lines += [_format_vllm_flag(row) for row in sorted(rows, key=lambda row: row.name)]
        lines.append("")
    return "\n".join(lines)


def _list_keys(row: flag_rows.FlagRow) -> Iterator[flag_rows.FlagRow]:
    """Yields a row, and the rows of its keys."""
    yield row
    for key in row.keys:
        yield replace(key, name=f"{row.name}.{key.name}")


def _format_vllm_flag(row: flag_rows.FlagRow) -> str:
    written = [row.written, *("-" + short for short, name in SHORT.items() if name == row.name)]
    silent = ", ".join(f"`{str(value).lower()}`" for value in row.neutral)
    return f"| {', '.join(f'`{name}`' for name in written)} | {row.kind} | {_escape_cell(row.why)} | {silent} |"


def _format_row(flag: Flag) -> str:
    dashes = "--[no-]" if flag.kind == "bool" else "--"
    names = [("-" if len(name) <= 2 else dashes) + name.replace("_", "-") for name in (flag.name, *flag.aliases)]
    shown = ", ".join(f"`{name}`" for name in names)
    value = ", ".join(f"`{choice}`" for choice in flag.choices) or flag.kind
    default = "" if flag.default in (None, "", [], {}) else f"`{_format_default(flag)}`"
    variables_ = ", ".join(f"`{name}`" for name in flag.env)
    return f"| {shown} | {value} | {default} | {_format_bounds(flag)} | {variables_} | {_escape_cell(flag.help)} |"


def _format_bounds(flag: Flag) -> str:
    """Formats the bounds of a flag; only the lower one if the upper one just rejects absurd values."""
    bound = flag.bound
    if bound is None or -bound.least > MOST:
        return ""
    if bound.most >= MOST or bound.most == YEAR:
        return f"{'more than' if bound.above else 'at least'} {bound.least}"
    return f"`{bound.span}`"


def _format_default(flag: Flag) -> str:
    if isinstance(flag.default, bool):
        return str(flag.default).lower()
    return " ".join(flag.default) if isinstance(flag.default, list) else str(flag.default)


def _escape_cell(text: str) -> str:
    """Escapes a text for a table cell."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("{", "\\{")


def _list_flag_variables() -> Iterator[Env]:
    for name, flag in get_flag_variables().items():
        meaning = flag.help if name == flag.env[0] else f"older name of `{flag.env[0]}`"
        kind = "secret" if flag.secret else flag.kind.replace("upper", "str")
        default = "" if flag.default in (None, "", [], {}) else _format_default(flag)
        yield Env(name, kind, default, f"{_escape_cell(meaning)}; `{flag.written}` wins")


def make_variables_section(flags: Iterable[Env], others: Iterable[Env] = ()) -> str:
    """Returns the section of docs/configuration.md about environment variables.

    Args:
        flags: the variables that set a flag.
        others: variables of another server.
    """
    every = (*flags, *TABLE)
    titles = (
        (READ, "Read"),
        (IGNORED, "Accepted without effect (one line says so)"),
        (REFUSED, "Refused"),
    )
    lines = [
        "## Environment variables",
        "",
        f"Booleans take `{' '.join(TRUE)}` and `{' '.join(FALSE)}`. "
        "A variable that has no effect, or that nobody knows (`VLLM_*`, `TRENCADIS_*`), prints one line.",
    ]
    for effect, title in titles:
        rows = [e for e in every if e.effect == effect and not e.plugin]
        if rows:
            lines += ["", f"### {title}", "", "| variable | kind | default | meaning |", "|---|---|---|---|"]
            lines += [f"| `{e.name}` | {e.kind} | {e.default or '-'} | {e.meaning} |" for e in rows]
    lines += ["", "### Others of vLLM", "", _OTHERS, "", "| here | why | variables |", "|---|---|---|"]
    lines += _group_by_reason(others)
    lines += ["", "### Of Gaudi's plug-ins", "", _OF_PLUGINS, "", "| variable | here | meaning |", "|---|---|---|"]
    lines += [f"| `{e.name}` | {_here(e)} | {e.meaning} |" for e in every if e.plugin]
    return "\n".join(lines) + "\n"


_OTHERS = "Variables of vLLM 0.33 and before, beside those above. Neutral ones have no effect, and a line says why."


def _group_by_reason(others: Iterable[Env]) -> Iterator[str]:
    """Yields one table row for each reason, with all variables that share it."""
    names: dict[tuple[str, str], list[str]] = {}
    for env in others:
        names.setdefault((_here(env), env.meaning), []).append(f"`{env.name}`")
    for (here, why), some in names.items():
        yield f"| {here} | {why} | {', '.join(some)} |"


_OF_PLUGINS = (
    "Every variable of vLLM's Gaudi plug-in, and of the bridge below it as far as it matters here: what works, what is "
    "neutral (it tunes how something is computed there, and has no effect here), and what is refused and why. The "
    "flags and buckets that both know stand above."
)


def _here(env: Env) -> str:
    """Returns ``works``, ``neutral`` or ``refused``, with the default or the refused values."""
    if env.effect == READ:
        return f"works; default {env.default}" if env.default else "works"
    return "neutral" if env.effect == IGNORED else f"refused ({env.refuses})"


def make_models_page(text: str) -> str:
    """Returns docs/models.md with the table from the registry; the rest of ``text`` is kept."""
    lines = ["| Family | Architecture | Serves | LoRA adapters of |", "|---|---|---|---|"]
    for name in model_registry.TABLE:
        family = model_registry.family_of(name)
        parts = ", ".join(family.adapters) or "none"
        lines.append(f"| {family.name} | `{name}` | {describe_use(family, name)} | {parts} |")
    table = "\n".join(lines)
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}"
