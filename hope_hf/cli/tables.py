"""Rows of results as a Markdown table, on the terminal, in reports and on model cards."""

# The report that run_eval.py writes and a model card is made from.
RESULTS_FILE = "results.json"
SCHEMA_VERSION = 1

Row = dict[str, str | int | float | None]


def markdown_table(rows: list[Row]) -> str:
    """Rows as an aligned Markdown table; `x_stderr` joins `x` as `x ± error`."""
    columns = [name for name in rows[0] if not name.endswith("_stderr")]
    cells = [columns] + [[_cell(row, name) for name in columns] for row in rows]
    widths = [max(3, *(len(line[i]) for line in cells)) for i in range(len(columns))]
    numeric = [all(not isinstance(row[name], str) for row in rows) for name in columns]

    def line(values: list[str]) -> str:
        padded = (
            value.rjust(width) if right else value.ljust(width)
            for value, width, right in zip(values, widths, numeric, strict=True)
        )
        return f"| {' | '.join(padded)} |"

    rule = ["-" * (width - 1) + (":" if right else "-") for width, right in zip(widths, numeric, strict=True)]
    return "\n".join([line(cells[0]), line(rule), *(line(values) for values in cells[1:])])


def _cell(row: Row, name: str) -> str:
    value, error = row[name], row.get(f"{name}_stderr")
    if error is None:
        return _number(value)
    text = f"{error:{_form(value)}}"
    # With the digits of its value, unless they are all 0.
    return f"{_number(value)} ± {text if text.strip('0.') else _number(error)}"


def _number(value) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:{_form(value)}}"


def _form(value: float) -> str:
    if value and not 1e-3 <= abs(value) < 1e5:
        return ".2e"
    return ".4f" if abs(value) < 100 else ",.1f"
