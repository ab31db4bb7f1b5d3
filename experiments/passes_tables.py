"""The tables of pass counts: how many passes each solver takes to each accuracy."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from ot_newton.experiments.report import MISSING, Column, format_table
from ot_newton.experiments.run import Row

GOALS = {
    "product": (1e-2, 1e-4, 1e-6),
    "hessian": (1e-1, 1e-2, 1e-3, 1e-4, 1e-6),
    "potentials": (1e-3, 1e-5, 1e-8),
    "run": (1e-1, 1e-2, 1e-3, 1e-5),
}
LABELS = ("table", "n", "eps", "point", "method")
KINDS = ("passes", "half_steps", "applications", "columns")
TITLES = {
    "product": "one Hessian-vector product: passes of the response to relative error",
    "hessian": "the exact Hessian, moments included: passes to relative error",
    "potentials": "potentials from nothing: passes to L1 marginal error",
    "adam": "Adam, a step: passes, median / largest",
    "run": "Adam→Newton: passes in all, after those to gradient norm",
}


def only(frame: pd.DataFrame, **labels: Any) -> pd.DataFrame:
    """The rows with these labels."""
    keep = np.ones(len(frame), dtype=bool)
    for name, label in labels.items():
        keep &= (frame[name] == label).to_numpy()
    return frame.loc[keep]


def groups(frame: pd.DataFrame, *names: str) -> Iterator[tuple[tuple[Any, ...], pd.DataFrame]]:
    """The labels of each group of rows, in order of appearance, and the group."""
    for labels in frame.loc[:, list(names)].drop_duplicates().itertuples(index=False):
        yield tuple(labels), only(frame, **dict(zip(names, labels, strict=True)))


def count(table: pd.DataFrame) -> pd.DataFrame:
    """A row for each count: passes by kind to a goal, of a median and a largest Adam step, and of a whole run."""
    rows: list[Row] = []
    if "table" not in table:
        return pd.DataFrame(rows)
    for labels, group in groups(table, *LABELS):
        first = dict(zip(LABELS, labels, strict=True))
        kind = first["table"]
        if kind in GOALS:
            rows += [first | _met(group, goal) for goal in GOALS[kind]]
        elif kind == "adam":
            rows += [first | row for row in _steps(group)]
        if kind == "run":
            last = group.iloc[-1]
            ends = ("error", "loss", "lambda_min", "steps", "status")
            rows.append(first | {"goal": "end"} | {name: last[name] for name in (*KINDS, *ends)})
    return pd.DataFrame(rows)


def _met(group: pd.DataFrame, goal: float) -> Row:
    """The first row within a goal; without passes if there is none."""
    within = group.loc[(group["error"] <= goal).to_numpy()]
    if within.empty:
        return {"goal": f"{goal:g}", "error": group["error"].min(), "passes": np.nan}
    row = within.iloc[0]
    bracket = {name: row[name] for name in ("lower", "upper", "exact") if name in row}
    return {"goal": f"{goal:g}", "error": row["error"], **{name: row[name] for name in KINDS}, **bracket}


def _steps(group: pd.DataFrame) -> list[Row]:
    """Median and largest step, the cold one at the start aside; how far the gradient was off, how the bracket did."""
    warm = group.loc[(group["step"] > 1).to_numpy()]
    looked = warm.loc[warm["exact"].notna().to_numpy()]
    held = ((looked["lower"] <= looked["exact"]) & (looked["exact"] <= looked["upper"])).sum()
    evidence: Row = {"error": looked["error"].max(), "looks": len(looked), "held": held} if len(looked) else {}
    return [
        {"goal": "median step", **{name: warm[name].median() for name in KINDS}, **evidence},
        {"goal": "largest step", **{name: warm[name].max() for name in KINDS}},
    ]


def print_tables(counts: pd.DataFrame) -> None:
    """All tables, each with a line for a method and a column for a point and a temperature."""
    for n in counts["n"].unique():
        for table, title in TITLES.items():
            here = only(counts, n=n, table=table)
            if not here.empty:
                goals = f" {' / '.join(map(_short, GOALS[table]))}" if table in GOALS else ""
                print(f"\nn = {n:.0f}, {title}{goals}")
                print(format_table(*_pivot(here)))


def _pivot(counts: pd.DataFrame) -> tuple[pd.DataFrame, list[Column]]:
    lines: dict[str, dict[str, str]] = {}
    for (method, point, eps), group in groups(counts, "method", "point", "eps"):
        cell = " / ".join(MISSING if value != value else f"{value:.0f}" for value in group["passes"])
        lines.setdefault(str(method), {})[f"{point}, eps {eps:g}"] = cell
    frame = pd.DataFrame([{"method": method, **cells} for method, cells in lines.items()])
    columns = [Column("method", ""), *(Column(name, name) for name in frame.columns if name != "method")]
    return frame, columns


def _short(goal: Any) -> str:
    return f"{goal:.0e}".replace("e-0", "e-")
