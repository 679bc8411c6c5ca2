"""From settings to a loaded model: weights, tokenizer's identity, K/V pool, limits, ModelInfo.

Owns how large the K/V pool is and what a service says about its model. Must not know sessions,
links or roles.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import torch

from protos.specmesh.v1 import session_pb2
from specmesh.config import EngineSettings
from specmesh.engine.block_pool import BlockPool
from specmesh.engine.decoder import load_decoder
from specmesh.engine.executor import Device
from specmesh.engine.families import ModelSpec
from specmesh.engine.kv_cache import KVCache, page_bytes
from specmesh.engine.sessions import Limits
from specmesh.errors import ConfigError
from specmesh.telemetry import installed_version
from specmesh.tokenizer import load_tokenizer

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
    dtype = DTYPES[settings.dtype]
    tokenizer = load_tokenizer(folder)
    decoder = load_decoder(folder, dtype=dtype, device=settings.device)
    spec = decoder.spec
    context_len = settings.max_context_len or spec.max_context_len
    if context_len > spec.max_context_len:
        raise ConfigError(
            f"{context_len} exceeds the model's {spec.max_context_len}",
            field="engine.max_context_len",
        )
    num_pages = settings.num_pages or _num_pages(settings, spec, dtype, context_len)
    cache = KVCache(
        spec, num_pages, page_size=settings.page_size, dtype=dtype, device=settings.device
    )
    limits = Limits(
        vocab_size=spec.vocab_size,
        vocab_hash=tokenizer.vocab_hash,
        max_context_len=context_len,
        max_sessions=settings.max_sessions,
        total_pages=num_pages,
        page_size=settings.page_size,
    )
    info = session_pb2.ModelInfo(
        model=folder.resolve().name,
        fingerprint=decoder.fingerprint,
        architecture=spec.architecture,
        vocab_size=spec.vocab_size,
        vocab_hash=tokenizer.vocab_hash,
        bos_token_id=spec.bos_id,
        eos_token_ids=spec.eos_ids,
        max_context_len=context_len,
        max_sessions=settings.max_sessions,
        page_size=settings.page_size,
        total_pages=num_pages,
        max_num_draft_tokens=settings.max_num_draft_tokens,
        device=_device_name(settings.device),
        device_id=_device_id(settings.device),
        dtype=settings.dtype,
        # Matrix products of other batch shapes may round otherwise.
        numeric_contract="batch-dependent",
        tokenizer=str(folder),
        version=installed_version(),
    )
    return LoadedModel(
        Device(decoder, cache, BlockPool(num_pages, settings.page_size)), limits, info
    )


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
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * DEVICE_MEMORY_SHARE)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdecimal():
        free = min(free, int(text))
    return int(free * HOST_MEMORY_SHARE)


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
