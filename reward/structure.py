"""Equality of whole answers: units, lists, sets, intervals, tuples, matrices, relations, then scalars."""

from __future__ import annotations

from collections.abc import Callable

from reward import limits, relations, sets, words
from reward.equal import SCALAR_OPS, Outcome, scalar_equal
from reward.nodes import Node, num, walk
from reward.prepare import prepare
from reward.relations import FalseRelation
from reward.text import word_key

_SET_LIKE = frozenset("tuple set named union intersect minus builder member rel list".split())
_SYNONYM_WORDS = {"dne": "does not exist", "none of these": "none of the above"}


def same_answer(answer: Node, gold: Node) -> Outcome:
    """Compare an answer with the gold.

    Raises:
        BoundError: a bound was met before the comparison could be decided.
    """
    try:
        return _same(prepare(answer), prepare(gold))
    except FalseRelation:
        return Outcome(False, "false relation")


def _same(a: Node, g: Node) -> Outcome:
    limits.check_time()
    for applies, compare in _KINDS:
        if applies(a, g):
            return compare(a, g)
    return Outcome(a == g, "structure")


def _either(op: str) -> Callable[[Node, Node], bool]:
    return lambda a, g: op in (a.op, g.op)


def _both(ops: frozenset[str]) -> Callable[[Node, Node], bool]:
    return lambda a, g: a.op in ops and g.op in ops


def same_words(answer: str, gold: str) -> bool:
    """Compare two word answers: case, articles and punctuation do not matter."""
    first, second = word_key(answer), word_key(gold)
    if first and first.replace(" ", "") == second.replace(" ", ""):
        return True
    return bool(first) and _SYNONYM_WORDS.get(first, first) == _SYNONYM_WORDS.get(second, second)


def _units(a: Node, g: Node) -> Outcome:
    if a.op == g.op and words.units_clash(a.name, g.name):
        return Outcome(False, "unit")
    values = [x.args[0] if x.op == "unit" else x for x in (a, g)]
    if values[0].op == "unit" or values[1].op == "unit":
        return Outcome(False, "unit")
    return _same(prepare(values[0]), prepare(values[1]))


def _has_equality(node: Node) -> bool:
    return node.op == "rel" and all(name in ("=", "~") for name in node.name.split())


def _equations(a: Node, g: Node) -> Outcome:
    solved_a = relations.solve(a) if _has_equality(a) else None
    solved_g = relations.solve(g) if _has_equality(g) else None
    if _has_equality(a) and _has_equality(g):
        simple = [s if s is not None and relations.names_one_quantity(s) else None for s in (solved_a, solved_g)]
        return _two_equations(a, g, *simple)
    solved, plain = (solved_a, g) if _has_equality(a) else (solved_g, a)
    if solved is None or (_has_equality(g) and not relations.names_one_quantity(solved)):
        return Outcome(False, "equation")
    value = prepare(solved.value)
    pair = next((label for label in solved.labels if label.op == "tuple"), None)
    if value.op == "tuple" and plain.op == "list" and pair is not None:
        if _relational(plain, plain):
            listed = _assigned(plain, tuple(arg.name for arg in pair.args))
            return Outcome(False, "label") if listed is None else _tuples(value, listed)
        return _elementwise(value.args, plain.args, "labelled tuple")  # (x, y) = (1, 2) for the gold "1, 2"
    outcome = _same(value, plain) if _has_equality(a) else _same(plain, value)
    return Outcome(outcome.same, f"labelled value: {outcome.rule}")


def _two_equations(a: Node, g: Node, solved_a: relations.Solved | None, solved_g: relations.Solved | None) -> Outcome:
    if solved_a is not None and solved_g is not None:
        if relations.same_labels(relations.renamed(solved_a), relations.renamed(solved_g)):
            first, second = relations.renamed(solved_a), relations.renamed(solved_g)
            if first.labels[:1] != second.labels[:1]:
                first, second = solved_a, solved_g
            outcome = _same(prepare(first.value), prepare(second.value))
            if outcome.same:
                return Outcome(True, f"labelled value: {outcome.rule}")
        elif not _symbols(solved_a.value) and not _symbols(solved_g.value):
            return Outcome(False, "label")
    if solved_g is not None and not _symbols(solved_g.value):
        return Outcome(False, "equation")  # the gold is solved: an unsolved equation is no answer
    if any(side.op not in SCALAR_OPS for side in (*a.args, *g.args)):
        return Outcome(False, "equation")
    return relations.same_equation(a, g)


def _symbols(node: Node) -> bool:
    return any(part.op in ("sym", "call") for part in walk(node))


def _holds_matrix(node: Node) -> bool:
    return node.op in SCALAR_OPS and any(part.op == "matrix" for part in walk(node))


def _matrices(a: Node, g: Node) -> Outcome:
    first, second = _scaled(a), _scaled(g)
    if first.op != "matrix" or second.op != "matrix" or first.name != second.name:
        return Outcome(False, "matrix")
    return _elementwise(first.args, second.args, "matrix")


def _scaled(node: Node) -> Node:
    """Multiply a scalar into a matrix; other matrix arithmetic stays as it is and matches nothing."""
    if node.op == "neg" and node.args[0].op == "matrix":
        return Node("matrix", tuple(Node("neg", (x,)) for x in node.args[0].args), node.args[0].name)
    if node.op == "mul" and sum(arg.op == "matrix" for arg in node.args) == 1:
        matrix = next(arg for arg in node.args if arg.op == "matrix")
        factors = tuple(arg for arg in node.args if arg.op != "matrix")
        return Node("matrix", tuple(Node("mul", (*factors, x)) for x in matrix.args), matrix.name)
    if node.op == "add":
        parts = [_scaled(arg) for arg in node.args]
        if len({part.name for part in parts}) == 1 and all(part.op == "matrix" for part in parts):
            columns = zip(*(part.args for part in parts), strict=True)
            return Node("matrix", tuple(Node("add", column) for column in columns), parts[0].name)
    if node.op == "div" and node.args[0].op == "matrix":
        return Node("matrix", tuple(Node("div", (x, node.args[1])) for x in node.args[0].args), node.args[0].name)
    return node


def _elementwise(left: tuple[Node, ...], right: tuple[Node, ...], rule: str) -> Outcome:
    if len(left) != len(right):
        return Outcome(False, rule)
    for a, b in zip(left, right, strict=True):
        outcome = _same(prepare(a), prepare(b))
        if not outcome.same:
            return Outcome(outcome.same, rule)
    return Outcome(True, rule)


def _tuples(a: Node, g: Node) -> Outcome:
    if a.name != g.name:
        return Outcome(False, "brackets")
    return _elementwise(a.args, g.args, "tuple")


def _point_and_list(a: Node, g: Node) -> Outcome:
    """Compare "x = 1, y = 2" with the point (1, 2)."""
    listed = _assigned(a if a.op == "list" else g)
    if listed is None:
        return _sets(a, g)
    return _tuples(listed, g) if a.op == "list" else _tuples(a, listed)


def _assigned(node: Node, order: tuple[str, ...] = ()) -> Node | None:
    """Return the point that "x = 1, y = 2" names, in the given order of letters, else in alphabetical order."""
    solved = [relations.solve(arg) if _has_equality(arg) else None for arg in node.args]
    names = [s.labels[0].name for s in solved if s is not None and len(s.labels) == 1 and s.labels[0].op == "sym"]
    values = dict(zip(names, (s.value for s in solved if s is not None), strict=False))
    if len(names) != len(solved) or len(values) != len(names) or set(order or names) != set(names):
        return None
    if not order and names != sorted(names):
        return None
    return Node("tuple", tuple(values[name] for name in order or names), "()")


def _members(node: Node) -> list[Node]:
    """Return the elements of a list or set, plus-minus expanded, tuples included."""
    items: list[Node] = []
    for arg in node.args:
        ready = prepare(arg)
        if ready.op == "list":
            items += ready.args
        elif ready.op == "rel" and len(ready.args) == 2 and prepare(ready.args[1]).op == "list":
            items += [Node("rel", (ready.args[0], x), ready.name) for x in prepare(ready.args[1]).args]
        else:
            items.append(ready)
        if len(items) > limits.MAX_ITEMS:
            raise limits.BoundError("too many elements")
    return items


def _collections(a: Node, g: Node) -> Outcome:
    """Match elements one to one in any order; a set and a plus-minus drop repetitions first."""
    left, right = _members(a), _members(g)
    rule = "set" if "set" in (a.op, g.op) else "list"
    if "ldots" in {x.op for x in (*left, *right)}:
        return _elementwise(tuple(left), tuple(right), "sequence")
    if a.op == "set" or a.name == "pm":
        left = _distinct(left)
    if g.op == "set" or g.name == "pm":
        right = _distinct(right)
    if len(left) != len(right):
        return Outcome(False, rule)
    rest = list(right)
    for item in left:
        for index, other in enumerate(rest):
            if _same(item, other).same:
                del rest[index]
                break
        else:
            return Outcome(False, rule)
    return Outcome(True, rule)


def _distinct(items: list[Node]) -> list[Node]:
    kept: list[Node] = []
    for item in items:
        if not any(_same(item, other).same for other in kept):
            kept.append(item)
    return kept


def _lists(a: Node, g: Node) -> Outcome:
    if _names_letters(g) and not _relational(a, a):
        return _elementwise(a.args, g.args, "assignments in order")
    found = _collections(a, g)
    return found if found.same or not _relational(a, g) else _sets(a, g)


def _names_letters(node: Node) -> bool:
    """Return whether a list assigns to different letters: then its values have an order; x_1, x_2 have none."""
    if node.op != "list" or not all(_has_equality(arg) and arg.args[0].op == "sym" for arg in node.args):
        return False
    letters = {arg.args[0].name.partition("_")[0] for arg in node.args}
    return len(letters) == len(node.args)


def _relational(a: Node, g: Node) -> bool:
    return any(x.op in ("rel", "member") for side in (a, g) for x in side.args)


def _sets(a: Node, g: Node) -> Outcome:
    if "tuple" in (a.op, g.op) and {a.op, g.op} & {"list", "set"} and not _relational(a, g):
        return Outcome(False, "brackets")
    try:
        (left, name_a), (right, name_g) = sets.pieces(a), sets.pieces(g)
        if name_a and name_g and name_a != name_g:
            return Outcome(False, "variable")
        return Outcome(sets.same_pieces(left, right), "real set")
    except sets.NotReal:
        return _symbolic_sets(a, g)


def _symbolic_sets(a: Node, g: Node) -> Outcome:
    if a.op == g.op == "rel":
        found = relations.same_inequality(a, g)
        if found.same:
            return found
    first, second = _as_interval(a), _as_interval(g)
    if first is not None and second is not None:
        if first.name != second.name:
            return Outcome(False, "interval")
        return _elementwise(first.args, second.args, "interval")
    if a.op == g.op in ("union", "intersect"):
        return _collections(Node("list", _flat(a, a.op)), Node("list", _flat(g, g.op)))
    if a.op == g.op and len(a.args) == len(g.args) and a.op in ("minus", "builder", "member"):
        return _elementwise(a.args, g.args, a.op)
    return Outcome(a == g, "structure")


def _flat(node: Node, op: str) -> tuple[Node, ...]:
    if node.op != op:
        return (node,)
    return tuple(x for arg in node.args for x in _flat(arg, op))


def _as_interval(node: Node) -> Node | None:
    """Return a tuple node for an interval with symbolic ends, however it was written."""
    if node.op == "tuple" and len(node.args) == 2:
        return node
    if node.op == "builder":
        return _as_interval(node.args[1])
    names = node.name.split()
    if node.op != "rel" or len(names) != 2 or node.args[1].op != "sym":
        return None
    low, _, high = node.args
    if all(name in (">", ">=") for name in names):
        low, high, names = high, low, [{">": "<", ">=": "<="}[name] for name in reversed(names)]
    if not all(name in ("<", "<=") for name in names):
        return None
    return Node("tuple", (low, high), ("[" if names[0] == "<=" else "(") + ("]" if names[1] == "<=" else ")"))


def _ratios(a: Node, g: Node) -> Outcome:
    if a.op == g.op == "ratio":
        if "clock" in (a.name, g.name) or len(a.args) != len(g.args):
            return _elementwise(a.args, g.args, "clock")
        pairs = [(Node("div", a.args[i : i + 2]), Node("div", g.args[i : i + 2])) for i in range(len(a.args) - 1)]
        return Outcome(all(scalar_equal(x, y).same for x, y in pairs), "ratio")
    ratio, plain = (a, g) if a.op == "ratio" else (g, a)
    if ratio.name == "clock" or len(ratio.args) != 2 or plain.op not in SCALAR_OPS:
        return Outcome(False, "ratio")
    return Outcome(scalar_equal(Node("div", ratio.args), plain).same, "ratio")


def _base_value(node: Node) -> tuple[int, int] | None:
    digits, _, base = node.name.rpartition("_")
    if len(digits) > limits.MAX_LITERAL_DIGITS:
        raise limits.BoundError("too many digits")
    try:
        return int(digits, int(base)), int(base)
    except ValueError:
        return None


def _residue(node: Node) -> bool:
    return node.op == "mod" and node.name != "value"


def _residues(a: Node, g: Node) -> Outcome:
    if not (_residue(a) and _residue(g)) or not scalar_equal(a.args[1], g.args[1]).same:
        return Outcome(False, "residue class")
    gap = Node("add", (a.args[0], Node("neg", (g.args[0],))))
    return Outcome(scalar_equal(Node("mod", (gap, a.args[1]), "value"), num(0)).same, "residue class")


def _words(a: Node, g: Node) -> Outcome:
    return Outcome(a.op == g.op and same_words(a.name, g.name), "words")


def _bases(a: Node, g: Node) -> Outcome:
    return Outcome(a.op == g.op and _base_value(a) == _base_value(g), "base")


_Applies = Callable[[Node, Node], bool]
_Compare = Callable[[Node, Node], Outcome]
_KINDS: tuple[tuple[_Applies, _Compare], ...] = (
    (_either("text"), _words),
    (_either("unit"), _units),
    (lambda a, g: _has_equality(a) or _has_equality(g), _equations),
    (lambda a, g: any(x.op == "matrix" or _holds_matrix(x) for x in (a, g)), _matrices),
    (_both(frozenset(("list", "set"))), _lists),
    (lambda a, g: {a.op, g.op} == {"list", "tuple"} and _relational(a, g), _point_and_list),
    (_both(frozenset(("tuple",))), _tuples),
    (_both(_SET_LIKE), _sets),
    (_either("ratio"), _ratios),
    (_either("base"), _bases),
    (lambda a, g: _residue(a) or _residue(g), _residues),
    (_both(SCALAR_OPS), scalar_equal),
)
