"""How fast text becomes tokens: our preparation of Parquet and JSON lines beside tiktoken in threads and processes.

Ways to run:
    python benchmarks/tokenise.py gpt2                 a quarter of an hour on two cores
    python benchmarks/tokenise.py --megabytes 30       with less text
    python benchmarks/tokenise.py --out results.jsonl  one JSON object a measurement
    python benchmarks/tokenise.py --tiny               everything small, to see that the script works

The text is the Python standard library, several times over, in documents of about 3,000 characters. Preparation reads
the file, tokenises, splits, writes, syncs and hashes; tiktoken alone has the documents in memory and keeps nothing.
"""

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import datasets
import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.record import Record, cpu_name, describe_machine
from data.prepare import DataConfig, prepare
from data.sources import files
from data.tokenizer import Tokenizer, load_tokenizer

DOCUMENT = 3000  # characters


@dataclass(frozen=True)
class Options:
    __doc__ = __doc__

    tokenizer: tyro.conf.Positional[str] = "gpt2"
    """As in --data.tokenizer."""
    megabytes: float = 360
    """Of text."""
    repeats: int = 3
    """How often each way is measured."""
    tiny: tyro.conf.FlagCreatePairsOff[bool] = False
    """Little text and a small tokenizer of its own."""
    out: Path | None = None
    """A file to append the measurements to."""


def documents(megabytes: float) -> list[str]:
    number = math.ceil(1e6 * megabytes / DOCUMENT)
    text = "".join(path.read_text(encoding="utf-8", errors="replace") for path in islice(files("stdlib"), number))
    whole = [text[i : i + DOCUMENT] for i in range(0, len(text), DOCUMENT)]
    return [f"{i} {text}" for i, text in enumerate(islice(cycle(whole), number))]  # no two are the same


def count(tokenizer: Tokenizer, group: list[str]) -> int:
    return sum(len(tokenizer.encode(text)) for text in group)


def measure(name: str, megabytes: float, repeats: int) -> Iterator[dict]:
    """One result for each way to make tokens with the tokenizer of this name."""
    texts, cores = documents(megabytes), os.cpu_count()
    groups = [texts[i : i + 300] for i in range(0, len(texts), 300)]
    size = sum(map(len, texts)) / 1e6
    with TemporaryDirectory() as directory:
        table = datasets.Dataset.from_dict({"text": texts})
        table.to_parquet(f"{directory}/text.parquet")
        Path(f"{directory}/text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        out = Path(directory) / "out"
        prepare(DataConfig(f"{directory}/text.jsonl", name), out)  # imports what is needed, and learns a bpe
        tokenizer = load_tokenizer(out)

        def prepared(suffix: str) -> int:
            config = DataConfig(f"{directory}/text.{suffix}", "model")  # that of `out`: nothing is learned again
            corpus = prepare(config, Path(f"{directory}/{time.time_ns()}"), model=out)
            return sum(map(len, corpus.tokens.values()))

        def alone(pool: type, workers: int) -> int:
            with pool(workers) as running:
                return sum(running.map(count, [tokenizer] * len(groups), groups))

        ways = {
            "tiktoken alone": (1, lambda: count(tokenizer, texts)),
            "tiktoken alone, threads": (cores, lambda: alone(ThreadPoolExecutor, cores)),
            "tiktoken alone, processes": (cores, lambda: alone(ProcessPoolExecutor, cores)),
            "data.prepare, Parquet": (cores, lambda: prepared("parquet")),
            "data.prepare, JSON lines": (cores, lambda: prepared("jsonl")),
        }
        seconds, tokens = {what: [] for what in ways}, {}
        for _ in range(repeats):  # in turn, so that a slow minute of the machine is everyone's
            for what, (_, work) in ways.items():
                start = time.perf_counter()
                tokens[what] = work()
                seconds[what].append(time.perf_counter() - start)
        for what, (workers, _) in ways.items():
            took = median(seconds[what])
            result = {"tokens/s": tokens[what] / took, "MB/s": size / took, "workers": workers}
            yield {"what": what} | result | {"tokenizer": name, "megabytes": size}


def main(options: Options) -> None:
    name, megabytes, repeats = options.tokenizer, options.megabytes, options.repeats
    if options.tiny:
        name, megabytes, repeats = "bpe:300", 0.05, 1
    print(f"{name}, {megabytes:.4g} MB, {os.cpu_count()} cores of {cpu_name()}")
    print("| what | workers | tokens/s | tokens/s a worker | MB/s |\n|---|---|---|---|---|")
    results = []
    for result in measure(name, megabytes, repeats):
        speed, workers = result["tokens/s"], result["workers"]
        print(f"| {result['what']} | {workers} | {speed:,.0f} | {speed / workers:,.0f} | {result['MB/s']:.1f} |")
        results.append(result)
    record = Record(options.out, describe_machine())  # not before: it imports torch, and tokenising has no use for that
    for result in results:
        record(result)


if __name__ == "__main__":
    main(tyro.cli(Options))
