"""Small trained models that come with entp, by name: `entp.load("count3-entp")`, `entp evaluate
count3-entp`.

Each is a folder here, as `entp export` writes it: model.safetensors in bfloat16, or its shards and
their index, config.json (the whole run), made.json (how it was made, and what the weights as they
lie here do on fresh sequences).
"""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent


def names() -> list[str]:
    """The models that there are."""
    return sorted({path.parent.name for path in HERE.glob("*/model.safetensors*")})
