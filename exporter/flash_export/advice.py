# SPDX-License-Identifier: Apache-2.0
"""What is said to the user in more than one place."""

GUARD = (
    "A row of padding that sees no key is NaN with -inf unless the probabilities are guarded: a boolean mask to "
    "scaled_dot_product_attention brings a guard, probs.masked_fill(probs.isnan(), 0) is one"
)
"""Which comes with every advice to hide by minus infinity."""
