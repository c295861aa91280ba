"""Tell a run that began on this machine from one that came from elsewhere, before it reads or sends anything.

A run's config.toml ends with a seal, which nobody can make who has not the key in data/prepared/. The seal is of the
options that reach beyond the run's own directory: its wishes.
"""

import hmac
import json
import secrets
from contextlib import suppress

from filelock import FileLock

from data import disk, prepare

WISHES = (("data", "source"), ("data", "val_source"), ("data", "tokenizer"), ("train", "init_from"), ("train", "wandb"))


def seal(wishes: list) -> bytes:
    """Return the last line of config.toml for the values of WISHES, in their order.

    Where no key can be kept, the line is another one each time, as if every run came from elsewhere.
    """
    path = prepare.PREPARED / ".key"
    key = secrets.token_bytes(32)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):  # of two processes, both get the key of the first
            if not path.exists():
                disk.replace_file(path, key)
                path.chmod(0o600)
            key = path.read_bytes()
    digest = hmac.digest(key, json.dumps(wishes).encode(), "sha256").hex()
    return f"# begun on this machine: {digest}\n".encode()
