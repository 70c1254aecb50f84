"""Parquet files with the columns of the published test files."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from prompt_r1.protocol import PAPER_INSTRUCTION


def published_row(
    text: str, golds: Sequence[str] | None, source: str = "PopQA-256-test"
) -> dict[str, object]:
    """A question as the published files have it."""
    return {
        "data_source": source,
        "prompt": [{"content": f"Question: {text}\n{PAPER_INSTRUCTION}", "role": "user"}],
        "ability": "multihop_qa",
        "reward_model": {"ground_truth": golds, "style": "rule"},
    }


def parquet(path: Path, *rows: dict[str, object]) -> Path:
    """Write rows as a parquet file."""
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path
