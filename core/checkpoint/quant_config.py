"""Parses ``quantization_config`` of a checkpoint: which weights are quantised, and how. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from trencadis.core.checkpoint.inc_config import GivenScale
from trencadis.core.checkpoint.json_fields import JsonFields, format_value
from trencadis.core.errors import StartupError
from trencadis.core.json_types import Json
from trencadis.core.quant.quantised_weight_layout_and_bytes import Scheme

WORKS = "compressed-tensors, fp8, AWQ (GEMM), GPTQ (4 and 8 bits), MXFP4 experts and 16-bit safetensors work"
ONLINE = ("fp8", "int8", "int4")
"""Values of ``--quantization`` that quantise a 16-bit checkpoint while it loads."""

ONLINE_GROUP = 32
"""Columns that share a scale in 4-bit weights. On the demo model, groups of 128 lost several points more accuracy."""

TOWER = "visual."
"""Prefix of the canonical names of a vision tower's weights, its projector included."""

GROUPS = 65536
LONGEST_PATTERN = 512


@dataclass(frozen=True)
class QuantRule:
    """A scheme and the modules that it applies to: names, ``re:`` patterns or the class Linear.

    Scheme None: 16 bits.
    """

    targets: tuple[str, ...]
    scheme: Scheme | None


@dataclass(frozen=True)
class Quantisation:
    """How a checkpoint's weights are stored, or how they are quantised while they load.

    Args:
        method: a name in the table of ``core.checkpoint.formats``, or ``online``.
        label: the method's name for users.
        rules: the first one that matches a module's name applies.
        ignore: modules in 16 bits: names, ``re:`` patterns, and with ``within`` any part of a dotted name.
        given: the only modules that are quantised while they load, with their scales; empty: all of the decoder.
        prefixes, inner: (stored, canonical) parts of names (``StoredNames``) by which files name modules of the tower.
        The inner ones, with dots at both ends, apply to the decoder as well.
    """

    method: str
    label: str
    rules: tuple[QuantRule, ...]
    ignore: tuple[str, ...] = ()
    within: bool = False
    given: tuple[tuple[str, GivenScale], ...] = ()
    prefixes: tuple[tuple[str, str], ...] = ()
    inner: tuple[tuple[str, str], ...] = ()

    def scheme(self, module: str) -> Scheme | None:
        """Returns the scheme of a module by its canonical name (``layers.0.mlp.up_proj``); None: 16 bits."""
        known: dict[str, Scheme | None] = self._known
        if module not in known:
            known[module] = self._find(module)
        return known[module]

    @cached_property
    def _known(self) -> dict[str, Scheme | None]:
        return {}

    def _find(self, module: str) -> Scheme | None:
        if self.given:
            return self.rules[0].scheme if self.given_scale(module) is not None else None
        if self.method == "online":
            return self.rules[0].scheme if module.startswith(("layers.", "lm_head")) else None
        names = (*aliases(module, self.inner), *tower_names(module, self.prefixes, self.inner))
        if any(_matches(pattern, names, self.within) for pattern in self.ignore):
            return None
        for rule in self.rules:
            if any(_matches(target, names) or target == "Linear" for target in rule.targets):
                return rule.scheme
        return None

    def given_scale(self, module: str) -> GivenScale | None:
        """Returns the scales that a file holds for a module; None: it holds none."""
        known: dict[str, GivenScale] = self._given
        return known.get(module)

    @cached_property
    def _given(self) -> dict[str, GivenScale]:
        return dict(self.given)

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """All distinct schemes that a weight may have."""
        return tuple(dict.fromkeys(rule.scheme for rule in self.rules if rule.scheme is not None))

    def widest_group(self) -> int:
        """Returns the largest group size, of which each rank's part of an MLP should be a multiple.

        1: there are no groups.
        """
        return max((s.group for s in self.schemes), default=0) or 1


def aliases(module: str, inner: tuple[tuple[str, str], ...] = ()) -> tuple[str, ...]:
    """Returns the names that a module has had in transformers' models. ``inner`` is explained in ``Quantisation``."""
    if module.startswith(TOWER):
        return module, f"model.{module}"
    stored = f"{module}."
    for theirs, ours in inner:
        stored = stored.replace(ours, theirs)
    if stored[:-1] != module:
        return (*aliases(module), *aliases(stored[:-1]))
    if module.startswith("lm_head"):
        return module, f"model.{module}", f"language_model.{module}"
    own = f"model.{module}", f"model.language_model.{module}", f"language_model.model.{module}"
    return module, *own, f"language_model.{module}"


Renames = Sequence[tuple[str, str]]
"""(stored, canonical) pairs of prefixes or inner parts of names."""


def canonical_name(stored: str, prefixes: Iterable[tuple[str, str]], inner: Renames) -> str | None:
    """Returns the canonical form of a stored name; None if no prefix matches."""
    for prefix, ours in prefixes:
        if stored.startswith(prefix):
            name = ours + stored[len(prefix) :]
            for theirs, mine in inner:
                name = name.replace(theirs, mine)
            return name
    return None


def tower_names(module: str, prefixes: Renames, inner: Renames) -> tuple[str, ...]:
    """Returns the stored names of a vision tower's module (canonical prefix ``visual``); empty for other modules.

    Several stored parts may have the same canonical form: all names that map back to ``module`` are returned.
    """
    if not module.startswith(TOWER):
        return ()
    names = {f"{module}."}
    for theirs, ours in reversed(inner):
        names |= {name.replace(ours, theirs) for name in names}
    starts = [(stored, ours) for stored, ours in prefixes if ours.startswith(TOWER)]
    found = (stored + name[len(ours) :] for stored, ours in starts for name in names if name.startswith(ours))
    return tuple(name[:-1] for name in dict.fromkeys(found) if canonical_name(name, prefixes, inner) == f"{module}.")


def _matches(pattern: str, names: Iterable[str], within: bool = False) -> bool:
    if pattern.startswith("re:"):
        return any(re.match(pattern[3:], name) for name in names)
    return any(name == pattern or (within and f".{pattern}." in f".{name}.") for name in names)


def online(name: str) -> Quantisation:
    """Returns the quantisation for ``--quantization fp8 | int8 | int4``."""
    schemes = {
        "fp8": Scheme(8, "float", activations="token"),
        "int8": Scheme(8, activations="token"),
        "int4": Scheme(4, group=ONLINE_GROUP),
    }
    return Quantisation("online", name, (QuantRule(("Linear",), schemes[name]),))


def from_inc(scales: dict[str, GivenScale]) -> Quantisation:
    """Returns the quantisation for ``--quantization inc``: 8-bit floats with a file's scales of weights and
    activations.
    """
    rule = QuantRule(("Linear",), Scheme(8, "float", activations="given"))
    return Quantisation("online", "inc", (rule,), given=tuple(sorted(scales.items())))


def read_quantisation(place: JsonFields) -> Quantisation:
    """Reads the object ``quantization_config``.

    Raises:
        StartupError: a method, format or value is not implemented; the message says what the file holds and what works.
    """
    value = place.values["quantization_config"]
    if not isinstance(value, dict):
        place.refuse("quantization_config", "it must be an object")
    c = place.within("quantization_config")
    method = c.values.get("quant_method")
    reader = {
        "compressed-tensors": _read_compressed_tensors,
        "fp8": _read_fp8,
        "awq": _read_awq,
        "gptq": _read_gptq,
        "mxfp4": _read_mxfp4,
    }.get(str(method))
    if reader is None:
        held = str(method) if method is not None else "quantised (no quant_method)"
        raise StartupError(f"{c.where} holds {held} weights (quantization_config); {WORKS}")
    return reader(c)


def _read_compressed_tensors(c: JsonFields) -> Quantisation:
    form = c.values.get("format")
    known = ("float-quantized", "int-quantized", "pack-quantized", "naive-quantized", "mixed-precision")
    if form not in known:
        raise StartupError(f"{c.where} holds {format_value(form)} weights (compressed-tensors format); {WORKS}")
    sparse = c.within("sparsity_config")
    if sparse.values.get("format", "dense") != "dense":
        raise StartupError(f"{c.where} holds sparse weights ({format_value(sparse.values['format'])}); {WORKS}")
    if c.within("transform_config").values.get("config_groups"):
        c.refuse("transform_config", "weights that are rotated as they run are not implemented")
    groups = c.within("config_groups")
    if not groups.values:
        c.refuse("config_groups", "it must name at least one group of modules")
    rules = tuple(_group(groups.within(name), name) for name in groups.values)
    return Quantisation("compressed-tensors", "compressed-tensors", rules, _patterns(c, "ignore"))


def _group(c: JsonFields, name: str) -> QuantRule:
    if c.values.get("format") not in (None, "float-quantized", "int-quantized", "pack-quantized", "naive-quantized"):
        raise StartupError(f"{c.where} holds {format_value(c.values['format'])} weights in {name}; {WORKS}")
    targets, w = _patterns(c, "targets"), c.within("weights")
    if not w.values:
        return QuantRule(targets, None)
    kind = w.values.get("type", "int")
    w.only("type", ("int", "float"), "int")
    bits = w.integer("num_bits", 1, 16, 8)
    if bits not in ((8,) if kind == "float" else (4, 8)):
        raise StartupError(f"{w.where} holds weights of {bits} bits ({kind}) in {name}; {WORKS}")
    group, block = _spans(w)
    return QuantRule(
        targets,
        Scheme(
            bits, str(kind), group, block, w.boolean("symmetric", True), _activations(c), w.is_given("actorder")
        ),
    )  # fmt: skip


def _spans(w: JsonFields) -> tuple[int, int]:
    """Returns (columns, rows) that share a scale."""
    size = w.values.get("group_size")
    group = 0 if size in (None, -1) else w.integer("group_size", 1, GROUPS)
    strategy = w.values.get("strategy")
    if strategy is None:
        strategy = "group" if group else "channel" if size == -1 else "tensor"
    if strategy == "block":
        shape = w.integers("block_structure", 1, GROUPS, 2)
        return shape[1], shape[0]
    if strategy not in ("tensor", "channel", "group"):
        w.refuse("strategy", "implemented: tensor, channel, group, block")
    if (strategy == "group") != (group > 0):
        w.refuse("group_size", f"strategy {strategy} {'needs one' if strategy == 'group' else 'has none'}")
    return group, 0 if strategy == "tensor" else 1


def _activations(c: JsonFields) -> str:
    a = c.within("input_activations")
    if not a.values:
        return "none"
    bits = a.integer("num_bits", 1, 16, 8)
    if bits != 8:
        raise StartupError(f"{a.where} asks activations of {bits} bits; implemented: 8, or 16 (none)")
    return "token" if a.values.get("dynamic") else "static"


def _read_fp8(c: JsonFields) -> Quantisation:
    c.only("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    c.only("activation_scheme", ("dynamic", "static"), "dynamic")
    group = block = 0
    if c.is_given("weight_block_size"):
        block, group = c.integers("weight_block_size", 1, GROUPS, 2)
    how = "static" if c.values.get("activation_scheme") == "static" else "token"
    scheme = Scheme(8, "float", group, block, activations=how)
    ignore = (*_patterns(c, "modules_to_not_convert"), *_patterns(c, "ignored_layers"))
    return Quantisation("fp8", "fp8", (QuantRule(("Linear",), scheme),), (*ignore, "lm_head"), within=True)


def _read_awq(c: JsonFields) -> Quantisation:
    version = str(c.values.get("version", "gemm")).lower()
    if version != "gemm":
        raise StartupError(f"{c.where} holds AWQ weights in {version} order; {WORKS}")
    bits = c.integer("bits" if c.is_given("bits") else "w_bit", 1, 16, 4)
    if bits != 4:
        raise StartupError(f"{c.where} holds AWQ weights of {bits} bits; {WORKS}")
    c.only("zero_point", (True,), True)
    scheme = Scheme(
        4, group=_group_size(c, "group_size" if c.is_given("group_size") else "q_group_size"), symmetric=False
    )
    ignore = (*_patterns(c, "modules_to_not_convert"), "lm_head")
    return Quantisation("awq", "awq", (QuantRule(("Linear",), scheme),), ignore, within=True)


def _read_mxfp4(c: JsonFields) -> Quantisation:
    """Reads the quantisation of gpt-oss: experts alone, in blocks of 32."""
    ignore = _patterns(c, "modules_to_not_convert")
    if any(".experts" in one for one in ignore):
        c.refuse("modules_to_not_convert", "implemented: experts in MXFP4")
    return Quantisation("mxfp4", "mxfp4", (QuantRule((MXFP4_EXPERTS,), Scheme(8, group=32, fp4=True)),))


MXFP4_EXPERTS = r"re:layers\.\d+\.mlp\.experts\."
"""Pattern of the canonical names of experts."""


def _group_size(c: JsonFields, key: str) -> int:
    return 0 if c.values.get(key) == -1 else c.integer(key, 1, GROUPS, 128)


def _read_gptq(c: JsonFields) -> Quantisation:
    form = str(c.values.get("checkpoint_format") or "gptq")
    if form not in ("gptq", "gptq_v2") or c.values.get("is_marlin_format"):
        raise StartupError(f"{c.where} holds GPTQ weights in {form} layout; {WORKS}")
    c.only("pack_dtype", ("int32",), "int32")
    base = _gptq_scheme(c, None)
    rules = []
    for pattern in c.within("dynamic").values:
        regex, what = pattern.removeprefix("-:").removeprefix("+:"), c.within("dynamic").within(pattern)
        _compiles(c, "dynamic", regex)
        rules.append(QuantRule((f"re:{regex}",), None if pattern.startswith("-:") else _gptq_scheme(what, base)))
    if not c.boolean("lm_head", False):
        rules.append(QuantRule(("lm_head",), None))
    rules.append(QuantRule(("Linear",), base))
    ignore = _patterns(c, "modules_to_not_convert")
    return Quantisation(form, "gptq", tuple(rules), ignore, within=True)


def _gptq_scheme(c: JsonFields, base: Scheme | None) -> Scheme:
    bits = c.integer("bits", 1, 16, base.bits) if base else c.integer("bits", 1, 16)
    if bits not in (4, 8):
        raise StartupError(f"{c.where} holds GPTQ weights of {bits} bits; {WORKS}")
    group = base.group if base and "group_size" not in c.values else _group_size(c, "group_size")
    symmetric = c.boolean("sym", base.symmetric if base else True)
    ordered = c.boolean("desc_act", base.ordered if base else False)
    return Scheme(bits, group=group, symmetric=symmetric, ordered=ordered)


def _patterns(c: JsonFields, key: str) -> tuple[str, ...]:
    """Returns a list of names and ``re:`` patterns; null counts as empty."""
    found: Json = c.values.get(key)
    if found is None:
        return ()
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        c.refuse(key, "it must be a list of names")
    for one in found:
        if one.startswith("re:"):
            _compiles(c, key, one[3:])
    return tuple(found)


def _compiles(c: JsonFields, key: str, pattern: str) -> None:
    try:
        if len(pattern) > LONGEST_PATTERN:
            raise ValueError(f"longer than {LONGEST_PATTERN} characters")
        re.compile(pattern)
    except (re.error, ValueError, OverflowError, RecursionError) as error:
        c.refuse(key, f"{pattern[:60]!r} is no pattern: {error}")
