"""Checkpoints that survive a kill, a full disk and a damaged file.

    runs/first/
      config.json                     the whole run
      environment.json                versions, device, commit, date
      metrics.jsonl                   one line per measurement
      checkpoints/step-00000200/      the last two: model.safetensors, config.json, trainer.pt
      checkpoints/best-00000150/      the best validation: model.safetensors, config.json
                                      (both with checksums.json)
      frozen/                         weights that are not trained, if there are any

A checkpoint is written into a hidden folder, flushed to disk and renamed: it is there whole or not
at all.
"""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from entp import pretrained
from entp.config import AnyModelConfig, ModelConfig, Run
from entp.config.json import model_from_json, run_from_json, run_to_json
from entp.errors import InputError
from entp.files import CHECKSUMS, Damaged, parse_json, verify_folder, write_folder
from entp.model.build import build_model
from entp.tasks.tokens import look_into
from entp.training.frozen import FOLDER as FROZEN
from entp.training.frozen import NOTE, join, verify_frozen
from entp.training.weights import INDEX, WHOLE, read_weights, weight_files, weights_name

KEEP = 2


def save_model(
    model: Any,
    folder: str | Path,
    run: Run | None = None,
    dtype: torch.dtype | None = None,
    more: dict[str, bytes] | None = None,
    shard_mib: float | None = None,
) -> Path:
    """Save a model so that `load(folder)` gives it back; `run` says how it was made.

    dtype: of the saved weights, if not their own. more: other files for the folder.
    shard_mib: no file of weights is larger than so many MiB; None: one file.
    """
    here = {p.name for p in Path(folder).iterdir()} if Path(folder).is_dir() else set()
    if here and not here & {WHOLE, INDEX}:
        raise InputError(
            f"{folder} holds other files than a model's, such as {min(here)}: give a new folder."
        )
    if run is None and not isinstance(model.config, ModelConfig):
        raise InputError(
            f"a {type(model).__name__} of HuggingFace's is saved with its run, or by "
            "model.network.save_pretrained(folder)."
        )
    config = {"model": dataclasses.asdict(model.config)} if run is None else run_to_json(run)
    files = weight_files(model.state_dict(), dtype, shard_mib)
    files["config.json"] = _json_bytes(config)
    return write_folder(Path(folder), {**files, **(more or {})})


def save_checkpoint(
    out: Path,
    step: int,
    weights: dict[str, Tensor],
    run: Run,
    trainer: dict[str, Any] | None,
    more: dict[str, bytes] | None = None,
) -> Path:
    """Write checkpoints/step-N (with trainer state, removing older ones) or checkpoints/best-N
    (without). more: what it says of the run's frozen weights, which are not among these."""
    kind = "best" if trainer is None else "step"
    files = {**weight_files(weights), "config.json": _json_bytes(run_to_json(run)), **(more or {})}
    if trainer is not None:
        buffer = io.BytesIO()
        torch.save(trainer, buffer)
        files["trainer.pt"] = buffer.getvalue()
    folder = write_folder(out / "checkpoints" / f"{kind}-{step:08d}", files)
    if kind == "step":
        keep_last(out, step)
    return folder


def keep_last(out: Path, step: int) -> None:
    """Remove all checkpoints but that of this step and the one before it.

    Later ones are damaged, or training would have gone on from them.
    """
    found = _checkpoints(out, "step")
    kept = [folder for folder in found if step_of(folder) <= step][:KEEP]
    for folder in found:
        if folder not in kept:
            shutil.rmtree(folder, ignore_errors=True)


def keep_best(out: Path, step: int | None) -> bool:
    """Remove all best checkpoints but that of this step; whether that one is there and whole.

    Others are older, or of a trajectory that was abandoned: after a crash, training goes on from
    an earlier step.
    """
    kept = False
    for folder in _checkpoints(out, "best"):
        if step_of(folder) == step:
            kept = is_whole(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return kept


def is_whole(folder: Path) -> bool:
    """Whether every file of the checkpoint is what was written."""
    try:
        verify(folder)
    except Damaged:
        return False
    return True


def newest(out: Path, kind: Literal["step", "best"] = "step") -> Path | None:
    """The newest undamaged checkpoint of a run, or None; damaged ones are named on stderr."""
    for folder in _checkpoints(out, kind):
        try:
            verify(folder)
            return folder
        except Damaged as error:
            print(
                f"checkpoint {folder} is damaged ({error}); trying the one before it.",
                file=sys.stderr,
            )
    return None


def verify(folder: Path) -> None:
    """Raise Damaged unless every file of the checkpoint is what was written."""
    needed = (weights_name(folder) or WHOLE, "config.json")
    verify_folder(folder, needed, ("trainer.pt", NOTE))
    verify_frozen(folder)


def read_trainer(folder: Path) -> dict[str, Any]:
    """The trainer state of a checkpoint; read without unpickling code."""
    found = torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True)
    return {"measured_at": found["step"], **found}  # old ones do not say


def load(
    path: str | Path,
    checkpoint: Literal["best", "last"] = "best",
    device: str | torch.device = "cpu",
) -> Any:
    """The model of a run folder (its best or its last checkpoint), of one checkpoint folder, or one
    that comes with entp: a Transformer, or a model of entp.hf where the run trained one."""
    folder = find(Path(path), checkpoint)
    config = read_model(folder)
    tensors = join(folder, read_weights(folder))
    model = build_model(config)
    if any(t.dtype == torch.float64 for t in tensors.values()):
        model = model.double()
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise InputError(
            f"the weights in {folder} do not fit its config.json: {' '.join(str(error).split())}"
        ) from None
    return model.to(device).eval()


def read_model(folder: Path) -> AnyModelConfig:
    """The configuration of the model in a folder with weights."""
    path = folder / "config.json"
    return model_from_json(_read_json(path), str(path))


def load_run(path: str | Path, checkpoint: Literal["best", "last"] = "best") -> Run:
    """The run that made the model in `path`; its tokenizer is found from now on."""
    folder = find(Path(path), checkpoint)
    look_into(folder)
    return run_from_json(_read_json(folder / "config.json"), str(path))


def find(path: Path, checkpoint: Literal["best", "last"] = "best") -> Path:
    """The folder with the weights: `path` itself, or a run's best (else last) whole checkpoint."""
    if not path.is_dir() and str(path) in pretrained.names():
        path = pretrained.HERE / path
    if not path.is_dir():
        known = f", or one of {', '.join(names)}" if (names := pretrained.names()) else ""
        raise InputError(
            f"there is no run folder {path}: give the --out of a finished or interrupted `entp "
            f"train`, a model that `entp export` wrote{known}. A folder in HuggingFace's "
            "format is for entp.hf.load, `entp train TASK --init`, `entp evaluate`, `entp "
            "generate` and `entp lm-eval`."
        )
    if weights_name(path) is not None:
        if (path / CHECKSUMS).is_file():
            try:
                verify(path)
            except Damaged as error:
                raise InputError(f"the checkpoint {path} is damaged: {error}.") from None
        return path
    folder = (newest(path, "best") if checkpoint == "best" else None) or newest(path, "step")
    if folder is None:
        raise InputError(
            f"{path} holds no complete checkpoint: the run stopped before its first one. Continue "
            "it with --resume."
        )
    return folder


def remove_leftovers(out: Path) -> None:
    """Delete what a killed process left half-written."""
    for folder in (*out.glob(f".{FROZEN}.*tmp"), *(out / "checkpoints").glob(".*.tmp")):
        shutil.rmtree(folder, ignore_errors=True)


def _checkpoints(out: Path, kind: str) -> list[Path]:
    """Checkpoint folders of a kind, newest first. Other names, such as those of a person's copies,
    are none of ours."""
    found = [
        p
        for p in (out / "checkpoints").glob(f"{kind}-*")
        if p.is_dir() and p.name.removeprefix(f"{kind}-").isdecimal()
    ]
    return sorted(found, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    """The step of a checkpoint folder."""
    return int(folder.name.partition("-")[2])


def _json_bytes(data: dict[str, Any]) -> bytes:
    return json.dumps(data, indent=1).encode()


def _read_json(path: Path) -> Any:
    try:
        return parse_json(path.read_text())
    except OSError:
        raise InputError(f"{path} is missing: the folder is not a complete run.") from None
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}.") from None
