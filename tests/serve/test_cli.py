"""The command line as a user meets it: one clear line for every error, no traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from aengine.serve.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Here = Callable[..., subprocess.CompletedProcess[str]]


def run(*arguments: str | bytes, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from aengine.serve.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Here:
    """Runs the command in this process: for what ends before a model is loaded."""

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["aengine", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        said = capfd.readouterr()
        return subprocess.CompletedProcess(arguments, int(end.value.code or 0), said.out, said.err)

    return call


def test_help_imports_no_torch() -> None:
    code = (
        "import sys\nfrom aengine.serve.cli import main\nsys.argv = ['aengine', '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout


def test_version() -> None:
    from aengine import __version__

    assert run("version").stdout.strip() == __version__


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", ""], "empty"),
        (["generate", "hi", "--model", "nope"], "unknown model 'nope'"),
        (["generate", "hi", "--max-tokens", "0"], "max_tokens=0"),
        (["generate", "hi", "--max-tokens", "-3"], "max_tokens=-3"),
        (["generate", "hi", "--temperature", "nan"], "temperature"),
        (["generate", "hi", "--device", "tpu"], "device='tpu'"),
        (["generate", "hi", "--dtype", "int3"], "dtype='int3'"),
        (["pull", "nope"], "no bundled model 'nope'"),
        (["generate", b"bad \xff bytes"], "not valid UTF-8"),
        (["generate"], "Missing argument 'prompt'"),
        (["generate", "hi", "--max-tokens", "many"], "'--max-tokens'"),
        (["generate", "hi", "--seed", "1.5"], "'--seed'"),
        (["generate", "hi", "--maxtokens", "3"], "--max-tokens"),
        (["generate", "hi", "--model", ""], "model=''"),
        (["generate", "hi", "there"], "there"),
        (["chat", "--model", "nope"], "unknown model 'nope'"),
        (["chat", "--max-tokens", "0"], "max_tokens=0"),
        (["chat", "--temperature", "-1"], "temperature=-1"),
        (["bench", "--requests", "0"], "'--requests'"),
        (["bench", "--output-tokens", "-1"], "'--output-tokens'"),
        (["bench", "--model", "nope"], "unknown model 'nope'"),
        (["polish"], "No such command 'polish'"),
    ],
)
def test_bad_input_is_one_line_and_an_exit_code(
    here: Here, arguments: list[str | bytes], said: str
) -> None:
    done = here(*map(os.fsdecode, arguments))
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert done.stderr.startswith("aengine: ")
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def test_bad_bytes_and_bad_values_in_a_process_of_its_own() -> None:
    for argument in (b"bad \xff bytes", "--max-tokens=0"):
        done = run("generate", "hi", argument)
        assert done.returncode == 2
        assert done.stderr.startswith("aengine: ")
        assert len(done.stderr.strip().splitlines()) == 1
        assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "code", "status"),
    [
        (["generate", "hi", "--model", "nope"], "model_load_failed", 1),
        (["generate", "hi", "--device", "tpu"], "invalid_config", 2),
        (["generate", "hi", "--max-tokens", "0"], "invalid_request", 2),
        (["bench", "--requests", "0"], "invalid_usage", 2),
        (["pull", "nope"], "model_load_failed", 1),
    ],
)
def test_errors_have_a_code_for_programs(
    here: Here, arguments: list[str], code: str, status: int
) -> None:
    done = here(*arguments, "--json")
    assert done.returncode == status
    assert done.stdout == ""
    error = json.loads(done.stderr)["error"]
    assert error["code"] == code
    assert error["message"]


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "letter.gguf"
    path.write_text("Dear reader, this is not a model.")
    done = run("generate", "hi", "--model", str(path))
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "GGUF" in done.stderr


def test_generate_streams_an_answer_and_closes_with_its_speed(smollm2_gguf: Path) -> None:
    done = run("generate", "Say hello.", "--max-tokens", "8", "--model", str(smollm2_gguf))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    last = done.stderr.strip().splitlines()[-1]
    assert "TTFT" in last
    assert "tokens/s" in last


def test_generate_as_json(smollm2_gguf: Path) -> None:
    done = run(
        "generate", "Say hello.", "--max-tokens", "4", "--model", str(smollm2_gguf), "--json"
    )
    answer = json.loads(done.stdout)
    assert answer["completion_tokens"] <= 4
    assert answer["text"]
    assert answer["finish_reason"] in ("length", "stop")


def test_doctor_knows_this_machine() -> None:
    found = json.loads(run("doctor", "--json").stdout)
    assert found["python"].startswith(".".join(map(str, sys.version_info[:2])))
    assert "torch" in found


def test_pull_says_where_the_model_lies(smollm2_gguf: Path) -> None:
    found = json.loads(run("pull", "--json").stdout)
    assert found["path"] == str(smollm2_gguf)
    assert found["bytes"] == smollm2_gguf.stat().st_size
    assert run("pull").stdout == f"{smollm2_gguf}\n"


def test_bench_as_json(smollm2_gguf: Path) -> None:
    load = ["--requests", "3", "--concurrency", "2", "--prompt-tokens", "9", "--output-tokens", "5"]
    done = run("bench", "--model", str(smollm2_gguf), *load, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["prompt_tokens"], found["completion_tokens"]) == (27, 15)
    assert 0 < found["ttft_s"]["median"] <= found["ttft_s"]["max"] <= found["e2e_s"]["max"]
    assert found["seconds"] >= found["e2e_s"]["max"]


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from aengine.serve.cli import main; main()", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_ctrl_c_ends_generate(smollm2_gguf: Path) -> None:
    with start("generate", "Tell a long story.", "--model", str(smollm2_gguf)) as process:
        assert process.stdout is not None
        process.stdout.read(1)  # the answer has begun
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.strip() == ""


def test_ctrl_c_stops_the_answer_and_not_the_chat(smollm2_gguf: Path) -> None:
    arguments = ["--model", str(smollm2_gguf), "--max-tokens", "2000", "--temperature", "0"]
    with start("chat", *arguments) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("Count from one to one thousand, one number a line.\n")
        process.stdin.flush()
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        answers, errors = process.communicate("/new\nSay hello.\n", timeout=60)
    assert process.returncode == 0, errors
    assert "(stopped)" in errors
    assert "Traceback" not in errors
    assert answers.rstrip().splitlines()[-1]


def test_a_reader_that_goes_away_is_no_traceback(smollm2_gguf: Path) -> None:
    with start("generate", "Tell a long story.", "--model", str(smollm2_gguf)) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == 1
    assert errors == ""


@pytest.mark.parametrize(
    "command",
    [
        ["chat"],
        *(pytest.param(c, marks=pytest.mark.slow) for c in (["generate", "Hello"], ["bench"])),
    ],
    ids=str,
)
def test_ctrl_c_while_it_starts(command: list[str], smollm2_gguf: Path) -> None:
    with start(*command, "--model", str(smollm2_gguf)) as process:
        time.sleep(1.0)  # behind its imports, and before it is ready
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in errors
