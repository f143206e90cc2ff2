"""A program that closes nothing ends all the same: within three seconds, with nothing on stderr.

Each case is a program of its own. Its last line starts a watchdog that ends it with an error and a
traceback if it is not gone by then.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

PRELUDE = """
import asyncio, atexit, faulthandler, os, signal, sys, threading, time
from aengine import BlockingEngine, Engine, SamplingParams, StructuredOutput
from aengine.testing import Faults, scripted_engine

LONG = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)

def slow(**options):
    return scripted_engine(faults=Faults(delay=0.001), **options)

def last_line():
    faulthandler.dump_traceback_later(3, exit=True)
"""


def end(code: str, *flags: str, returncode: int = 0, stdout: str = "ready\n") -> str:
    """Run a program to its end; its stderr."""
    program = PRELUDE + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, *flags, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (returncode, stdout), done.stderr
    return done.stderr


# How an engine is left behind. Each leaves `engine` open and prints "ready".
ENDS = {
    "blocking": """
        engine = BlockingEngine.around(slow())
        engine.__enter__()
        engine.generate([1], SamplingParams(max_tokens=3))
        print("ready")
        last_line()
    """,
    "blocking-in-a-stream": """
        engine = BlockingEngine.around(slow(loop=MODE))
        engine.__enter__()
        stream = engine.stream([1], LONG)
        next(stream)
        print("ready")
        last_line()
    """,
    "blocking-dropped": """
        engine = BlockingEngine.around(slow())
        engine.__enter__()
        stream = engine.stream([1], LONG)
        next(stream)
        del engine, stream
        print("ready")
        last_line()
    """,
    "after-asyncio-run": """
        async def main():
            global engine, stream
            engine = await slow(loop=MODE).start()
            stream = engine.generate([1], LONG)
            await anext(stream)
            print("ready")
        asyncio.run(main())
        last_line()
    """,
    "dropped-in-asyncio-run": """
        async def main():
            engine = await slow(loop=MODE).start()
            await anext(engine.generate([1], LONG))
            print("ready")
            last_line()
        asyncio.run(main())
    """,
    "loop-closed-under-it": """
        loop = asyncio.new_event_loop()
        engine = slow(loop=MODE)
        loop.run_until_complete(engine.start())
        loop.run_until_complete(one())
        loop.close()
        print("ready")
        last_line()
    """,
    "in-a-daemon-thread": """
        ready = threading.Event()
        async def main():
            async with slow(loop=MODE) as engine:
                await anext(engine.generate([1], LONG))
                ready.set()
                await asyncio.Event().wait()
        threading.Thread(target=lambda: asyncio.run(main()), daemon=True).start()
        ready.wait()
        print("ready")
        last_line()
    """,
    "dropped-completion": """
        async def main():
            global engine, stream
            engine = await scripted_engine(loop=MODE, faults=Faults(drop_at=2)).start()
            stream = engine.generate([1], LONG)
            await anext(stream)
            print("ready")
        asyncio.run(main())
        last_line()
    """,
    "grammar-compile": """
        from aengine.grammar.compiler import GrammarCompiler
        GrammarCompiler.compile_source = lambda self, source: time.sleep(30)
        async def main():
            global engine, task
            engine = await slow(loop=MODE).start()
            choice = StructuredOutput.choice(["yes", "no"])
            params = SamplingParams(max_tokens=5, structured=choice)
            task = engine.generate([1], params)
            await asyncio.sleep(0.3)
            print("ready")
        asyncio.run(main())
        last_line()
    """,
}  # fmt: skip
ONE = """
async def one():
    global stream
    stream = engine.generate([1], LONG)
    await anext(stream)
    return stream
"""


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("mode", ["own", pytest.param("caller", marks=pytest.mark.slow)])
def test_an_engine_that_nobody_closed(name: str, mode: str) -> None:
    code = textwrap.dedent(ENDS[name])
    assert end(f"MODE = {mode!r}\n{ONE}\n{code}") == ""


def test_an_unclosed_engine_is_a_resource_warning_and_nothing_worse() -> None:
    code = f"MODE = 'own'\n{textwrap.dedent(ENDS['dropped-in-asyncio-run'])}"
    said = end(code, "-X", "dev")
    assert "ResourceWarning: unclosed <Engine 'scripted' running>" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(("leave", "status"), [("sys.exit(3)", 3), ("1 // 0", 1)])
def test_leaving_by_an_exception(leave: str, status: int) -> None:
    said = end(
        f"""
        engine = BlockingEngine.around(slow())
        engine.__enter__()
        stream = engine.stream([1], LONG)
        next(stream)
        print("ready", flush=True)
        last_line()
        {leave}
        """,
        returncode=status,
    )
    assert said.count("Traceback") == (status == 1)


REAL = {
    "blocking": """
        engine = BlockingEngine(MODEL, dtype=DTYPE)
        engine.__enter__()
        stream = engine.stream("once upon a time", LONG)
        next(stream)
        print("ready")
        last_line()
    """,
    "prefill": """
        async def main():
            global engine, stream
            engine = await Engine(MODEL, dtype=DTYPE).start()
            stream = engine.generate("once upon a time " * 300, LONG)
            await asyncio.sleep(0.2)
            print("ready")
        asyncio.run(main())
        last_line()
    """,
}


@pytest.mark.parametrize("dtype", ["auto", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", REAL)
def test_a_real_model_that_nobody_closed(name: str, dtype: str, smollm2_gguf: Path) -> None:
    code = textwrap.dedent(REAL[name])
    assert end(f"MODEL, DTYPE = {str(smollm2_gguf)!r}, {dtype!r}\n{code}") == ""


CALLS = """
CALLS = {
    "generate": lambda: engine.generate([1]),
    "start": lambda: asyncio.run(engine.start()),
    "stats": lambda: asyncio.run(engine.stats()),
    "pause": lambda: asyncio.run(engine.pause()),
    "reset": lambda: asyncio.run(engine.reset_prefix_cache()),
    "many": lambda: asyncio.run(engine.generate_many([[1]])),
    "blocking": lambda: blocking.generate([1]),
    "blocking stats": lambda: blocking.stats(),
}
"""


def test_a_forked_child_is_told_and_neither_hangs_nor_hurts_its_parent() -> None:
    said = end(
        CALLS
        + textwrap.dedent(
            """
            engine = slow()
            asyncio.run(engine.start())
            blocking = BlockingEngine.around(slow())
            blocking.__enter__()
            child = os.fork()
            if not child:
                faulthandler.dump_traceback_later(3, exit=True)
                from aengine.errors import EngineClosedError
                for name, call in CALLS.items():
                    try:
                        call()
                    except EngineClosedError as error:
                        assert "fork" in str(error), name
                    else:
                        raise AssertionError(name)
                engine.abort("x")
                assert not engine.health().alive
                asyncio.run(engine.aclose())
                blocking.close()
                sys.exit(7)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 7, status
            async def still():
                return (await engine.generate([1], SamplingParams(max_tokens=3))).usage
            assert asyncio.run(still()).completion_tokens == 3
            assert blocking.generate([1], SamplingParams(max_tokens=3)).finish_reason == "length"
            print("ready")
            last_line()
            """
        ),
        # From Python 3.12 on `os.fork` itself warns whoever calls it beside any thread.
        "-W",
        "ignore:This process:DeprecationWarning",
    )
    assert said == ""
