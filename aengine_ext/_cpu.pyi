from collections.abc import Sequence
from typing import Any

def isas() -> list[str]: ...
def row_bytes(ggml_type: int, cols: int, /) -> int: ...
def new_model(
    layers: int,
    hidden: int,
    inner: int,
    heads: int,
    kv_heads: int,
    dim: int,
    vocab: int,
    eps: float,
    threads: int,
    inv_freq: Any,
    isa: str,
    /,
) -> object: ...
def set_matrix(
    model: object, index: int, ggml_type: int, rows: int, cols: int, int8: bool, raw: Any, /
) -> int: ...
def set_vector(model: object, index: int, raw: Any, /) -> None: ...
def forward(
    model: object,
    tokens: int,
    rows: int,
    logits: int,
    table_width: int,
    block_size: int,
    token_ids: int,
    positions: int,
    slots: int,
    logit_index: int,
    query_start: int,
    tables: int,
    out: int,
    keys: Sequence[int],
    values: Sequence[int],
    kv_itemsize: int,
    /,
) -> None: ...
def isa_of(model: object, /) -> str: ...
