"""How much memory there is to take, and how much work takes: what the system or the GPU says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_CGROUP = Path("/sys/fs/cgroup")


class MemorySource(Protocol):
    """Where a model's weights, activations and KV blocks are."""

    default_fraction: float
    """Share of the memory left over that KV blocks take if nobody says otherwise."""

    def free(self) -> int:
        """Bytes that can be taken now."""
        ...

    def peak_of(self, work: Callable[[], object]) -> int | None:
        """Do some work; the bytes that it takes at most while it runs. None: not measured here.

        Raises:
            torch.OutOfMemoryError: there are not that many.
        """
        ...


class HostMemory:
    """The memory of this machine, within a container's limit."""

    default_fraction = 0.25
    """A program that embeds the engine needs its memory too."""

    def free(self) -> int:
        """See `MemorySource.free`."""
        return available_memory()

    def peak_of(self, work: Callable[[], object]) -> None:
        """Nothing counts what is allocated on a CPU: the work is not done."""


class CudaMemory:
    """The memory of one GPU, as the driver and torch's allocator (whichever is used) count it."""

    default_fraction = 0.9
    """The rest is for what other programs take and for what the allocator cannot use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> int:
        """See `MemorySource.free`. Waits for the device."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(free)

    def peak_of(self, work: Callable[[], object]) -> int:
        """See `MemorySource.peak_of`. Waits for the device; nothing of the work is kept."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        work()
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_allocated(self._device)) - int(before)


def memory_of(device: torch.device) -> MemorySource:
    """The memory that belongs to a device."""
    return CudaMemory(device) if device.type == "cuda" else HostMemory()


def available_memory() -> int:
    """Bytes of host memory that can be taken without swapping, within a container's limit."""
    free = _meminfo("MemAvailable")
    if free is None:
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        free = min(free, max(0, limit - used))
    return free


def _meminfo(key: str) -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return None
    return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
