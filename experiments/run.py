"""From a configuration to files: the part that every experiment shares.

A folder holds one run of one configuration. A case is the unit of work: its file appears whole or not at all (written
beside, then renamed), so an interrupted run loses at most the case in progress, and the same command continues it.

    config.json         what was asked
    environment.json    where it was computed
    cases/NAME.json     one finished case
    points/NAME.npy     the point that the case ended at
    table.csv           a row per step and run
    summary.csv         a row per run
    figure.png
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from tqdm import tqdm

from ot_newton.experiments.environment import describe_environment
from ot_newton.experiments.errors import InputError, one_line
from ot_newton.experiments.files import load_array, write, write_array, write_csv

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What every experiment can be told; subclasses add their settings.

    `settings()` holds what determines the numbers: a folder is resumed only under equal settings.
    """

    name: ClassVar[str]
    _not_settings: ClassVar[frozenset[str]] = frozenset({"out", "redraw", "preset"})

    out: Path | None = None
    """Folder for the results; a folder under runs/ if none is given."""
    redraw: bool = False
    """Draw the figure again from the saved tables alone; compute nothing."""

    def folder(self) -> Path:
        """The folder that this configuration writes to."""
        preset = getattr(self, "preset", None)
        return self.out if self.out is not None else Path("runs") / (f"{self.name}-{preset}" if preset else self.name)

    def settings(self) -> Row:
        """The settings as plain JSON values."""
        values = {key: value for key, value in dataclasses.asdict(self).items() if key not in self._not_settings}
        return json.loads(json.dumps(values, default=str))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a finished case leaves behind: one row for the summary, a row per step, and the point it ended at."""

    summary: Row
    steps: Sequence[Row]
    point: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Context:
    """What a case is handed: the outcomes of the cases before it, and `progress(fraction)` to call on its way."""

    outcomes: Mapping[str, Outcome]
    progress: Callable[[float], None]


Case = Callable[[Context], Outcome]


@dataclasses.dataclass(frozen=True)
class Results:
    """Outcomes by case, and their tables: `table` has a row per step and run, `summary` a row per run."""

    outcomes: Mapping[str, Outcome]
    table: pd.DataFrame
    summary: pd.DataFrame


def tabulate(outcomes: Mapping[str, Outcome]) -> Results:
    """Stack the rows of all cases; the first column, `run`, names the case."""
    steps = [{"run": name, **row} for name, outcome in outcomes.items() for row in outcome.steps]
    runs = [{"run": name, **outcome.summary} for name, outcome in outcomes.items()]
    return Results(outcomes, pd.DataFrame(steps), pd.DataFrame(runs))


def run_cases(
    config: RunConfig,
    cases: Mapping[str, Case],
    *,
    tables: Callable[[Mapping[str, Outcome]], Results] = tabulate,
) -> Results:
    """Compute the cases that the folder of `config` does not hold yet, and write the tables.

    Args:
        config: settings; they decide the folder, and whether what it holds may be continued.
        cases: name → function that computes the case. They run in this order.
        tables: makes the tables from the finished cases; the place for columns that compare runs.

    Raises:
        InputError: the folder holds another configuration or a damaged case.
        OutputError: a file cannot be written. Finished cases stay.
        KeyboardInterrupt: with a message that says how many cases are finished.
    """
    folder = config.folder()
    _claim(folder, config)
    outcomes = {name: _read_case(folder, name) for name in cases if _case_path(folder, name).is_file()}
    missing = [name for name in cases if name not in outcomes]
    if not missing:
        print(f"all {len(cases)} cases are finished in {folder}: nothing to compute")
    else:
        if outcomes:
            print(f"{len(outcomes)} of {len(cases)} cases are finished in {folder}: going on with the rest")
        write(folder / "environment.json", json.dumps(describe_environment(), indent=2) + "\n")
    try:
        with _progress_bar(config.name, len(missing)) as bar:
            for done, name in enumerate(missing):
                bar.set_postfix_str(name)
                context = Context(outcomes, lambda fraction, done=done: _advance(bar, done + min(fraction, 1.0)))
                outcome = cases[name](context)
                _write_case(folder, name, outcome)
                outcomes[name] = outcome
                _advance(bar, done + 1)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"{len(outcomes)} of {len(cases)} cases are finished in {folder}; the same command goes on from there"
        ) from None
    finally:
        results = tables({name: outcomes[name] for name in cases if name in outcomes})
        if outcomes:
            write_csv(folder / "table.csv", results.table)
            write_csv(folder / "summary.csv", results.summary)
    return results


def _claim(folder: Path, config: RunConfig) -> None:
    path = folder / "config.json"
    wanted = {"experiment": config.name, **config.settings()}
    if path.is_file():
        found = _read_json(path, "give another --out")
        changed = [key for key in [*wanted, *found] if wanted.get(key) != found.get(key)]
        if changed:
            changes = ", ".join(f"{key}: {found.get(key)} → {wanted.get(key)}" for key in dict.fromkeys(changed))
            raise InputError(f"{folder} holds a run with other settings ({changes}); give another --out or remove it")
    write(path, json.dumps(wanted, indent=2) + "\n")


def _read_json(path: Path, remedy: str) -> Row:
    try:
        content = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise InputError(f"{path} is damaged ({one_line(error)}); {remedy}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} is damaged (expected a JSON object, got {type(content).__name__}); {remedy}")
    return content


def _case_path(folder: Path, name: str) -> Path:
    return folder / "cases" / f"{name}.json"


def _point_path(folder: Path, name: str) -> Path:
    return folder / "points" / f"{name}.npy"


def _write_case(folder: Path, name: str, outcome: Outcome) -> None:
    if outcome.point is not None:
        write_array(_point_path(folder, name), outcome.point)
    content = {"summary": outcome.summary, "steps": list(outcome.steps)}
    write(_case_path(folder, name), json.dumps(content, default=_plain) + "\n")


def _read_case(folder: Path, name: str) -> Outcome:
    path, remedy = _case_path(folder, name), "delete it and the case is computed again"
    content = _read_json(path, remedy)
    summary, steps = content.get("summary"), content.get("steps")
    if not isinstance(summary, dict) or not isinstance(steps, list) or not all(isinstance(row, dict) for row in steps):
        raise InputError(f"{path} is damaged (no summary or steps); {remedy}")
    point = _point_path(folder, name)
    return Outcome(summary, steps, load_array(point) if point.is_file() else None)


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    return str(value)


def _progress_bar(label: str, total: int) -> tqdm:
    layout = "{desc} {percentage:3.0f}%|{bar:24}| {elapsed}<{remaining} {postfix}"
    interval = 0.2 if sys.stderr.isatty() else 10.0
    return tqdm(total=total, desc=label, bar_format=layout, mininterval=interval, leave=False, disable=total == 0)


def _advance(bar: tqdm, position: float) -> None:
    bar.update(position - bar.n)
