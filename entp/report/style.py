"""Pictures on disk."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from entp.training.checkpoint import write_file


def save_figure(figure: Any, path: Path, dpi: int = 120) -> None:
    """Write a matplotlib figure so that `path` holds either all of it or what it held before; the
    suffix says the format."""
    image = io.BytesIO()
    figure.savefig(image, format=path.suffix.lstrip(".") or "png", dpi=dpi)
    write_file(path, image.getvalue())
