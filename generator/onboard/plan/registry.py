"""The edit of the framework's registry: one row more, everything else byte for byte as it was.

Imports libcst, which the rest of the planning does not need; import this module only where the edit is made.
"""

from __future__ import annotations

from bisect import bisect_left
from pathlib import Path
from typing import NamedTuple

import libcst as cst

from onboard.errors import UsageError
from onboard.plan.changes import FileChange, read_inside, sha256
from onboard.plan.names import check_identifier, shown
from onboard.plan.targets import REGISTRY

MAPPING = "MODEL_ARCH_MAPPING"
_LINE_LENGTH = 120


class _Found(NamedTuple):
    """The mapping's list, and the statement that it stands in."""

    statement: cst.SimpleStatementLine
    rows: cst.List


def insert_row(source: str, architecture: str, module: str, class_name: str, *, force: bool) -> str:
    """Add a row to ``MODEL_ARCH_MAPPING``, where the alphabet wants it.

    Args:
        source: the text of the registry.
        architecture: the row's key.
        module: the dotted module that the class is in.
        class_name: the class.
        force: replace a row that says something else, its tags included: they describe the other implementation.

    Returns:
        The new text; ``source`` itself if the row is there already (whatever its tags).

    Raises:
        UsageError: the row is taken, or the text holds no such mapping.
    """
    check_identifier(architecture, "architecture")
    check_identifier(class_name, "class name")
    for part in module.split("."):
        check_identifier(part, "module")
    try:
        tree = cst.parse_module(source)
    except (cst.ParserSyntaxError, RecursionError) as error:
        raise _unknown(f"it is not Python that can be parsed: {str(error).splitlines()[0]}") from None
    found = _find(tree)
    keys = [_key(row) for row in found.rows.elements]
    if architecture in keys:
        # In an OrderedDict the last of several rows is the one that counts.
        at = len(keys) - 1 - keys[::-1].index(architecture)
        here = _value(found.rows.elements[at])
        if here == (module, class_name):
            return source
        if not force:
            raise UsageError(
                f"{architecture} is registered already",
                f"its row in {MAPPING} names {'.'.join(here) if here else 'something else'}, not {module}.{class_name}",
                "keep that one, or replace it with --force",
                code="registry.conflict",
            )
        rows = _replaced(tree, found.rows, at, module, class_name)
    else:
        rows = _inserted(tree, found.rows, _place(keys, architecture), architecture, module, class_name)
    statement = found.statement.deep_replace(found.rows, rows)
    changed = tree.with_changes(body=[statement if line is found.statement else line for line in tree.body])
    return changed.code


def registry_change(checkout: Path, architecture: str, module: str, class_name: str, *, force: bool) -> FileChange:
    """The edit of a checkout's registry as a change of a plan; see :func:`insert_row`."""
    data = read_inside(checkout, REGISTRY)
    if data is None:
        raise UsageError(
            f"{checkout} has no {REGISTRY}",
            "that file is where NeMo AutoModel registers its models",
            "give a checkout of NeMo AutoModel with --into",
            code="registry.unreadable",
        )
    try:
        source = data.decode()
    except UnicodeDecodeError as error:
        raise _unknown(f"it is not UTF-8: {error.reason} at byte {error.start}") from None
    return FileChange(
        path=REGISTRY,
        content=insert_row(source, architecture, module, class_name, force=force),
        reason=f"registers {architecture}",
        edits_existing=True,
        before_sha256=sha256(data),
    )


def _find(tree: cst.Module) -> _Found:
    for statement in tree.body:
        if not isinstance(statement, cst.SimpleStatementLine):
            continue
        for part in statement.body:
            if isinstance(part, cst.Assign):
                names = [target.target for target in part.targets]
            elif isinstance(part, cst.AnnAssign):
                names = [part.target]
            else:
                continue
            if not any(isinstance(name, cst.Name) and name.value == MAPPING for name in names):
                continue
            value = part.value
            if isinstance(value, cst.Call) and value.args:
                value = value.args[0].value
            if not isinstance(value, cst.List):
                raise _unknown(f"{MAPPING} is not a list of rows")
            return _Found(statement, value)
    raise _unknown(f"it assigns no {MAPPING}")


def _key(element: cst.BaseElement) -> str | None:
    row = element.value
    if isinstance(element, cst.Element) and isinstance(row, cst.Tuple) and len(row.elements) == 2:
        return _string(row.elements[0].value)
    return None


def _value(element: cst.BaseElement) -> tuple[str, str] | None:
    """Module and class of a row, without its tags; None if they are not plain strings."""
    row = element.value
    if not isinstance(row, cst.Tuple) or not isinstance(pair := row.elements[1].value, cst.Tuple):
        return None
    if len(pair.elements) < 2:
        return None
    module, class_name = (_string(item.value) for item in pair.elements[:2])
    return None if module is None or class_name is None else (module, class_name)


def _string(node: cst.BaseExpression) -> str | None:
    value = node.evaluated_value if isinstance(node, cst.SimpleString | cst.ConcatenatedString) else None
    return value if isinstance(value, str) else None


def _place(keys: list[str | None], new: str) -> int:
    """The index for a new key in a list that is only mostly sorted.

    The rows that are in order are taken to be the longest run of rising keys; the new one goes behind the last of those
    that sorts before it. So a stray row at the end ("Inkling..." behind "Step3...") draws nothing to it.
    """
    tails: list[tuple[str, str]] = []
    tail_at: list[int] = []
    before: dict[int, int | None] = {}
    for at, key in enumerate(keys):
        if key is None:
            continue
        rank = _rank(key)
        length = bisect_left(tails, rank)
        before[at] = tail_at[length - 1] if length else None
        tails[length : length + 1] = [rank]
        tail_at[length : length + 1] = [at]
    at_or_none = tail_at[-1] if tail_at else None
    while at_or_none is not None:
        key = keys[at_or_none]
        if key is not None and _rank(key) < _rank(new):
            return at_or_none + 1
        at_or_none = before[at_or_none]
    return 0


def _rank(key: str) -> tuple[str, str]:
    return key.casefold(), key


def _inserted(tree: cst.Module, rows: cst.List, at: int, architecture: str, module: str, class_name: str) -> cst.List:
    elements = list(rows.elements)
    if not elements:
        raise _unknown(f"{MAPPING} has no rows to take the format from")
    opening = rows.lbracket.whitespace_after
    own_line = isinstance(opening, cst.ParenthesizedWhitespace)
    separator = opening if own_line else cst.SimpleWhitespace(" ")
    row = _row(tree, rows, architecture, module, class_name) if own_line else _flat(architecture, module, class_name)
    new = cst.Element(cst.parse_expression(row, config=tree.config_for_parsing))

    if at == 0:
        # A comment above the first row stays with that row.
        before, after = _split(opening, separator) if own_line else (opening, separator)
        rows = rows.with_changes(lbracket=rows.lbracket.with_changes(whitespace_after=before))
        elements.insert(0, new.with_changes(comma=cst.Comma(whitespace_after=after)))
    elif at < len(elements):
        previous = elements[at - 1]
        comma = cst.ensure_type(previous.comma, cst.Comma)
        before, after = _split(comma.whitespace_after, separator)
        elements[at - 1] = previous.with_changes(comma=comma.with_changes(whitespace_after=before))
        elements.insert(at, new.with_changes(comma=cst.Comma(whitespace_after=after)))
    else:
        previous = elements[-1]
        before, after = _split(rows.rbracket.whitespace_before, separator)
        trailing = previous.comma
        comma = trailing if isinstance(trailing, cst.Comma) else cst.Comma()
        elements[-1] = previous.with_changes(comma=comma.with_changes(whitespace_after=before))
        elements.append(new.with_changes(comma=trailing))
        rows = rows.with_changes(rbracket=rows.rbracket.with_changes(whitespace_before=after))
    return rows.with_changes(elements=elements)


def _split(
    gap: cst.BaseParenthesizableWhitespace, separator: cst.BaseParenthesizableWhitespace
) -> tuple[cst.BaseParenthesizableWhitespace, cst.BaseParenthesizableWhitespace]:
    """What stands before and after a row that is put into ``gap``.

    A comment at the end of the line above stays there, comments on lines of their own stay with the row below.
    """
    if isinstance(gap, cst.ParenthesizedWhitespace) and isinstance(separator, cst.ParenthesizedWhitespace):
        plain = cst.TrailingWhitespace(newline=gap.first_line.newline)
        before = gap.with_changes(empty_lines=[], indent=separator.indent, last_line=separator.last_line)
        return before, gap.with_changes(first_line=plain)
    return separator, gap


def _replaced(tree: cst.Module, rows: cst.List, at: int, module: str, class_name: str) -> cst.List:
    row = cst.ensure_type(rows.elements[at].value, cst.Tuple)
    own_line = isinstance(row.lpar[0].whitespace_after, cst.ParenthesizedWhitespace) if row.lpar else False
    text = _pair(tree, _indents(rows)[1], module, class_name) if own_line else _flat_pair(module, class_name)
    value = cst.parse_expression(text, config=tree.config_for_parsing)
    row = row.with_changes(elements=[row.elements[0], row.elements[1].with_changes(value=value)])
    elements = list(rows.elements)
    elements[at] = elements[at].with_changes(value=row)
    return rows.with_changes(elements=elements)


def _indents(rows: cst.List) -> tuple[str, str]:
    """The indent of a row and of what is inside it."""
    opening, closing = rows.lbracket.whitespace_after, rows.rbracket.whitespace_before
    outer = closing.last_line.value if isinstance(closing, cst.ParenthesizedWhitespace) else ""
    row = opening.last_line.value if isinstance(opening, cst.ParenthesizedWhitespace) else outer + " " * 4
    return row, row + (row.removeprefix(outer) if row.startswith(outer) else " " * 4)


def _row(tree: cst.Module, rows: cst.List, architecture: str, module: str, class_name: str) -> str:
    indent, inner = _indents(rows)
    pair = _pair(tree, inner, module, class_name)
    return tree.default_newline.join(["(", f'{inner}"{architecture}",', f"{inner}{pair},", f"{indent})"])


def _pair(tree: cst.Module, indent: str, module: str, class_name: str) -> str:
    """The row's value as ruff formats it: on one line if it fits."""
    flat = _flat_pair(module, class_name)
    if len(f"{indent}{flat},") <= _LINE_LENGTH:
        return flat
    return tree.default_newline.join(
        ["(", f'{indent}    "{module}",', f'{indent}    "{class_name}",', f"{indent})"],
    )


def _flat_pair(module: str, class_name: str) -> str:
    return f'("{module}", "{class_name}")'


def _flat(architecture: str, module: str, class_name: str) -> str:
    return f'("{architecture}", {_flat_pair(module, class_name)})'


def _unknown(why: str) -> UsageError:
    return UsageError(
        f"cannot edit {REGISTRY}",
        shown(why, 200) if not why.isprintable() else why,
        "add the row by hand, or use a release of NeMo AutoModel that onboard knows",
        code="registry.unreadable",
    )
