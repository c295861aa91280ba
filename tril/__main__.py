"""Ask about a model from the command line, in any folder, which is on the path.

    python -m tril check mine.py:make                                   does a position depend on a later token?
    python -m tril heads mine.py:make --ids "1 2 3" -o heads.html       what do its heads attend to?
    python -m tril check OWNER/NAME                                     a model on the Hugging Face hub, or a directory

mine.py:make is a function in a file, without arguments, that returns a model; or the model itself. `check` prints a
sentence, and exits with 0 (no position does), 1 (one does), 2 (no answer, and why) or 3 (none does, but one misses a
token of its past).
"""

import argparse
import importlib
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from torch import nn

import tril
from tril.decoder import open_by_transformers
from tril.errors import UserError, errors_as_user_error, printable
from tril.inspection import check_output
from tril.kinds import choose_heads, name_of
from tril.terminal import COLUMNS


def make_model(name: str) -> nn.Module:
    """Return the model, or the tokenizer in a file, that the command line names. Raises UserError if there is none."""
    place, _, factory = name.rpartition(":")
    if not place.endswith(".py"):
        if name.endswith(".py"):
            raise UserError(f"say what makes the model: {name}:make, a function in it that returns one")
        if ":" in name or Path(name).is_file():
            raise UserError("expected a function in a file, as mine.py:make, a directory, or OWNER/NAME")
        return open_by_transformers(name)
    path = Path(place).resolve()
    if not path.is_file():
        raise UserError(f"there is no file {place}")
    found = getattr(load(path), factory, None)
    if found is None:
        raise UserError(f"{place} has no {factory}: write a function in it that returns a model, and name that")
    if isinstance(found, nn.Module) or not callable(found):
        return found
    with errors_as_user_error(f"{place}:{factory}() does not return a model: name a function without arguments"):
        return found()


def load(path: Path) -> ModuleType:
    """Return a file as a module of its own project: of the first folder above it that is no package, or of one above.

    The folder is the first on the path, as if a script in it were run; the others come last. The file may have the name
    of another module, as copy.py.
    """
    roots = [folder for folder in path.parents if not (folder / "__init__.py").exists()]
    sys.path.insert(0, str(roots[0]))
    sys.path += map(str, roots[1:3])
    package = ".".join(path.parent.relative_to(roots[0]).parts)
    with errors_as_user_error(f"{path} cannot be imported"):
        if package:
            importlib.import_module(package)
        spec = spec_from_file_location(f"{package}.{path.stem}".strip("."), path)
        module = module_from_spec(spec)
        sys.modules.setdefault(spec.name, module)
        spec.loader.exec_module(module)
    return module


TOKENIZER = "a tokenizer.json, a name of tiktoken, a directory, OWNER/NAME, or an object in a file, mine.py:tokenizer"


def open_tokenizer(name: str) -> object:
    """Return a tokenizer: a name in a file, a tokenizer.json, a name of tiktoken, or what transformers opens."""
    if ".py:" in name:
        return make_model(name)
    with errors_as_user_error(f"{name!r} cannot be opened as a tokenizer ({TOKENIZER}; pip install what reads it)"):
        if name.endswith(".json"):
            import tokenizers

            return tokenizers.Tokenizer.from_file(name)
        if not Path(name).exists() and "/" not in name:
            import tiktoken

            return tiktoken.get_encoding(name)
        import transformers

        return transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)


def ids(text: str) -> list[int]:
    """Return the ids that the command line names."""
    return [int(number) for number in text.replace(",", " ").split()]


def check(options: argparse.Namespace) -> int:
    """Print the answer of the certificate and how the model was called; return the exit code."""
    report = tril.check_causality(make_model(options.model), length=options.length, strict=options.strict)
    print(printable(f"{report}; {report.call}"))
    return 3 if report.is_blind else not report.ok


def heads(options: argparse.Namespace) -> int:
    """Print the table of the heads, and save what else is asked for."""
    for path in options.out:  # check now, not after the work
        check_output(path)
    head, *pair = options.why or [""]
    if len(pair) > 2 or not all(map(str.isdecimal, pair)):
        raise UserError("--why takes a head, and perhaps the numbers of a query and a key, as in 1.1 6 2")
    text = options.text if options.ids is None else options.ids
    tokenizer = options.tokenizer or (options.text and ".py:" not in options.model and options.model)
    names = open_tokenizer(tokenizer) if tokenizer else None
    found = tril.inspect_heads(make_model(options.model), text, names)
    print(found)
    for place in choose_heads(head, found.att.shape) if head else ():
        print(f"\nhead {name_of(place)}\n{found.why(*place, *map(int, pair))}")
    for path in options.out:
        found.save(path)
        print(f"wrote {path}")
    return 0


def main() -> None:
    """Answer, and exit. A factory or a model that fails, however it does, is one sentence and 2."""
    parser = argparse.ArgumentParser(prog="python -m tril", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="check | heads")
    example = "example: python -m tril check mine.py:make"
    of_check = commands.add_parser("check", help="does a position depend on a later token?", epilog=example)
    of_check.set_defaults(run=check)
    of_check.add_argument("--length", type=int, help="tokens of a text; default: the model's, or 64 if it is large")
    of_check.add_argument("--strict", action="store_true", help="probe more positions, as train.py does")
    raw = argparse.RawDescriptionHelpFormatter
    columns = f"example: python -m tril heads OWNER/NAME --text 'To be' -o heads.html\n\n{COLUMNS}"
    of_heads = commands.add_parser("heads", help="what do its heads attend to?", epilog=columns, formatter_class=raw)
    of_heads.set_defaults(run=heads)
    given = of_heads.add_mutually_exclusive_group(required=True)
    given.add_argument("--ids", type=ids, help="the text as ids, as in '1 2 3'")
    given.add_argument("--text", help="the text, which --tokenizer encodes")
    of_heads.add_argument("--tokenizer", help=TOKENIZER)
    of_heads.add_argument("--why", nargs="+", help="explain where a head looks: 1.1, or 1.1 QUERY KEY")
    of_heads.add_argument("-o", "--out", action="append", default=[], type=Path, help="a file: .html .png .svg .npz")
    for command in (of_check, of_heads):
        command.add_argument("model", help="file.py:function, a directory, or OWNER/NAME on the Hugging Face hub")
    options = parser.parse_args()
    try:
        code = options.run(options)
    except (Exception, SystemExit) as error:
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        parser.exit(2, printable(" ".join(f"{options.model}: {kind}{error}".split())) + "\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
