"""Equality of whole answers: units, lists, sets, intervals, tuples, matrices, relations, then scalars."""

from __future__ import annotations

from reward import limits, relations, sets, words
from reward.equal import SCALAR_OPS, Outcome, scalar_equal
from reward.nodes import Node, num, walk
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


def prepare(node: Node) -> Node:
    """Move units, percent and degree marks to the outside and expand plus-minus into a list."""
    if node.op == "neg":
        inner = prepare(node.args[0])
        if inner.op == "unit":
            return Node("unit", (Node("neg", inner.args),), inner.name)
    if node.op == "percent":
        return Node("unit", node.args, "percent")
    if node.op == "deg":
        return Node("unit", node.args, "degree")
    if (
        node.op == "add"
        and len(node.args) == 2
        and node.args[1].op == "neg"
        and node.args[0].op in ("set", "builder", "named")
    ):
        return Node("minus", (node.args[0], node.args[1].args[0]))
    if node.op == "text":
        key = node.name.lower()
        if key in words.CONSTANT_WORDS and words.CONSTANT_WORDS[key] == "inf":
            return Node("inf")
        if len(node.name) == 1:
            return Node("sym", name=node.name)
        if word_key(key) in words.ALL_REALS:
            return Node("named", name="R")
        if "empty set" in key and len(key) < 16:
            return Node("set")
    if (
        node.op == "mul"
        and len(node.args) == 2
        and node.args[0].op == "sym"
        and node.args[0].name.isupper()
        and node.args[1].op == "tuple"
    ):
        return node.args[1]  # a named point, A(1, 2)
    if node.op == "base":
        digits, _, base = node.name.rpartition("_")
        if base == "10" and digits.isdigit():
            return num(int(digits))
    if node.op == "unit" and node.args[0].op in ("percent", "deg"):
        return prepare(node.args[0])
    if node.op in SCALAR_OPS and any(part.op in ("pm", "mp") for part in walk(node)):
        return Node("list", tuple(expand_signs(node)), "pm")
    return node


def expand_signs(node: Node) -> list[Node]:
    """Return the values of an expression with plus-minus signs; a minus-plus is tied to the plus-minus.

    Raises:
        BoundError: too many signs.
    """
    signs = [part for part in walk(node) if part.op in ("pm", "mp")]
    if len(signs) > limits.MAX_PLUS_MINUS:
        raise limits.BoundError("too many plus-minus signs")
    tied = any(part.op == "mp" for part in signs)
    count = 1 if tied else len(signs)
    return [_with_signs(node, [bool(code >> k & 1) for k in range(count)], tied, [0]) for code in range(2**count)]


def _with_signs(node: Node, minus: list[bool], tied: bool, seen: list[int]) -> Node:
    if node.op in ("pm", "mp"):
        flip = minus[0 if tied else seen[0]] != (node.op == "mp")
        seen[0] += 1
        inner = _with_signs(node.args[0], minus, tied, seen)
        return Node("neg", (inner,)) if flip else inner
    return Node(node.op, tuple(_with_signs(arg, minus, tied, seen) for arg in node.args), node.name, node.value)


def _same(a: Node, g: Node) -> Outcome:
    limits.check_time()
    if a.op == "text" or g.op == "text":
        return Outcome(a.op == g.op and same_words(a.name, g.name), "words")
    if a.op == "unit" or g.op == "unit":
        return _units(a, g)
    if _has_equality(a) or _has_equality(g):
        return _equations(a, g)
    if a.op == "matrix" or g.op == "matrix" or _holds_matrix(a) or _holds_matrix(g):
        return _matrices(a, g)
    if a.op in ("list", "set") and g.op in ("list", "set"):
        found = _collections(a, g)
        if found.same or not _relational(a, g):
            return found
    if {a.op, g.op} == {"list", "tuple"} and _relational(a, g):
        listed = _assigned(a if a.op == "list" else g)
        if listed is not None:
            return _same(*((listed, g) if a.op == "list" else (a, listed)))
    if a.op == "tuple" and g.op == "tuple":
        return _tuples(a, g)
    if a.op in _SET_LIKE and g.op in _SET_LIKE:
        return _sets(a, g)
    if "ratio" in (a.op, g.op):
        return _ratios(a, g)
    if "base" in (a.op, g.op):
        return Outcome(a.op == g.op and _base_value(a) == _base_value(g), "base")
    if _residue(a) or _residue(g):
        return _residues(a, g)
    if a.op in SCALAR_OPS and g.op in SCALAR_OPS:
        return scalar_equal(a, g)
    return Outcome(a == g, "structure")


def same_words(answer: str, gold: str) -> bool:
    """Compare two word answers: case, articles and punctuation do not matter."""
    first, second = word_key(answer), word_key(gold)
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
        return _two_equations(a, g, solved_a, solved_g)
    solved, plain = (solved_a, g) if _has_equality(a) else (solved_g, a)
    if solved is None:
        return Outcome(False, "equation")
    value = prepare(solved.value)
    if value.op == "tuple" and plain.op == "list" and any(label.op == "tuple" for label in solved.labels):
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
    if any(prepare(x).op == "list" for x in (*a.args, *g.args)):
        return _collections(Node("list", (a,)), Node("list", (g,)))
    return _elementwise(a.args, g.args, "tuple")


def _assigned(node: Node) -> Node | None:
    """Return the point that "x = 1, y = 2" names; the letters must stand in alphabetical order."""
    solved = [relations.solve(arg) if _has_equality(arg) else None for arg in node.args]
    names = [s.labels[0].name for s in solved if s is not None and len(s.labels) == 1 and s.labels[0].op == "sym"]
    if len(names) != len(solved) or len(set(names)) != len(names) or names != sorted(names):
        return None
    return Node("tuple", tuple(s.value for s in solved if s is not None), "()")


def _members(node: Node) -> list[Node]:
    """Return the elements of a list or set, plus-minus expanded, tuples included."""
    items: list[Node] = []
    for arg in node.args:
        ready = prepare(arg)
        if ready.op == "list":
            items += ready.args
        elif ready.op == "rel" and len(ready.args) == 2 and prepare(ready.args[1]).op == "list":
            items += [Node("rel", (ready.args[0], x), ready.name) for x in prepare(ready.args[1]).args]
        elif ready.op == "tuple":
            items += _tuple_choices(ready)
        else:
            items.append(ready)
        if len(items) > limits.MAX_ITEMS:
            raise limits.BoundError("too many elements")
    return items


def _tuple_choices(node: Node) -> list[Node]:
    choices: list[tuple[Node, ...]] = [()]
    for arg in node.args:
        ready = prepare(arg)
        options = ready.args if ready.op == "list" and ready.name == "pm" else (arg,)
        choices = [(*head, option) for head in choices for option in options]
        if len(choices) > limits.MAX_ITEMS:
            raise limits.BoundError("too many elements")
    return [Node("tuple", choice, node.name) for choice in choices]


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
