"""One generator of arithmetic problems behind three tasks: `sum`, `chain` and `worded`.

A problem is a start value and a few signed steps. The tasks differ in the size of the numbers, in how the problem is
told and in how much of the work a solution shows. A solution may slip: from the step that slips on, the wrong value is
carried along consistently, so that the outcome is decided there and not at the end.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from . import words

Task = Literal["sum", "chain", "worded"]
TASKS: tuple[Task, ...] = ("sum", "chain", "worded")

_MOST_MISSES = 200_000
# Collecting all 4,095 sums by chance takes about 40,000 draws.

_SMALL_STEPS = [delta for delta in range(-5, 6) if delta]
# Larger steps have twice as many facts to learn, and the warm start has a minute.

LABELS = "abcdefghijklmnop"
"""Names of a chain's start value and steps, in this order."""


@dataclass(frozen=True)
class Problem:
    """A start value and signed steps, with the words of its story.

    `deltas` are what each step adds; every partial result is 0 or more. `story` holds the name, the noun and, for each
    step, the verb phrase; it is empty except for the task `worded`.
    """

    task: Task
    start: int
    deltas: tuple[int, ...]
    story: tuple[str, ...] = ()

    @property
    def answer(self) -> int:
        """The right answer."""
        return self.start + sum(self.deltas)

    @property
    def key(self) -> tuple[object, ...]:
        """What makes two problems the same one.

        Not the order of the two terms of a sum, and not the length of a chain, whose shorter one is part of the longer.
        """
        if self.task == "sum":
            return ("sum", *sorted((self.start, self.deltas[0])))
        if self.task == "chain":
            return ("chain", self.start, self.deltas[:2])
        return (self.task, self.start, self.deltas, self.story)

    @property
    def question(self) -> str:
        """The text the user asks."""
        return _QUESTIONS[self.task](self)

    def prefix(self, num_steps: int) -> Problem:
        """The same problem, ending after its first steps; a chain ends after a whole round of two."""
        end = num_steps + num_steps % 2 if self.task == "chain" else num_steps
        return replace(self, deltas=self.deltas[:end], story=self.story[: 2 + end])

    def solution(self, slip: int | None = None, error: int = 0) -> str:
        """The worked solution, ending in a boxed answer.

        Args:
            slip: index of the step whose result is off by `error`; None for the right solution.
            error: added to that step's result and carried along.

        Returns:
            The text the assistant should write, without the end-of-turn token.
        """
        values, total = [self.start], self.start
        for index, delta in enumerate(self.deltas):
            total += delta + (error if index == slip else 0)
            values.append(total)
        return _SOLUTIONS[self.task](self, values)


def draw_problem(task: Task, rng: random.Random) -> Problem:
    """Draw one problem of a task."""
    if task == "sum":
        return Problem("sum", rng.randint(10, 99), (rng.randint(10, 99),))
    if task == "chain":
        return _draw_chain(rng)
    if task == "worded":
        start = rng.randint(20, 79)
        deltas = _draw_deltas(start, rng.randint(2, 4), rng)
        return Problem("worded", start, deltas, _draw_story(deltas, rng))
    raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r}")


def draw_solution(problem: Problem, correct_share: float, rng: random.Random) -> str:
    """A solution that is right with probability `correct_share`, and else slips once, at a random step."""
    if rng.random() < correct_share:
        return problem.solution()
    slip = rng.randrange(len(problem.deltas))
    partial = problem.start + sum(problem.deltas[: slip + 1])
    lowest = min(_partials(problem)[slip + 1 :])
    # A slip misses or doubles a carry, or is off by one or two; no later value may fall below 0.
    errors = [error for error in (-10, -2, -1, 1, 2, 10) if lowest + error >= 0 and partial + error >= 0]
    return problem.solution(slip, rng.choice(errors))


def split_problems(task: Task, sizes: dict[str, int], seed: int) -> dict[str, list[Problem]]:
    """Draw disjoint splits: no problem, nor for sums its mirror image, is in two of them.

    Args:
        task: the task to draw for.
        sizes: split name to number of problems, all distinct.
        seed: the same seed gives the same splits in the same order.

    Returns:
        split name to its problems.

    Raises:
        ValueError: the task has fewer distinct problems than asked for.
    """
    rng = random.Random(f"{task} {seed}")
    seen: set[tuple[object, ...]] = set()
    splits: dict[str, list[Problem]] = {}
    for name, size in sizes.items():
        problems: list[Problem] = []
        misses = 0
        while len(problems) < size:
            problem = draw_problem(task, rng)
            if problem.key in seen:
                misses += 1
                if misses > _MOST_MISSES:
                    raise ValueError(f"task {task} has too few distinct problems for {sizes}: ask for fewer")
                continue
            seen.add(problem.key)
            problems.append(problem)
        splits[name] = problems
    return splits


def _partials(problem: Problem) -> list[int]:
    values = [problem.start]
    for delta in problem.deltas:
        values.append(values[-1] + delta)
    return values


def _draw_chain(rng: random.Random) -> Problem:
    """Two different steps in turn, three to seven times, with every partial result within 10 and 99."""
    while True:
        pair = tuple(rng.sample(_SMALL_STEPS, 2))
        problem = Problem("chain", rng.randint(10, 99), pair * rng.randint(3, 7))
        if sum(pair) and all(10 <= value <= 99 for value in _partials(problem)):
            return problem


def _draw_deltas(start: int, count: int, rng: random.Random) -> tuple[int, ...]:
    """Steps of 1 to 5 up or down that keep every partial result within 10 and 99."""
    deltas: list[int] = []
    total = start
    for _ in range(count):
        delta = rng.choice([delta for delta in _SMALL_STEPS if 10 <= total + delta <= 99])
        deltas.append(delta)
        total += delta
    return tuple(deltas)


def _draw_story(deltas: tuple[int, ...], rng: random.Random) -> tuple[str, ...]:
    name, friend = rng.sample(words.NAMES, 2)
    verbs = {True: rng.sample(words.GAIN_VERBS, len(deltas)), False: rng.sample(words.LOSS_VERBS, len(deltas))}
    phrases = []
    for index, delta in enumerate(deltas):
        verb, preposition = verbs[delta > 0][index]
        where = friend if preposition in words.WITH_PERSON else f"the {rng.choice(words.PLACES)}"
        phrases.append(f"{verb} {{}} {preposition} {where}")
    return (name, rng.choice(words.NOUNS), *phrases)


def _sum_question(problem: Problem) -> str:
    return f"{problem.start}+{problem.deltas[0]}"


def _sum_solution(problem: Problem, values: list[int]) -> str:
    return f"\\boxed{{{values[-1]}}}"


def _chain_question(problem: Problem) -> str:
    first, second = problem.deltas[:2]
    return f"{problem.start}+({first:+d}{second:+d})*{len(problem.deltas) // 2}"


def _chain_solution(problem: Problem, values: list[int]) -> str:
    steps = zip(LABELS[1:], problem.deltas, values[1:], strict=False)
    lines = [f"{LABELS[0]}={values[0]}", *(f"{label}{delta:+d}={after}" for label, delta, after in steps)]
    return "\n".join([*lines, f"\\boxed{{{values[-1]}}}"])


def _worded_question(problem: Problem) -> str:
    name, noun, *phrases = problem.story
    steps = [f" {name} {phrase.format(abs(delta))}." for phrase, delta in zip(phrases, problem.deltas, strict=True)]
    return f"{name} has {problem.start} {noun}.{''.join(steps)} How many {noun} are left?"


def _worded_solution(problem: Problem, values: list[int]) -> str:
    name, noun, *phrases = problem.story
    rows = zip(phrases, problem.deltas, values, values[1:], strict=False)
    steps = [
        f" {name} {phrase.format(abs(delta))}, so {before}{delta:+d}={after}." for phrase, delta, before, after in rows
    ]
    return f"{name} has {problem.start} {noun}.{''.join(steps)} The answer is \\boxed{{{values[-1]}}}."


_QUESTIONS: dict[Task, Callable[[Problem], str]] = {
    "sum": _sum_question,
    "chain": _chain_question,
    "worded": _worded_question,
}
_SOLUTIONS: dict[Task, Callable[[Problem, list[int]], str]] = {
    "sum": _sum_solution,
    "chain": _chain_solution,
    "worded": _worded_solution,
}
