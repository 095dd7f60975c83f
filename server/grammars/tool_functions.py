"""Functions that an answer may call, for the grammars of calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trencadis.core.errors import BadRequest
from trencadis.core.json_types import Json, JsonMapping
from trencadis.server.grammars.grammar_writer import GrammarWriter, quoted
from trencadis.server.grammars.json_schema import normalise_schema

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_PLAIN = frozenset({"type", "properties", "required", "additionalProperties", "$defs"})


@dataclass(frozen=True, slots=True)
class ToolParameter:
    """One parameter of a function; ``schema`` is complete, including the definitions that it refers to."""

    name: str
    schema: Json
    required: bool
    where: str


@dataclass(frozen=True, slots=True)
class ToolFunction:
    """A function and the schema of its arguments, normalised.

    Args:
        where: JSON path of the schema in the request.
        fault: why ``schema`` accepts any object instead of the tool's schema.
    """

    name: str
    schema: Json
    where: str
    fault: BadRequest | None = None

    @classmethod
    def from_tool(cls, tool: JsonMapping, index: int, exact: bool) -> ToolFunction:
        """Returns the function of a checked tool.

        Args:
            exact: True if the arguments must fit the schema; else any object is accepted for a schema without a
            grammar.

        Raises:
            BadRequest: ``exact``, and the schema has no grammar.
        """
        function = tool["function"]
        where = f"tools[{index}].function.parameters"
        given = function.get("parameters")
        try:
            return cls(
                function["name"],
                normalise_schema({"type": "object", **given} if given else NO_PARAMETERS, where),
                where,
            )
        except BadRequest as error:
            if exact:
                raise
            return cls(function["name"], {"type": "object"}, where, error)

    def list_parameters(self) -> list[ToolParameter]:
        """Returns the parameters one by one, for call formats that do not write them as one JSON text.

        Raises:
            BadRequest: the schema has more than names, schemas and required names of parameters.
        """
        if self.fault is not None:
            # A schema for any object has no list of parameters: none of them could be written.
            raise self.fault
        root = self.schema if isinstance(self.schema, dict) else {}
        defs = root.get("$defs", {})
        node = root
        while isinstance(node.get("$ref"), str) and set(node) <= {"$ref", "$defs"}:
            node = defs.get(node["$ref"].removeprefix("#/$defs/"), {})
        if not set(node) <= _PLAIN or _refers_to_root(root):
            raise BadRequest(
                f"{self.where}: in this form of calls a grammar takes properties and required ones, and nothing that "
                "concerns several at once.",
                param=self.where,
            )
        required = node.get("required", ())
        made = []
        for name, schema in node.get("properties", {}).items():
            whole = {**schema, "$defs": defs} if isinstance(schema, dict) and defs else schema
            made.append(ToolParameter(name, whole, name in required, f"{self.where}.properties.{name}"[:120]))
        return made


def _refers_to_root(root: Json) -> bool:
    """Returns True if a schema refers to itself as a whole."""
    todo = [root]
    while todo:
        node = todo.pop()
        if isinstance(node, dict):
            if node.get("$ref") == "#":
                return True
            todo.extend(node.values())
        elif isinstance(node, list):
            todo.extend(node)
    return False


def make_separated_rule(writer: GrammarWriter, items: Sequence[tuple[str, bool]], separator: str) -> str:
    """Writes the rule of items in order with a separator between them; optional ones may be left out."""
    behind, alone = '""', '""'
    for item, required in reversed(items):
        if required:
            behind, alone = writer.add_rule(f"{separator} {item} {behind}"), writer.add_rule(f"{item} {behind}")
        else:
            alone = writer.add_rule(f"{item} {behind} | {alone}")
            behind = writer.add_rule(f"({separator} {item})? {behind}")
    return alone


def make_list_rule(writer: GrammarWriter, items: Sequence[str], many: bool) -> str:
    """Writes the rule of a list in brackets: one of ``items``, or with ``many`` one or more, each any of them."""
    each = writer.add_rule(" | ".join(items))
    more = f"({quoted(', ')} {each})*" if many else ""
    return writer.add_rule(f"{quoted('[')} {each} {more} {quoted(']')}")
