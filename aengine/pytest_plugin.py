"""The pytest plugin: fake engines, a shared real one, and a check for what a test leaves open.

Loaded by pytest through its `pytest11` entry point, so it must be light: whatever needs the engine
is imported when a test first asks for it. It needs no plugin for async tests and works with each of
them; the fixtures themselves are synchronous.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from aengine.testing import EngineFactory, FakeEngine
    from aengine.testing.fake import WatchedEngine
    from aengine.testing.leaks import LeakCheck

FIXTURES = ("aengine_fake", "aengine_factory")
MODES = ("fixtures", "all", "off")
WATCHED: pytest.StashKey[WeakSet[WatchedEngine]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """See pytest."""
    parser.addini(
        "aengine_leak_check",
        "which tests fail if they leave engine things open: fixtures (those that use aengine_fake "
        "or aengine_factory), all, or off",
        default="fixtures",
    )


def pytest_configure(config: pytest.Config) -> None:
    """See pytest."""
    if (mode := config.getini("aengine_leak_check")) not in MODES:
        raise pytest.UsageError(f"aengine_leak_check={mode!r} must be one of {', '.join(MODES)}")
    config.stash[WATCHED] = WeakSet()
    config.addinivalue_line(
        "markers",
        "aengine_leak_check(ignore=()): which kinds of leaks this test may leave: 'streams', "
        "'tasks', 'engines', 'threads'",
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Follow the test with a leak check: in its own loop, if it is a coroutine."""
    check = _leak_check(item)
    if check is None or not isinstance(item, pytest.Function):
        return (yield)
    from aengine.testing.leaks import LeakFound

    test = item.obj
    asynchronous = inspect.iscoroutinefunction(test)
    if asynchronous:
        item.obj = check.around(test)
    try:
        result = yield
        if not asynchronous:
            check.settle()
    except LeakFound as leak:
        raise pytest.fail.Exception(str(leak), pytrace=False) from None
    finally:
        item.obj = test
    return result


def _leak_check(item: pytest.Item) -> LeakCheck | None:
    mode = item.config.getini("aengine_leak_check")
    fixtures = getattr(item, "fixturenames", ())
    if mode == "off" or (mode == "fixtures" and not set(FIXTURES) & set(fixtures)):
        return None
    from aengine.testing.leaks import LeakCheck

    ignored = [
        kind
        for mark in item.iter_markers("aengine_leak_check")
        for kind in mark.kwargs.get("ignore", ())
    ]
    return LeakCheck(item.config.stash[WATCHED], ignored)


@pytest.fixture
def aengine_fake(pytestconfig: pytest.Config) -> Iterator[Callable[..., FakeEngine]]:
    """Makes fake engines: `aengine_fake("the answer")`. Arguments as of `fake_engine`.

    Each is to be closed by the test or fixture that made it; one that is not fails the test.
    """
    from aengine.testing import fake_engine

    made: list[FakeEngine] = []

    def make(*args: Any, **options: Any) -> FakeEngine:
        engine = fake_engine(*args, **options)
        pytestconfig.stash[WATCHED].add(engine)
        made.append(engine)
        return engine

    yield make
    _fail_for_open(made)


@pytest.fixture(scope="session")
def aengine_factory(pytestconfig: pytest.Config) -> Iterator[EngineFactory]:
    """Gives running engines of real models, each loaded once a session: `await factory("...")`."""
    from aengine.testing import EngineFactory

    factory = EngineFactory(pytestconfig.stash[WATCHED].add)
    yield factory
    _fail_for_open(factory.close())


def _fail_for_open(engines: list[Any]) -> None:
    """Close what is open, and say so."""
    left = [engine for engine in engines if engine.open]
    names = [repr(engine) for engine in left]
    for engine in left:
        engine.terminate()
    if names:
        pytest.fail(f"engines that were not closed: {', '.join(names)}", pytrace=False)
