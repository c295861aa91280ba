"""Turn a folder of Parquet files into token files, by datatrove: on all cores, or on a partition of a Slurm cluster.

python docs/make_tokens.py FOLDER TOKENIZER OUT [PARTITION]
"""

import sys
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor, SlurmPipelineExecutor
from datatrove.pipeline.filters import LambdaFilter
from datatrove.pipeline.readers import ParquetReader
from datatrove.pipeline.tokens import DocumentTokenizer

if __name__ == "__main__":
    folder, tokenizer, out, *partition = sys.argv[1:]
    pipeline = [
        ParquetReader(folder, glob_pattern="**/*.parquet"),
        LambdaFilter(lambda document: document.metadata["int_score"] >= 3),  # FineWeb-Edu's; or GopherQualityFilter()
        DocumentTokenizer(out, tokenizer_name_or_path=tokenizer, eos_token="<|endoftext|>"),
    ]
    options = {"tasks": len([*Path(folder).rglob("*.parquet")]), "logging_dir": f"{out}.logs"}
    if partition:
        SlurmPipelineExecutor(pipeline, time="04:00:00", partition=partition[0], mem_per_cpu_gb=4, **options).run()
    else:
        LocalPipelineExecutor(pipeline, **options).run()
