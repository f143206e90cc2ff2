"""A scripted model: the launch side of an engine without tensors, with a cache that can be caught.

Its KV cache holds the token ids themselves, in the blocks that the plan names, and the next token
is a function of what a sequence reads back through its own block table. So a block that is handed
to two sequences, freed too early or written out of order changes the output, as it would with a
real model, but visibly and at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from aengine.batch import StepResult
from aengine.errors import DeviceLostError
from aengine.testing.replies import Replies

if TYPE_CHECKING:
    import numpy.typing as npt

    from aengine.batch import BlockCopy, StepPlan

Script = Callable[[Sequence[int]], int]
"""`script(tokens of the sequence so far) -> next token`."""

TOKEN_BYTES = 8
"""What a token takes in the scripted KV cache."""
FREE = np.iinfo(np.int64).min


def arithmetic_script(vocab_size: int, *, salt: int = 0) -> Script:
    """A script whose token depends on every token before it, and never on anything else."""

    def script(tokens: Sequence[int]) -> int:
        state = salt + 0x9E3779B9
        for token in tokens:
            state = (state * 31 + token + 7) & 0xFFFFFFFF
        return (state >> 7) % vocab_size

    return script


@dataclass(slots=True, kw_only=True)
class Faults:
    """What goes wrong, and when. Steps count from 0 in the order in which they are launched.

    Args:
        delay: seconds that every step takes.
        raise_at: step -> the exception that it raises; its requests fail, the engine goes on.
        row_errors: seq_id -> the exception that its next sample raises, alone.
        lose_at: the step at which the device is lost, for good: the engine dies.
        drop_at: the step whose completion never comes: nothing is heard of the engine after it,
            until it is closed (or `release` is called).
    """

    delay: float = 0.0
    raise_at: Mapping[int, Exception] = field(default_factory=dict)
    row_errors: Mapping[int, Exception] = field(default_factory=dict)
    lose_at: int | None = None
    drop_at: int | None = None
    _released: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)

    def release(self) -> None:
        """Let a dropped completion come after all."""
        self._released.set()

    def meet(self, step: int) -> None:
        """What happens at this step. Blocks the device's thread, never a loop's.

        Raises:
            Exception: as `raise_at` says.
            DeviceLostError: as `lose_at` says.
        """
        if self.delay:
            self._released.wait(self.delay)
        if step in self.raise_at:
            raise self.raise_at[step]
        if step == self.lose_at:
            raise DeviceLostError(f"the device was lost at step {step}")
        if step == self.drop_at:
            self._released.wait()


@dataclass(slots=True)
class ScriptedOutput:
    """Tokens that are on the host already."""

    result: StepResult

    def to_host(self) -> StepResult:
        return self.result


@dataclass(slots=True)
class Begun:
    """A step whose constrained rows are still to be sampled."""

    plan: StepPlan
    tokens: dict[int, int]
    errors: dict[int, Exception]


class ScriptedLauncher:
    """Launches steps on a script.

    Args:
        script: the model, or what it answers.
        vocab_size: its tokens are 0 .. vocab_size - 1.
        num_blocks: usable KV blocks; block 0 is padding.
        block_size: tokens per block.
        max_num_seqs: slots.
        faults: what goes wrong.
        num_host_blocks: blocks of host memory for sequences that give way.
    """

    def __init__(
        self,
        script: Script | Replies,
        *,
        vocab_size: int,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        faults: Faults | None = None,
        num_host_blocks: int = 0,
    ) -> None:
        self.vocab_size = vocab_size
        self.faults = faults or Faults()
        self.launches = 0
        self.plans: list[StepPlan] = []
        self._script = script
        self._block_size = block_size
        self._kv = np.full((num_blocks + 1, block_size), FREE, dtype=np.int64)
        self._host_kv = np.full((num_host_blocks + 1, block_size), FREE, dtype=np.int64)
        self._future_map = np.zeros(max_num_seqs + 1, dtype=np.int64)

    def replay(self, plan: StepPlan) -> None:
        """A script has no steady steps."""

    def replay_begin(self, plan: StepPlan) -> None:
        """As `replay`."""

    def replay_finish(self, begun: Any, rows: Any, bitmask: Any) -> None:
        """As `replay`."""

    def chore(self) -> None:
        """Nor anything to prepare."""

    def copy_blocks(self, copy: BlockCopy) -> None:
        """Copy KV blocks to or from host memory."""
        device, host = list(copy.device_blocks), list(copy.host_blocks)
        if copy.to_host:
            self._host_kv[host] = self._kv[device]
        else:
            self._kv[device] = self._host_kv[host]

    def run(self, plan: StepPlan) -> ScriptedOutput:
        """Forward and sample everything."""
        return self.finish(self.begin(plan), (), np.zeros((0, 0), dtype=np.int32))

    def begin(self, plan: StepPlan) -> Begun:
        """Write the step's tokens into their blocks, sample the rows that wait for nothing."""
        number, self.launches = self.launches, self.launches + 1
        self.plans.append(plan)
        if isinstance(self._script, Replies):
            for init in plan.slot_inits:
                self._script.admit(init.request)
        self.faults.meet(number)
        self._write(plan)
        begun = Begun(plan, {}, {})
        waiting = set(plan.constrained)
        for row in np.flatnonzero(plan.samples).tolist():
            if row not in waiting:
                self._sample(begun, row, None)
        return begun

    def finish(
        self, begun: Begun, rows: Sequence[int], bitmask: npt.NDArray[np.int32]
    ) -> ScriptedOutput:
        """Sample the constrained rows that have a mask."""
        for row, mask in zip(rows, bitmask, strict=True):
            self._sample(begun, row, mask)
        sampling = np.flatnonzero(begun.plan.samples).tolist()
        return ScriptedOutput(
            StepResult(
                step_id=begun.plan.step_id,
                token_ids=[begun.tokens.get(row, 0) for row in sampling],
                errors=begun.errors,
                unsampled=set(sampling) - set(begun.tokens) - set(begun.errors),
            )
        )

    def _write(self, plan: StepPlan) -> None:
        known = iter(plan.prefill_token_ids.tolist())
        for row in range(plan.num_rows):
            start, length = int(plan.starts[row]), int(plan.lengths[row])
            for position in range(start, start + length):
                decode = row < plan.num_decode
                token = self._future_map[plan.slots[row]] if decode else next(known)
                block = plan.block_tables[row, position // self._block_size]
                self._kv[block, position % self._block_size] = token

    def _sample(self, begun: Begun, row: int, mask: npt.NDArray[np.int32] | None) -> None:
        plan = begun.plan
        seq_id = plan.seq_ids[row]
        if seq_id in self.faults.row_errors:
            begun.errors[row] = self.faults.row_errors[seq_id]
            return
        length = int(plan.starts[row] + plan.lengths[row])
        blocks = plan.block_tables[row, : -(-length // self._block_size)]
        tokens = self._kv[blocks].reshape(-1)[:length].tolist()
        try:
            token = self._next(seq_id, tokens)
        except Exception as error:  # the test's own script
            begun.errors[row] = error
            return
        if mask is not None:
            token = _nearest_allowed(token, mask, self.vocab_size)
        begun.tokens[row] = token
        self._future_map[plan.slots[row]] = token

    def _next(self, seq_id: int, tokens: Sequence[int]) -> int:
        if isinstance(self._script, Replies):
            return self._script.token(seq_id, len(tokens))
        return self._script(tokens)


def _nearest_allowed(token: int, mask: npt.NDArray[np.int32], vocab_size: int) -> int:
    """The first allowed token at or after `token`, going round."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size]
    allowed = np.flatnonzero(bits)
    if not len(allowed):
        raise ValueError("the mask allows no token")
    after: Any = allowed[allowed >= token]
    return int(after[0] if len(after) else allowed[0])
