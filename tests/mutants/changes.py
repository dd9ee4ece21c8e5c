"""The small changes that a mutant is made of: each place of a file where one is possible.

Changed are: a comparison (`<` to `<=`, `==` to `!=`, `is`, `in`), a sign (`+` to `-`, `*` to `/`), a number (one more;
from ten on, and a fraction, twice as much), `True` and `False`, `not`, `and` and `or`, a plain condition turned round,
`min` and `max`, and a call whose result nobody uses, which is left out. Not changed are texts, type annotations,
decorators, assertions, log lines and `__repr__`. Two times are hardly ever the same, so that `<=` says of them what `<`
does: there `<` becomes `>=`.
"""

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt}
SIGNS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}
OTHERS = {"min": "max", "max": "min"}
UNCHANGED_FIELDS = {"annotation", "returns", "decorator_list", "type_comment", "pattern"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Change:
    """One change of one node. `field` and `at` say where the node stands in `parent`."""

    parent: ast.AST
    field: str
    at: int | None
    old: ast.AST
    new: ast.AST
    lines: range
    """Of the statement that holds it; of a compound statement only its head."""
    defines: tuple[str, ...] | None
    """None inside a function. Else it runs while the file is imported, and these names get another value."""

    def apply(self) -> None:
        ast.fix_missing_locations(ast.copy_location(self.new, self.old))
        if self.at is None:
            setattr(self.parent, self.field, self.new)
        else:
            getattr(self.parent, self.field)[self.at] = self.new

    def __str__(self) -> str:
        return f"{_text(self.old)}  ->  {_text(self.new)}"


def changes(tree: ast.Module) -> list[Change]:
    """Every change of a file that is possible, in the order of its text."""
    return list(_walk(tree, lines=range(0), defines=()))


def _walk(node: ast.AST, lines: range, defines: tuple[str, ...] | None) -> Iterator[Change]:
    if isinstance(node, ast.stmt):
        lines = _head(node)
        if defines is not None:
            defines = _defined(node)
    for field, value in ast.iter_fields(node):
        if field in UNCHANGED_FIELDS:
            continue
        inside = None if isinstance(node, (*FUNCTIONS, ast.Lambda)) and field == "body" else defines
        for at, child in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(child, ast.AST) or _stays(child, node):
                continue
            where = at if isinstance(value, list) else None
            for new in _replacements(child):
                yield Change(node, field, where, child, new, _lines(child, lines), inside)
            yield from _walk(child, lines, inside)


def _lines(node: ast.AST, around: range) -> range:
    return _head(node) if isinstance(node, ast.stmt) else around


def _head(node: ast.stmt) -> range:
    body = getattr(node, "body", None)
    return range(node.lineno, max(node.lineno, body[0].lineno - 1 if body else node.end_lineno or node.lineno) + 1)


def _defined(node: ast.stmt) -> tuple[str, ...]:
    """The names that change their value if this statement of a module or a class does."""
    match node:
        case ast.Assign(targets=targets):
            return tuple(each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.AugAssign(target=ast.Name(id=name)):
            return (name,)
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return (name,)
    return ()


def _stays(node: ast.AST, parent: ast.AST) -> bool:
    match node:
        case ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return True
        case ast.FunctionDef(name="__repr__" | "__str__"):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.keyword(arg="strict"):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="log") | ast.Attribute(attr="_log")))):
            return True
        case ast.Expr(value=ast.Constant() | ast.Call(func=ast.Name(id="assert_never"))):
            return True
    return isinstance(parent, ast.Subscript) and isinstance(parent.value, ast.Name) and parent.value.id == "Literal"


def _replacements(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(ops=ops):
            swapped = COMPARISONS | TURNED if _compares_times(node) else COMPARISONS
            for at, op in enumerate(ops):
                new = copy.copy(node)
                new.ops = [*ops[:at], swapped[type(op)](), *ops[at + 1 :]]
                yield new
        case ast.BinOp(op=op, left=left, right=right) if type(op) in SIGNS and not (_is_text(left) or _is_text(right)):
            yield ast.BinOp(left, SIGNS[type(op)](), right)
        case ast.AugAssign(op=op, value=value) if type(op) in SIGNS and not _is_text(value):
            yield ast.AugAssign(node.target, SIGNS[type(op)](), value)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.BoolOp(op=op, values=values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1 if value < 10 else 2 * value)
        case ast.Constant(value=float(value)):
            yield ast.Constant(value * 2 or 1.0)
        case ast.Call(func=ast.Name(id=name)) if name in OTHERS:
            yield ast.Call(ast.Name(OTHERS[name], ast.Load()), node.args, node.keywords)
        case ast.Expr(value=ast.Call()):
            yield ast.Pass()
    match node:
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) if isinstance(
            test, ast.Name | ast.Attribute | ast.Call
        ):
            turned = copy.copy(node)
            turned.test = ast.UnaryOp(ast.Not(), test)
            yield turned


def _compares_times(node: ast.Compare) -> bool:
    """A name that ends in `_s` is a time in seconds, a fraction."""
    names = (getattr(each, "id", "") or getattr(each, "attr", "") for each in (node.left, *node.comparators))
    return any(name.lower().endswith("_s") for name in names)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )


def _text(node: ast.AST) -> str:
    """Its first line: of a compound statement its head."""
    return ast.unparse(node).split("\n", 1)[0][:90]
