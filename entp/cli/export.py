"""`entp export RUN`: a trained model as a small folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from entp.cli.evaluate import Checkpoint
from entp.cli.parse import name_of, named_task, parse


@dataclass(frozen=True)
class ExportOptions:
    """Save a trained model as a small folder that `entp.load` reads, with how it was made and what
    it does."""

    out: Path
    """New folder for the model."""
    checkpoint: Checkpoint = "best"
    """The best checkpoint by validation, or the last."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Type of the saved weights, which are measured as saved."""
    test_sequences: int = 10_000
    """Test sequences to measure it on."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:NUMBER."""
    task: str | None = None
    """module:Class of the run's task, if it is not a built-in one."""


def export_command(args: list[str]) -> int:
    """export RUN: save a trained model as a small folder"""
    folder = name_of(args, "run folder", [], "export")
    options = parse(ExportOptions, args[1:], f"entp export {folder}")
    if options.task is not None:
        named_task(options.task)
    from entp.training.distributed import World, pick_device
    from entp.training.export import export

    made = export(
        Path(folder),
        options.out,
        checkpoint=options.checkpoint,
        dtype=options.dtype,
        test_sequences=options.test_sequences,
        device=pick_device(options.device, World()),
    )
    size = (options.out / "model.safetensors").stat().st_size
    test = made["test"]
    found = "  ".join(f"{name} {x:.4g}" for name, x in test.items() if isinstance(x, float))
    print(
        f"{options.out}: {made['checkpoint']}, {size / 1e6:.2f} MB. On {test['n']} test "
        f"sequences: {found}"
    )
    return 0
