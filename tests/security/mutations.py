# SPDX-License-Identifier: Apache-2.0
"""Broken ONNX files by the thousand: honest models with a few bytes or a few fields changed at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import onnx
from google.protobuf.descriptor import FieldDescriptor  # type: ignore[import-untyped]
from google.protobuf.message import Message  # type: ignore[import-untyped]

_INTEGERS = (0, 1, -1, 2, 3, 7, 64, 127, 2**31 - 1, -(2**31), 2**62)
_FLOATS = (0.0, -0.0, 1.0, -1e30, float("inf"), float("-inf"), float("nan"))


def mutated(model: onnx.ModelProto, rng: random.Random) -> bytes:
    """``model`` as bytes with one to four changes, of its bytes or of its fields."""
    changes = rng.randint(1, 4)
    if rng.random() < 0.3:
        data = bytearray(model.SerializeToString())
        for _ in range(changes):
            rng.choice(_BYTE_CHANGES)(data, rng)
        return bytes(data)
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for _ in range(changes):
        _change_field(changed, rng)
    serialized: bytes = changed.SerializeToString()
    return serialized


def _flip(data: bytearray, rng: random.Random) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _remove(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data) + 1)
    del data[at : at + rng.randint(1, 9)]


def _insert(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.randbytes(rng.randint(1, 9))


def _repeat(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = data[at : at + rng.randint(1, 99)]


def _cut_off(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data) + 1) :]


_BYTE_CHANGES: tuple[Callable[[bytearray, random.Random], None], ...] = (_flip, _remove, _insert, _repeat, _cut_off)


def _messages(message: Message) -> Iterator[Message]:
    yield message
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in value if field.is_repeated else (value,):
                yield from _messages(inner)


def _change_field(model: onnx.ModelProto, rng: random.Random) -> None:
    message = rng.choice(list(_messages(model)))
    field = rng.choice(list(message.DESCRIPTOR.fields))
    if field.is_repeated:
        _change_list(getattr(message, field.name), field, model, rng)
    elif rng.random() < 0.3:
        message.ClearField(field.name)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        getattr(message, field.name).SetInParent()
    else:
        setattr(message, field.name, _scalar(field, model, rng))


def _change_list(values: Any, field: FieldDescriptor, model: onnx.ModelProto, rng: random.Random) -> None:
    """Removes, repeats, swaps or adds an entry."""
    change = rng.randrange(4)
    is_message = field.type == FieldDescriptor.TYPE_MESSAGE
    if not values or change == 0:
        values.add() if is_message else values.append(_scalar(field, model, rng))
    elif change == 1:
        del values[rng.randrange(len(values))]
    elif change == 2:
        values.append(values[rng.randrange(len(values))])
    elif is_message:
        first, second = values[rng.randrange(len(values))], values[rng.randrange(len(values))]
        first.CopyFrom(second)
    else:
        values[rng.randrange(len(values))] = _scalar(field, model, rng)


def _scalar(field: FieldDescriptor, model: onnx.ModelProto, rng: random.Random) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        return rng.choice(["", "x", "../x", "MatMul", "Softmax", "FlashAttention", "flash_export", *_words(model)])
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.choice((0, 1, 4, 8, 64)))
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return rng.choice(_FLOATS)
    if field.type == FieldDescriptor.TYPE_ENUM:
        return rng.choice(field.enum_type.values).number
    return _in_range(rng.choice(_INTEGERS), field)


def _in_range(number: int, field: FieldDescriptor) -> int:
    if field.type == FieldDescriptor.TYPE_INT32:
        return max(-(2**31), min(number, 2**31 - 1))
    return abs(number) if field.type == FieldDescriptor.TYPE_UINT64 else number


def _words(model: onnx.ModelProto) -> list[str]:
    """Names that the model uses, so that a change can join what was apart."""
    nodes = model.graph.node
    return [name for node in nodes for name in (*node.input, *node.output, node.op_type)]
