"""Compile the shipped sampling, shaping, linear, norm and rotary launches for sm_90.

Run as `python -m tests.kernels.audit_layers` without TRITON_INTERPRET; prints one JSON object a
kernel. `test_compile_audit_layers` does, and holds the bars. Inputs are meta tensors, which take
the launches of sm_90: no GPU, no memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from unittest import mock

import torch
from torch import Tensor

from kernels import (
    draft_rows,
    linear,
    linear_norm,
    linear_persistent,
    linear_specialised,
    norm,
    penalties,
    redraw,
    rope_kv,
    row_report,
    sampling,
    shaping,
)
from kernels.configs.layers import Specialised, linear_tiles
from kernels.fp8_weight import FP8
from kernels.sampling import DraftKind
from tests.kernels.sm90_audit import Launch, compile_launches, recorded

BATCH, BUCKET, VOCAB, SPARSE_IDS = 64, 4, 128256, 256


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.int32)


def longs(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.int64)


def floats(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.float32)


def accept_launches(
    kind: DraftKind, dtype: torch.dtype, num_sparse: int = SPARSE_IDS
) -> Iterator[tuple[str, Launch]]:
    """Both launches of accept at S64, for one kind of draft row; float32 with thresholds."""
    rows, ids = meta(BATCH, BUCKET, VOCAB, dtype=dtype), None
    if kind is DraftKind.SPARSE:
        rows, ids = floats(BATCH, BUCKET, num_sparse), ints(BATCH, BUCKET, num_sparse)
    filters = dtype is torch.float32
    with recorded(sampling, "_judge_kernel", "_close_kernel") as launches:
        sampling._launch_accept(
            meta(BATCH * (BUCKET + 1), VOCAB, dtype=dtype), longs(BATCH, BUCKET), ints(BATCH),
            longs(BATCH), ints(BATCH), ints(BATCH), floats(BATCH), ints(BATCH, 2),
            floats(BATCH, BUCKET + 1) if filters else None, None, int(kind), rows, ids,
            floats(BATCH), floats(BATCH, BUCKET) if filters else None, None, None, VOCAB,
            longs(BATCH, 3),
        )  # fmt: skip
    for launch, name in zip(launches, ("judge", "close"), strict=True):
        width = f"{num_sparse}-" if kind is DraftKind.SPARSE else ""
        yield f"{name}-{kind.name.lower()}-{width}{dtype}", launch


def sampling_launches() -> Iterator[tuple[str, Launch]]:
    yield from accept_launches(DraftKind.LOGITS, torch.bfloat16)
    yield from accept_launches(DraftKind.LOGITS, torch.float32)
    yield from accept_launches(DraftKind.WEIGHTS, torch.float16)
    yield from accept_launches(DraftKind.SPARSE, torch.bfloat16)
    yield from accept_launches(DraftKind.SPARSE, torch.float32, 1024)
    with recorded(sampling, "_draw_kernel") as launches:
        sampling._launch_draw(
            meta(BATCH, VOCAB), longs(BATCH), ints(BATCH), ints(BATCH), ints(BATCH),
            floats(BATCH), None, VOCAB, longs(BATCH, 3),
        )  # fmt: skip
    yield "draw", launches[0]
    for dtype in (torch.bfloat16, torch.float32):
        with recorded(draft_rows, "_survey_kernel", "_keep_kernel") as launches:
            draft_rows._launch_draft_rows(
                meta(BATCH, VOCAB, dtype=dtype), longs(BATCH), ints(BATCH), ints(BATCH),
                ints(BATCH), floats(BATCH), None if dtype is torch.bfloat16 else floats(BATCH),
                VOCAB, 0.01, ints(BATCH), ints(BATCH, 1024), floats(BATCH, 1024), ints(BATCH, 3),
                floats(BATCH), longs(BATCH, 3),
            )  # fmt: skip
        yield f"survey-{dtype}", launches[0]
        yield f"keep-{dtype}", launches[1]
    rows = floats(BATCH, BUCKET, 1024), ints(BATCH, BUCKET, 1024)
    with recorded(redraw, "_redraw_kernel") as launches:
        redraw._launch_redraw(
            rows[1], rows[0], longs(BATCH, BUCKET), ints(BATCH), longs(BATCH), ints(BATCH),
            ints(BATCH), VOCAB, longs(BATCH, 3),
        )  # fmt: skip
    yield "redraw", launches[0]
    with recorded(row_report, "_row_report_kernel") as launches:
        row_report._launch_row_report(
            meta(BATCH * (BUCKET + 1), VOCAB), longs(BATCH, BUCKET), ints(BATCH), ints(BATCH),
            floats(BATCH), None, None, *rows, ints(BATCH, BUCKET + 1), ints(BATCH, 3),
            floats(BATCH, 2 * BUCKET + 1, 16), longs(BATCH, 2 * BUCKET + 1, 16), VOCAB,
            floats(BATCH, BUCKET + 1), ints(BATCH, BUCKET + 1), ints(BATCH, BUCKET + 1),
            floats(BATCH, BUCKET, 3),
        )  # fmt: skip
    yield "report", launches[0]
    with recorded(shaping, "_groups_kernel", "_threshold_kernel") as launches:
        shaping._launch_thresholds(
            meta(BATCH * (BUCKET + 1), VOCAB), floats(BATCH), ints(BATCH), floats(BATCH),
            floats(BATCH), BUCKET + 1, VOCAB, None, None,
        )  # fmt: skip
    yield "groups", launches[0]
    yield "threshold", launches[1]
    with recorded(penalties, "_penalize_kernel") as launches:
        penalties._launch_penalize(
            floats(BATCH * (BUCKET + 1), VOCAB), ints(BATCH, 512), floats(BATCH, 512),
            ints(BATCH, 512), ints(BATCH, 512), floats(BATCH), floats(BATCH), floats(BATCH),
            longs(BATCH, BUCKET), ints(BATCH), VOCAB, None,
        )  # fmt: skip
    yield "penalize", launches[0]


def linear_launches() -> Iterator[tuple[str, Launch]]:
    """Products of weights of the activations' type and of one byte, and what adds their chunks."""
    shapes = [(rows, 4096, 28672, "swiglu") for rows in (1, 32, 64, 128, 160, 320)]
    shapes += [(rows, 576, 3072, "swiglu") for rows in (1, 64)]
    shapes += [(rows, 14336, 4096, "none") for rows in (5, 32, 64, 160, 320)]
    shapes += [(rows, 4096, 6144, "none") for rows in (1, 32, 64, 160, 320)]
    plain = [*shapes, (40, 14336, 4096, "none")]
    plain += [(rows, 4096, 128256, "none") for rows in (5, 32, 40, 64, 160, 320)]
    fp8 = [*shapes, *((rows, 5120, 27648, "none") for rows in (5, 32, 64, 160, 320))]
    fp8 += [(5, 576, 960, "none"), (5, 576, 576, "none")]
    for name, rows, depth, width, activation in (
        *(("linear", *shape) for shape in plain), *(("linear-fp8", *shape) for shape in fp8)
    ):  # fmt: skip
        weight, scale = meta(width, depth), None
        if name == "linear-fp8":
            weight, scale = weight.to(FP8), floats(width)
        with (
            recorded(linear, "_linear_kernel", "_finish_kernel") as launches,
            mock.patch.object(linear, "fits", return_value=False),  # specialised ones come apart
            mock.patch.object(linear, "fits_persistent", return_value=False),
        ):
            linear._launch_linear(meta(rows, depth), weight, scale, None, None, activation, True)
        yield f"{name}-{activation}-{width}x{depth}-{rows}", launches[0]
        if len(launches) > 1 and scale is None:
            yield f"finish-{activation}-{width}x{depth}-{rows}", launches[1]
    for dtype, activation in ((torch.float16, "none"), (torch.float32, "swiglu")):
        with recorded(linear, "_linear_kernel", "_finish_kernel") as launches:
            linear._launch_linear(
                meta(5, 4096, dtype=dtype), meta(6144, 4096, dtype=FP8), floats(6144), None, None,
                activation, True,
            )  # fmt: skip
        yield f"other-fp8-{activation}-{dtype}", launches[0]


# Products, (rows, depth, weights, type), that the table has `linear_specialised` take: its every
# launch, of one and two warpgroups.
SPECIALISED = [
    *((rows, 4096, 6144, torch.bfloat16) for rows in (40, 64, 160, 320)),
    *((rows, 14336, 4096, torch.bfloat16) for rows in (64, 80, 160, 320)),
    (64, 14336, 4096, torch.float16), (320, 14336, 4096, torch.float16),
]  # fmt: skip


def specialised_products() -> Iterator[tuple[Tensor, Tensor, Specialised]]:
    """(rows, weights, the table's launch) of SPECIALISED."""
    for rows, depth, width, dtype in SPECIALISED:
        x, weight = meta(rows, depth, dtype=dtype), meta(width, depth, dtype=dtype)
        own = linear_tiles(x, weight, False).specialised
        assert own is not None
        yield x, weight, own


def specialised_launches() -> Iterator[tuple[str, Launch]]:
    """The table's, with a residual and without."""
    for x, weight, own in specialised_products():
        (rows, depth), width = x.shape, len(weight)
        residual = meta(rows, width, dtype=x.dtype) if width == 4096 else None
        with (
            recorded(linear_specialised, "_specialised_linear_kernel") as launches,
            recorded(linear, "_finish_kernel"),
        ):
            linear._launch_linear(x, weight, None, None, residual, "none", True)
        yield f"specialised-{width}x{depth}-{rows}-{x.dtype}-{own}", launches[0]


# Launches that no table names, of one tile of rows: (launch, weights, depth, end).
SMALL = [
    (Specialised(1, 12, 32, 8), 4096, 4096, "residual"),
    (Specialised(2, 8, 64, 0), 6144, 4096, "plain"),
    (Specialised(2, 9, 64, 0, split=True), 4096, 14336, "chunks apart"),
    (Specialised(2, 5, 32, 8, at_once=2), 28672, 4096, "swiglu"),
    (Specialised(1, 3, 64, 0, at_once=4), 28672, 4096, "swiglu"),
    (Specialised(1, 3, 64, 0, 128, split=True, at_once=2), 4096, 14336, "chunks apart"),
]


def small_launches() -> Iterator[tuple[str, Launch]]:
    """What a sweep may try: tiles that share a multiprocessor, SwiGLU, and chunks apart."""
    for own, width, depth, end in SMALL:
        rows, is_swiglu = own.rows + own.more_rows, end == "swiglu"
        residual = meta(rows, width) if end == "residual" else None
        sums = floats(4, rows, width) if own.split else None
        x, weight = meta(rows, depth), meta(width, depth)
        out = meta(rows, width // 2 if is_swiglu else width)
        with recorded(linear_specialised, "_specialised_linear_kernel") as launches:
            linear_specialised.launch_specialised(
                x, weight, residual, out, sums, is_swiglu, linear.chunk_depth(weight, x.dtype), own,
                True,
            )  # fmt: skip
        yield f"specialised-small-{rows}-{end}-{own}", launches[0]


def persistent_launches() -> Iterator[tuple[str, Launch]]:
    """Gate and up, and a head, of an 8B model: tiles of four units alone, and of three as well."""
    for rows, width, activation, dtype in (
        (160, 28672, "swiglu", torch.bfloat16), (320, 28672, "swiglu", torch.bfloat16),
        (320, 28672, "swiglu", torch.float16), (65, 128256, "none", torch.bfloat16),
        (160, 128256, "none", torch.bfloat16),
    ):  # fmt: skip
        with recorded(linear_persistent, "_persistent_linear_kernel") as launches:
            linear._launch_linear(
                meta(rows, 4096, dtype=dtype), meta(width, 4096, dtype=dtype), None, None, None,
                activation, True,
            )  # fmt: skip
        yield f"persistent-{activation}-{rows}-{dtype}", launches[0]


def layer_launches() -> Iterator[tuple[str, Launch]]:
    with (
        recorded(linear_norm, "_finish_norm_kernel") as launches,
        recorded(linear, "_linear_kernel"),
    ):
        linear_norm._launch_linear_norm(
            meta(5, 14336), meta(4096, 14336), None, None, meta(5, 4096), meta(4096), 1e-5, True
        )
    yield "end-norm", launches[0]
    with recorded(norm, "_rmsnorm_kernel") as launches:
        norm._launch_rmsnorm(meta(32768, 4096), meta(32768, 4096), meta(4096), 1e-5)
    yield "norm", launches[0]
    qkv = meta(32768, 48, 128)
    for interleaved in (False, True):
        with recorded(rope_kv, "_rope_kv_kernel") as launches:
            rope_kv._launch_rope_kv(
                qkv[:, :32], qkv[:, 32:40], qkv[:, 40:], floats(8192, 64), floats(8192, 64),
                longs(32768), longs(32768), meta(512, 8, 64, 128), meta(512, 8, 64, 128),
                meta(128), meta(128), 1e-6, interleaved,
            )  # fmt: skip
        yield f"rope-{'interleaved' if interleaved else 'half'}", launches[0]


def main() -> None:
    named = [
        *sampling_launches(), *linear_launches(), *specialised_launches(),
        *small_launches(), *persistent_launches(), *layer_launches(),
    ]  # fmt: skip
    reports = compile_launches(launch for _, launch in named)
    for (name, _), report in zip(named, reports, strict=True):
        sys.stdout.write(json.dumps({"name": name, **asdict(report)}) + "\n")


if __name__ == "__main__":
    main()
