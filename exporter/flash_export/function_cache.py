# SPDX-License-Identifier: Apache-2.0
"""The cache part of the function bodies: what a cache form does before its queries attend.

Rows are only moved, in the type that they have: a cache's numbers come out bit for bit. A row of the new cache is one
of the old cache with the new keys behind it, so one GatherElements makes it, with empty caches and no new keys too.
"""

from __future__ import annotations

import onnx_ir as ir

from flash_export.function_builder import FunctionBuilder
from flash_export.op import LAYOUT_BHSD


class CacheWriter:
    """Appends new keys and values to a contiguous or paged cache.

    Args:
        build: where the nodes go.
        layout: of all nodes that call the body.
        inputs: the function's, by the operator's names; ``page_table`` among them where the cache is paged.

    Attributes:
        lengths: how many keys each batch then has, int64 ``[B]``.
        keys, values: the rows to attend to, in the layout of ``key``, ``[B, C, Hkv*D]`` or ``[B, Hkv, C, D]``.
        outputs: kv_lengths_out, key_cache_out, value_cache_out.
    """

    def __init__(self, build: FunctionBuilder, layout: int, inputs: dict[str, ir.Value]) -> None:
        self.build = build
        self.heads_first = layout == LAYOUT_BHSD
        self.axis = 2 if self.heads_first else 1
        self.inputs = inputs
        self.pages = self._pages() if "page_table" in inputs else None
        old_keys, old_values = self._rows("key_cache"), self._rows("value_cache")
        capacity = build.dim("capacity", old_keys, self.axis)
        self.before = self._before()
        self.new = build.dim("new_keys", inputs["key"], self.axis)
        self.lengths = self._least("lengths_after", build.op("Add", "all_keys", self.before, self.new), capacity)
        source = self._source(capacity)
        self.keys = self._appended(old_keys, inputs["key"], source)
        self.values = self._appended(old_values, inputs["value"], source)
        self.written = None if self.pages is None else self._written(self.pages, self._page_size())
        kv_lengths_out = build.op("Cast", "kv_lengths_out", self.lengths, to=int(ir.DataType.INT32))
        self.outputs = [kv_lengths_out, self._back("key_cache", self.keys), self._back("value_cache", self.values)]

    def _least(self, name: str, a: ir.Value, b: ir.Value) -> ir.Value:
        """The smaller of two int64 values; Min takes none below opset 12."""
        return self.build.op("Where", name, self.build.op("Less", f"{name}_first", a, b), a, b)

    def _before(self) -> ir.Value:
        """``kv_lengths``, 0 where negative, int64 ``[B]``. More than C needs no clamp: it has room for no new key."""
        build, zero = self.build, self.build.ints("zero", 0)
        given = build.op("Cast", "kv_lengths_int64", self.inputs["kv_lengths"], to=int(ir.DataType.INT64))
        given = build.op("Where", "from_zero", build.op("Less", "negative", given, zero), zero, given)
        batch = build.dim("batch", self.inputs["key"], [0])
        return build.op("Expand", "before", given, batch)

    def _source(self, capacity: ir.Value) -> ir.Value:
        """Where each row of the new cache stands in old rows and new ones together: ``[B, C, 1]``, ``[B, 1, C, 1]``."""
        build = self.build
        place = build.reshape("cache_place", build.count("cache_row", capacity), [0, 1])
        before = build.reshape("before_of_batch", self.before, [0, *([1] * self.axis), 1])
        new_row = build.op("Sub", "new_row", place, before)
        old = build.op("Less", "before_the_new", new_row, build.ints("zero", 0))
        is_new = build.op("And", "is_new", build.op("Not", "not_old", old), build.op("Less", "new", new_row, self.new))
        return build.op("Where", "source", is_new, build.op("Add", "in_both", new_row, capacity), place)

    def _appended(self, rows: ir.Value, new: ir.Value, source: ir.Value) -> ir.Value:
        build = self.build
        both = build.op("Concat", "old_and_new", rows, new, axis=self.axis)
        every = build.op("Expand", "source_of_each", source, build.shape_of(rows))
        return build.op("GatherElements", f"{new.name}_rows", both, every, axis=self.axis)

    # --- pages ---

    def _pages(self) -> ir.Value:
        """The page table, int64 ``[B, W]``, entries that are none (behind the last key) turned into some that are."""
        build, zero = self.build, self.build.ints("zero", 0)
        given = build.op("Cast", "page_table_int64", self.inputs["page_table"], to=int(ir.DataType.INT64))
        given = build.op("Where", "page_from_zero", build.op("Less", "negative_page", given, zero), zero, given)
        count = build.dim("page_count", self.inputs["key_cache"], 0)
        return self._least("pages", given, build.op("Sub", "last_page", count, build.ints("one", 1)))

    def _page_size(self) -> ir.Value:
        return self.build.dim("page_size", self.inputs["key_cache"], [self.axis])

    def _rows(self, name: str) -> ir.Value:
        """A cache as rows ``[B, C, …]``: of a paged one its pages one behind the other."""
        cache, build = self.inputs[name], self.build
        if self.pages is None:
            return cache
        pages = build.op("Gather", f"{name}_pages", cache, self.pages, axis=0)
        if self.heads_first:
            pages = build.op("Transpose", f"{name}_by_head", pages, perm=[0, 2, 1, 3, 4])
        copied = [0] * self.axis
        count = build.dim("pages_of_batch", self.pages, [1])
        joined = build.concat("page_dims", build.ints("same", copied), count, build.dim("last_dim", cache, [-1]))
        by = build.concat("page_factors", build.ints("ones", [1] * self.axis), self._page_size(), build.ints("o", [1]))
        return build.op("Reshape", f"{name}_rows", pages, build.op("Mul", "row_dims", joined, by))

    def _back(self, name: str, rows: ir.Value) -> ir.Value:
        """The cache with the rows that are new in it: of a paged one those pages that got one."""
        build, pages, written = self.build, self.pages, self.written
        if pages is None or written is None:
            return build.op("Identity", f"{name}_out", rows)
        cache, size = self.inputs[name], self._page_size()
        copied, last = build.ints("same", [0] * self.axis), build.dim("last_dim", cache, [-1])
        count = build.dim("pages_of_batch", pages, [1])
        apart = build.op("Reshape", f"{name}_apart", rows, build.concat("apart_dims", copied, count, size, last))
        heads = []
        if self.heads_first:
            apart = build.op("Transpose", f"{name}_by_page", apart, perm=[0, 2, 1, 3, 4])
            heads = [build.dim("kv_heads", cache, [1])]
        flat_dims = build.concat("flat_dims", build.ints("all_pages", [-1]), *heads, size, last)
        flat = build.op("Reshape", f"{name}_flat", apart, flat_dims)
        table = build.reshape("table_flat", pages, [-1])
        places = build.op(
            "Transpose", "written_pages", build.op("Gather", "page_of", table, written, axis=0), perm=[1, 0]
        )
        fresh = build.op("Gather", f"{name}_fresh", flat, build.reshape("written_flat", written, [-1]), axis=0)
        return build.op("ScatterND", f"{name}_out", cache, places, fresh)

    def _written(self, pages: ir.Value, size: ir.Value) -> ir.Value:
        """Which of the B·W entries a new row, or none but the next one's place, falls into: ``[1, N]``."""
        build = self.build
        first = build.op("Mul", "first_key", build.count("entry", build.dim("entries", pages, 1)), size)
        before = build.reshape("before_column", self.before, [0, 1])
        after = build.reshape("after_column", self.lengths, [0, 1])
        reached = build.op("Less", "reached", first, after)
        behind = build.op("Less", "ends_behind", before, build.op("Add", "end_key", first, size))
        touched = build.op("And", "touched", reached, behind)
        return build.op("NonZero", "written", build.reshape("touched_flat", touched, [-1]))
