"""The executor whose threads do not keep the interpreter from ending."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from concurrent.futures import CancelledError, wait

import pytest

from aengine.threads import DaemonPool


def test_as_many_at_once_as_there_may_be_threads() -> None:
    for _ in range(50):
        pool, barrier = DaemonPool(3, "many"), threading.Barrier(3)
        futures = [pool.submit(barrier.wait, 10) for _ in range(3)]
        wait(futures, timeout=20)
        assert sorted(future.result(0) for future in futures) == [0, 1, 2]
        pool.shutdown()


def test_one_thread_works_in_order_and_is_kept() -> None:
    pool, seen = DaemonPool(1, "one"), []
    for number in range(20):
        pool.submit(lambda n=number: seen.append((n, threading.get_ident())))  # type: ignore[misc]
    pool.shutdown()
    assert [n for n, _ in seen] == list(range(20))
    assert len({ident for _, ident in seen}) == 1


def test_results_and_errors_and_nothing_kept() -> None:
    class Thing:
        pass

    pool, thing = DaemonPool(2, "keep"), Thing()
    ref = weakref.ref(thing)
    assert pool.submit(lambda: 5).result(10) == 5
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 // 0).result(10)
    pool.submit(id, thing).result(10)
    del thing
    pool.submit(id, None).result(10)
    gc.collect()
    assert ref() is None
    pool.shutdown()
    assert not any(t.name.startswith("keep") for t in threading.enumerate())


def test_nothing_is_kept_when_the_result_is_there() -> None:
    class Thing:
        def call(self) -> None:
            pass

    pool, kept = DaemonPool(1, "prompt"), 0
    for _ in range(300):
        thing = Thing()
        ref = weakref.ref(thing)
        future = pool.submit(thing.call)
        del thing
        future.result(10)
        kept += ref() is not None
    pool.shutdown()
    assert kept == 0


def test_a_shut_pool_refuses_and_drops_what_has_not_begun() -> None:
    pool, gate = DaemonPool(1, "shut"), threading.Event()
    begun = threading.Event()
    running = pool.submit(lambda: (begun.set(), gate.wait(10)))
    assert begun.wait(10)
    queued = pool.submit(id, 1)
    pool.shutdown(wait=False, cancel_futures=True)
    with pytest.raises(RuntimeError):
        pool.submit(id, 1)
    with pytest.raises(CancelledError):
        queued.result(10)
    gate.set()
    running.result(10)
    pool.shutdown()
    assert not any(t.name.startswith("shut") for t in threading.enumerate())


def test_a_dropped_pool_ends_its_threads() -> None:
    pool = DaemonPool(2, "dropped")
    pool.submit(id, 1).result(10)
    threads = [t for t in threading.enumerate() if t.name.startswith("dropped")]
    del pool
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_a_job_without_an_end_does_not_hold_up_the_exit() -> None:
    code = (
        "import threading\n"
        "from aengine.threads import DaemonPool\n"
        "pool = DaemonPool(1, 'stuck')\n"
        "pool.submit(threading.Event().wait)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=30, check=False)
    assert done.returncode == 0
