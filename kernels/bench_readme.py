"""The README's table of op times: python -m kernels.bench --update-readme rows.csv

It is made of what `--csv` wrote on a GPU, and of nothing else, and replaces what stands between
the two marks.
"""

import csv
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- gpu-bench -->\n", "<!-- end of gpu-bench -->"
COLUMNS = ("op", "case", "median_ms", "TFLOP/s", "GB/s", "of limit", "of ceiling", "model_ms",
           "fp32_ms", "torch_ms")


def table(rows: list[dict[str, str]]) -> str:
    """Markdown; ValueError unless the rows were measured on one NVIDIA GPU."""
    measured = [row for row in rows if row["backend"] == "gpu"]
    names = {row.get("gpu", "") for row in measured}
    if len(names) != 1 or not min(names).startswith("NVIDIA "):
        found = ", ".join(sorted(names)) or "no GPU"
        raise ValueError(f"the rows are from {found}, expected those of one NVIDIA GPU; "
                         "run python -m kernels.bench --all --csv FILE there")
    first = measured[0]
    lines = [f"On an {first['gpu']} (driver {first['driver']}, numba-cuda {first['numba-cuda']}, "
             f"commit {first['commit']}), which copies {first['copy GB/s']} GB/s and multiplies "
             f"at {first['fp32 TFLOP/s']} TFLOP/s in float32, {first['bf16 TFLOP/s']} in bf16:", "",
             "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(row[column] for column in COLUMNS) + " |" for row in measured]
    return "\n".join(lines) + "\n"


def update(path: str, readme: Path = README) -> None:
    """Put the table of a CSV file into the README; ValueError if one of them does not fit."""
    with open(path, encoding="utf-8", newline="") as file:
        put_between(BEGIN, END, table(list(csv.DictReader(file))), readme)


def put_between(begin: str, end: str, text: str, readme: Path = README) -> None:
    """Replace what stands between two marks; ValueError if the README lacks one."""
    before, first, rest = readme.read_text(encoding="utf-8").partition(begin)
    _, last, after = rest.partition(end)
    if not (first and last):
        raise ValueError(f"{readme.name} lacks {begin.strip()} or {end}, expected both; add them")
    readme.write_text(before + begin + text + end + after, encoding="utf-8")
