# SPDX-License-Identifier: Apache-2.0
"""Reads back from an engine's bytes which of our plugins are in it, with the attributes they will run with.

A plan is deserialised only where a GPU is, so this reads the bytes. TensorRT writes every plugin of the network as
tagged strings: name, version, namespace, the number of fields, then each field's name, length, type and data. The
tags are those seen in plans of TensorRT for RTX 1.7 (``vtrt`` plans); a version that writes them otherwise is still
held to contain the names as often as needed, and the sidecar says that only the names were proven.
"""

from __future__ import annotations

import contextlib
import dataclasses
import struct
from collections import Counter
from collections.abc import Sequence

from flash_export.op import DOMAIN, FLOAT_ATTRIBUTES, INT_ATTRIBUTES, OPERATORS, VERSION
from flash_trt.onnx_file import FlashNode

_STRING = b"\x13\x80\x01\x00"  # then u64 length, _CHARS, u64 length, the characters
_CHARS = b"\x01\x80\x0c\x80\x01\x00"
_INT = b"\x07\x80\x01\x00"  # then i32
_DATA = b"\x01\x80\x03\x80\x01\x00"  # then u64 bytes, the bytes
_MOST_FIELDS = 64


class _UnknownForm(Exception):
    """The bytes are no plugin record in the form known here."""


@dataclasses.dataclass(frozen=True, slots=True)
class PluginRecord:
    """One plugin in a plan: its operator and its serialised fields, name -> raw little-endian bytes."""

    operator: str
    fields: dict[str, bytes]
    version: str = str(VERSION)


@dataclasses.dataclass(slots=True)
class _Reader:
    data: bytes
    at: int

    def take(self, size: int) -> bytes:
        if not 0 <= size <= len(self.data) - self.at:
            raise _UnknownForm
        self.at += size
        return self.data[self.at - size : self.at]

    def expect(self, tag: bytes) -> None:
        if self.take(len(tag)) != tag:
            raise _UnknownForm

    def length(self) -> int:
        return int(struct.unpack("<Q", self.take(8))[0])

    def integer(self) -> int:
        self.expect(_INT)
        return int(struct.unpack("<i", self.take(4))[0])

    def string(self) -> str:
        self.expect(_STRING)
        length = self.length()
        self.expect(_CHARS)
        if self.length() != length:
            raise _UnknownForm
        return self.take(length).decode("latin-1")

    def raw(self) -> bytes:
        self.expect(_DATA)
        return self.take(self.length())


def plugin_records(plan: bytes) -> list[PluginRecord]:
    """Every plugin of ours that ``plan`` holds, in its order; [] when it holds none in the known form."""
    records = []
    for name in OPERATORS:
        length = struct.pack("<Q", len(name))
        needle = _STRING + length + _CHARS + length + name.encode()
        at = plan.find(needle)
        while at >= 0:
            with contextlib.suppress(_UnknownForm):  # the same string in another role
                records.append((at, _record(_Reader(plan, at))))
            at = plan.find(needle, at + 1)
    return [record for _, record in sorted(records, key=lambda entry: entry[0])]


def _record(reader: _Reader) -> PluginRecord:
    operator, version, namespace = reader.string(), reader.string(), reader.string()
    count = reader.integer()
    if namespace != DOMAIN or not 0 <= count <= _MOST_FIELDS:
        raise _UnknownForm
    fields = {}
    for _ in range(count):
        name, _length, _type = reader.string(), reader.integer(), reader.string()
        fields[name] = reader.raw()
    return PluginRecord(operator, fields, version)


def expected_record(node: FlashNode) -> PluginRecord:
    """What ``node`` must look like in a plan."""
    ints = {name: struct.pack("<i", int(node.attributes[name])) for name in INT_ATTRIBUTES if name in node.attributes}
    floats = {
        name: struct.pack("<f", float(node.attributes[name])) for name in FLOAT_ATTRIBUTES if name in node.attributes
    }
    return PluginRecord(node.operator, ints | floats)


@dataclasses.dataclass(frozen=True, slots=True)
class Proof:
    """What the plan's bytes prove.

    Args:
        kind: "fields" when every node was found with its attributes; "names" when this TensorRT writes plugins in a
            form unknown here and only the operators' names were counted; "none" when something is missing.
        problems: one sentence for each thing missing.
    """

    kind: str
    problems: tuple[str, ...] = ()


def prove(plan: bytes, nodes: Sequence[FlashNode]) -> Proof:
    """Compares the plugins in ``plan`` with ``nodes``, the FlashAttention nodes of the model it was built from."""
    records = plugin_records(plan)
    if not records:
        problems = [
            f"{operator} occurs {plan.count(operator.encode())} times in the plan, of {count} nodes"
            for operator, count in Counter(node.operator for node in nodes).items()
            if plan.count(operator.encode()) < count
        ]
        return Proof("none" if problems else "names", tuple(problems))
    wanted = Counter(_key(expected_record(node)) for node in nodes)
    found = Counter(_key(_without_extras(record)) for record in records)
    # One too many alone is harmless: TensorRT may keep a layer twice. Beside a missing one it shows what became of it.
    problems = [f"the plan lacks {_describe(key)} ({n} of {wanted[key]})" for key, n in (wanted - found).items()]
    if problems:
        problems += [
            f"the plan has {_describe(key)} that no node asks for ({n})" for key, n in (found - wanted).items()
        ]
    return Proof("none" if problems else "fields", tuple(problems))


def _without_extras(record: PluginRecord) -> PluginRecord:
    """The record with the operator's attributes alone: the plugin may serialise fields of its own beside them."""
    contract = INT_ATTRIBUTES | FLOAT_ATTRIBUTES
    return PluginRecord(record.operator, {name: raw for name, raw in record.fields.items() if name in contract})


def _key(record: PluginRecord) -> tuple[str, tuple[tuple[str, bytes], ...]]:
    return record.operator, tuple(sorted(record.fields.items()))


def _describe(key: tuple[str, tuple[tuple[str, bytes], ...]]) -> str:
    operator, fields = key
    values = [
        f"{name} {struct.unpack('<f' if name in FLOAT_ATTRIBUTES else '<i', raw)[0]:g}"
        for name, raw in fields
        if len(raw) == 4
    ]
    return f"{operator} with {', '.join(values)}"
