"""llama.cpp's side of `cpu.py`: reads jobs as JSON lines, answers tokens a second as JSON lines.

Runs in an interpreter that has llama-cpp-python. Decodes with the low-level batch API: no sampling,
no detokenizing, no Python per token besides filling the batch, so it is measured at its best.
"""

from __future__ import annotations

import json
import sys
import time

import llama_cpp


class Llama:
    """One context with as many sequences as the largest job."""

    def __init__(self, path: str, threads: int, max_streams: int, context: int) -> None:
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = context * max_streams
        options.n_batch = options.n_ubatch = 512
        options.n_seq_max = max_streams
        options.n_threads = options.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        self.batch = llama_cpp.llama_batch_init(512, 0, 1)
        self.clear()

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def decode(self, tokens: list[tuple[int, int, int, bool]]) -> None:
        """One forward of (token, position, sequence, wants logits)."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, logits) in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = logits
        code = llama_cpp.llama_decode(self.context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        llama_cpp.llama_synchronize(self.context)

    def prefill(self, sequence: int, length: int) -> float:
        start = time.perf_counter()
        for first in range(0, length, 512):
            chunk = range(first, min(first + 512, length))
            self.decode([(100 + p % 40000, p, sequence, p == length - 1) for p in chunk])
        return length / (time.perf_counter() - start)

    def generate(self, streams: int, prompt: int, output: int) -> float:
        for sequence in range(streams):
            self.prefill(sequence, prompt)
        start = time.perf_counter()
        for step in range(output - 1):
            self.decode([(200 + s, prompt + step, s, True) for s in range(streams)])
        return streams * (output - 1) / (time.perf_counter() - start)


def main() -> None:
    path, threads, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    llama = Llama(path, threads, 32, context)
    for line in sys.stdin:
        job = json.loads(line)
        llama.clear()
        if job["kind"] == "prefill":
            rate = llama.prefill(0, job["prompt"])
        else:
            rate = llama.generate(job["streams"], job["prompt"], job["output"])
        print(json.dumps(rate), flush=True)


if __name__ == "__main__":
    main()
