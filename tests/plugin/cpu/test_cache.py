# SPDX-License-Identifier: Apache-2.0
"""The cache forms in the operator's library: in place where the caller binds one array to both sides, copies where not,
and a clear error, with nothing written, for what does not fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from contract import cache_cases
from contract.cache_cases import CACHE_CASES, CacheCase, CacheTensors
from contract.cache_model import feeds, node_of
from contract.node_model import model_of
from numpy.typing import NDArray
from onnxruntime import OrtValue

from flash_export.op import OPERATORS
from plugin.cpu.test_operator import options, refused

BY_NAME = {case.name: case for case in CACHE_CASES}
BOTH = ("no_room_for_all", "no_room_for_all_paged")
CACHES = ("key_cache", "value_cache")


def open_session(tensors: CacheTensors, **attributes: int) -> onnxruntime.InferenceSession:
    """A session of the case's node without its body; ``attributes`` are written over the case's."""
    model = model_of([node_of(tensors)], 18)
    del model.functions[:]
    for attribute in model.graph.node[0].attribute:
        if attribute.name in attributes:
            attribute.i = attributes[attribute.name]
    return onnxruntime.InferenceSession(model.SerializeToString(), options(), providers=["CPUExecutionProvider"])


class Bound:
    """A run between arrays of the caller: ``in_place`` names the outputs that get their input's array."""

    def __init__(self, tensors: CacheTensors, in_place: dict[str, str]) -> None:
        self.session = open_session(tensors)
        self.values = {name: OrtValue.ortvalue_from_numpy(array) for name, array in feeds(tensors).items()}
        self.binding = self.session.io_binding()
        for name, value in self.values.items():
            self.binding.bind_ortvalue_input(name, value)
        for output in OPERATORS[tensors.case.operator].outputs:
            if output in in_place:
                self.binding.bind_ortvalue_output(output, self.values[in_place[output]])
            else:
                self.binding.bind_output(output)

    def run(self) -> dict[str, NDArray]:
        """The outputs by name."""
        self.session.run_with_iobinding(self.binding)
        names = [output.name for output in self.session.get_outputs()]
        return dict(zip(names, self.binding.copy_outputs_to_cpu(), strict=True))


IN_PLACE = {f"{cache}_out": cache for cache in CACHES}


@pytest.mark.parametrize("name", BOTH)
def test_the_library_runs_the_node_instead_of_its_body(name: str, tmp_path: Any) -> None:
    settings, tensors = options(), cache_cases.make(BY_NAME[name])
    settings.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    model = model_of([node_of(tensors)], 18).SerializeToString()
    onnxruntime.InferenceSession(model, settings, providers=["CPUExecutionProvider"])
    assert [n.op_type for n in onnx.load(tmp_path / "optimized.onnx").graph.node] == [tensors.case.operator]


@pytest.mark.parametrize("name", [*BOTH, "fp16", "fp16_paged", "heads_last_paged", "nan_behind_the_length"])
def test_one_array_bound_to_both_sides_is_written_in_place(name: str) -> None:
    case = BY_NAME[name]
    bound = Bound(cache_cases.make(case), IN_PLACE)
    addresses = [bound.values[cache].data_ptr() for cache in CACHES]
    got = bound.run()
    assert cache_cases.make(case).why_wrong(got) == []
    outputs = dict(zip((o.name for o in bound.session.get_outputs()), bound.binding.get_outputs(), strict=True))
    assert [outputs[f"{cache}_out"].data_ptr() for cache in CACHES] == addresses
    for cache in CACHES:
        assert bound.values[cache].numpy().tobytes() == got[f"{cache}_out"].tobytes()


@pytest.mark.parametrize("name", BOTH)
def test_a_cache_of_its_own_memory_is_a_copy_and_its_input_stays(name: str) -> None:
    case = BY_NAME[name]
    bound = Bound(cache_cases.make(case), {"key_cache_out": "key_cache"})  # one of each
    assert cache_cases.make(case).why_wrong(bound.run()) == []
    untouched = cache_cases.make(case).given
    assert bound.values["value_cache"].numpy().tobytes() == untouched["value_cache"].tobytes()
    assert bound.values["key_cache"].numpy().tobytes() != untouched["key_cache"].tobytes()


def test_the_lengths_may_be_written_over_too() -> None:
    case = BY_NAME["no_room_for_all"]
    bound = Bound(cache_cases.make(case), IN_PLACE | {"kv_lengths_out": "kv_lengths"})
    assert cache_cases.make(case).why_wrong(bound.run()) == []


@pytest.mark.parametrize("page", [0, 16])
def test_words_one_by_one_in_place_are_the_prompt_at_once(page: int) -> None:
    """Twenty steps whose caches and lengths never move; the attention of each is that of the whole sequence's row."""
    words = 20
    all_at_once = CacheCase("words", (0, 0), seqlen_q=words, new=words, page=page, capacity=32, heads_q=6)
    whole = cache_cases.make(all_at_once)
    wanted, _, _ = whole.expected()
    reference = open_session(whole).run(None, feeds(whole))[0]
    step = dataclasses.replace(all_at_once, seqlen_q=1, new=1)
    given = {name: x[:, :, :1].copy() if name in ("query", "key", "value") else x for name, x in whole.given.items()}
    bound = Bound(CacheTensors(step, given), IN_PLACE | {"kv_lengths_out": "kv_lengths"})
    for word in range(words):
        for name in ("query", "key", "value"):
            bound.values[name].update_inplace(np.ascontiguousarray(whole.given[name][:, :, word : word + 1]))
        got = bound.run()
        np.testing.assert_allclose(got["output"][:, :, 0], reference[:, :, word], atol=3e-6)
        np.testing.assert_allclose(got["lse"][:, :, 0], wanted["lse"][:, :, word], atol=1e-3)
    np.testing.assert_array_equal(got["kv_lengths_out"], [words, words])
    np.testing.assert_array_equal(got["key_cache_out"], wanted["key_cache_out"])


@pytest.mark.parametrize(
    ("in_place", "output", "other"),
    [
        ({"key_cache_out": "value_cache"}, "key_cache_out", "value_cache"),
        ({"value_cache_out": "key_cache"}, "value_cache_out", "key_cache"),
        ({"key_cache_out": "key"}, "key_cache_out", "key"),
        ({"value_cache_out": "query"}, "value_cache_out", "query"),
    ],
    ids=["swapped", "swapped_values", "new_key", "query"],
)
def test_memory_of_another_tensor_is_refused_and_nothing_is_written(
    in_place: dict[str, str], output: str, other: str
) -> None:
    case = CacheCase("same_shapes", (3, 9), heads_q=2, seqlen_q=24, new=24, capacity=24, v_head_dim=16)
    bound = Bound(cache_cases.make(case), in_place)
    with pytest.raises(Exception, match="cannot run FlashAttentionCache") as error:
        bound.run()
    refused(error, f"tensor {output}", f"memory that {other} has too", "bind the output to its own input")
    for name, array in cache_cases.make(case).given.items():
        assert bound.values[name].numpy().tobytes() == array.tobytes(), name


@pytest.mark.parametrize(
    ("case", "tensor", "change", "parts"),
    [
        ("decode", "key", lambda x: x[..., :-1], ("tensor key", "head dim 15", "head dim 16")),
        ("decode", "value", lambda x: np.concatenate([x, x], 2), ("tensor value", "sequence 2", "sequence 1")),
        ("decode", "key", lambda x: x[:1], ("tensor key", "batch 1", "batch 4")),
        ("decode", "key_cache", lambda x: x[:, :1], ("tensor key_cache", "[B, 2, S, D]")),
        (
            "decode",
            "value_cache",
            lambda x: x[:, :, 1:],
            ("tensor value_cache", "sequence 47", "those of key_cache", "sequence 48"),
        ),
        ("decode", "kv_lengths", lambda x: x[:3], ("tensor kv_lengths", "[3]", "[4] or [1]")),
        ("decode", "kv_lengths", lambda x: x[:0], ("tensor kv_lengths", "[0]", "[4] or [1]")),
        ("decode_paged", "page_table", lambda x: x[:1], ("tensor page_table", "[1, 3]", "[4, W]")),
        ("decode_paged", "page_table", lambda x: x[0], ("tensor page_table", "[3]", "[4, W]")),
        ("decode_paged", "value_cache", lambda x: x[:-1], ("tensor value_cache", "batch 13", "batch 14")),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_written(
    case: str, tensor: str, change: Any, parts: tuple[str, ...]
) -> None:
    tensors = cache_cases.make(BY_NAME[case])
    given = dict(tensors.given)
    given[tensor] = np.ascontiguousarray(change(given[tensor]))
    bound = Bound(CacheTensors(tensors.case, given), IN_PLACE)
    with pytest.raises(Exception, match="cannot run FlashAttention") as error:
        bound.run()
    refused(error, 'node "attention"', *parts)
    for cache in CACHES:
        assert bound.values[cache].numpy().tobytes() == given[cache].tobytes(), cache


def test_a_page_of_no_size_is_refused_with_the_reason() -> None:
    tensors = cache_cases.make(CacheCase("page_of_24", (3,), page=24))
    with pytest.raises(Exception, match="page_size is 24; the kernels take powers of 2 from 16 to 256") as error:
        open_session(tensors).run(None, feeds(tensors))
    refused(error)


def test_a_cache_without_lengths_is_refused_when_the_session_opens() -> None:
    with pytest.raises(Exception, match="cannot create FlashAttentionCache") as error:
        open_session(cache_cases.make(BY_NAME["decode"]), has_kv_lengths=0)
    refused(error, "attribute has_kv_lengths", "got   0")


@pytest.mark.parametrize("entry", [-1, -(2**31), 2**31 - 1, 10**6])
def test_entries_that_are_no_page_write_nothing_and_read_nothing_outside(entry: int) -> None:
    """Undefined numbers, but no fault: every row goes through the wild entry."""
    tensors = cache_cases.make(BY_NAME["decode_paged"])
    given = dict(tensors.given) | {"page_table": np.full_like(tensors.given["page_table"], entry)}
    outputs = open_session(tensors).run(None, given)
    for name, output in (("key_cache", outputs[3]), ("value_cache", outputs[4])):
        np.testing.assert_array_equal(output, given[name])
    assert np.isfinite(outputs[0]).all()


def test_entries_of_a_pool_without_pages_are_refused() -> None:
    tensors = cache_cases.make(BY_NAME["decode_paged"])
    given = dict(tensors.given)
    for cache in CACHES:
        given[cache] = given[cache][:0]
    with pytest.raises(Exception, match="page_count is 0") as error:
        open_session(tensors).run(None, given)
    refused(error)
    given["page_table"] = given["page_table"][:, :0]
    output, lse, lengths, *_ = open_session(tensors).run(None, given)
    np.testing.assert_array_equal(output, 0)
    np.testing.assert_array_equal(lse, -np.inf)
    np.testing.assert_array_equal(lengths, 0)
