"""transformers' Llama of a named shape, one step: compiled whole, replayed as a CUDA graph.

The baseline of `specmesh/bench/steps.py`, on the same GPU, in the same run, timed by the same
function: what a user gets from transformers with a static cache, torch's attention and one graph
without breaks. Knows no kernels of ours.
"""

from __future__ import annotations

import argparse
import gc
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from specmesh.bench import steps
from specmesh.engine.families import spec_from_config

# Modes of torch.compile that leave CUDA graphs to us, and the seconds after which a compilation is
# given up: several times what it should take. The second mode tries dozens of kernels a product.
COMPILE_LIMITS_S = {"default": 240, "max-autotune-no-cudagraphs": 900}
# Slots of a static cache, which attention reads all of: no more than needed, to its advantage.
CACHE_UNIT = 64


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of a command that can time this baseline."""
    parser.add_argument(
        "--baseline",
        action="store_true",
        help="also transformers' Llama of the same shape (batch 1), compiled whole, in a CUDA "
        "graph; prints as it goes, compiles 1 to 2 minutes, gives up after 4 a case",
    )
    parser.add_argument(
        "--baseline-mode", choices=sorted(COMPILE_LIMITS_S), default="default",
        help="of torch.compile; autotuning takes several minutes more",
    )  # fmt: skip


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the command (status 2) where what it was asked for cannot run here."""
    if options.baseline:
        try:
            from transformers import LlamaForCausalLM, StaticCache  # noqa: F401
        except ImportError as error:
            parser.error(f"--baseline needs transformers 5.17 or newer: {error}")
    elif options.baseline_mode != "default":
        parser.error("--baseline-mode says how --baseline compiles, which was not asked for")
    if not torch.cuda.is_available():
        what = "steps and their baseline are" if options.baseline else "steps are"
        parser.error(f"{what} timed on a CUDA device, and this machine or torch build has none")


def load(model: str, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Any:
    """transformers' Llama of a named shape, random weights made on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = {k: v for k, v in steps.CONFIGS[model].items() if k != "architectures"}
    make_config: Any = LlamaConfig
    config = make_config(**fields, attn_implementation="sdpa")
    make_model: Any = LlamaForCausalLM._from_config
    with torch.device(device):  # in dtype from the start; its rotation's frequencies stay float32
        return make_model(config, dtype=dtype).eval()


class TransformersStep:
    """One step of `rows` tokens for each of `batch` sequences, the last of `context` tokens.

    The cache holds random keys and values in every slot, those behind the context too. A step
    moves the cache's length on by its rows: `rewind` before each.
    """

    def __init__(self, baseline: Any, batch: int, rows: int, context: int) -> None:
        """Allocate a cache for a model of `load`, on its device."""
        from transformers import StaticCache

        config, device = baseline.config, baseline.device
        self.baseline = baseline
        self.cache_len = -(-context // CACHE_UNIT) * CACHE_UNIT
        make_cache: Any = StaticCache
        self.cache = make_cache(config=config, max_cache_len=self.cache_len)
        self.cache.early_initialization(
            batch, config.num_key_value_heads, config.head_dim, baseline.dtype, device
        )
        generator = torch.Generator(device)
        generator.manual_seed(0)
        for layer in self.cache.layers:
            layer.keys.normal_(generator=generator)
            layer.values.normal_(generator=generator)
        self._lengths = [layer.cumulative_length for layer in self.cache.layers]
        self._starts = [torch.full_like(each, context - rows) for each in self._lengths]
        self.token_ids = torch.randint(
            config.vocab_size, (batch, rows), device=device, generator=generator
        )

    def rewind(self) -> None:
        """Set the cache's length to the tokens before this step's."""
        torch._foreach_copy_(self._lengths, self._starts)

    def forward(self) -> Tensor:
        """Logits [batch, rows, vocab_size] of the rows; their keys and values join the cache.

        Positions and mask are the model's own, from the cache's length.
        """
        logits: Tensor = self.baseline(
            input_ids=self.token_ids, past_key_values=self.cache, use_cache=True
        ).logits
        return logits


@contextmanager
def compiled(
    step: TransformersStep, mode: str = "default", backend: Any = "inductor"
) -> Iterator[Callable[[], Tensor]]:
    """`step.forward` as one compiled graph; a break in it or a second compilation is an error.

    What was compiled before in this process is forgotten: a compilation a step, which bounds the
    time.
    """
    torch._dynamo.reset()
    limits: Any = torch._dynamo.config
    with limits.patch(error_on_recompile=True):
        yield torch.compile(step.forward, fullgraph=True, dynamic=False, mode=mode, backend=backend)


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in what the main thread runs for longer."""

    def give_up(_signal: int, _frame: object) -> None:
        raise TimeoutError(f"compiling took longer than {seconds} s")

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def capture(run: Callable[[], Tensor], rewind: Callable[[], None]) -> tuple[Any, Tensor]:
    """A CUDA graph of `run`, and the tensor that each replay writes."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # the first compiles
            rewind()
            run()
        rewind()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = run()
    return graph, logits


def relative_error(logits: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    wide = expected.double()
    return float((logits.double() - wide).norm() / wide.norm())


def _timed(step: TransformersStep, mode: str) -> dict[str, Any]:
    """Fields of a report that are measured."""
    step.rewind()
    expected = step.forward().clone()
    began = time.perf_counter()
    with limited(COMPILE_LIMITS_S[mode]), compiled(step, mode) as run:
        graph, logits = capture(run, step.rewind)
    first_use_s = time.perf_counter() - began
    sent = torch.zeros(step.token_ids.shape, dtype=torch.int64, pin_memory=True)
    sent.copy_(step.token_ids)

    def whole() -> None:
        step.token_ids.copy_(sent, non_blocking=True)
        graph.replay()
        torch.cuda.synchronize()

    on_device = steps.device_times(graph.replay, before=step.rewind)
    wall = steps.wall_times(whole, before=step.rewind)
    return {
        "value": on_device.median,
        "unit": "ms",
        "p20": on_device.p20,
        "p80": on_device.p80,
        "baseline": None,
        "wall": wall.median,
        "first_use_s": first_use_s,
        "relative_error": relative_error(logits, expected),
    }


def measure(
    model: str,
    cases: Sequence[tuple[int, int]],
    context: int,
    device: torch.device,
    mode: str = "default",
) -> Iterator[tuple[tuple[int, int], dict[str, Any]]]:
    """Measure (batch, rows) after (batch, rows); yield each with its report.

    Device time of one replay as `steps.device_times` takes it, bfloat16, logits of every row.
    `relative_error` compares them with the model uncompiled; `wall` sends tokens and waits, and
    fetches nothing.
    """
    import transformers

    baseline = load(model, device)
    spec = spec_from_config(steps.CONFIGS[model])
    for batch, rows in cases:
        name = f"baseline-transformers-{model}-b{batch}x{rows}"
        sys.stdout.write(f"{name}: compiling, mode {mode}\n")
        sys.stdout.flush()
        with torch.no_grad():
            step = TransformersStep(baseline, batch, rows, context)
            report = {"name": name, **_timed(step, mode)}
        report |= {
            "floor": steps.pass_floor_ms(spec, torch.bfloat16, "model", context * batch),
            "bar": None,
            "context": context,
            "weight_dtype": "model",
            "cache_len": step.cache_len,
            "compile_mode": mode,
            "transformers": transformers.__version__,
        }
        yield (batch, rows), report
        del step
        gc.collect()
        torch.cuda.empty_cache()


def beside(report: dict[str, Any], num_steps: int = 1) -> dict[str, Any]:
    """The `baseline` field of our own report: a baseline's report, num_steps of it in a row."""
    what = f"transformers, compiled ({report['compile_mode']}) + CUDA graph, logits"
    if num_steps > 1:
        what += f", {num_steps} steps, no sampling"
    times = {key: num_steps * report[key] for key in ("value", "p20", "p80")}
    return {"name": what, "case": report["name"], **times}
