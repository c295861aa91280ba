"""How fast text becomes tokens: our preparation of Parquet and JSON lines beside tiktoken in threads and processes.

    python benchmarks/tokenise.py [gpt2]

The text is the Python standard library, several times over, in documents of about 3,000 characters. Preparation reads
the file, tokenises, splits, writes, syncs and hashes; tiktoken alone has the documents in memory and keeps nothing.
"""

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import datasets
import tiktoken

sys.path.insert(0, str(Path(__file__).parent.parent))

from data.prepare import DataConfig, prepare
from data.sources import files
from data.tokenizer import load_tokenizer

SIZE, DOCUMENT, REPEATS = 360_000_000, 3000, 3


def documents() -> list[str]:
    text = "".join(path.read_text(encoding="utf-8", errors="replace") for path in files("stdlib"))
    whole = [text[i : i + DOCUMENT] for i in range(0, len(text), DOCUMENT)]
    return [f"{i} {text}" for i, text in enumerate(islice(cycle(whole), SIZE // DOCUMENT))]  # no two are the same


def count(tokenizer: tiktoken.Encoding, group: list[str]) -> int:
    return sum(len(tokenizer.encode_to_numpy(text, disallowed_special=())) for text in group)


def rate(work: Callable[[], int]) -> tuple[float, int]:
    """Tokens a second, the median of several times; and the tokens."""
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        tokens = work()
        seconds.append(time.perf_counter() - start)
    return tokens / median(seconds), tokens


def main() -> None:
    name, cores = (sys.argv[1:] or ["gpt2"])[0], os.cpu_count()
    texts = documents()
    groups = [texts[i : i + 300] for i in range(0, len(texts), 300)]
    size = sum(map(len, texts)) / 1e6
    print(f"{name}, {size:.0f} MB, {cores} cores of {platform.processor() or platform.machine()}")
    with TemporaryDirectory() as directory:
        table = datasets.Dataset.from_dict({"text": texts})
        table.to_parquet(f"{directory}/text.parquet")
        Path(f"{directory}/text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        out = Path(directory) / "out"
        prepare(DataConfig(f"{directory}/text.jsonl", name), out)  # imports what is needed, and learns a bpe
        tokenizer = load_tokenizer(out)

        def prepared(suffix: str) -> int:
            corpus = prepare(DataConfig(f"{directory}/text.{suffix}", name), Path(f"{directory}/{time.time_ns()}"))
            return sum(map(len, corpus.tokens.values()))

        def alone(pool: type, workers: int) -> int:
            with pool(workers) as running:
                return sum(running.map(count, [tokenizer] * len(groups), groups))

        print("| what | workers | tokens/s | tokens/s a worker | MB/s |\n|---|---|---|---|---|")
        for what, workers, work in (
            ("tiktoken alone", 1, lambda: count(tokenizer, texts)),
            ("tiktoken alone, threads", cores, lambda: alone(ThreadPoolExecutor, cores)),
            ("tiktoken alone, processes", cores, lambda: alone(ProcessPoolExecutor, cores)),
            ("data.prepare, Parquet", cores, lambda: prepared("parquet")),
            ("data.prepare, JSON lines", cores, lambda: prepared("jsonl")),
        ):
            speed, tokens = rate(work)
            print(f"| {what} | {workers} | {speed:,.0f} | {speed / workers:,.0f} | {size * speed / tokens:.1f} |")


if __name__ == "__main__":
    main()
