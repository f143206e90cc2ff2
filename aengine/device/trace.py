"""A trace of launches, completions and wake-ups, for chrome://tracing or ui.perfetto.dev.

Format: the "Trace Event Format" of Chrome's trace viewer, complete events ("ph": "X"), times in µs.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Mapping


class Trace:
    """Spans in memory until `write`. Any thread may add; adding costs about a microsecond.

    Args:
        limit: most spans kept; later ones are counted in `dropped`.
    """

    def __init__(self, limit: int = 1_000_000) -> None:
        self._limit = limit
        self._spans: list[tuple[str, int, int, str, Mapping[str, Any] | None]] = []
        self.dropped = 0

    def span(
        self,
        name: str,
        start_ns: int,
        end_ns: int,
        *,
        track: str = "host",
        args: Mapping[str, Any] | None = None,
    ) -> None:
        """Add one span, in `time.perf_counter_ns()` times; `track` is the row it is drawn in."""
        if len(self._spans) >= self._limit:
            self.dropped += 1
            return
        self._spans.append((name, start_ns, end_ns, track, args))

    def measure(self, name: str, *, track: str = "host", **args: Any) -> _Measured:
        """`with trace.measure("name"):` adds the body's time as a span."""
        return _Measured(self, name, track, args)

    def events(self) -> list[dict[str, Any]]:
        """The spans as Chrome trace events, a metadata event a track first."""
        spans = list(self._spans)
        pid = os.getpid()
        tracks = {track: i for i, track in enumerate(dict.fromkeys(s[3] for s in spans), start=1)}
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track}}
            for track, tid in tracks.items()
        ]
        for name, start, end, track, args in spans:
            event: dict[str, Any] = {
                "ph": "X",
                "name": name,
                "cat": track,
                "pid": pid,
                "tid": tracks[track],
                "ts": start / 1000,
                "dur": max(end - start, 0) / 1000,
            }
            if args:
                event["args"] = dict(args)
            events.append(event)
        return events

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as JSON; the file replaces an older one at once, never half.

        Raises:
            OSError: the file cannot be written.
        """
        target = Path(path)
        partial = target.with_name(f"{target.name}.{os.getpid()}.{threading.get_ident()}.part")
        partial.write_text(json.dumps({"traceEvents": self.events(), "displayTimeUnit": "ms"}))
        partial.replace(target)


class _Measured:
    """The body of a `with`, as a span."""

    __slots__ = ("_args", "_name", "_start", "_trace", "_track")

    def __init__(self, trace: Trace, name: str, track: str, args: Mapping[str, Any]) -> None:
        self._trace, self._name, self._track, self._args = trace, name, track, args
        self._start = 0

    def __enter__(self) -> Self:
        self._start = time.perf_counter_ns()
        return self

    def __exit__(self, *_: object) -> None:
        end = time.perf_counter_ns()
        self._trace.span(self._name, self._start, end, track=self._track, args=self._args)
