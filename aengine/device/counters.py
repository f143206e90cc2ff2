"""What a device counts: records, completions, waits and how they ended, and wake-up latencies."""

from __future__ import annotations

import threading
from typing import Any

NUM_BUCKETS = 24
COUNTED = (
    "launches",
    "records",
    "completed",
    "failed",
    "waits",
    "waits_done_at_once",
    "waits_spun",
    "waits_abandoned",
    "loop_wakeups",
    "waiters_woken",
    "device_busy_ns",
)


class Counters:
    """Counters of one device. Any thread may add.

    One lock, held for an integer addition and nothing else: no allocation that could start the
    garbage collector (and so a finaliser that counts) happens inside it.
    """

    __slots__ = ("_buckets", "_counts", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(COUNTED, 0)
        self._buckets = [0] * NUM_BUCKETS

    def add(self, name: str, amount: int = 1) -> None:
        """Count `amount` more of `name` (one of `COUNTED`)."""
        with self._lock:
            self._counts[name] += amount

    def observe_wakeup(self, nanoseconds: int) -> None:
        """One wake-up: from the completion until its coroutine ran again."""
        bucket = min((max(nanoseconds, 0) // 1000).bit_length(), NUM_BUCKETS - 1)
        with self._lock:
            self._buckets[bucket] += 1

    def snapshot(self) -> dict[str, Any]:
        """All counts; `wakeup_latency_us` maps a bucket's upper bound in µs to its count."""
        with self._lock:
            counts: dict[str, Any] = dict(self._counts)
            buckets = list(self._buckets)
        counts["pending"] = counts["records"] - counts["completed"] - counts["failed"]
        counts["wakeup_latency_us"] = {1 << i: n for i, n in enumerate(buckets) if n}
        waits = counts["waits"]
        counts["share_spun"] = counts["waits_spun"] / waits if waits else 0.0
        return counts
