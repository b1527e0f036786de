"""The words of the tiny world, by part of speech: one token each, so that a study can look at verbs or prepositions."""

from __future__ import annotations

NAMES = ("Tom", "Anna", "Ben", "Mia", "Leo", "Eva", "Sam", "Ida")

NOUNS = ("apples", "books", "coins", "eggs", "pens", "shells", "stamps", "cards", "stones", "keys")

PLACES = ("shop", "market", "school", "park", "garden", "house", "river", "farm", "road", "beach")

# Each verb goes with one preposition.
GAIN_VERBS = (("buys", "at"), ("finds", "near"), ("gets", "from"), ("wins", "against"), ("picks", "in"))

LOSS_VERBS = (("gives", "to"), ("loses", "on"), ("sells", "outside"), ("drops", "behind"), ("leaves", "under"))

WITH_PERSON = frozenset({"from", "against", "to"})
"""Prepositions followed by a person; the others by a place."""

VERBS = (*(verb for verb, _ in GAIN_VERBS + LOSS_VERBS), "has", "is", "are", "left")

PREPOSITIONS = tuple(preposition for _, preposition in GAIN_VERBS + LOSS_VERBS)

OTHERS = ("the", "The", "so", "How", "many", "answer", "user", "assistant", "system")

WORDS = (*NAMES, *NOUNS, *PLACES, *VERBS, *PREPOSITIONS, *OTHERS)
"""Every word that is a token, with and without a space before it."""
