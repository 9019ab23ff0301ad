"""A run whose disk fails, or whose process ends, at any of its calls: resumed, it equals the
uninterrupted run bit for bit."""

from __future__ import annotations

import errno
import io
import itertools
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_disk import Call, Copies, Disk, Fails, contents, damages, ends_at, in_memory, read_only
from small_runs import TASK, fit, small_run

from entp.config import EmaConfig, Run, model_for
from entp.errors import InputError
from entp.files import CHECKSUMS
from entp.model import Transformer
from entp.results.environment import read_environment
from entp.training.checkpoint import find, load, newest, save_model, verify
from entp.training.cuda_graph import Stepper
from entp.training.initialise import Init
from entp.training.loggers import read_metrics

NOT_COMPARED = ("environment.json", "trainer.pt", "checksums.json")
"""Files with dates, or whose content is compared and not their bytes."""
EVERY = {"eval_every": 1, "checkpoint_every": 1, "eval_batches": 1, "monitor": "loss"}
SPARSE = {**EVERY, "eval_every": 2, "checkpoint_every": 2}


@pytest.fixture(scope="module", autouse=True)
def _still() -> Iterator[None]:
    """No seconds in the metrics, so that equal runs have equal files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: 0.0)
        patch.setenv("ENTP_COMMIT", "none")
        yield


@pytest.fixture
def place() -> Iterator[Path]:
    with in_memory() as folder:
        yield folder


def tiny_run(steps: int = 3, **train: Any) -> Run:
    """An EMA, a measurement and a checkpoint at every step."""
    model = model_for(TASK, "small", layers=1, heads=1, width=4)
    every = {**EVERY, **train}
    return small_run(steps=steps, model=model, batch_size=2, ema=EmaConfig(steps=4), train=every)


def go_on(run: Run, out: Path, init: Init | None = None) -> None:
    """As whoever started it does: again from the beginning, or with --resume."""
    fit(run, out, resume=(out / "config.json").exists(), init=init)


def plain(value: Any) -> Any:
    """The same with numbers instead of tensors, to be compared."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def state_of(out: Path) -> dict[str, Any]:
    """All that a run folder has, by file: one with leftovers, or with a checkpoint that is not
    whole, is none."""
    found: dict[str, Any] = dict(contents(out))
    for folder in (out / "checkpoints").iterdir():
        verify(folder)
    for name in found:
        if name.endswith("trainer.pt"):
            found[name] = trainer_of(found[name])
        elif name.endswith(NOT_COMPARED):
            found[name] = None
    return found


@cache
def trainer_of(data: bytes) -> Any:
    """The content of a trainer.pt: its bytes tell whether the run was resumed."""
    return plain(torch.load(io.BytesIO(data), weights_only=True))


def whole_state(run: Run, place: Path, init: Init | None = None) -> dict[str, Any]:
    """That of the uninterrupted run."""
    fit(run, place / "whole", init=init)
    return state_of(place / "whole")


def assert_ends_are_survived(
    run: Run, place: Path, init: Init | None = None, **options: Any
) -> int:
    """Whatever call the process ends before: how many states there are. options: of Copies."""
    whole = whole_state(run, place, init)
    copies = Copies(place / "copies", **options)
    with Disk(place / "run", copies):
        fit(run, place / "run", init=init)
    for call, out in copies:
        go_on(run, out, init)
        assert state_of(out) == whole, call
    return len(copies.found)


def assert_errors_are_survived(
    run: Run, place: Path, code: int, lasting: bool, begun: Path | None = None
) -> int:
    """Whatever call fails, of a new run or of one that goes on from `begun`: how many there are."""
    whole = whole_state(run, place)
    out, seen = place / "run", [without_dates(place / "whole")]
    for number in itertools.count(1):
        if begun is not None:
            shutil.copytree(begun, out)
        with Disk(out, Fails(number, code, lasting)) as disk:
            told = error_of(run, out)
        if number > len(disk.calls):
            break
        assert_told(told, out)
        if without_dates(out) not in seen:
            seen.append(without_dates(out))
            go_on(run, out)
            assert state_of(out) == whole, disk.calls[number - 1]
        shutil.rmtree(out, ignore_errors=True)
    return number - 1


def begun_run(run: Run, place: Path) -> Path:
    """What is left of a run whose process ends when its second checkpoint is there."""
    copies = Copies(place / "begun")
    with Disk(place / "cut", copies):
        fit(run, place / "cut")
    return next(out for _, out in copies if (out / "checkpoints/step-00000002").exists())


def without_dates(out: Path) -> dict[str, bytes | None]:
    return {name: d for name, d in contents(out).items() if "environment.json" not in name}


def error_of(run: Run, out: Path) -> str:
    """What training says when it cannot go on; empty if it can."""
    try:
        go_on(run, out)
    except InputError as error:
        return str(error)
    return ""


def assert_told(told: str, out: Path) -> None:
    """The sentence gives the way to go on that is right."""
    if told:
        assert str(out) in told
        assert ("use --resume" in told) == (out / "config.json").exists()


@pytest.mark.slow
def test_run_survives_an_end_at_any_call(place: Path) -> None:
    assert assert_ends_are_survived(tiny_run(), place) > 100


def test_run_survives_an_end_between_two_checkpoints(place: Path) -> None:
    run = tiny_run(6, **SPARSE)
    assert assert_ends_are_survived(run, place, about=is_line) > 15


def is_line(call: Call) -> bool:
    return call.kind == "write" and call.path.name == "metrics.jsonl"


def test_run_that_a_signal_stopped_survives_an_end_at_any_call(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the evaluation is made that the signal left out."""
    step, run = Stepper.__call__, tiny_run(5, **SPARSE)

    def signalled(stepper: Stepper, *rest: Any) -> Any:
        if stepper.state.step == 1:
            signal.raise_signal(signal.SIGTERM)
        return step(stepper, *rest)

    whole = whole_state(run, place)
    out, copies = place / "run", Copies(place / "copies")
    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "__call__", signalled)
        assert fit(run, out).step == 2
    assert [row["kind"] for row in read_metrics(out)] == ["train", "train"]
    with Disk(out, copies):
        go_on(run, out)
    for call, copy in copies:
        go_on(run, copy)
        assert state_of(copy) == whole, call


def test_start_that_came_to_nothing_is_no_part_of_a_run(place: Path) -> None:
    """It may have been on another machine."""
    copies = Copies(place / "copies")
    with Disk(place / "run", copies):
        fit(tiny_run(1), place / "run")
    begun = [out for _, out in copies if (out / "environment.json").exists()]
    fresh = [out for out in begun if not (out / "config.json").exists()]
    assert len(fresh) > 2
    for out in (*fresh, begun[-1]):
        go_on(tiny_run(1), out)
        told = read_environment(out)
        assert len(told.get("resumed", [])) == (out == begun[-1])


def test_copies_are_what_an_end_leaves(place: Path) -> None:
    run, copies = tiny_run(1), Copies(place / "copies")
    with Disk(place / "run", copies) as disk:
        fit(run, place / "run")
    known = [without_dates(out) for _, out in copies]
    for number in range(5, len(disk.calls), 9):
        out = place / str(number)
        assert ends_at(number, out, partial(fit, run, out))
        assert without_dates(out) in known
    assert not ends_at(len(disk.calls) + 1, place / "last", partial(fit, run, place / "last"))


@pytest.mark.parametrize(("code", "lasting"), [(errno.ENOSPC, True), (errno.EIO, False)])
def test_new_run_survives_an_error_at_any_call(code: int, lasting: bool, place: Path) -> None:
    assert assert_errors_are_survived(tiny_run(1), place, code, lasting) > 60


@pytest.mark.slow
def test_resumed_run_survives_a_disk_that_gets_full_at_any_call(place: Path) -> None:
    run = tiny_run()
    begun = begun_run(run, place)
    assert assert_errors_are_survived(run, place, errno.ENOSPC, True, begun) > 80


@pytest.mark.slow
def test_run_survives_a_power_failure_at_any_call(place: Path) -> None:
    assert assert_ends_are_survived(tiny_run(2), place, lost=True) > 50


def test_lines_of_a_checkpoint_are_on_disk_before_it(place: Path) -> None:
    """So that a power failure takes no line that nobody writes again."""
    with Disk(place / "run") as disk:
        fit(tiny_run(), place / "run")
    calls = [(call.kind, call.path.name) for call in disk.calls]
    saved = [n for n, call in enumerate(calls) if call == ("rename", ".step-00000002.tmp")]
    lines = [n for n, call in enumerate(calls[: saved[0]]) if call == ("write", "metrics.jsonl")]
    assert ("flush", "metrics.jsonl") in calls[lines[-1] : saved[0]]


def test_new_folders_are_on_disk_before_a_checkpoint_is_kept(place: Path) -> None:
    """Their names are in the folders above, which have to be flushed as well."""
    out = place / "above" / "run"
    with Disk(place) as disk:
        fit(tiny_run(1), out)
    calls = [(call.kind, call.path) for call in disk.calls]
    saved = calls.index(("rename", out / "checkpoints/.step-00000001.tmp"))
    for folder in (out.parent, out, out / "checkpoints"):
        made = calls.index(("mkdir", folder))
        assert ("flush", folder.parent) in calls[made:saved], folder


def test_read_only_folder_is_told_and_left_alone(place: Path) -> None:
    run = tiny_run()
    whole, begun = whole_state(run, place), begun_run(run, place)
    before = contents(begun)
    for out, told in ((begun, "step-00000002"), (place / "new", "no checkpoint had been written")):
        with Disk(out, read_only), pytest.raises(InputError, match=f"Read-only.*{told}"):
            go_on(run, out)
    assert contents(begun) == before
    go_on(run, begun)
    assert state_of(begun) == whole


def test_damaged_newest_checkpoint_is_named_and_the_run_ends_the_same(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever file lost its content, a part of it, or has another bit."""
    run = tiny_run()
    whole, out = whole_state(run, place), place / "whole"
    for path in (out / "checkpoints/step-00000003").iterdir():
        for damage in damages(path):
            assert newest(out) == out / "checkpoints/step-00000002", damage
            said = capsys.readouterr().err
            assert "step-00000003 is damaged" in said, damage
            assert path.name in said or path.name == CHECKSUMS, damage
        copy = shutil.copytree(out, place / path.name)
        (copy / path.relative_to(out)).write_bytes(b"")
        go_on(run, copy)
        assert state_of(copy) == whole, path


def test_damaged_checkpoint_takes_no_whole_ones_place(place: Path) -> None:
    """It is removed, so that two whole ones are kept."""
    out = place / "run"
    fit(tiny_run(), out)
    (out / "checkpoints/step-00000003/trainer.pt").write_bytes(b"")
    fit(tiny_run(4, checkpoint_every=4), out, resume=True)
    names = {path.name for path in (out / "checkpoints").glob("step-*")}
    assert names == {"step-00000002", "step-00000004"}


def test_damaged_best_checkpoint_is_refused(place: Path) -> None:
    fit(tiny_run(), place / "run")
    best = find(place / "run")
    assert best.name.startswith("best-")
    for path in best.iterdir():
        for damage in damages(path):
            with pytest.raises(InputError, match="is damaged"):
                load(best)
            assert find(place / "run").name == "step-00000003", damage
    assert find(place / "run") == best


def test_torn_last_line_of_metrics_is_written_again(place: Path) -> None:
    """Wherever it is torn."""
    run = tiny_run()
    whole, begun = whole_state(run, place), begun_run(run, place)
    lines = (begun / "metrics.jsonl").read_bytes()
    more = b'{"kind": "train", "step": 3, "loss": 2.5, "seconds": 0.0}\n'
    for size in range(1, len(more), 9):
        out = shutil.copytree(begun, place / str(size))
        (out / "metrics.jsonl").write_bytes(lines + more[:size])
        assert [row["step"] for row in read_metrics(out)] == [1, 1, 2, 2]
        go_on(run, out)
        assert state_of(out) == whole, size


def test_model_that_is_written_again_is_the_old_one_or_the_new(place: Path) -> None:
    """Or both are there under other names, between the two calls that exchange them."""
    old, new = (save_model(seeded_model(n), place / str(n)) for n in (0, 1))
    allowed, exchanged = [contents(old), contents(new)], 0
    copies = Copies(place / "copies")
    shutil.copytree(old, place / "root" / "model")
    with Disk(place / "root", copies) as disk:
        save_model(seeded_model(1), place / "root" / "model")
    for _, root in copies:
        if (root / "model").exists():
            assert contents(root / "model") in allowed
        else:
            exchanged += 1
            assert [contents(root / name) for name in (".model.old.tmp", ".model.tmp")] == allowed
        save_model(seeded_model(1), root / "model")
        assert contents(root) == contents(place / "root")
    assert exchanged == 1
    for number in range(1, len(disk.calls) + 1):
        root = place / f"root-{number}"
        shutil.copytree(old, root / "model")
        with Disk(root, Fails(number, errno.EIO)), suppress(OSError):
            save_model(seeded_model(1), root / "model")
        assert contents(root / "model") in allowed, disk.calls[number - 1]


def seeded_model(seed: int) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(tiny_run().model)


@pytest.mark.slow
def test_frozen_weights_survive_an_end_at_any_call(place: Path) -> None:
    pytest.importorskip("transformers", reason="needs the transformers library")
    from small_networks import begin, folder_of

    made = folder_of("llama", place / "w")
    run, init = begin(made, lora_rank=1, steps=1, ema=EmaConfig(steps=4), train=EVERY)
    assert assert_ends_are_survived(run, place, init, about=is_frozen) > 10


def is_frozen(call: Call) -> bool:
    return "frozen" in str(call.path)
