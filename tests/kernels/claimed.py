"""What one worker of `compile_ahead` compiles for sm_90: `python -m tests.kernels.claimed CLAIMS`.

Runs on a CPU: the driver is one that names a device and can launch nothing, and a kernel counts as
compiled when it is about to be. Prints a line a kernel. Needs a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kernels import configs


class NamesADevice:
    """A driver without a device behind it."""

    def get_current_device(self) -> int:
        """The first one."""
        return 0

    def get_current_stream(self, _device: int) -> int:
        """None that could be launched on."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """That of an H200."""
        return GPUTarget("cuda", 90, 32)


driver.set_active(NamesADevice())
configs.architecture = lambda _device: "sm_90"  # before the kernels take it from there

from draft_service.device_proposer import DraftSampler  # noqa: E402
from specmesh.engine.compile_ahead import Job, compile_shapes  # noqa: E402
from specmesh.engine.families import spec_from_config  # noqa: E402
from specmesh.engine.step_programs import StepShape  # noqa: E402

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 128,
    "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 2048,
}  # fmt: skip
SHAPES = [
    StepShape(1, 2, 0, 2, 1, 64), StepShape(2, 1, 16, 1, 1, 64), StepShape(16, 1, 0, 4, 1, 2048),
]  # fmt: skip


class NeverLaunched:
    """A compiled kernel: whoever launches it fails."""

    num_ready = 0

    @property
    def run(self) -> None:
        """What launches it has been built."""
        NeverLaunched.num_ready += 1


def main(claims: Path) -> None:
    """Compile a draft's steps as a worker does, and print what was this one's."""
    compiled: list[str] = []

    def do_compile(self: Any, key: str, *_rest: Any) -> NeverLaunched:
        compiled.append(f"{self.fn.__qualname__} {key}")
        kernel = NeverLaunched()
        self.device_caches[0][0][key] = kernel
        return kernel

    JITFunction._do_compile = do_compile
    job = Job(
        spec=spec_from_config(CONFIG),
        dtype=torch.bfloat16,
        device="cpu",
        page_size=64,
        invariant=True,
        make_sampler=partial(DraftSampler, 512, 64),
        shapes=SHAPES,
    )
    assert compile_shapes(job, claims) == len(SHAPES)
    assert JITFunction._do_compile is do_compile
    assert NeverLaunched.num_ready == len(compiled)
    sys.stdout.write("".join(f"{each}\n" for each in compiled))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
