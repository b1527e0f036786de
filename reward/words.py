"""Words that may stand in an answer: units, connectives, names of constants and functions."""

from __future__ import annotations

import re

FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan arccot sinh cosh tanh coth ln log lg exp min max gcd lcm sqrt".split()
)
CONSTANT_WORDS = {
    "pi": "pi", "infty": "inf", "infinity": "inf", "inf": "inf", "infinite": "inf", "infinitely many": "inf",
}  # fmt: skip
GREEK = frozenset(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi omicron rho varrho "
    "sigma varsigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega ell hbar"
    .split()
)  # fmt: skip
CONNECTIVES = {
    "or": "or",
    "and": "and",
    "或": "or",
    "或者": "or",
    "和": "and",
    "与": "and",
    "且": "and",
    "及": "and",
    "&": "and",
}
# Short words that are never a product of variables.
STOP_WORDS = frozenset(
    "a an the no on is it at to in as of if so do go he me we us up by my be am not yes odd even one two six ten "
    "all for any are but can did few has how its let may non nor now our out own put say see set she too was way who "
    "why you".split()
)
_UNIT_NAMES = {
    "cm": "cm centimeter centimetre", "mm": "mm millimeter millimetre", "m": "m meter metre",
    "km": "km kilometer kilometre",
    "in": "in inch inches", "ft": "ft foot feet", "yd": "yd yard", "mi": "mi mile", "g": "g gram gramme",
    "kg": "kg kilogram", "mg": "mg milligram", "lb": "lb lbs pound", "oz": "oz ounce", "s": "s sec second",
    "min": "min minute", "h": "h hr hrs hour", "day": "day", "week": "week", "month": "month", "year": "yr year",
    "l": "l L liter litre", "ml": "ml mL milliliter millilitre", "gal": "gal gallon", "dollar": "dollar usd USD buck",
    "cent": "cent", "euro": "euro EUR", "percent": "percent pct", "degree": "degree deg", "rad": "rad radian",
    "mph": "mph", "hz": "Hz hertz", "j": "J joule", "kj": "kJ", "n": "N newton", "w": "W watt",
    "kw": "kW", "v": "V volt", "pa": "Pa", "kpa": "kPa", "k": "K kelvin", "mol": "mol mole", "unit": "unit units",
    "square": "square sq", "cubic": "cubic cu", "per": "per", "kph": "kph", "yuan": "yuan RMB", "rupee": "rupee Rs",
    "acre": "acre",
    "point": "point pt pts", "people": "people person", "ev": "eV", "erg": "erg", "a": "A ampere", "c": "C",
    "nm": "nm nanometer", "um": "um micrometer", "angstrom": "angstrom", "amu": "amu", "solar": "solar",
}  # fmt: skip
UNITS: dict[str, str] = {}
for _key, _names in _UNIT_NAMES.items():
    for _name in _names.split():
        UNITS[_name] = _key
        if len(_name) > 3:
            UNITS[_name + "s"] = _key
            UNITS[_name.capitalize()] = _key
BASE_WORDS = {
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
    "nine": 9,
    "ten": 10,
    "sixteen": 16,
}
CURRENCY_WORDS = frozenset(("rs", "usd", "eur", "rmb"))
ALL_REALS = frozenset(
    ("all real numbers", "all reals", "real numbers", "the set of all real numbers", "all real x", "any real number")
)
MULTIPLIERS = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
# A number followed by one of these is no number with a unit: it denies, doubts, changes or chooses.
NOT_A_UNIT = frozenset(
    "is isn isnt are was not no never none wrong incorrect false invalid or and maybe perhaps possibly either neither "
    "but than less more greater fewer minus plus times over divided squared cubed factorial half third quarter mod "
    "modulo "
    "approximately about roughly around almost nearly between from to through least most other another except unless "
    "if when where with for all any some each every unknown undefined something answer solution true correct "
    "base power root raised percentage negative positive rejected excluded hundred thousand million billion trillion "
    "dozen one two three four five six seven eight nine ten zero so because since below under halves "
    "thirds fourth fourths quarters fifth fifths sixth sixths seventh sevenths eighth eighths ninth ninths tenth "
    "tenths "
    "hundredth hundredths thousandth thousandths millionth millionths twice double triple reciprocal inverse".split()
)
_UPRIGHT_UNIT_WORD = re.compile(r"[A-Za-z]+")


def unit_key(words: list[str]) -> str | None:
    """Return a normal form of a unit phrase, or None when the words cannot be a unit.

    Known units map to one spelling; other nouns stay, in lower case and without a plural s.
    """
    if not words or len(words) > 6:
        return None
    keys: list[str] = []
    for word in words:
        if word in UNITS:
            keys.append(UNITS[word])
        elif word.lower() in NOT_A_UNIT:
            return None
        elif word in ("/", "^2", "^3", "^-1", "^-2", "^-3"):
            keys.append(word)
        elif _UPRIGHT_UNIT_WORD.fullmatch(word):
            lower = word.lower()
            keys.append(UNITS.get(lower) or (lower[:-1] if len(lower) > 3 and lower.endswith("s") else lower))
        else:
            return None
    text = " ".join("per" if key == "/" else key for key in keys)
    text = re.sub(r"square (\w+)", r"\1 ^2", text)
    text = re.sub(r"cubic (\w+)", r"\1 ^3", text)
    return {"mi per h": "mph", "km per h": "kph"}.get(text, text)


def units_clash(one: str, other: str) -> bool:
    """Return whether two stated units contradict each other (no conversion is done)."""
    if one == other:
        return False
    first, second = set(one.split()), set(other.split())
    known = set(UNITS.values()) | {"^2", "^3"}
    if first & known != second & known:
        return True
    return not (first <= second or second <= first)
