# SPDX-License-Identifier: Apache-2.0
"""A dim is a polynomial in named lengths, so that ``4*batch`` splits into ``batch`` and 4 provably."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

Monomial = tuple[str, ...]

MAX_TERMS = 8
"""A longer sum in a ``dim_param`` is one name: the product of four such dims would have thousands of terms."""


class Dim:
    """A length: a polynomial with integer coefficients in the names of the dynamic dims. Immutable."""

    __slots__ = ("terms",)

    def __init__(self, terms: Mapping[Monomial, int]) -> None:
        self.terms: dict[Monomial, int] = {m: c for m, c in sorted(terms.items()) if c}

    @staticmethod
    def of(number: int) -> Dim:
        """A fixed length."""
        return Dim({(): int(number)})

    @staticmethod
    def named(name: str) -> Dim:
        """The dim that a ``dim_param`` stands for; sums and products such as ``4*s0 + 1`` are understood.

        A name that is a number is a name: nothing else says that the dim has that length.
        """
        if re.fullmatch(r"[\w.:/\-+* ]+", name) and not re.search(r"[^\s+*]\s+[^\s+*]|[\d\w]-", name):
            terms = [_parse_product(part) for part in name.split("+")]
            if len(terms) <= MAX_TERMS and all(t is not None for t in terms):
                dim = sum((t for t in terms if t is not None), Dim({}))
                if dim.static is None:
                    return dim
        return Dim({(name,): 1})

    @property
    def static(self) -> int | None:
        """The number, when it is one."""
        if not self.terms:
            return 0
        return self.terms[()] if set(self.terms) == {()} else None

    @property
    def symbol(self) -> str | None:
        """The name, when the dim is a single dynamic dim."""
        if len(self.terms) != 1:
            return None
        ((monomial, coefficient),) = self.terms.items()
        return monomial[0] if coefficient == 1 and len(monomial) == 1 else None

    @property
    def symbols(self) -> set[str]:
        """Every name that the dim depends on."""
        return {name for monomial in self.terms for name in monomial}

    def evaluate(self, sizes: Mapping[str, int]) -> int:
        """The number at these sizes of the named dims."""
        return sum(c * math.prod(sizes[name] for name in m) for m, c in self.terms.items())

    def renamed(self, names: Callable[[str], str]) -> Dim:
        """The dim with every name mapped."""
        return sum((Dim({tuple(sorted(map(names, m))): c}) for m, c in self.terms.items()), Dim({}))

    def divided(self, other: Dim) -> Dim | None:
        """The exact quotient, or None when it is no polynomial."""
        if self == other:
            return Dim.of(1)
        if len(other.terms) == 1:
            ((monomial, coefficient),) = other.terms.items()
            quotients = {_without(m, monomial): c for m, c in self.terms.items()}
            if None not in quotients and all(c % coefficient == 0 for c in self.terms.values()):
                return Dim({m: c // coefficient for m, c in quotients.items() if m is not None})
            return None
        if self.terms.keys() == other.terms.keys():
            ratios = {self.terms[m] / c for m, c in other.terms.items()}
            ratio = ratios.pop()
            if not ratios and ratio == int(ratio):
                return Dim.of(int(ratio))
        return None

    def __add__(self, other: Dim) -> Dim:
        terms = dict(self.terms)
        for monomial, coefficient in other.terms.items():
            terms[monomial] = terms.get(monomial, 0) + coefficient
        return Dim(terms)

    def __mul__(self, other: Dim) -> Dim:
        terms: dict[Monomial, int] = {}
        for a, x in self.terms.items():
            for b, y in other.terms.items():
                monomial = tuple(sorted(a + b))
                terms[monomial] = terms.get(monomial, 0) + x * y
        return Dim(terms)

    def __sub__(self, other: Dim) -> Dim:
        return self + other * Dim.of(-1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dim) and self.terms == other.terms

    def __hash__(self) -> int:
        return hash(tuple(self.terms.items()))

    def __repr__(self) -> str:
        parts = ["*".join(([str(c)] if c != 1 or not m else []) + list(m)) for m, c in self.terms.items()]
        return " + ".join(parts) or "0"


def _parse_product(text: str) -> Dim | None:
    product = Dim.of(1)
    for factor in (f.strip() for f in text.split("*")):
        if not factor:
            return None
        product = product * (Dim.of(int(factor)) if re.fullmatch("[0-9]{1,18}", factor) else Dim({(factor,): 1}))
    return product


def _without(monomial: Monomial, part: Monomial) -> Monomial | None:
    rest = list(monomial)
    for name in part:
        if name not in rest:
            return None
        rest.remove(name)
    return tuple(rest)


ONE = Dim.of(1)
Shape = tuple[Dim, ...]
