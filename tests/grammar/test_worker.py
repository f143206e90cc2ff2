"""Compiles that take too long: stopped for real, in a process that is gone afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import psutil
import pytest

from aengine.errors import EngineClosedError, GrammarError, GrammarTimeoutError
from aengine.grammar import GrammarCache, GrammarCompiler, GrammarLimits
from aengine.grammar.vocabulary import decode_vocabulary, encode_vocabulary
from aengine.request import StructuredOutput

from .support import byte_info, takes

if TYPE_CHECKING:
    from collections.abc import Iterator

HOSTILE = StructuredOutput.json(
    {
        "type": "object",
        "properties": {f"p{i}": {"type": "string"} for i in range(2000)},
        "minProperties": 1,
        "additionalProperties": False,
    }
)
"""57 KB of schema that the library would compile for minutes."""

HEAVY = StructuredOutput.json({"properties": {f"p{i}": {"type": "null"} for i in range(100)}})
"""Large enough to be tried in a worker, and harmless."""


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(byte_info(), GrammarLimits(compile_seconds=2.0))
    yield compiler
    compiler.close()
    assert compiler.workers.process_ids == ()


def test_a_heavy_grammar_compiles_and_keeps_its_worker(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(HEAVY)
    assert takes(grammar.matcher(), '{"p1":null}', compiler.tokenizer)
    kept = compiler.workers.process_ids
    assert len(kept) == 1
    compiler.compile(HEAVY)
    assert compiler.workers.process_ids == kept


def test_a_hostile_schema_times_out_and_its_process_is_gone(compiler: GrammarCompiler) -> None:
    """V#54003, S#39125: bounded in time, and stopped."""
    compiler.compile(HEAVY)
    (pid,) = compiler.workers.process_ids
    with pytest.raises(GrammarTimeoutError, match="2 s"):
        compiler.compile(HOSTILE)
    assert not psutil.pid_exists(pid)
    assert compiler.workers.process_ids == ()
    compiler.compile(HEAVY)


def test_others_compile_meanwhile_and_the_timeout_is_not_kept(compiler: GrammarCompiler) -> None:
    cache = GrammarCache(compiler)
    hostile = cache.submit(HOSTILE)
    light = [cache.submit(StructuredOutput.regex(f"[0-9]{{{i}}}")) for i in range(1, 6)]
    for future in light:
        future.result(60)
    assert not hostile.done()
    assert isinstance(hostile.exception(60), GrammarTimeoutError)
    assert cache.statistics().pending == 0
    assert not cache.submit(HOSTILE).done()
    cache.close()


def test_close_stops_a_compile_at_once() -> None:
    compiler = GrammarCompiler(byte_info(), GrammarLimits(compile_seconds=600))
    cache = GrammarCache(compiler)
    cache.submit(HEAVY).result(60)
    (pid,) = compiler.workers.process_ids
    hostile = cache.submit(HOSTILE)
    psutil.Process(pid)  # it is alive
    cache.close()
    assert isinstance(hostile.exception(0), EngineClosedError)
    assert not psutil.pid_exists(pid)
    with pytest.raises(EngineClosedError):
        compiler.compile(HEAVY)


def test_a_worker_that_dies_fails_one_request(compiler: GrammarCompiler) -> None:
    compiler.compile(HEAVY)
    (pid,) = compiler.workers.process_ids
    os.kill(pid, signal.SIGKILL)
    psutil.Process(pid).status()
    with pytest.raises(GrammarError, match="ended early"):
        compiler.compile(HEAVY)
    compiler.compile(HEAVY)


def test_errors_of_the_library_come_back_from_the_worker(compiler: GrammarCompiler) -> None:
    bad = StructuredOutput.json(
        {"properties": {f"p{i}": {"type": "null"} for i in range(100)}, "type": "any"}
    )
    with pytest.raises(GrammarError, match="any") as raised:
        compiler.compile(bad)
    assert raised.value.param == "structured"
    assert raised.value.value == bad.spec


def test_no_interpreter_is_a_clear_error(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(GrammarError, match="worker process"):
        compiler.compile(HEAVY)


def test_workers_run_side_by_side(compiler: GrammarCompiler) -> None:
    results: list[BaseException | None] = []

    def run(spec: StructuredOutput) -> None:
        try:
            compiler.compile(spec)
        except GrammarTimeoutError as error:
            results.append(error)
        else:
            results.append(None)

    threads = [threading.Thread(target=run, args=(spec,)) for spec in (HOSTILE, HEAVY, HEAVY)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(result is None for result in results) == [False, True, True]
    assert len(compiler.workers.process_ids) == 1


def test_the_worker_ends_with_its_input() -> None:
    command = [sys.executable, "-W", "error", "-m", "aengine.grammar.worker", str(1 << 31), "5"]
    requests = [json.dumps("start: /a+/"), json.dumps("start: nope")]
    data = encode_vocabulary(byte_info()) + "\n".join(requests).encode() + b"\n"
    done = subprocess.run(command, input=data, capture_output=True, timeout=60, check=True)
    answers = [json.loads(line)["error"] for line in done.stdout.splitlines()]
    assert answers[:2] == [None, None]
    assert "nope" in answers[2]


def test_an_orphaned_worker_ends_itself() -> None:
    """An alarm ends a compile that nobody is left to stop."""
    compiler = GrammarCompiler(byte_info())
    source = compiler.prepare(HOSTILE)
    command = [sys.executable, "-m", "aengine.grammar.worker", str(1 << 31), "0.1"]
    data = encode_vocabulary(byte_info()) + json.dumps(source.text).encode() + b"\n"
    done = subprocess.run(command, input=data, capture_output=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGALRM


def test_the_worker_imports_no_torch() -> None:
    code = "import sys, aengine.grammar.worker; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_vocabulary_survives_the_pipe() -> None:
    info = byte_info()
    copy = decode_vocabulary(encode_vocabulary(info).decode())
    assert list(copy.tokens) == list(info.tokens)
    assert copy.eos_ids == info.eos_ids
    assert copy.special_ids == info.special_ids
