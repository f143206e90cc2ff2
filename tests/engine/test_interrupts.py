"""Ctrl-C at any moment: the program ends within three seconds, and says nothing but that.

Each case is a program of its own, which interrupts itself and then has three seconds: a watchdog
ends it with an error and all tracebacks if it takes longer.
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
import asyncio, faulthandler, os, signal, sys, threading, time
import uvloop
from aengine import BlockingEngine, Engine, SamplingParams, StructuredOutput
from aengine.testing import Faults, scripted_engine

LONG = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)

def interrupt(after=0.0):
    def later():
        time.sleep(after)
        faulthandler.dump_traceback_later(3, exit=True)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=later, daemon=True).start()

def slow(**options):
    options = {"loop": MODE, "faults": Faults(delay=0.02)} | options
    return scripted_engine(**options)

def compiles_take_long():
    from aengine.grammar.compiler import GrammarCompiler
    GrammarCompiler.compile_source = lambda self, source: time.sleep(30)
"""
CATCH = """
try:
    RUN(main())
except KeyboardInterrupt:
    print("interrupted")
else:
    print("went on")
"""


def interrupted(code: str, stdout: str = "interrupted\n") -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, stdout, ""), done.stderr


PHASES = {
    "decoding": """
        async with slow() as engine:
            async for _ in engine.generate([1], LONG):
                interrupt()
    """,
    "awaiting": """
        async with slow() as engine:
            interrupt(0.1)
            await engine.generate([1], LONG)
    """,
    "many": """
        async with slow() as engine:
            interrupt(0.1)
            await engine.generate_many([[n] for n in range(50)], LONG)
    """,
    "compiling": """
        compiles_take_long()
        async with slow() as engine:
            interrupt(0.3)
            choice = StructuredOutput.choice(["yes", "no"])
            await engine.generate([1], SamplingParams(structured=choice))
    """,
    "closing": """
        engine = await slow(faults=Faults(delay=0.2)).start()
        stream = engine.generate([1], LONG)
        await anext(stream)
        interrupt(0.1)
        await engine.aclose()
    """,
    "leaving": """
        async with slow(faults=Faults(delay=0.2)) as engine:
            stream = engine.generate([1], LONG)
            await anext(stream)
            interrupt(0.1)
    """,
    "a silent device": """
        async with scripted_engine(loop=MODE, faults=Faults(drop_at=1)) as engine:
            interrupt(0.1)
            await engine.generate([1], LONG)
    """,
    "paused": """
        async with slow() as engine:
            stream = engine.generate([1], LONG)
            interrupt(0.2)
            await engine.pause("keep")
            await stream
    """,
}


@pytest.mark.parametrize(
    ("mode", "runner"),
    [
        ("own", "asyncio"),
        ("caller", "uvloop"),
        pytest.param("own", "uvloop", marks=pytest.mark.slow),
        pytest.param("caller", "asyncio", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("phase", PHASES)
def test_in_every_phase(phase: str, mode: str, runner: str) -> None:
    body = textwrap.indent(textwrap.dedent(PHASES[phase]), "    ")
    head = f"MODE, RUN = {mode!r}, {runner}.run\nasync def main():\n"
    interrupted(f"{head}{body}{CATCH}")


REAL = {
    "loading": """
        interrupt(WHEN)
        async with Engine(MODEL, loop=MODE, dtype=DTYPE) as engine:
            await asyncio.sleep(0)
    """,
    "prefilling": """
        async with Engine(MODEL, loop=MODE, dtype=DTYPE) as engine:
            interrupt(0.3)
            await engine.generate("once upon a time " * 400, LONG)
    """,
    "decoding": """
        async with Engine(MODEL, loop=MODE, dtype=DTYPE) as engine:
            interrupt(0.3)
            await engine.generate("once upon a time", LONG)
    """,
}
CASES = [
    ("loading", 0.05, "own", "asyncio", "auto"),
    ("prefilling", 0, "caller", "uvloop", "auto"),
]
SLOW_CASES = [
    case
    for phase, whens in (
        ("loading", (0.2, 0.5, 0.8, 1.2)),
        ("prefilling", (0,)),
        ("decoding", (0,)),
    )
    for when in whens
    for mode in ("own", "caller")
    for runner in ("asyncio", "uvloop")
    for dtype in ("auto", "float32")
    if (case := (phase, when, mode, runner, dtype)) not in CASES
]


@pytest.mark.parametrize(
    ("phase", "when", "mode", "runner", "dtype"),
    CASES + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES],
)
def test_with_a_real_model(
    phase: str, when: float, mode: str, runner: str, dtype: str, smollm2_gguf: Path
) -> None:
    body = textwrap.indent(textwrap.dedent(REAL[phase]), "    ")
    head = (
        f"MODE, RUN = {mode!r}, {runner}.run\n"
        f"MODEL, DTYPE, WHEN = {str(smollm2_gguf)!r}, {dtype!r}, {when}\n"
        "async def main():\n"
    )
    interrupted(f"{head}{body}{CATCH}")


BLOCKING = {
    "generating": "engine.generate([1], LONG)",
    "streaming": "list(engine.stream([1], LONG))",
    "many": "engine.generate_many([[n] for n in range(50)], LONG)",
    "pausing": "engine.pause('wait')",
}


@pytest.mark.parametrize(
    "call", [pytest.param(c, marks=() if c == "pausing" else pytest.mark.slow) for c in BLOCKING]
)
def test_a_blocking_call(call: str) -> None:
    interrupted(
        f"""
MODE = "own"
with BlockingEngine.around(slow()) as engine:
    chunks = engine.stream([1], LONG)
    next(chunks)
    interrupt(0.1)
    try:
        {BLOCKING[call]}
    except KeyboardInterrupt:
        print("interrupted")
    faulthandler.cancel_dump_traceback_later()
    chunks.close()
    while engine.stats().running:  # what was interrupted was dropped
        pass
    engine.resume()
    print(engine.generate([1], SamplingParams(max_tokens=2)).finish_reason)
""",
        stdout="interrupted\nlength\n",
    )


def test_a_blocking_start(smollm2_gguf: Path) -> None:
    interrupted(
        f"""
interrupt(0.5)
try:
    with BlockingEngine({str(smollm2_gguf)!r}) as engine:
        pass
except KeyboardInterrupt:
    print("interrupted")
"""
    )


def test_a_blocking_close() -> None:
    interrupted(
        """
MODE = "own"
try:
    with BlockingEngine.around(slow(faults=Faults(delay=0.2))) as engine:
        stream = engine.stream([1], LONG)
        next(stream)
        interrupt(0.1)
except KeyboardInterrupt:
    print("interrupted")
"""
    )
