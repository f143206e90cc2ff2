"""The cache: one compile for many callers, bounded bytes, nothing kept of failures."""

from __future__ import annotations

import threading
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

import pytest

from aengine.errors import EngineClosedError, EngineOverloadedError, GrammarError
from aengine.grammar import GrammarCache, GrammarCompiler, GrammarLimits
from aengine.grammar.translate import GrammarSource
from aengine.request import StructuredOutput

from .support import byte_info

if TYPE_CHECKING:
    from collections.abc import Iterator

_WAIT = 60


class FakeGrammar:
    """A compiled grammar of a size one chooses."""

    weakenings = ()

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def matcher(self) -> Any:
        raise AssertionError("nothing is matched here")


class FakeCompiler:
    """Counts compiles and holds them at a gate; a spec `bad...` fails, `heavy...` is heavy."""

    def __init__(self, **limits: Any) -> None:
        self.limits = GrammarLimits(**limits)
        self.compiled: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Semaphore(0)
        self.closed = False

    def prepare(self, structured: StructuredOutput) -> GrammarSource:
        spec = structured.spec
        return GrammarSource(text=spec, spec=spec, heavy=spec.startswith("heavy"))

    def compile_source(self, source: GrammarSource) -> FakeGrammar:
        self.compiled.append(source.spec)
        self.started.release()
        assert self.gate.wait(_WAIT)
        if source.spec.startswith("bad"):
            raise GrammarError("refused", param="structured") from ValueError("why")
        return FakeGrammar(100)

    def close(self) -> None:
        self.closed = True
        self.gate.set()


def _spec(text: str) -> StructuredOutput:
    return StructuredOutput.regex(text)


@pytest.fixture
def compiler() -> FakeCompiler:
    return FakeCompiler(cache_bytes=350, max_queued=4)


@pytest.fixture
def cache(compiler: FakeCompiler) -> Iterator[GrammarCache]:
    cache = GrammarCache(compiler)  # type: ignore[arg-type]
    yield cache
    cache.close()


def test_many_callers_one_compile(compiler: FakeCompiler, cache: GrammarCache) -> None:
    compiler.gate.clear()
    futures = [cache.submit(_spec("a")) for _ in range(20)]
    assert cache.get_nowait(_spec("a")) is None
    compiler.gate.set()
    grammars = {future.result(_WAIT) for future in futures}
    assert len(grammars) == 1
    assert compiler.compiled == ["a"]
    assert cache.get_nowait(_spec("a")) in grammars
    assert cache.submit(_spec("a")).result(0) in grammars
    assert cache.statistics().entries == 1


def test_the_kind_is_part_of_the_key(compiler: FakeCompiler, cache: GrammarCache) -> None:
    one = cache.submit(StructuredOutput(kind="regex", spec="a")).result(_WAIT)
    other = cache.submit(StructuredOutput(kind="grammar", spec="a")).result(_WAIT)
    assert one is not other


def test_least_recently_used_goes_first(compiler: FakeCompiler, cache: GrammarCache) -> None:
    for text in ("a", "b", "c"):
        cache.submit(_spec(text)).result(_WAIT)
    assert cache.get_nowait(_spec("a")) is not None
    cache.submit(_spec("d")).result(_WAIT)
    kept = [text for text in "abcd" if cache.get_nowait(_spec(text)) is not None]
    assert kept == ["a", "c", "d"]
    stats = cache.statistics()
    assert (stats.nbytes, stats.evictions, stats.entries) == (300, 1, 3)


def test_a_grammar_larger_than_the_cache_is_used_and_not_kept() -> None:
    compiler = FakeCompiler(cache_bytes=50)
    cache = GrammarCache(compiler)  # type: ignore[arg-type]
    assert cache.submit(_spec("a")).result(_WAIT).nbytes == 100
    assert cache.statistics().entries == 0
    cache.close()


def test_errors_are_not_kept_and_each_caller_gets_its_own(
    compiler: FakeCompiler, cache: GrammarCache
) -> None:
    compiler.gate.clear()
    futures = [cache.submit(_spec("bad")) for _ in range(3)]
    compiler.gate.set()
    errors = [future.exception(_WAIT) for future in futures]
    assert all(isinstance(error, GrammarError) for error in errors)
    assert len({id(error) for error in errors}) == 3
    assert all(isinstance(error.__cause__, ValueError) for error in errors if error)
    assert isinstance(cache.submit(_spec("bad")).exception(_WAIT), GrammarError)
    assert compiler.compiled == ["bad", "bad"]


def test_cancelling_one_caller_leaves_the_others(
    compiler: FakeCompiler, cache: GrammarCache
) -> None:
    compiler.gate.clear()
    leaves, stays = cache.submit(_spec("a")), cache.submit(_spec("a"))
    assert leaves.cancel()
    compiler.gate.set()
    assert stays.result(_WAIT).nbytes == 100
    assert leaves.cancelled()


def test_a_compile_nobody_waits_for_never_starts(
    compiler: FakeCompiler, cache: GrammarCache
) -> None:
    compiler.gate.clear()
    running = [cache.submit(_spec(text)) for text in ("a", "b")]  # as many as there are threads
    for _ in running:
        assert compiler.started.acquire(timeout=_WAIT)
    assert cache.submit(_spec("c")).cancel()
    last = cache.submit(_spec("d"))
    compiler.gate.set()
    wait([*running, last], _WAIT)
    assert sorted(compiler.compiled) == ["a", "b", "d"]
    assert cache.statistics().pending == 0


def test_a_heavy_compile_holds_up_no_light_one(compiler: FakeCompiler, cache: GrammarCache) -> None:
    compiler.gate.clear()
    heavy = [cache.submit(_spec(f"heavy{i}")) for i in range(2)]
    for _ in heavy:
        assert compiler.started.acquire(timeout=_WAIT)
    light = cache.submit(_spec("light"))
    assert compiler.started.acquire(timeout=_WAIT)
    assert "light" in compiler.compiled
    assert not any(future.done() for future in heavy)
    compiler.gate.set()
    wait([*heavy, light], _WAIT)


def test_too_many_waiting_is_overload(compiler: FakeCompiler, cache: GrammarCache) -> None:
    compiler.gate.clear()
    futures = [cache.submit(_spec(text)) for text in "abcd"]
    with pytest.raises(EngineOverloadedError) as raised:
        cache.submit(_spec("e"))
    assert raised.value.retry_after > 0
    assert cache.submit(_spec("a")) is not None  # joining is always possible
    compiler.gate.set()
    wait(futures, _WAIT)


def test_discard_and_clear(compiler: FakeCompiler, cache: GrammarCache) -> None:
    for text in "ab":
        cache.submit(_spec(text)).result(_WAIT)
    cache.discard(_spec("a"))
    cache.discard(_spec("never seen"))
    assert cache.get_nowait(_spec("a")) is None
    assert cache.statistics().nbytes == 100
    cache.clear()
    assert cache.get_nowait(_spec("b")) is None
    assert cache.statistics().nbytes == 0


def test_close_answers_all_and_ends_the_threads(compiler: FakeCompiler) -> None:
    before = set(threading.enumerate())
    cache = GrammarCache(compiler)  # type: ignore[arg-type]
    compiler.gate.clear()
    futures = [cache.submit(_spec(text)) for text in ("a", "heavy", "c", "d")]
    cache.close()
    cache.close()
    for future in futures:
        assert isinstance(future.exception(0), EngineClosedError)
    assert compiler.closed
    assert not set(threading.enumerate()) - before
    with pytest.raises(EngineClosedError):
        cache.submit(_spec("e"))


def test_real_compiles_from_many_threads() -> None:
    compiler = GrammarCompiler(byte_info())
    cache = GrammarCache(compiler)
    specs = [StructuredOutput.regex(f"[0-9]{{{i % 5 + 1}}}") for i in range(40)]
    futures = []
    lock = threading.Lock()

    def ask(part: list[StructuredOutput]) -> None:
        for spec in part:
            future = cache.submit(spec)
            with lock:
                futures.append((spec, future))

    threads = [threading.Thread(target=ask, args=(specs[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    by_spec: dict[str, set[int]] = {}
    for spec, future in futures:
        by_spec.setdefault(spec.spec, set()).add(id(future.result(_WAIT)))
    assert len(by_spec) == 5
    assert all(len(ids) == 1 for ids in by_spec.values())
    cache.close()
