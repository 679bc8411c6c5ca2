"""The specification of attention, in plain PyTorch: THEORY.md sections 2 and 3 in their own order.

First the mergeable statistics of a softmax (m, l, u), then attention with every option, then its
backward, then attention over paged K/V in the leaf-and-chunk order that makes a verify step and
single decodes agree bit for bit, then the error bound of window attention. Everything here runs in
float64 and keeps the dtype it is given. Must not know Triton or a device. The Triton twins are
`softmax_state`, `attention`, `attention_backward`, `paged_attention` and `window_error`.

Sources: Milakov & Gimelshein, arXiv 1805.02867 (online softmax); Dao et al., arXiv 2205.14135
(blocked attention and its backward).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference import philox_words

LEAF_SIZE = 256  # tokens whose statistics start from the empty state
CHUNK_SIZE = 1024  # tokens whose leaves are folded together before they join the total
# Last counter word of the dropout streams. The key is the caller's dropout seed, never a request's
# sampling seed, so it need not differ from `streams.Purpose`.
DROPOUT_STREAM = 0x64726F70

# ---------------------------------------------------------------- online softmax


@dataclass(frozen=True, slots=True)
class SoftmaxState:
    """Statistics of a set of visible keys: m = max z, l = sum e^(z-m), u = sum e^(z-m) v.

    m and l: [*rows]; u: [*rows, value_dim]. The empty set is m = -inf, l = 0, u = 0.
    """

    m: Tensor
    l: Tensor  # noqa: E741 (the name of the literature)
    u: Tensor


def empty_state(rows: tuple[int, ...], values: Tensor) -> SoftmaxState:
    """Statistics of no keys at all, in the dtype and on the device of `values` [.., value_dim]."""
    return SoftmaxState(
        values.new_full(rows, -math.inf),
        values.new_zeros(rows),
        values.new_zeros((*rows, values.shape[-1])),
    )


def _reference_point(m: Tensor) -> Tensor:
    """m, or 0 for an empty set: -inf - (-inf) is never formed."""
    return torch.where(m == -math.inf, 0.0, m)


def block_state(scores: Tensor, values: Tensor) -> SoftmaxState:
    """Statistics of one block: scores [*rows, n], -inf where masked; values [.., n, value_dim]."""
    m = scores.amax(dim=-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -math.inf)
    weights = torch.exp(scores - _reference_point(m)[..., None])
    return SoftmaxState(m, weights.sum(dim=-1), weights @ values)


def merge(a: SoftmaxState, b: SoftmaxState) -> SoftmaxState:
    """Statistics of the union of two disjoint sets. merge(empty, x) is x, bit for bit.

    Order-free in exact arithmetic; in floating point the order is part of a kernel's contract.
    """
    m = torch.maximum(a.m, b.m)
    point = _reference_point(m)
    scale_a, scale_b = torch.exp(a.m - point), torch.exp(b.m - point)
    a_empty, b_empty = a.m == -math.inf, b.m == -math.inf
    mass = scale_a * a.l + scale_b * b.l
    weighted = scale_a[..., None] * a.u + scale_b[..., None] * b.u
    mass = torch.where(a_empty, b.l, torch.where(b_empty, a.l, mass))
    weighted = torch.where(a_empty[..., None], b.u, torch.where(b_empty[..., None], a.u, weighted))
    return SoftmaxState(m, mass, weighted)


def step(state: SoftmaxState, scores: Tensor, values: Tensor) -> SoftmaxState:
    """Add one block of keys to the statistics; a fully masked block changes nothing."""
    return merge(state, block_state(scores, values))


def finalize(state: SoftmaxState) -> tuple[Tensor, Tensor]:
    """Output o = u / l and lse = m + log l. A row without visible keys gives 0 and -inf."""
    is_empty = state.l == 0
    mass = torch.where(is_empty, 1.0, state.l)
    out = state.u / mass[..., None]
    return out, torch.where(is_empty, -math.inf, state.m + torch.log(mass))


# ---------------------------------------------------------------- attention


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What an attention call does to its scores.

    The score of a query at position t = query index + query_offset and key j is
    scale * q.k, capped to softcap * tanh(s / softcap) when softcap > 0, plus the bias. Key j is
    visible iff (not causal or j <= t) and (window is None or j > t - window) and the boolean mask
    (True = attend) allows it. query_offset None means keys - queries, that is bottom-right
    alignment; scale None means head_dim ** -0.5. dropout_p drops probabilities after the softmax;
    the mask depends on (dropout_seed, batch * heads + head, query index, key index) alone.
    """

    causal: bool = False
    query_offset: int | None = None
    window: int | None = None
    softcap: float = 0.0
    scale: float | None = None
    dropout_p: float = 0.0
    dropout_seed: int = 0

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}")
        if not 0.0 <= self.dropout_p < 1.0:
            raise ValueError(f"dropout_p must be in [0, 1), got {self.dropout_p}")
        if self.softcap < 0.0:
            raise ValueError(f"softcap must not be negative, got {self.softcap}")
        if not 0 <= self.dropout_seed < 1 << 63:
            raise ValueError(f"dropout_seed must be in [0, 2**63), got {self.dropout_seed}")

    def scale_for(self, head_dim: int) -> float:
        """The scale of the scores: the one given, or head_dim ** -0.5."""
        return head_dim**-0.5 if self.scale is None else self.scale

    def offset_for(self, num_queries: int, num_keys: int) -> int:
        """The query offset: the one given, or that of bottom-right alignment."""
        return num_keys - num_queries if self.query_offset is None else self.query_offset


DEFAULT_OPTIONS = AttentionOptions()


def visible_keys(num_queries: int, num_keys: int, options: AttentionOptions) -> Tensor:
    """Boolean [num_queries, num_keys]: True where causality and window let a query see a key."""
    position = torch.arange(num_queries)[:, None] + options.offset_for(num_queries, num_keys)
    key = torch.arange(num_keys)[None, :]
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool)
    if options.causal:
        visible &= key <= position
    if options.window is not None:
        visible &= key > position - options.window
    return visible


def dropout_keep(
    seed: int, dropout_p: float, batch_head: int, num_queries: int, num_keys: int
) -> Tensor:
    """Boolean [num_queries, num_keys] of kept probabilities, a function of coordinates alone.

    Philox counter = (key >> 2, query, batch * heads + head, DROPOUT_STREAM), word key & 3; kept iff
    the word is at least dropout_p * 2**32. A backward with other tiles replays the same mask.
    """
    threshold = math.ceil(dropout_p * 2.0**32)
    calls = torch.arange((num_keys + 3) // 4)
    rows = [
        philox_words(seed, calls, query, batch_head, DROPOUT_STREAM).reshape(-1)[:num_keys]
        for query in range(num_queries)
    ]
    words = torch.stack(rows) if rows else torch.zeros(0, num_keys, dtype=torch.int64)
    return words >= threshold


@dataclass(frozen=True, slots=True)
class _Probabilities:
    """Scores and probabilities of one call: [batch, heads, queries, keys]."""

    scores: Tensor
    probs: Tensor  # before dropout
    keep: Tensor | None  # kept probabilities times 1 / (1 - p)
    cap_slope: Tensor | float  # derivative of the softcap
    lse: Tensor


def _expand_heads(kv: Tensor, num_heads: int) -> Tensor:
    """Query head h reads kv head h // group."""
    return kv.repeat_interleave(num_heads // kv.shape[1], dim=1)


def _probabilities(
    q: Tensor, k: Tensor, options: AttentionOptions, bias: Tensor | None, mask: Tensor | None
) -> _Probabilities:
    batch, heads, num_queries, head_dim = q.shape
    num_keys = k.shape[2]
    scores = q @ _expand_heads(k, heads).transpose(-1, -2) * options.scale_for(head_dim)
    cap_slope: Tensor | float = 1.0
    if options.softcap > 0.0:
        capped = torch.tanh(scores / options.softcap)
        scores, cap_slope = options.softcap * capped, 1.0 - capped * capped
    if bias is not None:
        scores = scores + bias
    visible = visible_keys(num_queries, num_keys, options).to(q.device)
    if mask is not None:
        visible = visible & mask
    scores = torch.where(visible, scores, -math.inf)  # last: garbage under the mask cannot leak
    block = block_state(scores, scores.new_zeros(num_keys, 1))
    _, lse = finalize(block)
    probs = torch.exp(scores - _reference_point(lse)[..., None])
    keep = None
    if options.dropout_p > 0.0:
        masks = [
            dropout_keep(options.dropout_seed, options.dropout_p, index, num_queries, num_keys)
            for index in range(batch * heads)
        ]
        kept = torch.stack(masks).view(batch, heads, num_queries, num_keys)
        keep = kept.to(q.dtype) / (1.0 - options.dropout_p)
    return _Probabilities(scores, probs, keep, cap_slope, lse)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions = DEFAULT_OPTIONS,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """O = dropout(softmax(S)) V with S as `AttentionOptions` says.

    q: [batch, heads, queries, d]; k, v: [batch, kv_heads, keys, d], heads a multiple of kv_heads;
    bias (added) and mask (bool, True = attend) broadcast to [batch, heads, queries, keys].
    Returns (out like q, lse [batch, heads, queries], natural logarithm, before dropout). A query
    that sees no key gets out 0 and lse -inf.
    """
    p = _probabilities(q, k, options, bias, mask)
    weights = p.probs if p.keep is None else p.probs * p.keep
    return weights @ _expand_heads(v, q.shape[1]), p.lse


@dataclass(frozen=True, slots=True)
class AttentionGradients:
    """Gradients shaped like the inputs; bias is None when there was none."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None


def attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions = DEFAULT_OPTIONS,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> AttentionGradients:
    """G_V = P'G_O; G_P = G_O V'; G_S = P (G_P - rowsum(P G_P)); G_Q = G_S K s; G_K = G_S'Q s.

    P is recomputed, never stored; the subtracted row mean equals g_o . o and makes the gradient of
    a common shift of a row zero. Under dropout P' carries the replayed mask and G_P passes it too.
    Rows without visible keys have gradient 0.
    """
    heads, kv_heads, scale = q.shape[1], k.shape[1], options.scale_for(q.shape[-1])
    p = _probabilities(q, k, options, bias, mask)
    weights = p.probs if p.keep is None else p.probs * p.keep
    grad_probs = grad_out @ _expand_heads(v, heads).transpose(-1, -2)
    if p.keep is not None:
        grad_probs = grad_probs * p.keep
    row_mean = (p.probs * grad_probs).sum(dim=-1, keepdim=True)
    grad_scores = p.probs * (grad_probs - row_mean)
    grad_bias = None if bias is None else grad_scores.sum_to_size(bias.shape)
    grad_products = grad_scores * p.cap_slope * scale
    grad_q = grad_products @ _expand_heads(k, heads)
    grad_k = grad_products.transpose(-1, -2) @ q
    grad_v = weights.transpose(-1, -2) @ grad_out

    def sum_groups(grad: Tensor) -> Tensor:
        return grad.unflatten(1, (kv_heads, heads // kv_heads)).sum(dim=2)

    return AttentionGradients(grad_q, sum_groups(grad_k), sum_groups(grad_v), grad_bias)


# ---------------------------------------------------------------- attention over paged K/V


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Which queries and pages a paged call works on; token i is in its sequence's page i // size.

    cu_seqlens_q: int32 [num_seqs + 1], packed query ranges. context_lens: int32 [num_seqs], tokens
    with valid K/V, this call's own included: query i of n sits at position context_len - n + i.
    block_tables: int32 [num_seqs, max_pages]. max_query_len, max_context_len: host bounds on the
    two kinds of lengths, which shape the launch; lengths themselves stay on the device.
    """

    cu_seqlens_q: Tensor
    context_lens: Tensor
    block_tables: Tensor
    max_query_len: int
    max_context_len: int


def paged_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    batch: PagedBatch,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> tuple[Tensor, Tensor]:
    """Causal attention of packed queries over paged K/V in the leaf-and-chunk order.

    q: [num_tokens, heads, d]; pools: [pages, kv_heads, page_size, d]. Of the options, window,
    softcap and scale apply. The statistics of each 256-token leaf start empty, leaves fold
    ascending into 1024-token chunks, chunks ascending into the total: a launch may split by leaf
    or by chunk, and a verify step equals single decodes. Returns (out like q, lse [num_tokens,
    heads], natural logarithm). Queries before the first token (position < 0) give 0 and -inf.
    """
    out = torch.zeros_like(q)
    lse = q.new_full(q.shape[:2], -math.inf)
    cu_seqlens_q, context_lens = batch.cu_seqlens_q.tolist(), batch.context_lens.tolist()
    for index, context_len in enumerate(context_lens):
        start, end = cu_seqlens_q[index], cu_seqlens_q[index + 1]
        if start == end:
            continue
        tables = batch.block_tables[index].to(torch.int64)
        k, v = (_gather(pool, tables, context_len) for pool in (k_pool, v_pool))
        state = _fold(q[start:end], k, v, options)
        rows, row_lse = finalize(state)
        out[start:end] = rows.permute(2, 0, 1, 3).flatten(1, 2)
        lse[start:end] = row_lse.permute(2, 0, 1).flatten(1, 2)
    return out, lse


def _gather(pool: Tensor, block_table: Tensor, context_len: int) -> Tensor:
    """The first context_len tokens of a sequence: [kv_heads, context_len, d]."""
    page_size = pool.shape[2]
    pages = block_table[: (context_len + page_size - 1) // page_size]
    return pool[pages].transpose(0, 1).flatten(1, 2)[:, :context_len]


def _fold(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> SoftmaxState:
    """Fold one sequence's keys: q [n, heads, d], k and v [kv_heads, context_len, d].

    Rows of the returned state are [kv_heads, group, n].
    """
    num_queries, heads, head_dim = q.shape
    kv_heads, context_len, _ = k.shape
    grouped = q.view(num_queries, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    rule = AttentionOptions(causal=True, window=options.window)
    visible = visible_keys(num_queries, context_len, rule).to(q.device)
    rows = (kv_heads, heads // kv_heads, num_queries)
    total = empty_state(rows, v)
    for chunk_start in range(0, context_len, CHUNK_SIZE):
        chunk = empty_state(rows, v)
        chunk_end = min(chunk_start + CHUNK_SIZE, context_len)
        for leaf_start in range(chunk_start, chunk_end, LEAF_SIZE):
            leaf = slice(leaf_start, min(leaf_start + LEAF_SIZE, chunk_end))
            if not bool(visible[:, leaf].any()):
                continue
            scores = grouped @ k[:, None, leaf].transpose(-1, -2) * options.scale_for(head_dim)
            if options.softcap > 0.0:
                scores = options.softcap * torch.tanh(scores / options.softcap)
            scores = torch.where(visible[:, leaf], scores, -math.inf)
            chunk = merge(chunk, block_state(scores, v[:, None, leaf]))
        total = merge(total, chunk)
    return total


# ---------------------------------------------------------------- the price of a window


def window_error_bound(
    q: Tensor, k: Tensor, v: Tensor, window: int, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """How far window attention can be from full attention, row by row.

    delta [batch, heads, queries]: the probability mass that full attention (`options`) puts on
    keys at least `window` positions back; bound = 2 delta M with M the largest ||v|| among all keys
    of the row's kv head: ||o - o'|| <= 2 delta M when delta < 1 (THEORY.md section 3). Bounds one
    row's output, not task quality. Rows without visible keys have delta 0.
    """
    probs = _probabilities(q, k, options, None, None).probs
    near = AttentionOptions(query_offset=options.query_offset, window=window)
    kept = visible_keys(q.shape[2], k.shape[2], near).to(q.device)
    delta = torch.where(kept, 0.0, probs).sum(dim=-1)
    norms = _expand_heads(v.norm(dim=-1).amax(dim=-1, keepdim=True), q.shape[1])
    return delta, 2.0 * delta * norms
