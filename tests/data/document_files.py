"""Small files of every kind, as other programs write them."""

import csv
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet


def write(path: Path, texts: list[str | None], **columns: list) -> str:
    """A file of the kind that its name says, with the column `text` and others; its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"text": texts, **columns})
    rows = table.to_pylist()
    if path.suffix == ".txt":
        path.write_text("\n<|endoftext|>\n".join(texts))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        with path.open("wb") as file:
            pyarrow.parquet.write_table(table, file)
    elif path.suffix == ".arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, table.column_names, delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    return str(path)
