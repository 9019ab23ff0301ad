"""`entp export RUN`: a trained model as a small folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from entp.cli.evaluate import Checkpoint
from entp.cli.parse import name_of, named_task, parse
from entp.errors import InputError
from entp.fields import LARGEST


@dataclass(frozen=True)
class ExportOptions:
    """Save a trained model as a small folder that `entp.load` or HuggingFace reads, with how it was
    made and what it does."""

    out: Path
    """New folder for the model."""
    format: Literal["entp", "hf", "gpt2"] = "entp"
    """entp: for `entp.load`; hf: for transformers' AutoModelForCausalLM, with its source; gpt2: a
    decoder as a plain GPT-2."""
    checkpoint: Checkpoint = "best"
    """The best checkpoint by validation, or the last."""
    dtype: Literal["bf16", "fp32"] | None = None
    """Type of the saved weights, which are measured as saved. None: bf16, and fp32 for
    HuggingFace, which computes in this type."""
    shard_mib: float | None = None
    """Largest file of weights in MiB; there are as many shards as it needs. HuggingFace's formats
    do not cut a tensor. None: one file."""
    test_sequences: int = 10_000
    """Test sequences to measure it on."""
    data: str | None = None
    """Where the task's data is. None: found by ENTP_DATA."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:NUMBER."""
    task: str | None = None
    """module:Class of the run's task, if it is not a built-in one."""

    def __post_init__(self) -> None:
        check_shards(self.shard_mib)


def check_shards(mib: float | None) -> None:
    """InputError for a size that no file of weights can have."""
    if mib is not None and not 0 < mib <= LARGEST:
        raise InputError(
            f"--shard-mib is {mib:g}: it must be above 0 and at most {LARGEST:g}; leave it out "
            "for one file."
        )


def export_command(args: list[str]) -> int:
    """export RUN: save a trained model as a small folder"""
    folder = name_of(args, "run folder", [], "export")
    options = parse(ExportOptions, args[1:], f"entp export {folder}")
    if options.task is not None:
        named_task(options.task)
    from entp.training.distributed import World, pick_device

    made = _write(Path(folder), options, pick_device(options.device, World()))
    size = sum(file.stat().st_size for file in options.out.glob("model*.safetensors"))
    test = made["test"]
    found = "  ".join(f"{name} {x:.4g}" for name, x in test.items() if isinstance(x, float))
    print(
        f"{options.out}: {made['checkpoint']}, {size / 1e6:.2f} MB. On {test['n']} test "
        f"sequences: {found}"
    )
    return 0


def _write(folder: Path, options: ExportOptions, device: Any) -> dict[str, Any]:
    """Write the model in the format that is asked for; made.json."""
    rest = {
        "checkpoint": options.checkpoint,
        "dtype": options.dtype or ("bf16" if options.format == "entp" else "fp32"),
        "shard_mib": options.shard_mib,
        "test_sequences": options.test_sequences,
        "data": options.data,
        "device": device,
    }
    if options.format == "entp":
        from entp.training.export import export

        return export(folder, options.out, **rest)
    from entp.hf.export import export_hf

    return export_hf(folder, options.out, format=options.format, **rest)
