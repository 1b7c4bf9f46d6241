"""Evaluates the spec's expressions of config fields, which generated code contains as Python."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

_BINARY: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARE: Final[Mapping[type[ast.cmpop], Callable[[Any, Any], bool]]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.Gt: operator.gt,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_CALLS: Final[Mapping[str, Callable[..., Any]]] = {"bool": bool, "int": int, "float": float}


def evaluate(expression: str, config: Mapping[str, Any], layer_idx: int = 0) -> Any:
    """Value of an expression of ``config.<field>`` and ``layer_idx``.

    Args:
        expression: Python: arithmetic, comparisons, ``and``/``or``/``not``, subscripts and choices.
        config: field name to value.
        layer_idx: value of ``layer_idx``.

    Raises:
        ValueError: it contains anything else.
        KeyError: a field that ``config`` does not have.
    """

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name(id="layer_idx"):
                return layer_idx
            case ast.Attribute(value=ast.Name(id="config"), attr=name):
                return config[name]
            case ast.BinOp() if type(node.op) in _BINARY:
                return _BINARY[type(node.op)](value(node.left), value(node.right))
            case ast.UnaryOp(op=ast.Not()):
                return not value(node.operand)
            case ast.UnaryOp(op=ast.USub()):
                return -value(node.operand)
            case ast.BoolOp():
                # As Python: the first value that decides, not its truth.
                stops = isinstance(node.op, ast.Or)
                for item in node.values[:-1]:
                    if bool(found := value(item)) == stops:
                        return found
                return value(node.values[-1])
            case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id="config"), ast.Constant(name), default]):
                return config.get(str(name), value(default))
            case ast.IfExp():
                return value(node.body) if value(node.test) else value(node.orelse)
            case ast.Compare(ops=[op]) if type(op) in _COMPARE:
                return _COMPARE[type(op)](value(node.left), value(node.comparators[0]))
            case ast.Subscript():
                return value(node.value)[value(node.slice)]
            case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _CALLS:
                return _CALLS[name](*map(value, node.args))
        raise ValueError(f"{ast.unparse(node)} in {expression!r} is not understood")

    return value(ast.parse(expression, mode="eval").body)
