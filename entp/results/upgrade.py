"""Files of results and tests of earlier versions, in today's schema.

Before version 2 a record had means only, under other names: `final` and `fresh` for the test,
`sequence_accuracy` for exact match, `settings` for the configuration.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from entp.config.upgrade import METRICS as RENAMED
from entp.config.upgrade import upgrade_config, upgrade_values
from entp.results.schema import VERSION
from entp.tasks.metrics import EXACT_MATCH, LOSS, TOKEN_ACCURACY, Metric, Sums

MEASURED = {metric.name: metric for metric in (EXACT_MATCH, TOKEN_ACCURACY, LOSS)}
"""All that version 1 could measure."""
BY_LENGTH = 2048
"""Sequences at most by which version 1 measured accuracy by length, rounded up to batches."""


OLD_STREAM = (
    "Tested on the test stream of earlier versions, by which settings had been compared as well; "
    "new runs are tested on one that is used for nothing else."
)


def upgrade_record(data: Any) -> Any:
    """A file of results in today's schema; what is not one stays as it is."""
    if not isinstance(data, dict) or "schema_version" in data or "recipe" not in data:
        return data
    arms = _object(data, "arms")
    metrics = _metrics(arms)
    not_run = {label: arm["why"] for label, arm in arms.items() if "why" in _dict(arm)}
    return {
        "schema_version": VERSION,
        **{key: data[key] for key in ("recipe", "title", "question") if key in data},
        "command": f"entp reproduce {data['recipe']}",
        "metrics": [_spec(name) for name in metrics],
        "figures": [{"kind": "curves"}],
        "arms": {
            label: _arm(_dict(arm, f"arms.{label}"), f"arms.{label}")
            for label, arm in arms.items()
            if label not in not_run
        },
        "not_run": not_run,
    }


def _dict(value: Any, where: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {value!r:.40}: it must be an object")
    return value


def _object(data: dict[str, Any], key: str) -> dict[str, Any]:
    if key not in data:
        raise ValueError(f"it has no {key!r}")
    return _dict(data[key], key)


def _metrics(arms: dict[str, Any]) -> list[str]:
    """What the arms measured, in the order of their table."""
    found: dict[str, None] = {}
    for label, arm in arms.items():
        found |= dict.fromkeys(_dict(arm, f"arms.{label}").get("ours", {}))
    return [RENAMED.get(name, name) for name in found] or list(MEASURED)


def _spec(name: str) -> dict[str, Any]:
    metric = MEASURED.get(name, Metric(name))
    return dataclasses.asdict(metric)


def _arm(arm: dict[str, Any], where: str) -> dict[str, Any]:
    runs = arm.get("runs", [])
    if not isinstance(runs, list):
        raise ValueError(f"{where}.runs is {runs!r:.40}: it must be a list")
    return {
        "factors": {},
        "paper": upgrade_values(arm.get("paper", {})),
        "seeds": arm.get("seeds", []),
        "runs": [_run(_dict(run, f"{where}.runs"), where) for run in runs],
    }


def _run(run: dict[str, Any], where: str) -> dict[str, Any]:
    """A run with its values under today's names; what is missing stays missing, for the schema."""
    run = dict(run)
    config = upgrade_config(run.pop("settings", {}))
    if "config" in run:
        run["config_hash"] = run.pop("config")
    if "final" in run:
        run["test"] = upgrade_test(run.pop("final"), config.get("batch_size", 1))
    if isinstance(run.get("steps"), int):
        run["sequences"] = sequences_by(config, run["steps"])
    if isinstance(run.get("best"), dict):
        run["best"] = upgrade_values(run["best"])
    if isinstance(run.get("curve"), list):
        run["curve"] = [_point(_dict(p, f"{where}.curve"), config) for p in run["curve"]]
    return {**run, "config": config}


def _point(point: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """0.0 s was written where the time was not known."""
    values = upgrade_values(point)
    step, seconds = values.pop("step", None), values.pop("seconds", None)
    read = sequences_by(config, step) if isinstance(step, int) else None
    return {"step": step, "seconds": seconds or None, "sequences": read, "values": values}


def sequences_by(config: dict[str, Any], step: int) -> int:
    """Sequences that training read before this step."""
    size = config.get("batch_size", 64)
    first = config.get("curriculum") or {"steps": 0}
    late = config.get("batch_schedule") or {"step": step, "batch_size": size}
    early = min(step, first["steps"])
    after = max(0, step - max(early, late["step"]))
    middle = step - early - after
    return early * (first.get("batch_size") or size) + middle * size + after * late["batch_size"]


def upgrade_test(final: Any, batch_size: int) -> Any:
    """test.json of a run folder from its final.json; what is not one stays as it is."""
    if not isinstance(final, dict) or "totals" in final or "n" not in final:
        return final
    n, by_length = final["n"], final.get("by_length", {})
    found: dict[str, Any] = {
        "checkpoint": final.get("weights"),
        "concurrent_runs": final.get("trained_side_by_side"),
        "totals": _totals(final, n, by_length, batch_size),
        "note": OLD_STREAM,
    }
    told = final.get("generated")
    if told is not None:
        right = _counted(told["right"], told["n"]).to_json()
        found["generated"] = {"sequences": told["n"], "all": {"exact_match": right}}
    return found


def _totals(
    final: dict[str, Any], n: int, by_length: dict[str, float], batch_size: int
) -> dict[str, Any]:
    """Of means: counts where they are known, None for squares that are not."""
    values = {k: v for k, v in upgrade_values(final).items() if k in MEASURED}
    targets = n * max(1, len(by_length))
    sums = {name: Sums(n, v * targets, targets, None, None, None) for name, v in values.items()}
    if "exact_match" in values:
        sums["exact_match"] = _counted(round(values["exact_match"] * n), n)
    slices = {}
    if by_length:
        each = min(n, -(-BY_LENGTH // batch_size) * batch_size)
        bins = {at: _counted(round(p * each), each).to_json() for at, p in by_length.items()}
        slices = {"token_accuracy": {"length": bins}}
    in_order = {name: sums[name].to_json() for name in MEASURED if name in sums}
    return {"sequences": n, "all": in_order, "slices": slices}


def _counted(right: int, n: int) -> Sums:
    """So many of n sequences with one answer each."""
    return Sums(n, right, n, right, right, n)
