"""How inputs are changed: bytes, JSON trees and protobuf messages, each in its own terms."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

MAX_BYTES = 1 << 16
NUMBERS = (0, 1, 2, 3, 7, 8, 15, 16, 17, 63, 64, 127, 128, 255, 256, 65535, 1 << 20)
LARGE = ((1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e38, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", " ", "\x00", "\n", "é", "\u202e", "\U0001f600", "a" * 70000, "../../x", "{{", "%s")


def mutated_bytes(rng: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    """One to four changes of bytes."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        how = rng.randrange(8)
        if how == 0 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif how == 1 and data:
            data[at % len(data)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif how == 2:
            del data[at : at + rng.choice((1, 2, 4, 16, 256))]
        elif how == 3:
            data[at:at] = data[at : at + rng.choice((1, 2, 4, 16, 256))]
        elif how == 4:
            width = rng.choice((1, 2, 4, 8))
            number = rng.choice((*NUMBERS, *LARGE)) % (1 << (8 * width))
            data[at : at + width] = number.to_bytes(width, "little")
        elif how == 5:
            other = rng.choice(list(others)) if others else b""
            start = rng.randrange(len(other) + 1)
            data[at:] = other[start:]
        elif how == 6:
            del data[at:]
        else:
            data[at:at] = rng.choice(TEXTS[:-4]).encode() * rng.choice((1, 1, 3, 100))
    return bytes(data[:MAX_BYTES])


# ---------------------------------------------------------------- JSON


def mutated_json(rng: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    """Another value somewhere in the tree; bytes now and then, or where there is no tree."""
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):
        return mutated_bytes(rng, content, others)
    if rng.random() < 0.15:
        return mutated_bytes(rng, content, others)
    for _ in range(rng.randint(1, 3)):
        tree = _changed(rng, tree)
    return json.dumps(tree).encode(errors="surrogatepass")[: 4 * MAX_BYTES]


def _changed(rng: random.Random, tree: Any) -> Any:
    if isinstance(tree, dict) and tree and rng.random() < 0.85:
        key = rng.choice(list(tree))
        changed = dict(tree)
        how = rng.random()
        if how < 0.15:
            del changed[key]
        elif how < 0.25:
            changed[rng.choice((*TEXTS[:6], *tree))] = tree[key]
        else:
            changed[key] = _changed(rng, tree[key])
        return changed
    if isinstance(tree, list) and tree and rng.random() < 0.85:
        changed_list = list(tree)
        at = rng.randrange(len(tree))
        how = rng.random()
        if how < 0.2:
            del changed_list[at]
        elif how < 0.35:
            changed_list.insert(at, rng.choice(tree))
        else:
            changed_list[at] = _changed(rng, tree[at])
        return changed_list
    return _any_value(rng, tree)


def _any_value(rng: random.Random, near: Any) -> Any:
    if isinstance(near, int | float) and not isinstance(near, bool) and rng.random() < 0.5:
        return rng.choice((near + 1, near - 1, -near, near * 2, near / 3, near * 1000))
    return rng.choice(
        (
            None,
            True,
            False,
            rng.choice(NUMBERS),
            rng.choice(LARGE),
            -rng.choice(NUMBERS),
            rng.choice(FLOATS),
            rng.choice(TEXTS),
            "\ud800",
            [],
            {},
            [near],
            {"content": near},
            _nested(rng.choice((10, 200))),
        )
    )


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


# ---------------------------------------------------------------- protobuf


def mutated_message(
    rng: random.Random, kind: type[Message], content: bytes, others: Sequence[bytes]
) -> bytes:
    """Another value in some field, however deep; bytes now and then."""
    if rng.random() < 0.2:
        return mutated_bytes(rng, content, others)
    message = _parsed(kind, content) or kind()
    for _ in range(rng.randint(1, 3)):
        if others and rng.random() < 0.1:
            message.MergeFrom(_parsed(kind, rng.choice(list(others))) or kind())
        else:
            _change_message(rng, message)
    return message.SerializeToString()[: 4 * MAX_BYTES]


def _parsed(kind: type[Message], content: bytes) -> Message | None:
    try:
        return kind.FromString(content)
    except DecodeError:
        return None


def _change_message(rng: random.Random, message: Any) -> None:
    fields = message.DESCRIPTOR.fields
    present = [field for field, _ in message.ListFields()]
    field = rng.choice(present if present and rng.random() < 0.8 else list(fields))
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _change_map(rng, getattr(message, field.name), field.message_type)
    elif field.is_repeated:
        _change_repeated(rng, getattr(message, field.name), field)
    elif field.message_type is not None:
        if rng.random() < 0.1:
            message.ClearField(field.name)
        else:
            getattr(message, field.name).SetInParent()
            if field.message_type.fields:
                _change_message(rng, getattr(message, field.name))
    elif rng.random() < 0.1:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _scalar(rng, field, getattr(message, field.name)))


def _change_map(rng: random.Random, entries: Any, entry: Any) -> None:
    if entries and rng.random() < 0.3:
        del entries[rng.choice(list(entries))]
    else:
        key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
        entries[_scalar(rng, key, None)] = _scalar(rng, value, None)


def _change_repeated(rng: random.Random, values: Any, field: Any) -> None:
    how = rng.random()
    if values and how < 0.2:
        del values[rng.randrange(len(values))]
    elif field.message_type is not None:
        if values and how < 0.8:
            chosen = rng.choice(values)
            if how < 0.3:
                values.add().CopyFrom(chosen)
            elif field.message_type.fields:
                _change_message(rng, chosen)
        else:
            values.add()
    elif values and how < 0.7:
        at = rng.randrange(len(values))
        values[at] = _scalar(rng, field, values[at])
    else:
        values.extend([_scalar(rng, field, None)] * rng.choice((1, 1, 2, 9, 2000)))


def _scalar(rng: random.Random, field: Any, near: Any) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice(FLOATS)
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return rng.choice((0, 1, 2, 3, 4, 99, -1))
    if kind == FieldDescriptor.CPPTYPE_STRING:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return mutated_bytes(rng, near or bytes(8), ())
        return rng.choice((*TEXTS, near or "x", (near or "x") * 2))
    bits = 64 if kind in (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64) else 32
    number = rng.choice((*NUMBERS, *LARGE, (near or 0) + 1, (near or 0) - 1)) % (1 << bits)
    signed = kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64)
    return number - (1 << bits) if signed and number >> (bits - 1) else number
