"""Measure how tables are read: seconds, and the most memory of a process, for 100 MB of JSON lines and of CSV.

    python benchmarks/tables.py                     this version
    python benchmarks/tables.py ../before .         two checkouts in turns; a git worktree is one

The tables are made in a temporary folder. Each reading is a process of its own. Printed are medians.
"""

import csv
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIZE, TURNS = 100_000_000, 3


def make(folder: Path) -> list[Path]:
    """Write the same texts, of 0.2 to 4 kB, as two tables."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(5000)]
    paths = [folder / "t.jsonl", folder / "t.csv"]
    with open(paths[0], "w") as lines, open(paths[1], "w", newline="") as cells:
        table = csv.writer(cells)
        table.writerow(["id", "text"])
        number = 0
        while lines.tell() < SIZE:
            sentences = (" ".join(draw.choices(words, k=12)) for _ in range(draw.randint(3, 60)))
            text = "\n".join(sentence + draw.choice([".", ".", ".", ', "naïve"']) for sentence in sentences)
            lines.write(json.dumps({"id": number, "text": text, "meta": {"page": f"p{number}"}}) + "\n")
            table.writerow([number, text])
            number += 1
    return paths


def read(path: str) -> None:
    """Read a table, and print the seconds, the MB of memory, and the characters that were found."""
    from data.sources import documents

    began = time.perf_counter()
    characters = sum(len(piece) for document in documents(path, "text") for piece in document)
    seconds = time.perf_counter() - began
    print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, characters)


def main(versions: list[str]) -> None:
    print("| table | version | seconds | memory, MB | characters |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for path in make(Path(folder)):
            measured = {version: [] for version in versions}
            for _ in range(TURNS):
                for version in versions:
                    command = [sys.executable, __file__, "--read", str(path), version]
                    ran = subprocess.run(command, capture_output=True, text=True, check=True)
                    measured[version].append(map(float, ran.stdout.split()))
            for version, runs in measured.items():
                seconds, memory, characters = map(statistics.median, zip(*runs, strict=True))
                print(f"| {path.name} | {version} | {seconds:.2f} | {memory:.0f} | {characters:,.0f} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--read"]:
        sys.path.insert(0, sys.argv[3])
        read(sys.argv[2])
    else:
        main(sys.argv[1:] or [str(Path(__file__).parent.parent)])
