# SPDX-License-Identifier: Apache-2.0
"""The plugin's enqueue computes every row of the operator's contract, with emulated kernels on host memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from contract import emulated_library, tensors
from contract.cases import CASES, Case
from contract.implementations import EmulatedKernels
from contract.tolerance import why_lse_rejected, why_rejected

from plugin import host_plugin
from plugin.driver import PluginFailed


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_enqueue_computes_the_operator(case: Case, native_build: Path) -> None:
    given = tensors.make(case)
    if reasons := emulated_library.why_unsupported(emulated_library.Problem(case, given).arguments):
        with pytest.raises(PluginFailed, match="cannot run"):
            host_plugin.run(native_build, case, given)
        pytest.skip("refused by the kernels, and so by the plugin: " + "; ".join(reasons))
    if reasons := EmulatedKernels().why_not(case, given):
        pytest.skip("; ".join(reasons))
    output, lse = host_plugin.run(native_build, case, given)
    reference, reference_lse, base = tensors.expected(case)
    reasons = why_rejected(output, reference, base, softcap=case.softcap)
    if case.operator == "FlashAttentionEx":
        assert lse is not None
        reasons += why_lse_rejected(lse, reference_lse)
    assert reasons == [], f"seed {tensors.seed_of(case)}"
