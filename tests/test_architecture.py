"""The house rules, checked on the source: who may wait, who may import what, how long a module is.

A new folder or top-level module fails here until it is declared in `ROOMS`.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "aengine"
EXTENSION = ROOT / "aengine_ext"
LONGEST = 400


@dataclass(frozen=True, kw_only=True)
class Room:
    """What the modules of one folder (or one top-level module) may do."""

    awaits: bool = False
    pure: bool = False
    """Neither torch nor any asyncio library, not even inside a function."""


ROOMS = {
    "__init__.py": Room(),
    "errors.py": Room(pure=True),
    "config.py": Room(pure=True),
    "request.py": Room(pure=True),
    "batch.py": Room(pure=True),
    "outputs.py": Room(pure=True),
    "checks.py": Room(pure=True),
    "threads.py": Room(pure=True),
    "pytest_plugin.py": Room(awaits=True),
    "policy": Room(pure=True),
    "device": Room(awaits=True),
    "model": Room(),
    "kernels": Room(),
    "grammar": Room(),
    "execute": Room(),
    "engine": Room(awaits=True),
    "serve": Room(awaits=True),
    "testing": Room(awaits=True),
}

IMPURE = {"torch", "asyncio", "anyio", "uvloop", "triton", "cuda"}

DISPLAYS = (ast.Dict, ast.List, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
TABLE_CALLS = {"dict", "list", "set"}
MUTABLE_CALLS = {
    "bytearray", "defaultdict", "deque", "OrderedDict", "Counter",
    "WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "Lock", "RLock", "Event", "Condition",
    "Semaphore", "BoundedSemaphore", "Queue", "SimpleQueue", "ThreadPoolExecutor", "local", "count",
    "ContextVar", "Thread", "SimpleNamespace",
}  # fmt: skip
MUTATORS = {
    "append", "add", "update", "pop", "popitem", "clear", "extend", "insert", "remove", "discard",
    "setdefault", "appendleft", "popleft",
}  # fmt: skip
CACHES = {"cache", "lru_cache"}


def _modules(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*.py") if "__pycache__" not in path.parts)


def _room(path: Path) -> Room:
    return ROOMS[path.relative_to(PACKAGE).parts[0]]


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


every_module = pytest.mark.parametrize("path", _modules(PACKAGE), ids=_name)
every_source = pytest.mark.parametrize("path", _modules(PACKAGE) + _modules(EXTENSION), ids=_name)


def test_every_folder_is_declared() -> None:
    found = {
        entry.name
        for entry in PACKAGE.iterdir()
        if (entry.is_dir() and entry.name != "__pycache__") or entry.suffix == ".py"
    }
    assert found - ROOMS.keys() == set(), "declare the new room in ROOMS"


@every_module
def test_only_some_rooms_wait(path: Path) -> None:
    if _room(path).awaits:
        return
    waits = (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)
    for node in ast.walk(_tree(path)):
        assert not isinstance(node, waits), f"{_name(path)}:{node.lineno} waits"
        if isinstance(node, ast.comprehension):
            assert not node.is_async, f"{_name(path)} has an async comprehension"


@every_module
def test_pure_rooms_import_neither_torch_nor_asyncio(path: Path) -> None:
    if _room(path).pure:
        assert {name.split(".")[0] for name in _imported(_tree(path))} & IMPURE == set()


def test_pure_rooms_load_without_torch_and_asyncio() -> None:
    """What they import in turn counts too."""
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in _modules(PACKAGE)
        if _room(path).pure
    ]
    code = f"import sys, {', '.join(names)}; print(*sorted({IMPURE!r} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


@pytest.mark.parametrize("path", _modules(EXTENSION), ids=_name)
def test_the_extension_imports_nothing_of_the_package(path: Path) -> None:
    assert {name.split(".")[0] for name in _imported(_tree(path))} & {"aengine", "torch"} == set()


C_MODULES = {"aengine_ext._completions": "device", "aengine_ext._cpu": "kernels"}


@every_module
def test_c_modules_have_one_room_each(path: Path) -> None:
    """Import-linter sees Python modules only. `doctor` names them to say whether they are there."""
    if path == PACKAGE / "serve" / "doctor.py":
        return
    tree = _tree(path)
    named = set(_imported(tree)) | {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)
    }
    named |= {
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    room = path.relative_to(PACKAGE).parts[0]
    assert {name for name, owner in C_MODULES.items() if name in named and owner != room} == set()


@every_source
def test_modules_are_short_and_say_what_they_are(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LONGEST, "two ideas share this module"
    assert ast.get_docstring(_tree(path)), "a module begins with a docstring"


@every_source
def test_no_module_level_mutable_state(path: Path) -> None:
    """Three engines in one process do not know of each other."""
    problems = [f"{_name(path)}:{line} {what}" for line, what in _state(_tree(path))]
    assert problems == []


def _state(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Module-level objects that are, or could be, changed while the program runs."""
    tables: set[str] = set()
    for statement in _module_level(tree):
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for decorator in statement.decorator_list:
                called = decorator.func if isinstance(decorator, ast.Call) else decorator
                needed = len(statement.args.args) > len(statement.args.defaults)
                # Without a needed argument a cache is one constant, computed late.
                if _last_name(called) in CACHES and needed:
                    yield statement.lineno, f"{statement.name} keeps a cache"
        if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or statement.value is None:
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        value = statement.value
        called_name = _last_name(value.func) if isinstance(value, ast.Call) else ""
        if called_name in MUTABLE_CALLS:
            yield statement.lineno, f"{', '.join(names)} is mutable"
        if isinstance(value, DISPLAYS) or called_name in TABLE_CALLS:
            tables.update(names)
            if any(not name.strip("_").isupper() for name in names if name != "__all__"):
                yield statement.lineno, f"{', '.join(names)} is mutable and not named as a constant"
    yield from _changes(tree, tables)


def _changes(tree: ast.Module, tables: set[str]) -> Iterator[tuple[int, str]]:
    """Where a constant table is changed after all, or a module's name is rebound."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield node.lineno, f"global {', '.join(node.names)}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id in tables and node.func.attr in MUTATORS:
                yield node.lineno, f"{owner.id} is changed"
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            if isinstance(node.value, ast.Name) and node.value.id in tables:
                yield node.lineno, f"{node.value.id} is changed"
        elif isinstance(node, ast.AugAssign) and _last_name(node.target) in tables:
            yield node.lineno, f"{_last_name(node.target)} is changed"


def _module_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run at import, inside if, try and with too."""
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        statement = pending.pop(0)
        yield statement
        if isinstance(statement, (ast.If, ast.Try, ast.With)):
            for field in ("body", "orelse", "finalbody"):
                pending += getattr(statement, field, [])
            for handler in getattr(statement, "handlers", []):
                pending += handler.body


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize(
    "source",
    [
        "seen = {}",
        "_cache = dict()",
        "import threading\nlock = threading.Lock()",
        "from functools import cache\n@cache\ndef f(x): ...",
        "TABLE = {}\ndef f(k):\n    TABLE[k] = 1",
        "TABLE = []\ndef f(k):\n    TABLE.append(k)",
        "engine = None\ndef f():\n    global engine\n    engine = 1",
        "try:\n    import x\nexcept ImportError:\n    found = []",
    ],
)
def test_the_check_for_state_sees_it(source: str) -> None:
    assert list(_state(ast.parse(source)))


def test_the_check_for_state_lets_constants_be() -> None:
    source = '__all__ = ["a"]\nTABLE = {"a": 1}\n_NAMES = ("x",)\nlogger = getLogger("x")'
    source += "\nSCALARS = dict(a=1)\n@cache\ndef library(): ..."
    assert list(_state(ast.parse(source))) == []


def test_import_contracts() -> None:
    tool = shutil.which("lint-imports", path=str(Path(sys.executable).parent))
    if tool is None:
        pytest.skip("import-linter is not installed")
    done = subprocess.run(
        [tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
