"""One request at a time, the slow and plain way: what the engine's answers are compared with.

Nothing of the sampler, the scheduler or the detokenizer is used: a sequence runs alone through the
model, a token a step; sampling is numpy in float64 over the whole vocabulary, written from the
documentation of `SamplingParams`; text is decoded anew for each prefix. Only the grammar library
and the numbers of the forward are the engine's own.
"""

from __future__ import annotations

import codecs
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from aengine.batch import StepPlan
from aengine.config import EngineConfig, KVCacheConfig, SchedulerConfig
from aengine.execute.inputs import InputBuilder
from aengine.execute.loader import load_model
from aengine.grammar import GrammarCompiler, describe
from aengine.request import FinishReason, SamplingParams

if TYPE_CHECKING:
    import numpy.typing as npt

    from aengine.grammar import GrammarMatcher
    from aengine.model.files import LoadedFiles

    Floats = npt.NDArray[np.float64]
    Mask = npt.NDArray[np.bool_]

BLOCK = 16
SHORTEST_JUMP = 8
CPU = torch.device("cpu")


@dataclass
class Answer:
    """One completion. `failed`: its request fails with a GenerationError instead."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[Floats] = field(default_factory=list)
    """For each sampled token the log-probabilities of the whole vocabulary, if asked for."""
    prompt_logprobs: list[Floats] = field(default_factory=list)
    """The same for each token of the prompt but the first."""
    failed: bool = False
    num_forced: int = 0


class NaiveModel:
    """Answers one request at a time.

    Args:
        files: the model.
        dtype: as the engine's option.
        max_model_len: longest sequence.
    """

    def __init__(self, files: LoadedFiles, dtype: str, max_model_len: int) -> None:
        config = EngineConfig(
            model="naive",
            device="cpu",
            dtype=dtype,
            max_model_len=max_model_len,
            scheduler=SchedulerConfig(max_num_seqs=1, block_size=BLOCK),
            kv_cache=KVCacheConfig(memory=256 << 20),
        )
        self._files = files
        self._forward = load_model(config, files, CPU).forward
        self._builder = InputBuilder(block_size=BLOCK, device=CPU)
        self._blocks = np.arange(1, 1 + -(-max_model_len // BLOCK), dtype=np.int32)[None]
        self._longest = max_model_len
        info = describe(files.tokenizer, files.end_token_ids, files.config.vocab_size)
        self._grammars = GrammarCompiler(info)

    def close(self) -> None:
        self._grammars.close()

    def logits(self, tokens: list[int], start: int) -> Floats:
        """[tokens, V] after each of these tokens, the first of which is at position `start`."""
        plan = StepPlan(
            step_id=1,
            num_decode=0,
            seq_ids=[1],
            slots=np.array([1], dtype=np.int32),
            starts=np.array([start], dtype=np.int32),
            lengths=np.array([len(tokens)], dtype=np.int32),
            prefill_token_ids=np.array(tokens, dtype=np.int32),
            block_tables=self._blocks,
            num_blocks=np.array([self._blocks.shape[1]], dtype=np.int32),
            samples=np.zeros(1, dtype=np.bool_),
            prompt_logprob_rows=[0],
        )
        batch = self._builder.build(plan, torch.zeros(2, dtype=torch.int64))
        with torch.inference_mode():
            return self._forward(batch).numpy().astype(np.float64)

    def answer(self, prompt: list[int], params: SamplingParams, index: int) -> Answer:
        """Completion `index` of the request."""
        rules = Rules(self._files, params, prompt, index, self._longest)
        matcher: GrammarMatcher | None = None
        if params.structured is not None:
            matcher = self._grammars.compile(params.structured).matcher()
        answer, outputs, computed = Answer(), [], 0
        answer.token_ids = outputs
        while True:
            rows = self.logits([*prompt, *outputs][computed:], computed)
            computed = len(prompt) + len(outputs)
            if not outputs and params.prompt_logprobs is not None:
                answer.prompt_logprobs = [log_softmax(row) for row in rows[:-1]]
            # A grammar that leaves no choice for some tokens goes on by itself behind the next.
            jumps = matcher is not None and rules.leaps(matcher)
            token = rules.choose(rows[-1], outputs, None if matcher is None else allowed(matcher))
            if token is None:
                answer.failed = True
                return answer
            outputs.append(token)
            if params.logprobs is not None:
                answer.logprobs.append(log_softmax(rows[-1]))
            if matcher is not None:
                matcher.advance(token)
            if rules.ended(answer):
                return answer
            if matcher is not None and jumps:
                forced = matcher.forced_tokens()
                tokens = list(itertools.takewhile(lambda t: t not in rules.ends, forced))
                if len(outputs) + len(tokens) < rules.most:
                    for token in tokens:
                        matcher.advance(token)
                    outputs += tokens
                    answer.num_forced += len(tokens)


def allowed(matcher: GrammarMatcher) -> Mask:
    """Which tokens may come next, a bool each."""
    vocab = matcher._backend.tokenizer  # type: ignore[attr-defined]
    words = np.zeros(vocab.mask_words, dtype=np.int32)
    matcher.fill_bitmask(words)
    return np.unpackbits(words.view(np.uint8), bitorder="little")[: vocab.vocab_size] == 1


class Rules:
    """What the parameters of one completion say about its next token and its end."""

    def __init__(
        self,
        files: LoadedFiles,
        params: SamplingParams,
        prompt: list[int],
        index: int,
        longest: int,
    ) -> None:
        self.params = params
        self.prompt = prompt
        self.tokenizer = files.tokenizer
        self.key = stream_key(params.seed or 0, index)
        room = longest - len(prompt)
        self.most = room if params.max_tokens is None else min(room, params.max_tokens)
        self.ends = set(params.stop_token_ids)
        if not params.ignore_eos:
            self.ends |= files.end_token_ids
        self.bad_words = [
            files.tokenizer.encode(text, add_special_tokens=False)
            for word in params.bad_words
            for text in (word, " " + word.lstrip())
        ]
        self.may_jump = params.logprobs is None and not any(
            (
                params.stop,
                params.allowed_token_ids,
                params.logit_bias,
                params.bad_words,
                params.logits_processors,
            )
        )

    def leaps(self, matcher: GrammarMatcher) -> bool:
        """Whether what is forced behind the next token is appended unsampled."""
        return self.may_jump and len(matcher.forced_tokens()) >= SHORTEST_JUMP

    def choose(self, logits: Floats, outputs: list[int], mask: Mask | None) -> int | None:
        """The next token; None: there is none."""
        params = self.params
        scores = logits.copy()
        if mask is not None:
            scores[~mask] = -np.inf
        if params.allowed_token_ids is not None:
            others = np.ones(len(scores), dtype=bool)
            others[list(params.allowed_token_ids)] = False
            scores[others] = -np.inf
        for word in self.bad_words:
            before = word[:-1]
            if len(outputs) >= len(before) and outputs[len(outputs) - len(before) :] == before:
                scores[word[-1]] = -np.inf
        if len(outputs) < params.min_tokens:
            scores[list(self.ends)] = -np.inf
        for token, value in (params.logit_bias or {}).items():
            scores[token] += value
        self._penalise(scores, outputs)
        for processor in params.logits_processors:
            given = torch.tensor(scores, dtype=torch.float32)
            scores = processor(tuple(outputs), given).numpy().astype(np.float64)
        if not np.isfinite(scores.max()):
            return None
        if params.temperature == 0 or params.top_k == 1:
            return int(scores.argmax())
        return self._draw(scores, len(self.prompt) + len(outputs))

    def _penalise(self, scores: Floats, outputs: list[int]) -> None:
        params = self.params
        for token in {*self.prompt, *outputs}:
            factor = params.repetition_penalty
            scores[token] *= 1 / factor if scores[token] > 0 else factor
        for token in set(outputs):
            scores[token] -= params.presence_penalty
            scores[token] -= params.frequency_penalty * outputs.count(token)

    def _draw(self, scores: Floats, position: int) -> int:
        params = self.params
        weights = np.exp((scores - scores.max()) / params.temperature)
        kept = np.ones(len(scores), dtype=bool)
        order = np.sort(scores)[::-1]
        if 0 < params.top_k < len(scores):
            kept &= scores >= order[params.top_k - 1]
        if params.top_p < 1:
            within = weights * kept
            sums = np.cumsum(np.sort(within)[::-1])
            needed = int((sums < params.top_p * sums[-1]).sum())
            kept &= scores >= order[needed]
        kept &= weights >= params.min_p
        sums = np.cumsum(weights * kept)
        target = uniform(self.key, position) * sums[-1]
        return int((sums <= target).sum())

    def ended(self, answer: Answer) -> bool:
        """Whether the newest token ends the completion; notes why, and the text."""
        count, token = len(answer.token_ids), answer.token_ids[-1]
        found = self._stop_string(answer.token_ids)
        if found is not None:
            answer.text, answer.stop_reason = found
            answer.finish_reason = FinishReason.STOP
            return True
        if token in self.ends and count >= self.params.min_tokens:
            answer.finish_reason = FinishReason.STOP
            answer.stop_reason = token if token in self.params.stop_token_ids else None
        elif count >= self.most:
            answer.finish_reason = FinishReason.LENGTH
        else:
            return False
        answer.text = self._bytes(answer.token_ids).decode(errors="replace")
        return True

    def _stop_string(self, outputs: list[int]) -> tuple[str, str] | None:
        params = self.params
        if len(outputs) < params.min_tokens:
            return None
        # A match may not end within what came before `min_tokens`.
        exempt = len(certain(self._bytes(outputs[: max(0, params.min_tokens - 1)])))
        text = certain(self._bytes(outputs))
        matches = []
        for stop in params.stop:
            start = text.find(stop, max(0, exempt - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        if not matches:
            return None
        end, start, stop = min(matches)
        return text[: end if params.include_stop_str_in_output else start], stop

    def _bytes(self, tokens: list[int]) -> bytes:
        skipped = self.tokenizer.special_ids if self.params.skip_special_tokens else frozenset()
        return b"".join(self.tokenizer.token_bytes(t) for t in tokens if t not in skipped)


def certain(data: bytes) -> str:
    """The text of these bytes without a character that is only begun."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


def log_softmax(logits: Floats) -> Floats:
    shifted: Floats = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


MASK64 = 2**64 - 1


def mix64(x: int) -> int:
    """SplitMix64's finaliser."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK64
    return x ^ (x >> 31)


def stream_key(seed: int, index: int) -> int:
    """The key of completion `index` of a request with this seed."""
    return mix64(mix64(seed & MASK64) + index & MASK64)


def uniform(key: int, position: int) -> float:
    """In [0, 1): the number that decides the token at this position."""
    golden = 0x9E3779B97F4A7C15
    bits = mix64(key ^ mix64((position + 1) * golden & MASK64))
    return float((bits >> 12) * 2.0**-52)
