"""Documents for tests, and the folder of real data, if there is one."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

REAL = Path(os.environ.get("ENTP_DATA", "").split(os.pathsep)[0] or "nowhere")
needs_real_data = pytest.mark.skipif(
    not (REAL / "gpt2_bpe").is_dir(), reason="ENTP_DATA does not name a folder with gpt2_bpe"
)
TEXT = "the cat sat on a mat, and über 12 naïve dogs' houses 日本 (again)\n\n it's   fine"
WORDS = TEXT.split(" ")
PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".xz": lzma.compress,
    ".gz": gzip.compress,
    ".zst": lambda data: zstandard.ZstdCompressor().compress(data),
}


def documents(count: int, seed: int = 0, most_words: int = 40) -> list[str]:
    """Some documents of a few words each, with accents, line feeds and spaces in a row."""
    rng = random.Random(seed)
    return [
        f"{number} " + " ".join(rng.choices(WORDS, k=rng.randint(1, most_words)))
        for number in range(count)
    ]


def as_jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_bytes(PACK[path.suffix if path.suffix in PACK else ""](as_jsonl(texts)))
    return path
