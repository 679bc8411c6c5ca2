"""Linear layers with fused ends: bias, activation, SwiGLU, residual: `specmesh::linear`.

    y = act(x W^T + b) + r,     or     y = silu(x Wg^T + bg) * (x Wu^T + bu) + r

W is of x's type, or one byte a weight (`fp8_weight`), which tiles convert as they are read.

Numeric contract (`invariant=True`): products are summed in tiles of `BLOCK_K` ascending inside
chunks of K (`chunk_depth`: of the weight's shape and type alone), each chunk from zero in float32,
and chunks are added ascending. Tile shape, which operand is which, number of rows and whether
chunks are split among programs appear nowhere in it, so a row's bits do not depend on who shares
the call. A split writes every chunk's partial and adds them in a second launch; nothing is added
atomically. One family of matrix instructions serves all tiles of an architecture
(`configs/layers.py`). The sum of a chunk of fp8 weights is multiplied by its channel's scale, and
rounded, before it is added to others: who reads chunks need not know of scales. With
`invariant=False` the product is the vendor library's, which takes no fp8 weights, and the end is
one more launch.

On sm_90 a launch starts before the one ahead of it ends and asks for its first weights meanwhile
(`early_launch`): weights must not be written by the kernel before.

Specification: `reference_layers.linear` and `swiglu`. Must not know models or layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.configs.layers import LinearTiles, Specialised, launches_early, linear_tiles
from kernels.fp8_weight import Fp8Weight
from kernels.linear_kernels import _finish_kernel, _linear_kernel
from kernels.linear_persistent import fits_persistent, launch_persistent
from kernels.linear_specialised import begins_on_16, fits, launch_specialised

BLOCK_K = 64
UNCUT_WIDTH = 12288  # weights of so many columns fill a device without splitting K: one chunk
NUM_CHUNKS = 4  # of a narrower weight
# A run this short takes a program no longer than the launch that would add its parts; where columns
# outnumber it so far, there are programs enough without splitting.
SHALLOW_DEPTH, SHALLOW_RATIO = 1024, 4
CHUNK_K_FLOAT32 = 128  # no tensor cores: shorter runs of additions keep float32's digits
ACTIVATIONS = ("none", "silu", "gelu", "gelu_tanh", "relu", "swiglu")


def chunk_depth(weight: Tensor, dtype: torch.dtype) -> int:
    """Columns of K summed in one run, for a weight [n, depth] and activations of a type; part of
    the numeric contract.

    A function of shape and type alone: one run for a weight wide enough to fill a device by its
    columns, or shallow, a quarter of the depth for another, so that few or many rows may split it.
    float32 has no tensor cores: shorter runs of additions keep its digits.
    """
    num_columns, depth = weight.shape
    if dtype is torch.float32:
        return CHUNK_K_FLOAT32
    num_tiles = max(1, triton.cdiv(depth, BLOCK_K))
    is_shallow = depth <= SHALLOW_DEPTH and num_columns >= SHALLOW_RATIO * depth
    is_uncut = num_columns >= UNCUT_WIDTH or is_shallow
    return BLOCK_K * (num_tiles if is_uncut else triton.cdiv(num_tiles, NUM_CHUNKS))


def _num_chunks(weight: Tensor, dtype: torch.dtype) -> int:
    return triton.cdiv(weight.shape[1], chunk_depth(weight, dtype))


def _specialised(
    tiles: LinearTiles, x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None,
    activation: str,
) -> Specialised | None:  # fmt: skip
    """The launch of `linear_specialised` that takes this product, if one does."""
    own, chunk = tiles.specialised, chunk_depth(weight, x.dtype)
    takes = own is not None and fits(x, weight, scale, bias, activation, chunk, own)
    return own if takes else None


def _splits(
    tiles: LinearTiles, own: Specialised | None, weight: Tensor, dtype: torch.dtype
) -> bool:
    """Whether programs share the chunks of this product, and leave their sums to be added."""
    split = tiles.split if own is None else own.split
    return split and _num_chunks(weight, dtype) > 1


def _descriptor(tensor: Tensor, block: int, step_k: int) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [block, step_k])


def _is_cut_by_16(tensor: Tensor) -> bool:
    """Whether rows are whole 16 bytes."""
    return tensor.shape[1] * tensor.element_size() % 16 == 0


def _can_describe(tensor: Tensor, block: int) -> bool:
    """Whether bulk copies may read tiles: rows on 16 bytes, and no tile wider than the tensor."""
    aligned = tensor.stride(0) * tensor.element_size() % 16 == 0 and tensor.stride(1) == 1
    return (
        aligned and begins_on_16(tensor) and tensor.shape[0] >= block and tensor.shape[1] >= BLOCK_K
    )


def _launch_linear(
    x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    activation: str, invariant: bool,
) -> Tensor:  # fmt: skip
    width = weight.shape[0] // (2 if activation == "swiglu" else 1)
    out = x.new_empty(x.shape[0], width)
    if x.shape[0] == 0:
        return out
    partials = launch_product(x, weight, scale, bias, residual, out, activation, invariant)
    return out if partials is None else _finish(partials, bias, residual, out, activation)


def launch_product(
    x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    out: Tensor, activation: str, invariant: bool,
) -> Tensor | None:  # fmt: skip
    """Write `out` and return None, or return the chunks' sums [chunks, rows, n], to be added.

    scale: of an fp8 weight's channels. Its sums are scaled.
    """
    if not invariant:
        return F.linear(x, weight)[None]
    swiglu = activation == "swiglu"
    tiles = linear_tiles(x, weight, swiglu)
    own, lasting = _specialised(tiles, x, weight, scale, bias, activation), tiles.persistent
    chunk, early = chunk_depth(weight, x.dtype), launches_early(x.device)
    partials = None
    if _splits(tiles, own, weight, x.dtype):
        shape = (_num_chunks(weight, x.dtype), x.shape[0], weight.shape[0])
        partials = torch.empty(shape, dtype=torch.float32, device=x.device)
    if own is not None:
        launch_specialised(x, weight, residual, out, partials, swiglu, chunk, own, early)
    elif lasting is not None and fits_persistent(
        x, weight, scale, bias, residual, activation, chunk, lasting
    ):
        launch_persistent(x, weight, out, swiglu, lasting, early)
    else:
        _launch_tiles(x, weight, scale, bias, residual, out, partials, activation)
    return partials


def _launch_tiles(
    x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    out: Tensor, partials: Tensor | None, activation: str,
) -> None:  # fmt: skip
    """The kernel that takes every product: `out`, or the chunks' sums where `partials` is given."""
    num_rows, depth = x.shape
    width, num_chunks = out.shape[1], _num_chunks(weight, x.dtype)
    swiglu, split = activation == "swiglu", partials is not None
    tiles = linear_tiles(x, weight, swiglu)
    chunk, early = chunk_depth(weight, x.dtype), launches_early(x.device)
    describe = (
        tiles.descriptors
        and _can_describe(weight, tiles.block_n)
        and (not swiglu or width % tiles.block_n == 0)
    )
    describe_x = describe and not tiles.gathers and _can_describe(x, 1)
    step_k = tiles.block_k if depth % tiles.block_k == chunk % tiles.block_k == 0 else BLOCK_K
    ahead = tiles.ahead if early and describe and _is_cut_by_16(weight) else 0
    grid = (
        triton.cdiv(num_rows, tiles.block_m + tiles.more_m) * triton.cdiv(width, tiles.block_n),
        num_chunks if split else 1,
    )
    _linear_kernel[grid](
        x, weight, scale,
        _descriptor(x, tiles.block_m, step_k) if describe_x else None,
        _descriptor(x, tiles.more_m, step_k) if describe_x and tiles.more_m else None,
        _descriptor(weight, tiles.block_n, step_k) if describe else None,
        bias, residual, out, partials,
        *x.stride(), *weight.stride(), 0 if residual is None else residual.stride(0), width,
        num_rows, width, depth,
        ACTIVATION=activation, BLOCK_M=tiles.block_m, MORE_M=tiles.more_m, BLOCK_N=tiles.block_n,
        BLOCK_K=step_k, CHUNK_K=chunk, ONE_CHUNK=num_chunks == 1, SPLIT=split,
        EVEN=depth % step_k == 0, TURNED=tiles.turned, ORDERED=tiles.ordered, AHEAD=ahead,
        THREADS=32 * tiles.num_warps, EARLY=early, num_warps=tiles.num_warps,
        num_stages=tiles.num_stages * tiles.block_k // step_k, launch_pdl=early,
    )  # fmt: skip


def operands(
    x: Tensor, weight: Tensor | Fp8Weight, bias: Tensor | None, invariant: bool
) -> tuple[Tensor, Tensor | None]:
    """(values, scales or None) of a weight that fits x [.., depth] and bias. Raises ValueError."""
    if isinstance(weight, Fp8Weight):
        values, scale = weight.values, weight.scale
    else:
        values, scale = weight, None
    if values.shape[1] != x.shape[-1] or (scale is None and values.dtype is not x.dtype):
        raise ValueError(
            f"weight {tuple(values.shape)} {values.dtype} does not fit x {tuple(x.shape)} {x.dtype}"
        )
    if scale is not None and not invariant:
        raise ValueError("the library's product takes no fp8 weights: they need invariant=True")
    if bias is not None and (bias.shape != values.shape[:1] or bias.stride(0) != 1):
        raise ValueError(f"bias {tuple(bias.shape)} does not fit weight {tuple(values.shape)}")
    return values, scale


def linear_chunks(
    x: Tensor, weight: Tensor | Fp8Weight, bias: Tensor | None, *, invariant: bool = True
) -> tuple[Tensor, Tensor | None]:
    """x W^T + b for a reader that may end it itself: (finished [num_rows, n], None), or the chunks'
    sums [chunks, num_rows, n], to be added ascending in float32, and the bias to add then.

    x [num_rows, depth], weight and bias as of `linear`. Raises ValueError where they do not fit.
    """
    values, scale = operands(x, weight, bias, invariant)
    heads = torch.ops.specmesh.linear_chunks(x, values, scale, bias, invariant)
    return heads, bias if heads.ndim == 3 else None


def _finish(
    partials: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor, activation: str
) -> Tensor:
    num_chunks, num_rows, _ = partials.shape
    width, block = out.shape[1], 1024
    early = launches_early(out.device)
    _finish_kernel[(triton.cdiv(width, block), num_rows)](
        partials, bias, residual, out, 0 if residual is None else residual.stride(0), width,
        num_rows, width, NUM_CHUNKS=num_chunks, ACTIVATION=activation, BLOCK=block, EARLY=early,
        num_warps=4, launch_pdl=early,
    )  # fmt: skip
    return out


_linear = torch.library.custom_op("specmesh::linear", _launch_linear, mutates_args=())


@_linear.register_fake
def _linear_fake(
    x: Tensor, weight: Tensor, _scale: Tensor | None, _bias: Tensor | None,
    _residual: Tensor | None, activation: str, _invariant: bool,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape[0], weight.shape[0] // (2 if activation == "swiglu" else 1))


def _launch_chunks(
    x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, invariant: bool
) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[0])
    if x.shape[0] == 0:
        return out
    partials = launch_product(x, weight, scale, bias, None, out, "none", invariant)
    return out if partials is None else partials


_chunks = torch.library.custom_op("specmesh::linear_chunks", _launch_chunks, mutates_args=())


@_chunks.register_fake
def _chunks_fake(
    x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, invariant: bool
) -> Tensor:
    rows, width = x.shape[0], weight.shape[0]
    if rows == 0:
        return x.new_empty(rows, width)
    if not invariant:
        return x.new_empty(1, rows, width)
    tiles = linear_tiles(x, weight, False)
    own = _specialised(tiles, x, weight, scale, bias, "none")
    if not _splits(tiles, own, weight, x.dtype):
        return x.new_empty(rows, width)
    return x.new_empty(_num_chunks(weight, x.dtype), rows, width, dtype=torch.float32)


def linear(
    x: Tensor,
    weight: Tensor | Fp8Weight,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    residual: Tensor | None = None,
    invariant: bool = True,
) -> Tensor:
    """act(x W^T + b) + residual, one rounding to x's type. Inference only.

    x [.., depth], any strides; weight [width, depth] of x's type or fp8, any strides; bias [width],
    contiguous; residual [.., width]. activation: one of `ACTIVATIONS`; "swiglu" takes weight
    [2 width, depth] and bias [2 width], gate first. invariant: see the module text; False rounds
    the product to x's type before the end. Raises ValueError on shapes or names that do not fit.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is none of {', '.join(ACTIVATIONS)}")
    values, scale = operands(x, weight, bias, invariant)
    if activation == "swiglu" and len(values) % 2:
        raise ValueError("a SwiGLU weight has as many rows for gate as for up")
    width = len(values) // (2 if activation == "swiglu" else 1)
    if residual is not None:
        if residual.shape != (*x.shape[:-1], width):
            raise ValueError(f"residual {tuple(residual.shape)} is not [.., {width}]")
        residual = residual.reshape(-1, width)
        residual = residual if residual.stride(1) == 1 else residual.contiguous()
    y = torch.ops.specmesh.linear(
        x.reshape(-1, x.shape[-1]), values, scale, bias, residual, activation, invariant
    )
    return y.view(*x.shape[:-1], width)
