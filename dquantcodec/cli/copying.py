"""Tokens of a source into a file's writer, block by block, none but finite numbers: what compress and append share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..file.overlap import ahead
from .console import Console
from .progress import Advance

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..tensors import KVLayer, KVSource

#: Bytes of keys and values held at once: large enough for whole pages of many layers, small beside 300 MB.
BLOCK_BYTES = 32 << 20
#: The same for a device, which wants longer work; the next block is read meanwhile.
DEVICE_BLOCK_BYTES = 128 << 20


def reading_threads(device: str, threads: int) -> int:
    """Threads that read ahead: with a device at work, this machine's cores are free to read what it needs next."""
    return 0 if device == "cpu" else threads


def copy_tokens(
    source: KVSource, writer: Any, policy: str, advance: Advance, firsts: Sequence[int], readers: int = 0
) -> int:
    """Give ``writer`` the tokens of every sequence from its first of ``firsts`` on; how many numbers were replaced.

    So many ``readers``, threads, read the next tokens meanwhile.
    """
    replaced = 0
    with ExitStack() as opened:
        pool = opened.enter_context(ThreadPoolExecutor(readers)) if readers else None
        blocks = _blocks(source, policy, firsts, pool)
        if pool:
            blocks = opened.enter_context(closing(ahead(blocks)))
        for block in blocks:
            writer.append(block.keys, block.values, sequence=block.sequence)
            replaced += block.replaced
            advance(block.tokens * source.token_bytes)
            if block.last:
                writer.finish(block.sequence)  # so that only one sequence's newest tokens are ever held
    return replaced


@dataclass(frozen=True, eq=False)
class _Block:
    """Tokens of one sequence, an array for each layer; ``last``: the sequence ends with them."""

    sequence: int
    tokens: int
    last: bool
    keys: list[NDArray[Any]]
    values: list[NDArray[Any]]
    replaced: int


def _blocks(source: KVSource, policy: str, firsts: Sequence[int], pool: Executor | None) -> Iterator[_Block]:
    step = max(128, (DEVICE_BLOCK_BYTES if pool else BLOCK_BYTES) // source.token_bytes // 128 * 128)
    tensors = [(layer, kind) for layer in source.layers for kind in ("key", "value")]
    for sequence in range(source.sequences):
        # A sequence without tokens still has an end.
        for start in range(firsts[sequence], max(source.tokens, firsts[sequence] + 1), step):
            stop = min(start + step, source.tokens)

            def read(
                tensor: tuple[KVLayer, str], part: tuple[int, int, int] = (sequence, start, stop)
            ) -> tuple[NDArray[Any], int]:
                return read_finite(source, *tensor, part, policy)

            arrays, changed = zip(*(pool.map if pool else map)(read, tensors))
            yield _Block(
                sequence, stop - start, stop == source.tokens, list(arrays[::2]), list(arrays[1::2]), sum(changed)
            )


def read_finite(
    source: KVSource, layer: KVLayer, kind: str, part: tuple[int, int, int], policy: str
) -> tuple[NDArray[Any], int]:
    """One block of one tensor without NaN or infinity, and how many were replaced."""
    from ..tensors import find_nonfinite, replace_nonfinite

    tensor = layer.tensor(kind)
    sequence, start, stop = part
    block = tensor.read(source.layout, sequence, start, stop)
    if policy != "error":
        return replace_nonfinite(block, policy)
    if found := find_nonfinite(block):
        raise InputError(
            f"{found.what}; clean the tensor, or give --nonfinite=clamp or --nonfinite=zero",
            code="input-nonfinite",
            path=tensor.path,
            tensor=tensor.name,
            **({"sequence": sequence} if source.sequences > 1 else {}),
            token=start + found.token,
            head=found.head,
            channel=found.channel,
        )
    return block, 0


def tell_replaced(replaced: int, policy: str, console: Console) -> None:
    if replaced:
        put = "0" if policy == "zero" else "0 for NaN, the token's largest magnitude for infinity"
        console.result(f"replaced {replaced} number{'s' if replaced > 1 else ''} that were not finite: {put}")
