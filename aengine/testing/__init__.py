"""For tests of programs that embed the engine: a scripted engine, its model and tokenizer."""

from __future__ import annotations

from aengine.testing.engine import scripted_engine
from aengine.testing.scripted import Faults, Script, ScriptedLauncher, arithmetic_script
from aengine.testing.tokens import EOS, ByteTokenizer

__all__ = [
    "EOS",
    "ByteTokenizer",
    "Faults",
    "Script",
    "ScriptedLauncher",
    "arithmetic_script",
    "scripted_engine",
]
