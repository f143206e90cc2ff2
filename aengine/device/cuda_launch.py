"""Launch lists: a steady step as a handful of driver calls with the GIL held (law 11)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from aengine.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from aengine.device.completions import HostCompletion
    from aengine.device.cuda_stream import CudaStream
    from aengine.device.driver import Event


class PreparedLaunch:
    """A list of driver calls that ends in a record, made in one go with the GIL held (law 11).

    Made by `CudaStream.prepare`. One list must not run while it runs.
    """

    def __init__(
        self,
        stream: CudaStream,
        calls: Sequence[tuple[int, tuple[int, ...]]],
        slots: Sequence[tuple[int, int]],
        key: Hashable,
        holds: object = None,
    ) -> None:
        driver = stream.device.driver
        native = stream.device.reactor.native
        if native is None or not stream.writes_flags:
            raise DeviceError("launch lists need the extension and stream memory operations")
        self._stream = stream
        self._holds = holds
        self._key = key
        record = (driver.address("cuEventRecord"), (0, stream.handle))
        write = (driver.address("cuStreamWriteValue32_v2"), (stream.handle, stream.word_on_device))
        count = len(calls)
        self._list = native.LaunchList(
            (*calls, write, record), (*slots, (count, 2), (count + 1, 0))
        )

    def launch(self, *holds: object, values: Sequence[int] = ()) -> HostCompletion:
        """Make the calls and record.

        Args:
            holds: kept alive until the device has passed the record.
            values: one for each of the list's slots.

        Returns:
            The record. It has failed already if a call did (what was called before that stays
            enqueued) or the device is lost.

        Raises:
            DeviceError: the device is closed.
            TypeError: not one value for each slot.
        """
        stream, start = self._stream, time.perf_counter_ns()
        stream.device.check_open()
        stream.device.reactor.counters.add("launches")
        start_event = stream.mark_start()

        def run(event: Event, sequence: int) -> None:
            self._run(values, event, sequence)

        return stream.record_after(run, self._key, (self, holds), start, start_event)

    def _run(self, values: Sequence[int], event: Event, sequence: int) -> None:
        code = self._list.run(*values, sequence, event.handle)
        if code:
            device = self._stream.device
            device.note_error(code)
            device.driver.check(code, f"call {self._list.failed_call} of a launch list")
