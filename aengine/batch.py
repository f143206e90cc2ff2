"""What crosses between deciding and launching: host integers only, one object a step.

A `StepPlan` is made by `policy.scheduler`, read by `execute` and never written again (law 4: the
arrays are this step's own copies). A `StepResult` is what came back to the host for that plan.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from aengine.request import Request

    IntArray = npt.NDArray[np.int32]


class LaneKind(enum.Enum):
    """How prefill and decode share the device in one step."""

    PLAIN = "plain"
    PRIORITY = "priority"
    GREEN = "green"


@dataclass(frozen=True, slots=True, kw_only=True)
class SmPartition:
    """A split of the device for one step. `prefill` and `decode` count SMs (CPU: threads).

    `PLAIN` is "no split": both run on the whole device and the counts are those of the device.
    """

    kind: LaneKind
    prefill: int
    decode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotInit:
    """A sequence takes a slot (for the first time, or again after a preemption) in this step.

    The launch side builds the slot's sampling state from it: parameters, token counts, seed.
    `output_token_ids` are the tokens generated before a preemption, oldest first.
    """

    slot: int
    request: Request
    output_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedTokens:
    """Output tokens that were appended, not sampled: the grammar allowed nothing else.

    The sampler has not seen them: it counts them before the row's next sample.
    """

    slot: int
    token_ids: tuple[int, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class StepPlan:
    """One step: R rows, decode rows first, each a run of consecutive tokens of one sequence.

    Rows `0 .. num_decode-1` compute one token each whose id is in the FutureMap at the row's slot:
    the host may not know it yet. Rows from `num_decode` on compute host-known tokens (a chunk of a
    prompt, or a preempted sequence coming back), laid end to end in `prefill_token_ids`.

    A row may read blocks that a row before it writes in this same step (two prompts that share a
    beginning): in each layer the keys and values of all rows are written before any row attends.

    Shapes: `slots`, `starts`, `lengths`, `num_blocks` are [R] int32; `block_tables` is [R, widest]
    int32, row i valid up to `num_blocks[i]`, 0 beyond; `samples` is [R] bool; `seq_ids` is [R].
    """

    step_id: int
    num_decode: int
    seq_ids: Sequence[int]
    slots: IntArray
    starts: IntArray
    lengths: IntArray
    prefill_token_ids: IntArray
    block_tables: IntArray
    num_blocks: IntArray
    samples: npt.NDArray[np.bool_]
    slot_inits: Sequence[SlotInit] = ()
    constrained: Sequence[int] = ()
    """Rows (indices into the plan) that sample and whose sample waits for a grammar mask."""
    prompt_logprob_rows: Sequence[int] = ()
    """Prefill rows whose every position wants log-probabilities."""
    forced: Sequence[ForcedTokens] = ()
    """Tokens appended to running rows since the step before."""
    partition: SmPartition | None = None

    @property
    def num_rows(self) -> int:
        return len(self.seq_ids)

    @property
    def num_tokens(self) -> int:
        return self.num_decode + len(self.prefill_token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """KV blocks to be copied between the device and host memory, the i-th to or from the i-th.

    `copy_id` counts with the steps. What the copy reads is written already, and nothing that was
    launched before it or will be launched before it has ended touches what it writes.
    """

    copy_id: int
    to_host: bool
    device_blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token's own, its rank (1 = most likely), the top k."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True, kw_only=True, eq=False)
class StepResult:
    """What a finished step brought to the host.

    `token_ids[j]` belongs to the j-th sampling row of the plan (`samples` in row order).
    `logprobs` and `prompt_logprobs` are keyed by plan row; `errors` holds rows that failed alone.
    `prompt_logprobs[row]` is about the prompt tokens at `start + 1 .. start + length` of that row,
    as far as the prompt goes: each position's logits speak of the token after it.
    """

    step_id: int
    token_ids: Sequence[int]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    errors: Mapping[int, Exception] = field(default_factory=dict)
    unsampled: Collection[int] = ()
    """Constrained rows whose mask was late: they sampled nothing and are to be computed again."""
