"""`specmesh inflate`: a larger checkpoint that computes exactly a small model's function.

A realistic pair without a large download: real distributions and real acceptance, at the cost of a
large model's every matrix product, key and value. Lower case is the small model, upper case the
large one: hidden h <= H, head width d | D, heads, MLP units and layers alike. With real numbers the
two compute the same logits, for these reasons:

1. **Stream.** Channels 0..h-1 carry the small stream, the other H - h are exactly zero throughout:
   the embedding has zeros there, and every row of an output or down projection (and its bias) that
   writes to them is zero wherever its input is not. So columns that read them hold random numbers.
2. **RMSNorm.** The mean of squares over H channels is h/H times that over h, so with
   EPS = eps * h/H the large norm divides by sqrt(h/H) times what the small one divides by; its
   weight is the small one times sqrt(h/H), and what comes out is the small norm's output.
3. **Attention, active heads.** Query head t of the small key/value head j becomes a head of a large
   key/value head that holds j's projections (copies of it where the large groups are smaller).
   Head dimensions: rotary pair i becomes pair i * D/d, whose angle theta^(-2i/d) is the same.
   On the other pairs, and on the dimensions that do not rotate, the query row or the key row is
   zero, in turns, the other one random: they add nothing to a score. Scores are divided by sqrt(D)
   in place of sqrt(d), so query rows are multiplied by sqrt(D/d).
   A norm over the head (Qwen3) sees zeros on the added dimensions of query and key. With rows times
   c, c^2 = (h/H)(D/d), its mean of squares plus EPS is (h/H) times the small one; the output is
   sqrt(D/d) times the small one, which the key's weight takes back and the query's keeps as the
   factor of the score.
4. **What is added** (heads, dimensions of values, MLP units, whole layers) takes part in every
   product with random weights and rejoins the stream as an exact zero: in turns, its value or up
   row is zero and its column of the output or down projection random, or the other way round. No
   activation and no matrix is all zeros; a product 0 * w or x * 0 is exactly 0, and adding 0 is
   exact, so a floating-point result differs from the small model's only by the order of a sum and
   the rounding of weights to the written type.
5. **Head.** Logits read the final norm of the active channels. The vocabulary stays.

Norm weights are written in float32 (a service casts them to its own type), matrices in the type
asked for. The written model keeps family, tokenizer, rotary base, windows and context length.

Not refused quietly: rotary scaling `yarn` with another head width (its blend rounds by pair index).
"""

from specmesh.inflate.checkpoint import InflateOptions, Inflation, Report, inflate
from specmesh.inflate.layout import PRESETS, Shape, requested_shape

__all__ = [
    "PRESETS",
    "InflateOptions",
    "Inflation",
    "Report",
    "Shape",
    "inflate",
    "requested_shape",
]
