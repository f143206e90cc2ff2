"""For tests of programs that embed the engine: fake engines, their model and tokenizer."""

from __future__ import annotations

from aengine.testing.engine import scripted_engine
from aengine.testing.fake import EngineFactory, FakeEngine, fake_engine
from aengine.testing.replies import Replies
from aengine.testing.scripted import Faults, Script, ScriptedLauncher, arithmetic_script
from aengine.testing.tokens import EOS, ByteTokenizer

__all__ = [
    "EOS",
    "ByteTokenizer",
    "EngineFactory",
    "FakeEngine",
    "Faults",
    "Replies",
    "Script",
    "ScriptedLauncher",
    "arithmetic_script",
    "fake_engine",
    "scripted_engine",
]
