"""What the CPU kernels' modes cost in quality: teacher-forced against float32 torch.

    python benchmarks/cpu_quality.py [--tokens 2000]

The text is this repository's own documentation; share of positions with the same most likely token,
and the mean Kullback-Leibler divergence of the next-token distributions.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from aengine.execute.forward import NativeForward
from aengine.execute.loader import native_spec
from aengine.kernels.native import NativeModel
from aengine.model.causal_lm import CausalLM
from aengine.model.files import open_model
from aengine.model.hub import resolve
from aengine.model.registry import decoder_spec

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.model.paged import run  # noqa: E402


class Bound:
    """A native model with the face of a `CausalLM`."""

    def __init__(self, model: NativeModel, like: CausalLM) -> None:
        self.config, self.num_heads, self.num_kv_heads = (
            like.config,
            like.num_heads,
            like.num_kv_heads,
        )
        self._model = model

    def forward(self, batch: object, kv_cache: object, _: object) -> torch.Tensor:
        return NativeForward(self._model, kv_cache)(batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2000)
    args = parser.parse_args()
    files = open_model(resolve("smollm2-135m"))
    spec = decoder_spec(files.config, args.tokens)
    text = "\n".join(
        path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")) if path.is_file()
    )
    ids = files.tokenizer.encode(text)[: args.tokens]
    model = CausalLM(
        spec,
        files.weights,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=args.tokens,
    )
    wanted = run(model, [ids], [500])[0].log_softmax(-1)
    for mode, kv_dtype in (("float32", torch.float32), ("int8", torch.float16)):
        native = Bound(NativeModel(native_spec(spec, mode, 2), files.weights), model)
        found = run(native, [ids], [500], kv_dtype)[0].log_softmax(-1)
        same = (found.argmax(-1) == wanted.argmax(-1)).float().mean()
        divergence = (wanted.exp() * (wanted - found)).sum(-1).mean()
        print(f"{mode}, KV {kv_dtype}: {len(ids)} tokens, top-1 {same:.4f}, KL {divergence:.5f}")


if __name__ == "__main__":
    main()
