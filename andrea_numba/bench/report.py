"""The README's table of CPU figures, and its plot, from what `--csv` wrote and nothing else."""

from __future__ import annotations

import csv
import importlib.util
import io
from pathlib import Path

from ..errors import UserError

ROOT = Path(__file__).resolve().parents[2]
PLOT = "data/cpu_bench.svg"
BEGIN, END = "<!-- cpu-bench -->\n", "<!-- end of cpu-bench -->"
HEAD = ("measured", "ours", "PyTorch", "ratio", "tokens/s", "of ceiling", "")
SWEEP = "sweep, "


def update(path: str, root: Path = ROOT) -> None:
    """Put the figures of a CSV file into the README, and draw the plot if they have a sweep."""
    from kernels.bench_readme import put_between

    rows = read(path)
    swept = [row for row in rows if row["figure"].startswith(SWEEP)]
    made = table(rows)
    if swept:
        if importlib.util.find_spec("matplotlib") is None:
            raise UserError("the plot needs matplotlib: pip install '.[plot]'")
        (root / PLOT).write_bytes(plot(swept))
        made += f"\n![Training speed against context, batch and width]({PLOT})\n"
    try:
        put_between(BEGIN, END, made, root / "README.md")
    except ValueError as error:
        raise UserError(str(error)) from None


def read(path: str) -> list[dict[str, str]]:
    """The rows of a file that `--csv` wrote; raises UserError for another one."""
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows or not rows[0].keys() >= {"figure", "ratio", "rung", "commit"}:
        raise UserError(f"{path} has no figures of this bench; write them with --csv {path}")
    return rows


def table(rows: list[dict[str, str]]) -> str:
    """Markdown: one row a figure and way of PyTorch, medians and (20th to 80th percentile)."""
    first = rows[0]
    torch = f", PyTorch {first['torch']}" if first.get("torch") else ""
    lines = [f"On {first['threads']} threads of an {first['processor']} ({first['rung']}), Python "
             f"{first['python']}, NumPy {first['numpy']}, Numba {first['numba']}{torch}, commit "
             f"{first['commit']}:", "", "| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    for row in rows:
        if not row["figure"].startswith(SWEEP):
            theirs = row["theirs"] and f"{_spread(row, 'theirs')}, {row['peer']}"
            cells = (row["figure"], _spread(row, "ours"), theirs, row["ratio"] and
                     f"{float(row['ratio']):.2f} ×", row["tokens_per_second"] and
                     f"{float(row['tokens_per_second']):,.0f}", row["of_ceiling"] and
                     f"{float(row['of_ceiling']):.0%}", row["note"])
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _spread(row: dict[str, str], name: str) -> str:
    low, high = row[f"{name}_p20"], row[f"{name}_p80"]
    return f"{row[name]} {row['unit']}" + (f" ({low} to {high})" if low else "")


def plot(rows: list[dict[str, str]]) -> bytes:
    """An SVG of tokens a second, ours and PyTorch's, against each axis of the sweep."""
    import matplotlib
    from matplotlib.figure import Figure

    lines: dict[str, list[tuple[int, float, float | None]]] = {}
    for row in rows:
        axis, value = row["figure"].removeprefix(SWEEP).split()
        ours = float(row["tokens_per_second"])
        theirs = ours * float(row["ours"]) / float(row["theirs"]) if row["theirs"] else None
        lines.setdefault(axis, []).append((int(value), ours, theirs))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": PLOT}):
        figure = Figure(figsize=(10, 3.2), layout="constrained")
        for axes, (axis, points) in zip(figure.subplots(1, len(lines), squeeze=False)[0],
                                        lines.items(), strict=True):
            values, ours, theirs = zip(*points, strict=True)
            axes.plot(values, ours, "o-", label="andrea-numba")
            if None not in theirs:
                axes.plot(values, theirs, "s--", label="PyTorch")
            axes.set(xlabel=axis, ylim=(0, None), xscale="log", xticks=values, xticklabels=values)
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        figure.axes[0].set_ylabel("tokens/s of training, fp32")
        figure.axes[0].legend()
        image = io.BytesIO()
        figure.savefig(image, format="svg", metadata={"Date": None})
    return image.getvalue()
