"""Tiny values for the sizes that have no canonical name, by the words of the field's name and by its real value.

The real value comes first: a size that equals the hidden size in the real model equals it in the tiny one, because
classes leave parts out where two sizes agree (OPT's projection of the embeddings); a product of two fields that gives a
third keeps doing so. What has no relation to another size gets a value that no other size has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

SMALL = 8
"""Numbers up to this are features (a kernel's width, a factor), not sizes to shrink."""
CHUNK = 8
"""Tokens in a chunk: shorter than a test sequence, which then has several."""

# Word of a name to tiny value, the first that is in the name.
_BY_WORD = {
    "chunk": CHUNK,
    "chunksize": CHUNK,
    "multiple": 8,
    "distance": 16,
    "buckets": 8,
    "types": 6,
    "len": 6,
    "length": 6,
    "rope": 8,
    "nope": 12,
    "v": 20,
    "state": 14,
}
_SIZE_WORDS = frozenset(("d", "dim", "dims", "embd", "hidden", "inner", "lora", "rank", "size", "width"))
# Values for what is left; even, for what is split into halves.
_POOL = (12, 20, 28, 36, 44, 52, 56, 60, 68, 76, 84, 88, 92, 96, 100, 104)
_OTHER_VOCABULARY = 157
_HEADS = frozenset(("heads", "n", "num"))
_HEAD_SIZE = frozenset(("d", "dim", "head", "headdim"))


def shrink(real: Mapping[str, int], known: Mapping[str, tuple[int, int]], window: int) -> dict[str, int]:
    """Tiny values of fields that are no canonical size.

    Args:
        real: the whole numbers of the real config by field, without canonical sizes, flags and tokens.
        known: canonical name to real and tiny value.
        window: tokens of the tiny window.

    Returns:
        The fields to change.
    """
    found = _heads(real, known)
    sizes = []
    for name, value in real.items():
        words = name.split("_")
        if value > 2 and not {"groups", "ngroups"}.isdisjoint(words):
            found[name] = 2
        if name in found or value <= SMALL:
            continue
        tiny = _related(name, value, known, window)
        if tiny is not None:
            found[name] = tiny
        elif not _SIZE_WORDS.isdisjoint(words):
            sizes.append(name)
    taken = {tiny for _, tiny in known.values()} | {found.get(name, value) for name, value in real.items()}
    free = (size for size in _POOL if size not in taken)
    found |= dict(zip(sizes, free, strict=False))
    for name, value in real.items():
        product = _product(value, real, found)
        if value > SMALL and product is not None and name not in _names_of_heads(real):
            found[name] = product
    return found


def _related(name: str, value: int, known: Mapping[str, tuple[int, int]], window: int) -> int | None:
    """The tiny value that the name's words or another size of the same value give."""
    words = name.split("_")
    if "vocab" in words:
        real, tiny = known["vocab_size"]
        return tiny if value == real else _OTHER_VOCABULARY
    if "window" in words:
        return window
    if "sliding_window" in known and value in (known["sliding_window"][0], 2 * known["sliding_window"][0]):
        return window * value // known["sliding_window"][0]
    if not {"layers", "blocks"}.isdisjoint(words):
        return known["num_hidden_layers"][1] if value == known["num_hidden_layers"][0] else None
    if (by_word := _by_word(words)) is not None:
        return by_word
    real, tiny = known.get("hidden_size", (0, 0))
    if real and value % real == 0 and value // real <= 4:
        return value // real * tiny
    return None


def _by_word(words: Iterable[str]) -> int | None:
    return next((tiny for word, tiny in _BY_WORD.items() if word in words), None)


def _heads(real: Mapping[str, int], known: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Counts of heads and the sizes of a head that belong to them, other than those of the attention.

    State-space layers have ``heads * size of a head = expand * hidden size``; a class may say the product too, or
    compute the size. Layers of linear attention have fewer heads of keys than of values.
    """
    expand = next((value for name, value in real.items() if "expand" in name.split("_")), None)
    hidden, tiny_hidden = known.get("hidden_size", (0, 0))
    counts = {name: value for name, value in real.items() if "heads" in name.split("_")}
    keys = min((value for name, value in counts.items() if "key" in name.split("_")), default=None)
    found: dict[str, int] = {}
    for name, count in counts.items():
        size = next((other for other in real if _belong(name, other)), None)
        if expand and size and count * real[size] == expand * hidden:
            found |= {size: 8, name: expand * tiny_hidden // 8}
        elif keys and count > SMALL:
            # Few heads of keys, each for several of values, where the real model has it so.
            found[name] = 2 if count == keys != max(counts.values()) else 4 if count > keys else 3
        elif count > SMALL:
            found |= {name: 6 if size else 4} | ({size: 8} if size else {})
    return found


def _belong(heads: str, size: str) -> bool:
    """Whether one field counts the heads whose size another one gives: ``mamba_n_heads`` and ``mamba_d_head``."""
    a, b = heads.split("_"), size.split("_")
    if "head" not in b and "headdim" not in b:
        return False
    return [word for word in a if word not in _HEADS] == [word for word in b if word not in _HEAD_SIZE]


def _names_of_heads(real: Mapping[str, int]) -> set[str]:
    counts = [name for name in real if "heads" in name.split("_")]
    return {*counts, *(size for size in real for name in counts if _belong(name, size))}


def _product(value: int, real: Mapping[str, int], found: Mapping[str, int]) -> int | None:
    """Heads times the size of a head, where the real value is that product."""
    for heads in real:
        for size in real:
            if "heads" in heads.split("_") and _belong(heads, size) and real[heads] * real[size] == value:
                return found.get(heads, real[heads]) * found.get(size, real[size])
    return None
