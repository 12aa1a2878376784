# SPDX-License-Identifier: Apache-2.0
"""The table covers the operator: a new attribute, name or dtype without rows is named here."""

from __future__ import annotations

import collections
import dataclasses

import pytest

from contract.cases import CASES, Case
from contract.tolerance import DTYPES
from flash_export.op import ATTENTION_OPERATORS, FLOAT_ATTRIBUTES, INT_ATTRIBUTES, OPERATORS, Attributes


def test_every_row_has_its_own_name() -> None:
    repeated = [name for name, count in collections.Counter(c.name for c in CASES).items() if count > 1]
    assert repeated == []


@pytest.mark.parametrize("attribute", [*INT_ATTRIBUTES, *FLOAT_ATTRIBUTES])
def test_every_attribute_has_two_values(attribute: str) -> None:
    assert len({case.attributes()[attribute] for case in CASES}) >= 2


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Case)])
def test_every_property_of_a_case_has_two_values(field: str) -> None:
    assert len({getattr(case, field) for case in CASES}) >= 2


@pytest.mark.parametrize("operator", ATTENTION_OPERATORS)
def test_every_operator_has_rows_in_every_dtype(operator: str) -> None:
    assert {case.dtype for case in CASES if case.operator == operator} == set(DTYPES)


def test_every_row_is_a_node_that_the_contract_allows() -> None:
    for case in CASES:
        assert Attributes(**case.attributes()).why_not_of(OPERATORS[case.operator]) is None, case.name


@pytest.mark.parametrize("size", ["batch", "seqlen_q", "seqlen_kv"])
def test_every_size_is_zero_and_one_somewhere(size: str) -> None:
    assert {0, 1} <= {getattr(case, size) for case in CASES}
