"""The figure beside each file of results."""

from __future__ import annotations

import errno
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from faulty_disk import Disk, Fails
from killed_runs import two_runs
from small_runs import fit

from entp.errors import InputError
from entp.experiments import study as study_module
from entp.experiments.study import RESULTS, Study
from entp.report.figures import draw_record
from entp.results.schema import Record

pytest.importorskip("matplotlib")


@pytest.fixture
def study(tmp_path: Path) -> Study:
    """Results of a run, in two folders."""
    recipe = two_runs(2)
    found = Study(recipe.record(), recipe.runs(), tmp_path / "a", tmp_path, tmp_path / "b/all.json")
    for path in found.places:
        path.parent.mkdir()
    fit(found.arms[0].run, tmp_path / "first")
    found.write()
    return found


def test_those_who_draw_at_once_wait_for_each_other(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawing, seen = threading.Lock(), []

    def watched(record: Record, path: Path) -> bool:
        alone = drawing.acquire(blocking=False)
        seen.append(alone)
        time.sleep(0.05)
        try:
            return draw_record(record, path)
        finally:
            if alone:
                drawing.release()

    monkeypatch.setattr(study_module, "draw_record", watched)
    with ThreadPoolExecutor(4) as pool:
        for one in [pool.submit(study.draw) for _ in range(8)]:
            one.result()
    assert seen == [True] * 8
    one, other = (path.with_suffix(".png").read_bytes() for path in study.places)
    assert one == other
    assert sorted(path.name for path in study.root.iterdir()) == [RESULTS, "results.png"]


def test_figure_has_what_another_process_has_added(study: Study) -> None:
    study.draw()
    before = [path.with_suffix(".png").read_bytes() for path in study.places]
    fit(study.arms[1].run, study.folders / "second")
    study.write()
    study.draw()
    assert all(
        path.with_suffix(".png").read_bytes() != old
        for path, old in zip(study.places, before, strict=True)
    )


def test_full_disk_is_told(study: Study) -> None:
    with Disk(study.root, Fails(1, errno.ENOSPC)), pytest.raises(InputError, match="Make room"):
        study.draw()
