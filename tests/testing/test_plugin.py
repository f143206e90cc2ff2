"""The pytest plugin as a test author meets it: whole small suites, run by pytest itself."""
# ruff: noqa: F811 (a fixture is imported, and named again where it is used)

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from tests.suites import plugin_arguments, suite  # noqa: F401

if TYPE_CHECKING:
    from tests.suites import Suite

ROOT = Path(__file__).resolve().parents[2]

HEAD = """
import asyncio
import pytest
import threading
from aengine import BlockingEngine, EngineDeadError, FinishReason, GenerationError, SamplingParams
from aengine.testing import Faults

def params(n=50): return SamplingParams(max_tokens=n)
"""


def test_it_is_declared_as_an_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"aengine": "aengine.pytest_plugin"}


def test_loading_it_imports_nothing_heavy() -> None:
    """Every pytest run of every project that has aengine installed pays for this import."""
    code = (
        "import sys, pytest\nbefore = set(sys.modules)\nimport aengine.pytest_plugin\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["aengine", "aengine.pytest_plugin"]


def test_a_suite_that_does_not_use_it_imports_no_engine(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import sys\n"
        "def test_nothing():\n"
        "    assert 'aengine.pytest_plugin' in sys.modules\n"
        "    heavy = {'torch', 'numpy', 'aengine.engine', 'aengine.testing'}\n"
        "    assert not heavy & sys.modules.keys()\n"
    )
    command = [sys.executable, "-m", "pytest", str(tmp_path), *plugin_arguments()]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stdout


ASYNCIO = """
@pytest.mark.asyncio(loop_scope={scope!r})
class Test_{scope}_{loop}:
    async def test_answer(self, aengine_fake):
        async with aengine_fake("The answer.", loop={loop!r}) as engine:
            result = await engine.generate("What?")
        assert result.text == "The answer."
        assert result.finish_reason is FinishReason.STOP

    async def test_left_early(self, aengine_fake):
        async with aengine_fake("x" * 4000, loop={loop!r}) as engine:
            async for chunk in engine.generate("What?"):
                break
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await engine.generate("again")
"""


def test_with_pytest_asyncio_in_every_loop_scope(suite: Suite) -> None:
    scopes = ["function", "class", "module", "package", "session"]
    tests = "".join(
        ASYNCIO.format(scope=scope, loop=loop) for scope in scopes for loop in ("own", "caller")
    )
    suite(HEAD + tests).check(passed=2 * 10)


WIDE_FIXTURE = """
import pytest_asyncio

@pytest_asyncio.fixture(scope={scope!r}, loop_scope={fixture_loop!r})
async def engine_{name}(aengine_factory):
    async with aengine_factory.fake({{"one": "1", "two": "2"}}) as engine:
        yield engine

@pytest.mark.asyncio(loop_scope={test_loop!r})
@pytest.mark.parametrize("prompt, answer", [("one", "1"), ("two", "2")])
async def test_{name}(engine_{name}, prompt, answer):
    assert (await engine_{name}.generate(prompt)).text == answer
"""


def test_an_engine_in_a_fixture_serves_tests_in_other_loops(suite: Suite) -> None:
    """A fixture's loop lives at least as long as the fixture, as pytest-asyncio demands."""
    tests = [
        WIDE_FIXTURE.format(
            scope=scope, fixture_loop=fixture, test_loop=test, name=f"{scope}_{fixture}_{test}"
        )
        for scope, fixture in [
            ("function", "function"),
            ("function", "session"),
            ("module", "module"),
            ("module", "session"),
            ("session", "session"),
        ]
        for test in ("function", "module", "session")
    ]
    suite(HEAD + "".join(tests)).check(passed=2 * 15)


def test_with_the_plugin_of_anyio(suite: Suite) -> None:
    source = """
@pytest.fixture(params=[("asyncio", {"use_uvloop": False}), ("asyncio", {"use_uvloop": True})])
def anyio_backend(request): return request.param

@pytest.fixture
async def engine(aengine_fake, anyio_backend):
    async with aengine_fake("From a fixture.") as engine:
        yield engine

@pytest.mark.anyio
@pytest.mark.parametrize("loop", ["own", "caller"])
async def test_in_the_test(aengine_fake, loop):
    async with aengine_fake("Here.", loop=loop) as engine:
        assert (await engine.generate("?")).text == "Here."

@pytest.mark.anyio
async def test_in_a_fixture(engine):
    assert (await engine.generate("?")).text == "From a fixture."

@pytest.mark.anyio
async def test_leak(engine):
    engine.kept = engine.generate("?" , SamplingParams(max_tokens=4000, ignore_eos=True))
"""
    result = suite(HEAD + source)
    result.check(passed=6, failed=2)
    assert "stream <Stream req-1 running> was neither finished nor dropped" in result.said


def test_without_an_async_plugin(suite: Suite) -> None:
    source = """
def test_blocking(aengine_fake):
    with BlockingEngine.around(aengine_fake({"sky": "Blue.", "sea": "Wet."})) as engine:
        assert engine.generate("the sea").text == "Wet."
        assert engine.generate([{"role": "user", "content": "the sky"}]).text == "Blue."

def test_run(aengine_fake):
    async def main():
        async with aengine_fake(lambda prompt: prompt.upper()) as engine:
            return await engine.generate("loud")
    assert asyncio.run(main()).text == "LOUD"
"""
    result = suite(HEAD + source, "-p", "no:asyncio", "-p", "no:anyio")
    result.check(passed=2)


FAULTS = """
@pytest.mark.asyncio
@pytest.mark.parametrize("loop", ["own", "caller"])
class TestFaults:
    async def test_raise_at_step(self, aengine_fake, loop):
        faults = Faults(raise_at={3: ValueError("boom")})
        async with aengine_fake("long enough", faults=faults, loop=loop) as engine:
            with pytest.raises(GenerationError, match="boom"):
                await engine.generate("?")
            assert (await engine.generate("?")).text == "long enough"

    async def test_lose_the_device(self, aengine_fake, loop):
        async with aengine_fake("long enough", faults=Faults(lose_at=2), loop=loop) as engine:
            with pytest.raises(EngineDeadError, match="step 2"):
                await engine.generate("?")
            assert engine.health().state == "dead"

    async def test_drop_a_completion(self, aengine_fake, loop):
        async with aengine_fake("long enough", faults=Faults(drop_at=4), loop=loop) as engine:
            seen = []
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    async for chunk in engine.generate("?"):
                        seen.append(chunk.text)
            assert "".join(seen) == "long"

    async def test_delay(self, aengine_fake, loop):
        async with aengine_fake("x" * 500, faults=Faults(delay=0.005), loop=loop) as engine:
            result = await engine.generate("?", deadline=0.05)
            assert result.finish_reason is FinishReason.DEADLINE
            assert 0 < len(result.text) < 500

    async def test_a_prompt_that_nobody_scripted(self, aengine_fake, loop):
        async with aengine_fake({"sky": "Blue."}, loop=loop) as engine:
            with pytest.raises(GenerationError, match="no scripted reply.*'sky'"):
                await engine.generate("the sea")
            assert (await engine.generate("the sky")).text == "Blue."
"""


def test_faults(suite: Suite) -> None:
    suite(HEAD + FAULTS).check(passed=10)


LEAKS = """
KEPT = []

@pytest.fixture
def engine(aengine_fake):
    engine = aengine_fake("x" * 4000, faults=Faults(delay=0.001))
    asyncio.run(engine.start())
    yield engine
    asyncio.run(engine.aclose(drain=False))

@pytest.mark.asyncio
async def test_stream(engine):
    KEPT.append(engine.generate("?", request_id="kept"))
    await anext(KEPT[0])

@pytest.mark.asyncio
async def test_task(aengine_fake):
    async with aengine_fake() as engine:
        KEPT.append(asyncio.create_task(asyncio.Event().wait(), name="listener"))

@pytest.mark.asyncio
async def test_engine(aengine_fake):
    KEPT.append(await aengine_fake(loop="own").start())

@pytest.mark.asyncio
async def test_engine_in_this_loop(aengine_fake):
    KEPT.append(await aengine_fake(loop="caller").start())

def test_blocking_engine(aengine_fake):
    KEPT.append(BlockingEngine.around(aengine_fake()))
    KEPT[-1].__enter__()

def test_thread(aengine_fake):
    threading.Thread(target=threading.Event().wait, args=(2,), name="reader", daemon=True).start()
"""


def test_what_leaks_is_named_and_fails_the_test(suite: Suite) -> None:
    result = suite(HEAD + LEAKS, "-p", "no:unraisableexception", "-p", "no:threadexception")
    out = result.said
    for test, said in {
        "test_stream": "stream <Stream kept running> was neither finished nor dropped",
        "test_task": "task 'listener' (Event.wait) still runs",
        "test_engine": "engine <Engine 'scripted' running> was not closed",
        "test_thread": "thread 'reader' still runs",
    }.items():
        assert f"::{test} - " in out
        assert said in out
    result.check(failed=6)


def test_a_leak_can_be_allowed_or_the_check_be_off(suite: Suite) -> None:
    task = """
@pytest.mark.asyncio
{mark}
async def test_task(aengine_fake):
    async with aengine_fake():
        test_task.kept = asyncio.create_task(asyncio.Event().wait())
"""
    allowed = task.format(mark='@pytest.mark.aengine_leak_check(ignore=["tasks"])')
    suite(HEAD + allowed).check(passed=1)
    suite(HEAD + task.format(mark=""), ini="aengine_leak_check = off\n").check(passed=1)
    suite(HEAD + task.format(mark="")).check(failed=1)


def test_all_tests_can_be_checked(suite: Suite) -> None:
    source = """
@pytest.mark.asyncio
async def test_task():
    test_task.kept = asyncio.create_task(asyncio.Event().wait(), name="stray")
"""
    suite(HEAD + source).check(passed=1)
    result = suite(HEAD + source, ini="aengine_leak_check = all\n")
    result.check(failed=1)
    assert "task 'stray'" in result.said


def test_an_unknown_setting_is_refused(suite: Suite) -> None:
    result = suite("", ini="aengine_leak_check = sometimes\n")
    assert "aengine_leak_check='sometimes' must be one of" in result.said


def test_a_failing_test_is_not_said_to_leak(suite: Suite) -> None:
    source = """
@pytest.mark.asyncio
async def test_it(aengine_fake):
    asyncio.create_task(asyncio.Event().wait())
    assert 1 == 2
"""
    result = suite(HEAD + source)
    result.check(failed=1)
    assert "leaked" not in result.said


def test_an_engine_left_open_by_a_fixture_is_an_error(suite: Suite) -> None:
    source = """
@pytest.fixture
def engine(aengine_fake):
    engine = aengine_fake()
    asyncio.run(engine.start())
    return engine

def test_it(engine):
    assert engine.health().alive
"""
    result = suite(HEAD + source)
    result.check(passed=1, errors=1)
    assert "engines that were not closed: <Engine 'scripted' running>" in result.said


def test_the_factory_loads_a_model_once(suite: Suite, smollm2_gguf: Path) -> None:
    source = f"""
MODEL = {str(smollm2_gguf)!r}
SEEN = set()

@pytest.mark.asyncio
@pytest.mark.parametrize("turn", [1, 2, 3])
async def test_it(aengine_factory, turn):
    engine = await aengine_factory(MODEL, max_model_len=256)
    SEEN.add(id(engine))
    result = await engine.generate("The sky is", SamplingParams(max_tokens=4, temperature=0))
    assert len(result.token_ids) == 4
    assert len(SEEN) == 1

@pytest.mark.asyncio
async def test_closed_by_a_test(aengine_factory):
    engine = await aengine_factory(MODEL, max_model_len=256)
    await engine.aclose()
    assert (await aengine_factory(MODEL, max_model_len=256)).health().alive

@pytest.mark.asyncio
async def test_only_its_own_loop(aengine_factory):
    with pytest.raises(ValueError, match="own loop"):
        await aengine_factory(MODEL, loop="caller")
"""
    suite(HEAD + source).check(passed=5)
