"""From settings to a loaded model: weights, tokenizer's identity, K/V pool, limits, ModelInfo.

Owns how large the K/V pool is and what a service says about its model. Must not know sessions,
links or roles.
"""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass
from pathlib import Path

import torch

from protos.specmesh.v1 import session_pb2
from specmesh.config import EngineSettings
from specmesh.engine.block_pool import BlockPool
from specmesh.engine.decoder import (
    Decoder,
    check_fp8,
    check_placement,
    check_present,
    load_decoder,
    read_device,
)
from specmesh.engine.executor import Device
from specmesh.engine.families import ModelSpec, read_spec
from specmesh.engine.kv_cache import KVCache, page_bytes
from specmesh.engine.sessions import Limits
from specmesh.engine.weights import WeightDtype, weight_bytes
from specmesh.errors import ConfigError
from specmesh.telemetry import installed_version
from specmesh.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

# A pool of unset size: room for this many tokens a session, within this share of free memory.
AVERAGE_CONTEXT_LEN = 1024
HOST_MEMORY_SHARE = 0.25
DEVICE_MEMORY_SHARE = 0.85

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, and what the service says about it."""

    device: Device
    limits: Limits
    info: session_pb2.ModelInfo


def load_model(settings: EngineSettings) -> LoadedModel:
    """Load weights and allocate K/V. Blocks for seconds. Raises ConfigError."""
    folder = settings.model
    dtype_name = dtype_of(settings)
    dtype = DTYPES[dtype_name]
    device, fused = device_of(settings), is_fused(settings)
    check_present(device, field="engine.device")
    check_placement(device, dtype)
    if settings.weight_dtype == "fp8":
        check_fp8(device, dtype, fused=fused, invariant=settings.invariant)
    tokenizer = load_tokenizer(folder)
    needed = weight_bytes(read_spec(folder, tokenizer.vocab_size), dtype, kept_dtype(settings))
    free = _available_bytes(settings.device)
    if needed > free:
        raise ConfigError(
            f"the weights take {needed / 1e9:.1f} GB in {_types(settings)}, {settings.device} has "
            f"{free / 1e9:.1f} GB free",
            field="engine.model",
        )
    decoder = load_decoder(
        folder,
        dtype=dtype,
        device=settings.device,
        weight_dtype=settings.weight_dtype,
        fused=fused,
        invariant=settings.invariant,
    )
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading took for a while is free for pages
    spec = decoder.spec
    context_len = settings.max_context_len or spec.max_context_len
    if context_len > spec.max_context_len:
        raise ConfigError(
            f"{context_len} exceeds the model's {spec.max_context_len}",
            field="engine.max_context_len",
        )
    num_pages = settings.num_pages or _num_pages(settings, spec, dtype, context_len)
    kv_bytes = num_pages * page_bytes(spec, settings.page_size, dtype.itemsize)
    if kv_bytes > (free := _available_bytes(settings.device)):
        raise ConfigError(
            f"{num_pages} pages take {kv_bytes / 1e9:.1f} GB, {settings.device} has "
            f"{free / 1e9:.1f} GB free beside the weights",
            field="engine.num_pages",
        )
    cache = KVCache(
        spec, num_pages, page_size=settings.page_size, dtype=dtype, device=settings.device
    )
    logger.info(
        "memory planned",
        extra={
            "weight_bytes": needed,
            "kv_bytes": kv_bytes,
            "pages": num_pages,
            "free_bytes": _available_bytes(settings.device),
        },
    )
    limits = Limits(
        vocab_size=spec.vocab_size,
        vocab_hash=tokenizer.vocab_hash,
        max_context_len=context_len,
        max_sessions=settings.max_sessions,
        total_pages=num_pages,
        page_size=settings.page_size,
    )
    info = _describe(settings, decoder, tokenizer.vocab_hash, limits)
    return LoadedModel(
        Device(decoder, cache, BlockPool(num_pages, settings.page_size)), limits, info
    )


def _describe(
    settings: EngineSettings, decoder: Decoder, vocab_hash: int, limits: Limits
) -> session_pb2.ModelInfo:
    """What the service says about its model."""
    spec, folder = decoder.spec, settings.model
    return session_pb2.ModelInfo(
        model=folder.resolve().name,
        fingerprint=decoder.fingerprint,
        architecture=spec.architecture,
        vocab_size=spec.vocab_size,
        vocab_hash=vocab_hash,
        bos_token_id=spec.bos_id,
        eos_token_ids=spec.eos_ids,
        max_context_len=limits.max_context_len,
        max_sessions=settings.max_sessions,
        page_size=settings.page_size,
        total_pages=limits.total_pages,
        max_num_draft_tokens=settings.max_num_draft_tokens,
        device=_device_name(settings.device),
        device_id=_device_id(settings.device),
        dtype=_types(settings),
        # Without the contract, matrix products of other batch shapes may round otherwise.
        numeric_contract="invariant" if decoder.is_invariant else "batch-dependent",
        tokenizer=str(folder),
        version=installed_version(),
    )


def device_of(settings: EngineSettings) -> torch.device:
    """The device that weights and K/V lie on. Raises ConfigError."""
    return read_device(settings.device, field="engine.device")


def dtype_of(settings: EngineSettings) -> str:
    """The name of the type that weights and K/V have."""
    if settings.dtype != "auto":
        return settings.dtype
    return "bfloat16" if device_of(settings).type == "cuda" else "float32"


def kept_dtype(settings: EngineSettings) -> WeightDtype:
    """What matrices of layers take in memory: the reference layers hold fp8 ones as floats."""
    return settings.weight_dtype if is_fused(settings) else "model"


def _types(settings: EngineSettings) -> str:
    """What weights and K/V are, for people."""
    name = dtype_of(settings)
    return name if settings.weight_dtype == "model" else f"{name}, {settings.weight_dtype} weights"


def is_fused(settings: EngineSettings) -> bool:
    """Whether Triton kernels run. Raises ConfigError where they cannot."""
    on_gpu = device_of(settings).type == "cuda"
    if settings.kernels == "triton" and not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            "triton kernels need a GPU, or TRITON_INTERPRET=1 to be interpreted",
            field="engine.kernels",
        )
    return settings.kernels == "triton" or (settings.kernels == "auto" and on_gpu)


def _num_pages(
    settings: EngineSettings, spec: ModelSpec, dtype: torch.dtype, context_len: int
) -> int:
    """Pages for max_sessions average contexts within memory, one whole context at least."""
    per_session = -(-min(AVERAGE_CONTEXT_LEN, context_len) // settings.page_size)
    wanted = max(settings.max_sessions * per_session, -(-context_len // settings.page_size))
    each = page_bytes(spec, settings.page_size, dtype.itemsize)
    affordable = _free_bytes(settings.device) // each
    if affordable < per_session:
        raise ConfigError(
            f"memory holds {affordable} pages of {each} bytes, one context needs {per_session}",
            field="engine.num_pages",
        )
    return min(wanted, affordable)


def _free_bytes(device: str) -> int:
    """What the K/V pool may take of the free memory."""
    on_gpu = torch.device(device).type == "cuda"
    share = DEVICE_MEMORY_SHARE if on_gpu else HOST_MEMORY_SHARE
    return int(_available_bytes(device) * share)


def _available_bytes(device: str) -> int:
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdecimal():
        free = min(free, int(text))
    return free


def _device_name(device: str) -> str:
    if torch.device(device).type == "cuda":
        return f"{device} {torch.cuda.get_device_name(device)}"
    return device


def _device_id(device: str) -> str:
    """Equal for two services exactly when they share the device."""
    if torch.device(device).type == "cuda":
        return f"cuda:{torch.cuda.get_device_properties(device).uuid}"
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = boot.read_text().strip() if boot.is_file() else socket.gethostname()
    return f"{device}:{host}"
