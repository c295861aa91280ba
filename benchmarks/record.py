"""What every measurement says besides its numbers: on what machine it was made, with what, and when."""

import json
import platform
import time
from dataclasses import dataclass
from pathlib import Path


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def describe_machine(device: str = "cpu") -> dict[str, str | int]:
    """What makes a figure another one elsewhere. device: a kind of device, as PyTorch names it."""
    import torch  # which tokenise.py does without until it has measured

    return {
        "cpu": cpu_name(),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


@dataclass(frozen=True)
class Record:
    """Where measurements go, each with the machine it was made on: a line of JSON in a file, if one is wanted."""

    out: Path | None
    machine: dict[str, str | int]

    def __call__(self, result: dict) -> dict:
        """Append a measurement, and return it."""
        if self.out:
            with open(self.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(result | self.machine) + "\n")
        return result
