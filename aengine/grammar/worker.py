"""A process that compiles grammars and says whether that worked: it can be killed, a thread cannot.

Run as `python -m aengine.grammar.worker MEMORY_BYTES SECONDS`. It reads lines of JSON: first the
vocabulary, then one grammar a line; it answers each with a line of JSON. It imports no torch. An
alarm ends it if a compile runs past its time while nobody is left to kill it.
"""

from __future__ import annotations

import contextlib
import json
import math
import resource
import signal
import sys

import llguidance

from aengine.grammar.vocabulary import decode_vocabulary, wrap


def _answer(error: str | None) -> None:
    sys.stdout.write(json.dumps({"error": error}) + "\n")
    sys.stdout.flush()


def main(memory: int, seconds: float) -> None:
    """Serve until standard input ends."""
    with contextlib.suppress(ValueError, OSError):  # a harder limit is in force already
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    info = decode_vocabulary(sys.stdin.readline())
    tokenizer = llguidance.LLTokenizer(wrap(info), eos_token=list(info.eos_ids), slices=[])
    _answer(None)
    for line in sys.stdin:
        signal.alarm(math.ceil(seconds) + 1)
        matcher = llguidance.LLMatcher(
            tokenizer,
            json.loads(line),
            log_level=0,
            limits=llguidance.LLParserLimits(verbose_errors=False),
        )
        signal.alarm(0)
        _answer(matcher.get_error() if matcher.is_error() else None)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
