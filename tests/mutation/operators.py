"""The small wrong changes that the tests of a module should notice.

A mutant is one node of a module's syntax tree replaced. Annotations, decorators,
docstrings and what stands in a `raise` or a warning (wording) are left as they are.
"""

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

COMPARED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
COMPUTED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
REMOVED = (
    ast.Expr,
    ast.Assign,
    ast.AugAssign,
    ast.Delete,
    ast.Raise,
    ast.Assert,
    ast.Continue,
    ast.Break,
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
LONGEST = 70
"""Characters of code shown on each side of a change."""


@dataclass(frozen=True)
class Mutant:
    """One change: where it is, and how it reads.

    `position` and `variant` find it again in the tree; `lines` are those that a test
    has to run to notice it; `deferred` says whether it is in the body of a function,
    rather than in code that runs when the module is imported.
    """

    position: int
    variant: int
    lines: tuple[int, ...]
    deferred: bool
    function: str
    before: str
    after: str

    def tree(self, source: str) -> ast.Module:
        """The syntax tree of `source` with the change made."""
        tree = ast.parse(source)
        node = list(ast.walk(tree))[self.position]
        new = ast.copy_location(list(_variants(node))[self.variant], node)
        return ast.fix_missing_locations(_Swap(node, new).visit(tree))

    @property
    def key(self) -> tuple[str, str, str]:
        """What a change is called by, whichever line it stands on."""
        return self.function, self.before, self.after


def mutants(source: str) -> list[Mutant]:
    """All mutants of a module, in the order of its lines."""
    tree = ast.parse(source)
    left_alone = set(_left_alone(tree))
    places = dict(_places(tree))
    statements = dict(_statements(tree))
    found = [
        Mutant(
            position,
            variant,
            _lines(node),
            *places[id(node)],
            *_shown(statements.get(id(node), node), node, new),
        )
        for position, node in enumerate(ast.walk(tree))
        if id(node) not in left_alone
        for variant, new in enumerate(_variants(node))
    ]
    return sorted(found, key=lambda mutant: mutant.lines)


class _Swap(ast.NodeTransformer):
    """Puts one node in the place of another."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


def _lines(node: ast.AST) -> tuple[int, ...]:
    """The lines of a simple node; only the first one of a compound statement."""
    if isinstance(node, ast.stmt) and hasattr(node, "body"):
        return (node.lineno,)
    if isinstance(node, ast.comprehension | ast.keyword):
        node = node.iter if isinstance(node, ast.comprehension) else node.value
    return tuple(range(node.lineno, node.end_lineno + 1))


def _statements(tree: ast.Module) -> Iterator[tuple[int, ast.stmt]]:
    """For each node, the innermost statement that it belongs to."""
    for statement in ast.walk(tree):  # from the outside inward
        if isinstance(statement, ast.stmt):
            yield from ((id(node), statement) for node in ast.walk(statement))


def _shown(statement: ast.AST, node: ast.AST, new: ast.AST) -> tuple[str, str]:
    """A change as two short lines of code, about the place where they differ."""
    before, after = _code(statement), _code(new)
    if statement is not node:
        _Swap(node, new).visit(statement)
        after = _code(statement)
        _Swap(new, node).visit(statement)
    if before == after:  # deeper than the head of a statement
        before, after = _code(node), _code(new)
    return _about(before, after), _about(after, before)


def _about(text: str, other: str) -> str:
    """The part of a line near the first character in which it differs."""
    differ = [i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b]
    middle = differ[0] if differ else min(len(text), len(other))
    start = max(0, min(middle - LONGEST // 2, len(text) - LONGEST))
    end = start + LONGEST
    return ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")


def _code(node: ast.AST) -> str:
    """A node as one line of code; of a compound statement, its head."""
    if hasattr(node, "decorator_list"):
        node = _with(node, decorator_list=[])
    text = ast.unparse(node)
    if isinstance(node, ast.stmt) and hasattr(node, "body"):
        text = text.split("\n")[0]
    return " ".join(text.split())


def _places(tree: ast.Module) -> Iterator[tuple[int, tuple[bool, str]]]:
    """For each node, whether it runs when a function is called, and whose it is."""

    def walk(
        node: ast.AST, deferred: bool, name: str
    ) -> Iterator[tuple[int, tuple[bool, str]]]:
        yield id(node), (deferred, name)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{name}.{node.name}".lstrip(".")
        body = getattr(node, "body", None) if isinstance(node, FUNCTIONS) else None
        inside = {id(part) for part in (body if isinstance(body, list) else [body])}
        for child in ast.iter_child_nodes(node):
            yield from walk(child, deferred or id(child) in inside, name)

    return walk(tree, False, "")


def _left_alone(tree: ast.Module) -> Iterator[int]:
    """The nodes that say something to people or to mypy, not to the computer."""
    for node in ast.walk(tree):
        for part in _not_code(node):
            yield from (id(inner) for inner in ast.walk(part))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield id(node)


def _not_code(node: ast.AST) -> list[ast.AST]:
    """Parts of a node in which nothing is changed."""
    match node:
        case ast.Expr(value=ast.Constant() as text):
            return [text]
        case ast.Raise():
            return list(ast.iter_child_nodes(node))
        case ast.Call(func=ast.Attribute(attr="warn")):
            return list(node.args)
        case ast.FormattedValue(format_spec=ast.AST() as spec):
            return [spec]
        case ast.AnnAssign():
            return [node.annotation]
        case ast.arg(annotation=ast.AST() as annotation):
            return [annotation]
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            returned = [node.returns] if node.returns else []
            return [*node.decorator_list, *returned]
        case ast.ClassDef():
            return [*node.decorator_list]
    return []


def _variants(node: ast.AST) -> Iterator[ast.AST]:
    """The wrong nodes that might stand in the place of a right one."""
    if isinstance(node, REMOVED):
        yield ast.Pass()
    match node:
        case ast.Compare():
            yield from _compared(node)
        case ast.BinOp(op=op) if type(op) in COMPUTED:
            yield _with(node, op=COMPUTED[type(op)]())
        case ast.AugAssign(op=op) if type(op) in COMPUTED:
            yield _with(node, op=COMPUTED[type(op)]())
        case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
            yield operand
        case ast.BoolOp(op=op):
            yield _with(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.Return(value=ast.AST() as value):
            if not (isinstance(value, ast.Constant) and value.value is None):
                yield ast.Return(ast.Constant(None))
        case ast.If() | ast.IfExp():
            yield _with(node, test=ast.UnaryOp(ast.Not(), node.test))
        case ast.comprehension(ifs=[_, *_] as tests):
            for test in tests:
                yield _with(node, ifs=[other for other in tests if other is not test])
        case ast.Call(keywords=keywords):
            for keyword in keywords:
                kept = [other for other in keywords if other is not keyword]
                yield _with(node, keywords=kept)
        case ast.Constant(value=value):
            yield from _constants(value)
        case _:
            pass


def _compared(node: ast.Compare) -> Iterator[ast.AST]:
    for i, op in enumerate(node.ops):
        ops = [*node.ops]
        ops[i] = COMPARED[type(op)]()
        yield _with(node, ops=ops)


def _constants(value: object) -> Iterator[ast.AST]:
    match value:
        case bool():
            yield ast.Constant(not value)
        case int() | float():
            yield ast.Constant(value + 1)
        case str() | bytes():
            yield ast.Constant(value + ("X" if isinstance(value, str) else b"X"))
        case _:
            pass


def _with(node: ast.AST, **fields: object) -> ast.AST:
    """A copy of a node in which some fields differ."""
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new
