"""From a step's result to what it means for each sequence: tokens, ends, log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aengine.policy.sequence import RowUpdate
from aengine.request import FinishReason, RequestState

if TYPE_CHECKING:
    from aengine.batch import StepResult
    from aengine.policy.planning import LaunchedStep
    from aengine.policy.sequence import Sequence


@dataclass(slots=True)
class Settled:
    """The updates of one step, and which sequences end with it."""

    updates: list[RowUpdate] = field(default_factory=list)
    ended: list[tuple[Sequence, FinishReason]] = field(default_factory=list)


def settle(launched: LaunchedStep, result: StepResult) -> Settled:
    """Append the step's tokens to its sequences; stale rows are passed over."""
    settled = Settled()
    plan = launched.plan
    num_decode = plan.num_decode
    tokens = result.token_ids
    for row, error in sorted(result.errors.items()):
        sequence = launched.sequences[row]
        if not launched.is_stale(sequence):
            settled.updates.append(
                RowUpdate(
                    sequence.seq_id,
                    sequence.request,
                    finish_reason=FinishReason.ERROR,
                    cached_tokens=sequence.cached_tokens,
                    error=error,
                )
            )
            settled.ended.append((sequence, FinishReason.ERROR))
    if result.errors or result.logprobs or result.unsampled:
        for row in range(num_decode):
            _settle_row(launched, result, row, int(tokens[row]), settled)
    else:
        _settle_plain(launched, result, settled)
    sampled = num_decode
    for row in range(num_decode, plan.num_rows):
        _keep_prompt_logprobs(launched, result, row)
        if plan.samples[row]:
            _settle_row(launched, result, row, int(tokens[sampled]), settled)
            sampled += 1
    return settled


def _settle_plain(launched: LaunchedStep, result: StepResult, settled: Settled) -> None:
    """The decode rows of a step without errors and log-probabilities: the hot path."""
    step_id = launched.plan.step_id
    running = RequestState.RUNNING
    updates, ended = settled.updates, settled.ended
    decode = launched.sequences[: launched.plan.num_decode]
    for sequence, token in zip(decode, result.token_ids, strict=False):
        if sequence.state is not running or sequence.since > step_id:
            continue
        output = sequence.output
        output.append(token)
        request = sequence.request
        update = RowUpdate(
            request.seq_id, request, (token,), None, None, False, sequence.cached_tokens
        )
        updates.append(update)
        if token in sequence.stops or len(output) >= sequence.most_output:
            _end(sequence, token, update, ended)


def _settle_row(
    launched: LaunchedStep, result: StepResult, row: int, token: int, settled: Settled
) -> None:
    sequence = launched.sequences[row]
    if launched.is_stale(sequence) or row in result.errors or row in result.unsampled:
        return
    sequence.output.append(token)
    first = len(sequence.output) == 1
    wants_prompt = first and sequence.request.params.prompt_logprobs is not None
    logprobs = result.logprobs.get(row)
    update = RowUpdate(
        sequence.seq_id,
        sequence.request,
        (token,),
        first=first,
        cached_tokens=sequence.cached_tokens,
        logprobs=None if logprobs is None else (logprobs,),
        prompt_logprobs=tuple(sequence.prompt_logprobs) if wants_prompt else None,
    )
    settled.updates.append(update)
    _end(sequence, token, update, settled.ended)


def _end(
    sequence: Sequence,
    token: int,
    update: RowUpdate,
    ended: list[tuple[Sequence, FinishReason]],
) -> None:
    """Note the end of a sequence, if its newest token ends it."""
    reason = sequence.end_of(token)
    if reason is None:
        return
    update.finish_reason = reason
    if reason is FinishReason.STOP and token in sequence.request.params.stop_token_ids:
        update.stop_reason = token
    ended.append((sequence, reason))


def _keep_prompt_logprobs(launched: LaunchedStep, result: StepResult, row: int) -> None:
    found = result.prompt_logprobs.get(row)
    sequence = launched.sequences[row]
    if not found or launched.is_stale(sequence) or row in result.errors:
        return
    # A chunk computed again after a preemption brings some that are there already.
    have = len(sequence.prompt_logprobs)
    sequence.prompt_logprobs += found[max(0, have - int(launched.plan.starts[row]) - 1) :]
