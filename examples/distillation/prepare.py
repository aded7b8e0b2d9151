"""Make the data, a student and its teacher: the task of examples/digits, at which the teacher is good.

    python examples/distillation/prepare.py [--out DIR]

Writes what examples/digits/prepare.py writes into ``DIR`` (prompts, and the student as ``model/``), and ``teacher/``, a
model of nearly three times its size with the same tokenizer, taught by demonstrations that always sort up. Takes about
a minute; what was already made is kept.
"""

import argparse
import hashlib
import importlib.util
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=FOLDER / "data", help="folder to write to")
    out = parser.parse_args().out
    digits = load_digits()
    student = digits.Settings(hidden=96, mlp=192)
    print(digits.prepare(out, student))
    print(make_teacher(digits, out, replace(student, hidden=160, mlp=320, steps=800, share_up=1.0, seed=1)))


def make_teacher(digits, out: Path, settings) -> str:  # type: ignore[no-untyped-def]
    """Make ``teacher/`` where it is missing; returns one line that says what was done."""
    wanted = asdict(settings) | {"script": hashlib.sha256(Path(digits.__file__).read_bytes()).hexdigest()}
    done = out / "taught.json"
    if done.is_file():
        before = json.loads(done.read_text())
        if before["settings"] == wanted:
            return f"{out / 'teacher'}: already made, held-out accuracy {before['accuracy']:.3f}"
        done.unlink()
    _, heldout = digits.make_prompts(settings)
    accuracy = digits.make_policy(out / "teacher", settings, heldout)
    # Last, so that a half-made folder is made again.
    digits.write_atomically(done, json.dumps({"settings": wanted, "accuracy": accuracy}, indent=1) + "\n")
    return f"{out / 'teacher'}: right on {accuracy:.3f} of held-out prompts"


def load_digits() -> ModuleType:
    """The script of examples/digits."""
    spec = importlib.util.spec_from_file_location("digits_prepare", FOLDER.parent / "digits" / "prepare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
