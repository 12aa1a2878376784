# SPDX-License-Identifier: Apache-2.0
"""A size is never rounded to nothing."""

from __future__ import annotations

import pytest

from flash_trt.attention import attention_rows
from flash_trt.byte_sizes import spell_bytes


@pytest.mark.parametrize(
    ("size", "spelled"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (5120, "5.0 KiB"),
        (2**20 - 1, "1024.0 KiB"),
        (2**20, "1.00 MiB"),
        (9175040, "8.75 MiB"),
    ],
)
def test_a_size_is_told_in_the_unit_that_fits(size: int, spelled: str) -> None:
    assert spell_bytes(size) == spelled


@pytest.mark.parametrize(
    ("scratch", "told"), [(0, "1 by our plugin, without scratch memory"), (4096, "1 by our plugin, with up to 4.0 KiB")]
)
def test_an_attention_without_scratch_memory_is_told_to_have_none(scratch: int, told: str) -> None:
    (row,) = attention_rows([{"name": "a", "by": "plugin", "scratch_bytes": scratch}]).values()
    assert row.startswith(told)
    assert "0.00" not in row
