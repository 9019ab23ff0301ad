"""`entp theory pointers`: chase and compose as weights set by hand."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from entp.bench.options import at_least
from entp.errors import InputError
from entp.tasks.composition import Compose
from entp.tasks.pointers import Chase

if TYPE_CHECKING:
    from entp.model import Transformer

LONGEST = 1024
"""Longest sequence on which weights are tried."""
TASKS: dict[str, type[Chase] | type[Compose]] = {"chase": Chase, "compose": Compose}
TRIED = ("entp", "decoder", "prefix-lm")


@dataclass(frozen=True)
class PointersOptions:
    """Chase or compose as weights set by hand: build encoder and decoder, try them, save them."""

    task: Literal["chase", "compose"] = "chase"
    """Which task. Its sizes are the options below; without one the task's own."""
    nodes: int | None = None
    """Of chase: entries of the table."""
    hops: int | None = None
    """Of chase: queries; the k-th follows k pointers."""
    table: Literal["cycle", "function"] | None = None
    """Of chase: one cycle through all nodes, or any function."""
    tables: int | None = None
    """Of compose: tables, and steps."""
    choices: int | None = None
    """Of compose: permutations in a table."""
    size: int | None = None
    """Of compose: values that are permuted."""
    order: Literal["first-to-last", "last-to-first"] | None = None
    """Of compose: how tables stand in the sequence."""
    sequences: int = 64
    """Random sequences to try, in every mode."""
    seed: int = 0
    """Seed of these."""
    out: Path | None = None
    """Folder for a checkpoint of each: `entp evaluate` takes them."""

    def __post_init__(self) -> None:
        at_least(self, 1, "sequences")
        at_least(self, 0, "seed")
        length = self.chosen().model_needs()["context_length"]
        if length > LONGEST:
            raise InputError(
                f"these sizes make sequences of {length} tokens: at most {LONGEST} are tried, "
                "because attention takes n² numbers. Give smaller ones."
            )

    def chosen(self) -> Chase | Compose:
        """The task with the sizes that were given."""
        names = {f.name: kind for kind in TASKS.values() for f in fields(kind)}
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        kind = TASKS[self.task]
        for name in given:
            if names[name] is not kind:
                raise InputError(
                    f"--{name} is an option of {names[name].name}: with --task {self.task} leave "
                    "it out."
                )
        return kind(**given)

    def run(self) -> tuple[str, int]:
        from entp.terminal import format_table
        from entp.theory.pointers import tried, weights_for

        task = self.chosen()
        batch = task.batch(self.seed, "test", 0, self.sequences)
        rows, saved, wrong = [], [], 0
        for name, (mode, model) in weights_for(task).items():
            found = {each: tried(model, batch, each, task.prefix) for each in TRIED}
            config = model.config
            right = [f"{one.right} of {one.targets}" for one in found.values()]
            sizes = [config.layers, config.width, config.heads]
            rows.append([name, *map(str, sizes), *right, f"{found[mode].margin:.1f}"])
            saved += self._saved(name, mode, model, task)
            wrong += found[mode].targets - found[mode].right
        modes = [f"right ({mode})" for mode in TRIED]
        table = format_table(["weights", "layers", "width", "heads", *modes, "least margin"], rows)
        return "\n".join([f"{task!r}", table, *saved]), 1 if wrong else 0

    def _saved(self, name: str, mode: str, model: Transformer, task: Any) -> list[str]:
        """A line about the checkpoint, saved as a run of the task."""
        if self.out is None:
            return []
        from entp.config import Run, TrainConfig
        from entp.training.checkpoint import save_model

        # fp32: no autocast of float64.
        run = Run(task, model.config, mode, train=TrainConfig(precision="fp32"))
        folder = save_model(model, self.out / name, run)
        return [f"saved: {folder}. Try: entp evaluate {folder}"]
