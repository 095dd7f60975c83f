"""Types that a build of mypy's saw at places without annotations: what functions return, what they are called with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from tools.renaming.hints import Hints, alias
from tools.renaming.project import Symbol


class Observer:
    """Reads one build; ``reader`` gives its nodes and names."""

    def __init__(self, reader: Any) -> None:
        self.reader, self.nodes, self.types = reader, reader.nodes, reader.types
        self.seen_returns: dict[Symbol, set[str]] = defaultdict(set)
        self.seen_params: dict[tuple[Symbol, str], set[str]] = defaultdict(set)

    def hints(self) -> Hints:
        """What all places agree about, but for None and Any."""
        project = self.reader.project
        for module in project.modules:
            tree = self.reader.result.files.get(module)
            for node in self.reader.walk(tree) if tree is not None else ():
                if isinstance(node, self.nodes.FuncDef):
                    self.function(node)
                elif isinstance(node, self.nodes.CallExpr):
                    self.call(node)
                elif isinstance(node, self.nodes.Decorator):
                    self.parametrized(node)
        return Hints(self._agreed(self.seen_returns), self._agreed(self.seen_params))

    def _agreed(self, seen: dict[Any, set[str]]) -> dict[Any, str]:
        found = {}
        for key, kinds in seen.items():
            some = sorted(kinds - {"None", "Any"})
            if 0 < len(some) <= 4:
                found[key] = " | ".join([*some, *(["None"] if "None" in kinds else [])])
        return found

    def text(self, kind: Any, depth: int = 0) -> str | None:
        """A type as an annotation."""
        t = self.types
        kind = t.get_proper_type(kind)
        if kind is None or depth > 3:
            return None
        if isinstance(kind, t.NoneType):
            return "None"
        if isinstance(kind, t.UnionType):
            parts = [self.text(i, depth + 1) for i in kind.items]
            return " | ".join(dict.fromkeys(p for p in parts if p)) if all(parts) else None
        if isinstance(kind, t.LiteralType):
            return self.text(kind.fallback, depth)
        if isinstance(kind, t.TupleType):
            if kind.partial_fallback.type.fullname != "builtins.tuple":
                return self.text(kind.partial_fallback, depth)
            return f"tuple[{', '.join(self.text(i, depth + 1) or 'object' for i in kind.items) or '()'}]"
        if isinstance(kind, t.CallableType):
            made = self.text(kind.ret_type, depth + 1)
            if kind.is_type_obj():
                return f"type[{made}]" if made else None
            return f"{alias('typing')}.Callable[..., {made}]" if made else None
        if isinstance(kind, t.Instance):
            return self.instance(kind, depth)
        return None

    def instance(self, kind: Any, depth: int) -> str | None:
        info = kind.type
        module, name = info.module_name, info.fullname[len(info.module_name) + 1 :]
        if "@" in name or not info.fullname.startswith(module) or module not in self.reader.result.files:
            return None
        head = name if module == "builtins" else f"{alias(module)}.{name}"
        if not kind.args:
            return head
        parts = [self.text(a, depth + 1) for a in kind.args]
        if any(p is None for p in parts):
            return head if module != "builtins" else f"{head}[{', '.join(p or 'object' for p in parts)}]"
        return f"{head}[{', '.join(p or '' for p in parts)}]"

    def function(self, node: Any) -> None:
        symbols = self.reader.function(node)
        if not symbols:
            return
        for one in self._own(node.body):
            given = getattr(one, "expr", None)
            if given is None:
                continue
            kind = self.reader.result.types.get(given)
            text = self.text(kind) if kind is not None else None
            if text is not None:
                self.seen_returns[symbols[0]].add(text)

    def _own(self, body: Any) -> Iterator[Any]:
        """Statements that return, and expressions that yield, of a function itself."""
        reader, todo = self.reader, [body]
        inner = (self.nodes.FuncDef, self.nodes.LambdaExpr, self.nodes.ClassDef)
        while todo:
            node = todo.pop()
            if isinstance(node, self.nodes.ReturnStmt | self.nodes.YieldExpr):
                yield node
            todo += [n for n in reader.children(node) if not isinstance(n, inner)]

    def call(self, node: Any) -> None:
        kind = self.reader.result.types.get(node.callee)
        kind = self.types.get_proper_type(kind) if kind is not None else None
        if not isinstance(kind, self.types.CallableType):
            return
        definition = kind.definition
        if isinstance(definition, self.nodes.Decorator):
            definition = definition.func
        if not isinstance(definition, self.nodes.FuncDef):
            return
        symbols = self.reader.function(definition)
        if not symbols:
            return
        names = list(definition.arg_names)[len(definition.arguments) - len(kind.arg_names) :]
        for i, (argument, how, name) in enumerate(zip(node.args, node.arg_kinds, node.arg_names, strict=True)):
            if how.is_star():
                return
            if name is None:
                name = names[i] if i < len(names) else None
            seen = self.reader.result.types.get(argument)
            text = self.text(seen) if seen is not None else None
            if name is not None:
                self.seen_params[symbols[0], name].add(text or "Any")

    def parametrized(self, node: Any) -> None:
        symbols = self.reader.function(node.func)
        for decorator in node.decorators if symbols else ():
            if not isinstance(decorator, self.nodes.CallExpr) or len(decorator.args) < 2:
                continue
            if getattr(decorator.callee, "name", "") != "parametrize":
                continue
            names = self._names(decorator.args[0])
            kind = self.reader.result.types.get(decorator.args[1])
            kind = self.types.get_proper_type(kind) if kind is not None else None
            if not isinstance(kind, self.types.Instance) or not kind.args:
                continue
            item = self.types.get_proper_type(kind.args[0])
            for i, name in enumerate(names):
                one = item
                if len(names) > 1:
                    if not isinstance(item, self.types.TupleType) or len(item.items) != len(names):
                        break
                    one = item.items[i]
                text = self.text(one)
                if text is not None and text != "object":
                    self.seen_params[symbols[0], name].add(text)

    def _names(self, node: Any) -> list[str]:
        if isinstance(node, self.nodes.StrExpr):
            return [n.strip() for n in node.value.split(",") if n.strip()]
        return [i.value for i in getattr(node, "items", ()) if isinstance(i, self.nodes.StrExpr)]
