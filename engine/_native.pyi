"""The engine's kernels (see engine/native)."""

def available_isas() -> list[str]:
    """Kernel variants that run on this processor, best first, which is the one in use."""

def use_isa(name: str) -> None:
    """Use another variant, in the whole process.

    Raises:
        ValueError: it does not run here; the message names those that do.
    """

def use_threads(count: int) -> None:
    """Compute with so many threads, the caller included; not while anything is computed.

    Raises:
        ValueError: fewer than 1.
    """

class Pages:
    """Pages in memory: strides in elements, the content of a token contiguous."""

    def __init__(
        self,
        *,
        data: int,
        block_stride: int,
        head_stride: int,
        token_stride: int,
        key_dim: int,
        value_dim: int,
        value_start: int,
        bfloat16: bool,
    ) -> None: ...

class Sequences:
    """`PagedSequences` in memory: int32, contiguous rows of `table_width`."""

    def __init__(
        self,
        *,
        tables: int,
        table_width: int,
        first_keys: int,
        lengths: int,
        query_starts: int,
        count: int,
        block_size: int,
    ) -> None: ...

def attend(
    *,
    pages: Pages,
    sequences: Sequences,
    query: int,
    query_token_stride: int,
    query_head_stride: int,
    output: int,
    sinks: int,
    kv_heads: int,
    heads_per_kv: int,
    scaling: float,
    softcap: float,
    window: int,
    chunk: int,
) -> None:
    """Causal attention over pages, into `output` [tokens, heads, value dim]; addresses, 0 for no `sinks` (float)."""

def store(
    *,
    pages: Pages,
    key: int,
    key_token_stride: int,
    key_head_stride: int,
    value: int,
    value_token_stride: int,
    value_head_stride: int,
    stored_value_dim: int,
    blocks: int,
    offsets: int,
    tokens: int,
    kv_heads: int,
) -> None:
    """Write keys and values into pages; `blocks` and `offsets` are int64."""

def packed_size(out: int, in_: int) -> int:
    """Elements of a packed weight [out, in]."""

def pack(*, weight: int, out: int, in_: int, panels: int) -> None:
    """Pack a bfloat16 weight [out, in] into `panels`."""

def linear(*, rows: int, num_rows: int, panels: int, bias: int, out: int, in_: int, output: int) -> None:
    """`rows` [num_rows, in] times a packed weight, into `output` [num_rows, out]; all bfloat16. 0 for no `bias`."""

def normalize(
    *,
    x: int,
    rows: int,
    x_stride: int,
    weight: int,
    width: int,
    output: int,
    epsilon: float,
    offset: float,
    round_first: bool,
) -> None:
    """RMS norm of bfloat16 rows, times weight + `offset`; rounded before that where `round_first`."""

def gate(*, gate: int, gate_stride: int, up: int, up_stride: int, rows: int, width: int, output: int) -> None:
    """silu(gate) * up, of bfloat16 rows."""

def draw(
    *,
    logits: int,
    changed: int,
    rows: int,
    width: int,
    temperatures: int,
    numbers: int,
    tokens: int,
    normalizers: int,
) -> None:
    """One token (int64) for each row of `changed` (float), which are `logits` after penalties, or the same memory.

    At a temperature (float) of 0 the first of the largest, else the inverse of the cumulative distribution at
    `numbers` (double). `normalizers` (float) are the logarithms of the sums of exp(logits): not finite where nothing
    can be drawn.
    """
