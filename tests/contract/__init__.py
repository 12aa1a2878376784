# SPDX-License-Identifier: Apache-2.0
"""The operator's contract: one table of cases that every implementation runs."""
