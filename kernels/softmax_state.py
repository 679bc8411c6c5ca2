"""Online-softmax statistics in Triton: empty, step, merge, finalize, shared by every attention op.

A state is (m, l, u): the largest score seen in base 2, the mass sum 2^(z-m), and the value sum
sum 2^(z-m) v, in float32. Empty is m = -inf, l = 0, u = 0, and merge(empty, x) is x bit for bit.
Scores enter already multiplied by log2 e, so each exponential is one exp2; `lse` leaves in the
natural logarithm. `AXIS` names the key axis of a score tile: 1 when rows are queries, 0 for
the transposed tiles of paged attention. Must not know masks, pages or heads.

Specification: `reference_attention.SoftmaxState` and the functions beside it.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


@triton.jit
def reference_point(m):
    """m, or 0 for an empty set: -inf - (-inf) is never formed."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def weigh(m, l, s, factor, AXIS: tl.constexpr):  # noqa: E741
    """Take one tile of scores, times factor > 0, into (m, l). Returns (m, l, decay, weights).

    u follows as u * decay + weights . v. A fully masked tile has weights 0 and decay 1, or 0 on
    an empty state. The factor is outside the maximum, so that the exponent is one fused
    multiply-add; a negative factor would turn the maximum into a minimum.
    """
    m_new = tl.maximum(m, tl.max(s, AXIS) * factor)
    point = reference_point(m_new)
    weights = tl.exp2(tl.fma(s, factor, -tl.expand_dims(point, AXIS)))
    decay = tl.exp2(m - point)
    return m_new, l * decay + tl.sum(weights, AXIS), decay, weights


@triton.jit
def dot(a, b, acc, ORDERED: tl.constexpr):
    """acc + a . b in float32, IEEE for float32 inputs.

    ORDERED sums products one by one over the inner axis, so that a row's bits cannot depend on its
    place in the tile where the product comes from a CPU library (the interpreter's tests).
    """
    if ORDERED:
        acc += tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], 1)
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def step(m, l, u, s, v, factor):  # noqa: E741
    """Take one tile of keys into the state: s [rows, keys] scores, v [keys, dim] values."""
    m, l, decay, weights = weigh(m, l, s, factor, 1)  # noqa: E741
    return m, l, dot(weights.to(v.dtype), v, u * decay[:, None], False)


@triton.jit
def merge(m_a, l_a, u_a, m_b, l_b, u_b, AXIS: tl.constexpr):
    """Statistics of the union of two disjoint sets; an empty side leaves the other's bits alone."""
    m = tl.maximum(m_a, m_b)
    point = reference_point(m)
    scale_a = tl.exp2(m_a - point)
    scale_b = tl.exp2(m_b - point)
    a_empty = m_a == float("-inf")
    b_empty = m_b == float("-inf")
    l = scale_a * l_a + scale_b * l_b  # noqa: E741
    l = tl.where(a_empty, l_b, tl.where(b_empty, l_a, l))  # noqa: E741
    u = tl.expand_dims(scale_a, AXIS) * u_a + tl.expand_dims(scale_b, AXIS) * u_b
    u = tl.where(
        tl.expand_dims(a_empty, AXIS), u_b, tl.where(tl.expand_dims(b_empty, AXIS), u_a, u)
    )
    return m, l, u


@triton.jit
def finalize(m, l, u, AXIS: tl.constexpr):  # noqa: E741
    """Output u / l and natural lse; 0 and -inf for rows that saw no key."""
    is_empty = l == 0.0
    mass = tl.where(is_empty, 1.0, l)
    out = u / tl.expand_dims(mass, AXIS)
    lse = (m + tl.log2(mass)) * 0.6931471805599453  # ln 2
    return out, tl.where(is_empty, float("-inf"), lse)


@triton.jit
def _state_kernel(scores, values, m_out, l_out, u_out, num_rows, num_keys, value_dim,
                  ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr):  # fmt: skip
    """States of [num_rows] score rows over shared values, tile by tile ascending."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)  # noqa: E741
    u = tl.zeros([ROWS, DIM], tl.float32)
    for first in range(0, num_keys, KEYS):
        keys = first + tl.arange(0, KEYS)
        inside = (rows[:, None] < num_rows) & (keys[None, :] < num_keys)
        s = tl.load(scores + rows[:, None] * num_keys + keys[None, :], inside, float("-inf"))
        inside = (keys[:, None] < num_keys) & (dims[None, :] < value_dim)
        v = tl.load(values + keys[:, None] * value_dim + dims[None, :], inside, 0.0)
        m, l, u = step(m, l, u, s, v, 1.4426950408889634)  # log2 e  # noqa: E741
    tl.store(m_out + rows, m, rows < num_rows)
    tl.store(l_out + rows, l, rows < num_rows)
    inside = (rows[:, None] < num_rows) & (dims[None, :] < value_dim)
    tl.store(u_out + rows[:, None] * value_dim + dims[None, :], u, inside)


@triton.jit
def _merge_kernel(m_in, l_in, u_in, m_out, l_out, u_out, num_states, num_rows, value_dim,
                  ROWS: tl.constexpr, DIM: tl.constexpr):  # fmt: skip
    """Fold num_states states of each row in ascending order."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    live = rows < num_rows
    inside = live[:, None] & (dims[None, :] < value_dim)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)  # noqa: E741
    u = tl.zeros([ROWS, DIM], tl.float32)
    for state in range(num_states):
        at = state * num_rows + rows
        m_b = tl.load(m_in + at, live, float("-inf"))
        l_b = tl.load(l_in + at, live, 0.0)
        u_b = tl.load(u_in + at[:, None] * value_dim + dims[None, :], inside, 0.0)
        m, l, u = merge(m, l, u, m_b, l_b, u_b, 1)  # noqa: E741
    tl.store(m_out + rows, m, live)
    tl.store(l_out + rows, l, live)
    tl.store(u_out + rows[:, None] * value_dim + dims[None, :], u, inside)


@triton.jit
def _finalize_kernel(m_in, l_in, u_in, out, lse_out, num_rows, value_dim,
                     ROWS: tl.constexpr, DIM: tl.constexpr):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    live = rows < num_rows
    inside = live[:, None] & (dims[None, :] < value_dim)
    m = tl.load(m_in + rows, live, float("-inf"))
    l = tl.load(l_in + rows, live, 0.0)  # noqa: E741
    at = rows[:, None] * value_dim + dims[None, :]
    result, lse = finalize(m, l, tl.load(u_in + at, inside, 0.0), 1)
    tl.store(out + at, result, inside)
    tl.store(lse_out + rows, lse, live)


_ROWS = 16  # rows a program owns; the smallest tile a tensor core takes
_KEYS = 32


def softmax_state(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics (m, l, u) of score rows: step over tiles of keys from the empty state.

    scores: float32 [rows, keys], natural scale, -inf where masked; values: float32 [keys, d].
    Returns float32 m [rows] in base 2 (m = max z / ln 2), l [rows], u [rows, d].
    """
    num_rows, num_keys = scores.shape
    scores, values = scores.contiguous(), values.contiguous()
    m, l, u = _outputs(num_rows, values.shape[1], scores)  # noqa: E741
    _state_kernel[(triton.cdiv(num_rows, _ROWS),)](
        scores, values, m, l, u, num_rows, num_keys, values.shape[1],
        ROWS=_ROWS, KEYS=_KEYS, DIM=matrix_columns(values.shape[1]),
    )  # fmt: skip
    return m, l, u


def merge_states(m: Tensor, l: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # noqa: E741
    """Fold states [n, rows] (u: [n, rows, d]) of disjoint key sets, ascending along the first axis.

    The order is part of the result: callers on two machines that fold the same list get equal bits.
    Float32 contiguous inputs of any device; merge of an empty state and x is x bit for bit.
    """
    num_states, num_rows, value_dim = u.shape
    outputs = _outputs(num_rows, value_dim, u)
    _merge_kernel[(triton.cdiv(num_rows, _ROWS),)](
        m.contiguous(), l.contiguous(), u.contiguous(), *outputs, num_states, num_rows, value_dim,
        ROWS=_ROWS, DIM=matrix_columns(value_dim), enable_fp_fusion=False,
    )  # fmt: skip
    return outputs


def finalize_state(m: Tensor, l: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:  # noqa: E741
    """Output u / l [rows, d] and natural lse [rows]; 0 and -inf for empty rows."""
    num_rows, value_dim = u.shape
    out, lse = torch.empty_like(u), torch.empty_like(m)
    _finalize_kernel[(triton.cdiv(num_rows, _ROWS),)](
        m,
        l,
        u.contiguous(),
        out,
        lse,
        num_rows,
        value_dim,
        ROWS=_ROWS,
        DIM=matrix_columns(value_dim),
    )
    return out, lse


def matrix_columns(dim: int) -> int:
    """Columns of a tile that holds `dim` of them: a matrix instruction takes no fewer than 16."""
    return max(16, triton.next_power_of_2(dim))


def _outputs(num_rows: int, value_dim: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (
        like.new_empty(num_rows),
        like.new_empty(num_rows),
        like.new_empty(num_rows, value_dim),
    )
