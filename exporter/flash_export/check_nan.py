# SPDX-License-Identifier: Apache-2.0
"""Numbers of the unfused model that are NaN: there nothing is compared, and a proof that says so is worth more."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flash_export.advice import GUARD
from flash_export.check_model import Expected, ModelRun
from flash_export.check_site import SiteRun

_HIDDEN = "as attention is for rows whose keys are all hidden by minus infinity (padding), where the fused one gives 0"


def warn_of_nan(model_runs: Sequence[ModelRun], site_runs: Sequence[SiteRun], expected: Expected) -> list[str]:
    """One warning for each output that is NaN somewhere in the unfused model, with how much of it and why.

    Where an attention on the way has rows without a visible key, it is NaN there and the FlashAttention node 0.
    """
    hidden = any(run.verdict.reference_is_nan for run in site_runs if run.trial in expected.outputs)
    why = f"{_HIDDEN}. {GUARD}" if hidden else "which it makes, or is given, outside attention"
    warnings = []
    for i, name in enumerate(dict.fromkeys(run.output for run in model_runs)):
        found = [arrays[i] for arrays in expected.outputs.values() if arrays[i].dtype.kind == "f"]
        counts = [int(np.isnan(array).sum()) for array in found]
        if any(counts):
            size = sum(array.size for array in found)
            warnings.append(
                f"the unfused model is NaN in {sum(counts):,} of {size:,} numbers of output {name}, on "
                f"{sum(map(bool, counts))} of {len(counts)} sets of inputs, and these were not compared: {why}"
            )
    return warnings


def may_be_of_nan(
    run: ModelRun, model_runs: Sequence[ModelRun], site_runs: Sequence[SiteRun], expected: Expected
) -> bool:
    """Whether ``run``'s output holds integers or truths where an attention on the way is NaN: they are made of any."""
    position = list(dict.fromkeys(one.output for one in model_runs)).index(run.output)
    if expected.outputs[run.trial][position].dtype.kind not in "biu":
        return False
    return any(site.trial == run.trial and site.verdict.reference_is_nan for site in site_runs)
