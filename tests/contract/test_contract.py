# SPDX-License-Identifier: Apache-2.0
"""Every implementation computes every row of the table, within the one tolerance rule."""

from __future__ import annotations

import pytest

from contract import tensors
from contract.cases import CASES, Case
from contract.implementations import IMPLEMENTATIONS, Implementation
from contract.tolerance import why_lse_rejected, why_rejected


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda i: i.name)
def test_implementation_computes_the_operator(implementation: Implementation, case: Case) -> None:
    given = tensors.make(case)
    if reasons := implementation.why_not(case, given):
        pytest.skip(f"{implementation.name}: " + "; ".join(reasons))
    output, lse = implementation.run(case, given)
    reference, reference_lse, base = tensors.expected(case)
    reasons = why_rejected(output, reference, base, softcap=case.softcap)
    if case.operator == "FlashAttentionEx":
        assert lse is not None
        reasons += why_lse_rejected(lse, reference_lse)
    assert reasons == [], f"seed {tensors.seed_of(case)}"


def test_what_the_table_must_run_on_is_in_the_list() -> None:
    """One that is left out of it is not tested, and nothing else would tell."""
    names = ["body_in_onnxruntime", "body_in_reference_evaluator", "emulated_kernels", "cpu_operator"]
    assert [i.name for i in IMPLEMENTATIONS] == names
