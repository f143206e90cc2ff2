"""The C extension by itself: queue, timer, waits and launch lists."""

from __future__ import annotations

import ctypes
import os
import select
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aengine.device.native import load_native

if TYPE_CHECKING:
    from pathlib import Path

native: Any = load_native()
pytestmark = pytest.mark.skipif(native is None, reason="the extension is not built")
POST = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _readable(descriptor: int, seconds: float = 0) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(int(seconds * 1000)))


@given(st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=20), max_size=10))
def test_the_queue_gives_what_was_posted_in_order(batches: list[list[int]]) -> None:
    queue = native.Queue()
    post = POST(native.post_address)
    for batch in batches:
        for index, number in enumerate(batch):
            if index % 2:
                queue.post(number)
            else:
                post(queue.ticket(number))
        assert _readable(queue.fileno()) == bool(batch)
        assert queue.drain() == batch
        assert not _readable(queue.fileno())
    queue.close()


def test_many_posts_are_one_write() -> None:
    queue = native.Queue()
    for number in range(100):
        queue.post(number)
    assert int.from_bytes(os.read(queue.fileno(), 8), "little") == 1
    assert queue.drain() == list(range(100))
    queue.ring()
    queue.ring()
    assert int.from_bytes(os.read(queue.fileno(), 8), "little") == 1


def test_posting_from_threads_without_the_gil_loses_nothing() -> None:
    queue, each = native.Queue(), 5000
    post = POST(native.post_address)  # a CFUNCTYPE call lets the GIL go

    def work(offset: int) -> None:
        for number in range(offset, offset + each):
            post(queue.ticket(number))

    threads = [threading.Thread(target=work, args=(each * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    seen: list[int] = []
    while len(seen) < 4 * each:
        assert _readable(queue.fileno(), 5), "a wake-up was lost"
        seen += queue.drain()
    for thread in threads:
        thread.join()
    assert sorted(seen) == list(range(4 * each))
    for i in range(4):
        own = [number for number in seen if i * each <= number < (i + 1) * each]
        assert own == sorted(own), "a poster's own order was lost"


def test_a_ticket_may_come_after_the_queue_is_gone() -> None:
    queue = native.Queue()
    ticket, unused = queue.ticket(1), queue.ticket(2)
    queue.discard(unused)
    queue.close()
    queue.close()
    with pytest.raises(ValueError, match="closed"):
        queue.ticket(3)
    with pytest.raises(ValueError, match="closed"):
        queue.fileno()
    del queue
    POST(native.post_address)(ticket)


def test_the_timer_fires_once_when_due() -> None:
    timer = native.Timer()
    start = time.perf_counter_ns()
    timer.arm(start + 3_000_000)
    assert not timer.drain()
    assert _readable(timer.fileno(), 5)
    assert time.perf_counter_ns() >= start + 3_000_000
    assert timer.drain()
    assert not timer.drain()
    timer.arm(1)  # long past
    assert _readable(timer.fileno(), 5)


@given(st.integers(0, 2**32 - 1), st.integers(-(2**31), 2**31 - 1))
def test_sequence_numbers_wrap(target: int, ahead: int) -> None:
    word = ctypes.c_uint32((target + ahead) % 2**32)
    address = ctypes.addressof(word)
    assert native.flag_reached(address, target) == (ahead >= 0)
    now = time.perf_counter_ns()
    seen = native.wait_flag(address, target, 0, now)
    assert (seen is not None) == (ahead >= 0)


@pytest.mark.parametrize("spin_from", [0, 10**18])
def test_waiting_lets_other_threads_run_and_sees_the_word(spin_from: int) -> None:
    word = ctypes.c_uint32(0)

    def set_it() -> None:
        word.value = 5

    timer = threading.Timer(0.01, set_it)
    timer.start()
    limit = time.perf_counter_ns() + 5_000_000_000
    seen = native.wait_flag(ctypes.addressof(word), 5, min(spin_from, limit), limit)
    assert seen is not None
    assert seen <= time.perf_counter_ns()
    timer.join()
    assert native.wait_flag(ctypes.addressof(word), 5, 0, limit, True) is not None


def test_another_word_ends_the_wait() -> None:
    own, other = ctypes.c_uint32(0), ctypes.c_uint32(7)
    far = time.perf_counter_ns() + 60_000_000_000

    def wait(*pairs: int) -> int | None:
        # Asleep in the first half, spinning in the second: the suite's timeout is the assertion.
        for spin_from in (far, 0):
            seen = native.wait_flag(ctypes.addressof(own), 5, spin_from, far, False, pairs)
        return seen

    assert wait(ctypes.addressof(other), 7) == 0
    own.value = 5
    seen = wait(ctypes.addressof(other), 7)
    assert seen is not None
    assert seen > 0, "its own word counts first"
    own.value, other.value = 0, 0
    many = (ctypes.addressof(other), 1) * 40
    assert native.wait_flag(ctypes.addressof(own), 5, 0, 0, True, many) is None
    other.value = 1
    assert wait(*many) == 0
    for bad in ((0, 1), (ctypes.addressof(other), -1), ("x", 1)):
        with pytest.raises((ValueError, OverflowError, TypeError)):
            native.wait_flag(ctypes.addressof(own), 5, 0, 0, False, bad)


def test_bad_addresses_are_refused() -> None:
    for call in (
        lambda: native.wait_flag(0, 1, 0, 0),
        lambda: native.flag_reached(0, 1),
        lambda: native.LaunchList(((0, ()),)),
    ):
        with pytest.raises(ValueError, match="null"):
            call()


CALL = ctypes.PYFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 12)


@given(
    st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=12), min_size=1, max_size=5),
    st.data(),
)
def test_a_launch_list_makes_its_calls(calls: list[list[int]], data: st.DataObject) -> None:
    made: list[tuple[int, ...]] = []
    record = CALL(lambda *args: made.append(args) or 0)
    address = ctypes.cast(record, ctypes.c_void_p).value
    names = st.tuples(st.integers(0, len(calls) - 1), st.integers(0, 11))
    slots = data.draw(st.lists(names, max_size=4, unique=True))
    prepared = native.LaunchList(tuple((address, tuple(c)) for c in calls), tuple(slots))
    for _ in range(2):
        made.clear()
        values = data.draw(st.lists(st.integers(0, 2**64 - 1), min_size=4, max_size=4))
        assert prepared.run(*values[: len(slots)]) == 0
        expected = [[*c, *[0] * (12 - len(c))] for c in calls]
        for (call, arg), value in zip(slots, values, strict=False):
            expected[call][arg] = value
        assert made == [tuple(c) for c in expected]
        assert prepared.failed_call is None


def test_a_launch_list_stops_at_the_first_failure() -> None:
    made: list[int] = []
    record = CALL(lambda code, *_: made.append(code) or code)
    address = ctypes.cast(record, ctypes.c_void_p).value
    prepared = native.LaunchList(((address, (0,)), (address, (700,)), (address, (0,))))
    assert prepared.run() == 700
    assert prepared.failed_call == 1
    assert made == [0, 700]
    with pytest.raises(TypeError, match="0 slots"):
        prepared.run(1)
    with pytest.raises(IndexError):
        native.LaunchList(((address, ()),), ((1, 0),))
    with pytest.raises(ValueError, match="at most 12"):
        native.LaunchList(((address, tuple(range(13))),))
    with pytest.raises(TypeError):
        native.LaunchList([(address, ())])


def test_symbols_come_from_loaded_libraries_only(fake_cuda: Path) -> None:
    library = ctypes.CDLL(str(fake_cuda))
    address = native.symbol(str(fake_cuda), "cuInit")
    assert address == ctypes.cast(library.cuInit, ctypes.c_void_p).value
    with pytest.raises(LookupError, match="no symbol"):
        native.symbol(str(fake_cuda), "cuNothing")
    with pytest.raises(LookupError, match="not loaded"):
        native.symbol("libsurely-not-loaded.so.1", "cuInit")
