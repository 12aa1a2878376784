# SPDX-License-Identifier: Apache-2.0
"""Tests that share what the first of them fetches or builds run in one worker."""

from __future__ import annotations

import os

import pytest


@pytest.mark.xdist_group("groups")
def test_the_tests_of_a_group_go_to_one_worker(request: pytest.FixtureRequest) -> None:
    """pytest-xdist groups by names that it appends; a pytest that it does not know drops them without a word."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("there are no workers: pytest runs without -n")
    assert request.node.nodeid.endswith("@groups")
