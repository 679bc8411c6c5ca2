"""Compile a launch for sm_90 without a GPU, and count what matters in the machine code.

A launch function runs on meta tensors with its kernel replaced by a recorder; the recorded
arguments become a signature exactly as the launcher would specialise them (1 is a constant, numbers
and pointers divisible by 16 are marked), and Triton's bundled ptxas, nvdisasm and cuobjdump do the
rest. A disassembler takes .3 s of processor time to start, so one reads the code of all launches.
Needs a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

SM_90 = GPUTarget("cuda", 90, 32)
_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
}
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Launch:
    """One recorded launch: positional arguments and keyword arguments of the kernel."""

    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class Report:
    """Counts from the machine code of one kernel."""

    wgmma: int
    mma: int
    async_copies: int  # cp.async and bulk tensor copies
    slow_conversions: int  # between floats, one value an instruction
    stack_bytes: int
    spills_in_loops: int  # local-memory accesses in innermost loops around tensor-core products
    spills_in_any_loop: int  # the same in every innermost loop
    registers: int
    shared_bytes: int


class _Recorder:
    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def record(*args: Any, **options: Any) -> None:
            self.launches.append(Launch(self.kernel, args, options))

        return record


@contextlib.contextmanager
def recorded(module: Any, *names: str) -> Iterator[list[Launch]]:
    """Replace the named kernels of a module by recorders; yields the list they fill."""
    launches: list[Launch] = []
    kernels = {name: getattr(module, name) for name in names}
    for name, kernel in kernels.items():
        setattr(module, name, _Recorder(kernel, launches))
    try:
        yield launches
    finally:
        for name, kernel in kernels.items():
            setattr(module, name, kernel)


def _specialise(value: Any, specialised: bool) -> tuple[str, bool]:
    """(type, divisible by 16) of a run-time argument."""
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype], True
    if isinstance(value, TensorDescriptor):
        shape = ", ".join(str(size) for size in value.block_shape)
        return f"tensordesc<{_TYPES[value.base.dtype]}[{shape}]>", False
    if isinstance(value, GluonDescriptor):
        kind = f"{_TYPES[value.base.dtype]}{list(value.block_shape)},{value.layout!r}"
        return f"tensordesc<{kind}>", False
    if isinstance(value, float):
        return "fp32", False
    return ("i32" if -(2**31) <= value < 2**31 else "i64"), specialised and value % 16 == 0


@dataclass(frozen=True)
class _Compiled:
    """What the compiler made of a launch. code: its instructions alone."""

    code: bytes
    registers: int
    stack_bytes: int
    shared_bytes: int


def compile_launches(launches: Iterable[Launch]) -> list[Report]:
    """Compile recorded launches for sm_90 and read registers, stack and instructions."""
    compiled = [_compile(launch) for launch in launches]
    listed = _disassemble([own.code for own in compiled])
    return [_read(own, lines) for own, lines in zip(compiled, listed, strict=True)]


def _compile(launch: Launch) -> _Compiled:
    parameters = launch.kernel.params
    names = [parameter.name for parameter in parameters]
    values = dict(zip(names, launch.args, strict=False))
    values |= {name: value for name, value in launch.options.items() if name in names}
    options = {name: value for name, value in launch.options.items() if name not in names}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(parameters):
        value, specialised = values[parameter.name], not parameter.do_not_specialize
        is_one = isinstance(value, int) and value == 1 and specialised
        if parameter.is_constexpr or value is None or is_one:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        signature[parameter.name], divisible = _specialise(value, specialised)
        if divisible:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source_type = GluonASTSource if launch.kernel.is_gluon() else ASTSource
    source = source_type(launch.kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=SM_90, options=options)
    cubin = compiled.asm["cubin"]
    usage = next(line for line in _run("cuobjdump", cubin, "-res-usage") if " REG:" in line)
    fields = dict(part.split(":", 1) for part in usage.split() if part.count(":") == 1)
    return _Compiled(
        _code_in(cubin), int(fields["REG"]), int(fields["STACK"]), compiled.metadata.shared
    )


def _run(tool: str, content: bytes, *options: str) -> list[str]:
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        return subprocess.run(
            [str(_TOOLS / tool), *options, file.name], capture_output=True, text=True, check=True
        ).stdout.splitlines()


def _code_in(cubin: bytes) -> bytes:
    """The instructions of an ELF file: its sections named .text and more."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names_at = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    names = sections[names_at][4]
    code = [
        cubin[offset : offset + length]
        for name, _, _, _, offset, length in sections
        if cubin.startswith(b".text.", names + name)
    ]
    assert len(code) == 1  # every device function is inlined: addresses are those of one kernel
    return code[0]


def _disassemble(codes: list[bytes]) -> list[list[str]]:
    """Lines of each kernel; addresses and what jumps name count through all of them."""
    lines = iter(_run("nvdisasm", b"".join(codes), "--binary", "SM90a")[1:])
    listed, end = [], 0
    for code in codes:
        end += len(code)
        own = list(itertools.islice(lines, len(code) // _INSTRUCTION_BYTES))
        last = _INSTRUCTION.match(own[-1])
        assert last is not None
        assert int(last[1], 16) == end - _INSTRUCTION_BYTES
        listed.append(own)
    return listed


def _read(own: _Compiled, lines: list[str]) -> Report:
    code = "\n".join(lines)
    instructions = [
        (int(match[1], 16), match[2], match[3], match[4])
        for match in map(_INSTRUCTION.match, lines)
        if match
    ]
    return Report(
        wgmma=code.count("HGMMA"),
        mma=code.count("HMMA"),
        async_copies=code.count("LDGSTS") + code.count("UTMALDG"),
        slow_conversions=code.count("F2F."),
        stack_bytes=own.stack_bytes,
        spills_in_loops=_spills_in_loops(instructions, around=("HGMMA", "HMMA")),
        spills_in_any_loop=_spills_in_loops(instructions, around=("",)),
        registers=own.registers,
        shared_bytes=own.shared_bytes,
    )


_INSTRUCTION_BYTES = 16
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\d\s+)?([A-Z0-9.]+)([^;]*)")


def _spills_in_loops(
    instructions: list[tuple[int, str | None, str, str]], around: tuple[str, ...]
) -> int:
    """Local loads and stores inside innermost loops that hold instructions with such beginnings.

    A loop is a predicated backward branch; waits on barriers jump back without a predicate.
    """
    wanted = [at for at, _, name, _ in instructions if name.startswith(around)]
    loops = []
    for at, predicate, name, operands in instructions:
        target = re.search(r"0x([0-9a-f]+)", operands)
        if name == "BRA" and predicate and target and int(target[1], 16) < at:
            first = int(target[1], 16)
            if any(first <= place <= at for place in wanted):
                loops.append((first, at))
    innermost = [
        own
        for own in loops
        if not any(o != own and own[0] <= o[0] and o[1] <= own[1] for o in loops)
    ]
    return sum(
        name.startswith(("LDL", "STL")) and any(first <= at <= last for first, last in innermost)
        for at, _, name, _ in instructions
    )
