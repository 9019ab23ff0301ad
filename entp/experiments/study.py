"""The results of a recipe: what is known of its runs, and the files that they are written to."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from entp.errors import InputError
from entp.experiments.collect import (
    Kept,
    add_metrics,
    baseline_streams,
    collect,
    find_folder,
    match_runs,
)
from entp.experiments.recipe import ArmRun
from entp.experiments.sibling import read_sibling
from entp.experiments.testing import (
    batches_of,
    is_complete,
)
from entp.files import explain_failed_writes, lock_folder, write_file
from entp.report.figures import draw_record
from entp.results.schema import BaselineRecord, Record, TotalsData
from entp.results.store import better_run, read_record, write_record
from entp.tasks.base import Split
from entp.training.evaluate import evaluate_baseline

RESULTS = "results.json"
WRITE_AFTER = 10.0
"""Seconds of baselines that may be lost."""


@dataclasses.dataclass(frozen=True)
class Study:
    """The arms of a recipe, and where their results are."""

    blank: Record
    arms: list[ArmRun]
    root: Path
    """Where the results are."""
    folders: Path
    """Where the run folders are."""
    record: Path | None

    @property
    def places(self) -> list[Path]:
        """The files that results are written to."""
        own = self.root / RESULTS
        return [own] if self.record is None else [own, self.record]

    def read_kept(self, quiet: bool = True) -> Kept:
        """The runs in the record that are of these arms; none where there is no record yet."""
        if self.record is None or not self.record.exists():
            return {}
        return match_runs(self._read(self.record), self.arms, self.record, quiet)

    def read_known(self, quiet: bool = True) -> Kept:
        """The same, and the runs that the recipe with these run folders has in a record beside
        ours."""
        kept, recipe = self.read_kept(), self.folders.name
        if self.record is None or recipe == self.blank.recipe:
            return kept
        path = self.record.with_name(f"{recipe}.json")
        metrics = {metric.name for metric in self.blank.metrics}
        others = read_sibling(path, recipe, self.arms, metrics, quiet) if path.exists() else {}
        for arm in self.arms:
            best = better_run(kept.get(arm.hash), others.get(arm.hash))
            if best is not None and best is not kept.get(arm.hash):
                kept[arm.hash] = best
                if not quiet:
                    print(f"{arm.name}: as {path} has it", file=sys.stderr)
        return kept

    def _read(self, path: Path) -> Record:
        found = read_record(path)
        if found.recipe != self.blank.recipe:
            raise InputError(
                f"{path} holds results of {found.recipe}, not of {self.blank.recipe}: give another "
                "name."
            )
        return found

    def keep_what_is_left_out(self, kept: int) -> None:
        """Copy a record that is about to lose runs: they may be hours of a GPU."""
        if self.record is None or not self.record.exists():
            return
        if sum(len(arm.runs) for arm in self._read(self.record).arms.values()) > kept:
            names = (
                self.record.with_name(f"{self.record.name}.old{number or ''}")
                for number in itertools.count()
            )
            copy = next(path for path in names if not path.exists())
            write_file(copy, self.record.read_bytes())
            print(f"{self.record}: what is left out is still in {copy}.", file=sys.stderr)

    def is_to_do(self, arm: ArmRun, kept: Kept) -> bool:
        """Whether a run is to be trained or tested. One that the record has as done but untested is
        tested if its folder is here, and trained again if not."""
        run = kept.get(arm.hash)
        if run is None or not run.done:
            return True
        here = (find_folder(arm, self.folders) / "config.json").exists()
        if run.test is not None:
            return here and not is_complete(run.test, arm)
        if not here:
            print(
                f"{self.record}: {arm.name} is done but untested, and its folder is not in "
                f"{self.folders}: it is trained again.",
                file=sys.stderr,
            )
        return True

    def recorded(self, arms: Sequence[ArmRun]) -> Study | None:
        """What is to be written while these arms are under way: without a record nothing, as their
        folders have it all."""
        return self if arms and self.record is not None else None

    def write(self, answered: Sequence[BaselineRecord] = ()) -> Record:
        """Collect what there is and write it, with what baselines answered since."""
        return self._write(self.places, answered)

    def write_so_far(self) -> None:
        """The same for the record alone, while arms are under way."""
        self._write(self.places[-1:])

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Inside, no other process writes to a folder of these results. All wait in one order."""
        with ExitStack() as stack:
            for folder in sorted({path.parent.resolve() for path in self.places}):
                stack.enter_context(lock_folder(folder))
            yield

    def _write(self, places: Sequence[Path], answered: Sequence[BaselineRecord] = ()) -> Record:
        """Another process may have added to the record since it was read."""
        with explain_failed_writes(self.root), self.locked():
            blank = self.blank
            if self.record is not None and self.record.exists():
                blank = add_metrics(blank, self._read(self.record), self.read_kept())
            found = collect(blank, self.arms, self.folders, self.read_known())
            streams = baseline_streams(self.arms, [*self._known_baselines(), *answered])
            told = [one for _, one in streams.values() if one.totals]
            found = found.model_copy(update={"baselines": told})
            for path in places:
                found = write_record(path, found)
        return found

    def _known_baselines(self) -> list[BaselineRecord]:
        """What the files have of baselines; files that are not of this recipe have none."""
        known: list[BaselineRecord] = []
        for path in self.places:
            try:
                known += self._read(path).baselines if path.exists() else []
            except InputError:  # the record has been read before; ours is written anew
                continue
        return known

    def add_baselines(self, found: Record, only: Sequence[str] = ()) -> Record:
        """Let the baselines answer what they have not, or what `only` some arms are tested on. What
        takes a while is written as soon as it is there."""
        arms = [arm for arm in self.arms if not only or arm.label in only]
        answered: list[BaselineRecord] = []
        start = time.monotonic()
        for arm, one in baseline_streams(arms, found.baselines).values():
            names = [name for name in arm.baseline_names if name not in one.totals]
            if names:
                where = "" if one.split == "test" else f", {one.split}"
                print(f"{arm.label}{where}: baselines", file=sys.stderr, flush=True)
            for name in names:
                totals = _answer(arm, one.split, name)
                if totals is not None:
                    answered.append(one.model_copy(update={"totals": {name: totals}}))
                if answered and time.monotonic() - start > WRITE_AFTER:
                    found, answered = self.write(answered), []
                    start = time.monotonic()
        return self.write(answered) if answered else found

    def draw(self) -> None:
        """The figure beside each file of results, of what is in it now: another process may have
        added to it."""
        first, *others = (path.with_suffix(".png") for path in self.places)
        with explain_failed_writes(self.root), self.locked():
            if draw_record(self._read(self.places[0]), first):
                for other in others:
                    write_file(other, first.read_bytes())


def _answer(arm: ArmRun, split: Split, name: str) -> TotalsData | None:
    """What a baseline has on test sequences; None, with a word, if it cannot answer here."""
    try:
        return TotalsData.of(evaluate_baseline(arm.test_task, name, batches_of(arm, split)))
    except InputError as error:  # such as a library that is not installed
        print(f"baseline {name} is left out: {error}", file=sys.stderr, flush=True)
        return None
