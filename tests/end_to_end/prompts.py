"""Prompts of exact lengths in tokens, cut from ordinary prose."""

from __future__ import annotations

LENGTHS = (
    1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 255, 256, 257, 511, 512, 513, 777, 1023, 1025, 1500,
)  # fmt: skip
"""Tokens. Around the borders of blocks (16 tokens) and of prefill chunks (512 tokens), and in between."""

SENTENCES = (
    "The ferry leaves the northern bank at half past six, when the fog still lies on the water.",
    "On board are two carts of apples, a doctor with her bag, and a boy who has never seen the city.",
    "The pilot knows every shoal by the colour of the waves above it, and he does not trust the charts.",
    "In the year 1874 a flood moved the landing stage 300 metres to the west, and nobody moved it back.",
    "A letter arrives with the first crossing; the answer goes out with the last one of the same day.",
    "What is carried over must be whole: half a cargo is worth less than none, says the harbour master.",
    "When the river freezes, people walk, and the price of apples falls to 4 pence a dozen.",
    "Nobody unloads before the rope is fast, and nobody casts off before the last crate is counted.",
    "The engineer measured the current at three depths and wrote the numbers into a small blue book.",
    "Her daughter asked why the boat never turns around, and she said that both of its ends are bows.",
)


def prose(num_sentences: int) -> str:
    """Varied text without a short period: the sentences in an order that shifts with every round."""
    picked = (SENTENCES[(7 * i + i // len(SENTENCES)) % len(SENTENCES)] for i in range(num_sentences))
    return " ".join(f"{number}. {sentence}" for number, sentence in enumerate(picked, start=1))
