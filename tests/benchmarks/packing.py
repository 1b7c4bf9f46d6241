"""How long `onboard packing inspect` takes for 10 million tokens and for four times as many, and in how much memory.

Not a test: what is measured depends on the machine. Writes nothing but a temporary folder. `make bench` runs this.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SIZE, MULT, EOS, VOCAB = 4096, 8, 2, 32_000
MOST_SECONDS = 10.0
MOST_GROWTH = 1.25
"""How much more memory four times the data may take."""


def write(path: Path, rows: int) -> int:
    """Write packed rows of sequences of 8 to 800 tokens.

    Returns:
        How many tokens they hold.
    """
    rng = np.random.default_rng(0)
    schema = pa.schema(
        [
            ("input_ids", pa.list_(pa.int64())),
            ("loss_mask", pa.list_(pa.int8())),
            ("seq_start_id", pa.list_(pa.int64())),
        ]
    )
    tokens = 0
    with pq.ParquetWriter(path, schema) as writer:
        for first in range(0, rows, 500):
            ids, masks, starts = [], [], []
            for _ in range(min(500, rows - first)):
                left, lengths = SIZE, []
                while left >= MULT:
                    lengths.append(min(int(rng.integers(1, 101)) * MULT, left // MULT * MULT))
                    left -= lengths[-1]
                stored = np.array(lengths) + 1
                ends = np.cumsum(stored)
                row = rng.integers(3, VOCAB, ends[-1])
                row[ends - 1] = EOS
                mask = np.ones(ends[-1], dtype=np.int8)
                mask[ends - 1] = 0
                ids.append(row)
                masks.append(mask)
                starts.append(ends - stored)
                tokens += len(row)
            writer.write_table(pa.table([ids, masks, starts], schema=schema), row_group_size=500)
    return tokens


def measure(path: Path) -> tuple[float, float]:
    """Wall seconds and peak megabytes of one process."""
    words = ["packing", "inspect", str(path), "--pad-seq-to-mult", str(MULT), "--pad-id", str(EOS)]
    command = [sys.executable, "-m", "onboard", *words, "--vocab-size", str(VOCAB), "--format", "quiet"]
    began = time.perf_counter()
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    if status:
        sys.exit(f"{' '.join(command)} failed")
    return seconds, usage.ru_maxrss / (1024 if sys.platform == "linux" else 1024 * 1024)


def main() -> int:
    """Print both measurements; exit 1 where 10 million tokens take too long, or memory grows with the data."""
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for rows in (2_500, 10_000):
            path = Path(folder) / f"training_{SIZE}.parquet"
            tokens = write(path, rows)
            seconds, megabytes = min(measure(path) for _ in range(3))
            found.append(megabytes)
            size = path.stat().st_size / 1e6
            print(f"{tokens / 1e6:5.1f} million tokens, {size:5.1f} MB: {seconds:.2f} s, {megabytes:.0f} MB of memory")
            if rows == 2_500 and seconds > MOST_SECONDS:
                return 1
    return int(found[1] > found[0] * MOST_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
