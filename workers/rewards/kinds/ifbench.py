"""``ifbench``: whether an answer follows every instruction of its prompt, by the checkers of IFEval and IFBench.

Zhou et al. 2023, "Instruction-Following Evaluation for Large Language Models"; Pyatkin et al. 2025, "Generalizing
Verifiable Instruction Following". The checkers are those of the package if-verifiable, which has both, and of
``ifbench_checkers``, which has IFBench's later corrections. The package's own wrapper around them is not used, because
its verdicts differ from slime's.
"""

import importlib
import logging
import random
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from penstock.workers.rewards.kinds.kind import Question

#: The package it imports.
PACKAGE = "if_verifiable"
#: Most instructions of a prompt.
MAX_INSTRUCTIONS = 64


def ifbench(question: Question) -> float:
    """Return 1 if the answer follows all instructions as they are written (strict), else 0; an empty one follows none.

    Uses ``instruction_id_list`` of ``metadata``; ``kwargs``, a map for each (the last one counts for missing ones, and
    a single map for all), in which null is ignored; ``prompt_text``, for instructions to repeat the prompt.

    Raises:
        ValueError: the metadata name no instruction, an unknown one, or invalid arguments; or it needs data of nltk
            that are not installed.
    """
    names = _names(question.metadata)
    checkers = _checkers()
    for name in names:
        if name not in checkers:
            raise ValueError(f"reward ifbench: there is no instruction {name[:80]!r} in IFEval or IFBench: correct it")
    before = random.getstate()
    try:
        # A checker chooses missing kwargs at random.
        random.seed(0)
        asked = _with_kwargs(names, question)
        # All are checked: invalid metadata must not depend on the answer.
        followed = [_follows(name, checkers[name], said, question) for name, said in asked]
        return float(all(followed))
    finally:
        random.setstate(before)


def _names(metadata: Mapping[str, Any]) -> list[str]:
    given = metadata.get("instruction_id_list")
    names = [str(one).strip() for one in given if one is not None] if isinstance(given, list) else []
    names = [name for name in names if name]
    if not 0 < len(names) <= MAX_INSTRUCTIONS:
        raise ValueError(
            f"reward ifbench: the metadata need a list instruction_id_list of 1 to {MAX_INSTRUCTIONS} names, and here "
            f"it has {len(names)}: correct it, or the dataset's metadata_key"
        )
    return names


def _with_kwargs(names: list[str], question: Question) -> list[tuple[str, dict[str, Any]]]:
    given = question.metadata.get("kwargs")
    maps = [given] * len(names) if isinstance(given, dict) else given if isinstance(given, list) else []
    maps = [one if isinstance(one, dict) else {} for one in maps] or [{}]
    maps += [maps[-1]] * (len(names) - len(maps))
    said = [{str(key): value for key, value in one.items() if value is not None} for one in maps]
    return list(zip(names, said, strict=False))


def _follows(name: str, checker: Any, kwargs: dict[str, Any], question: Question) -> bool:
    try:
        made = checker(name)
        made.build_description(**kwargs)
        if "prompt" in (made.get_instruction_args() or ()):
            made.build_description(prompt=str(question.metadata.get("prompt_text") or ""))
    except Exception as exc:
        raise _unusable(name, exc) from exc
    if not question.text.strip():
        return False
    try:
        return bool(made.check_following(question.text))
    except MemoryError:
        raise
    # The arguments do not fit the checker.
    except (TypeError, AttributeError) as exc:
        raise _unusable(name, exc) from exc
    except Exception as exc:
        if type(exc) is LookupError:
            raise _unusable(name, exc) from exc
        # The checker fails on this answer.
        return False


def _unusable(name: str, exc: Exception) -> ValueError:
    if type(exc) is LookupError:
        lacks = str(exc).partition("Resource ")[2].split(" ")[0].strip("'\x1b[0123456789m") or "its data"
        return ValueError(
            f"reward ifbench: instruction {name} needs nltk's {lacks}, which is not installed: run `python -m "
            f"nltk.downloader {lacks}` on a machine with a network, and set NLTK_DATA to its folder"
        )
    return ValueError(f"reward ifbench: instruction {name} cannot be checked with its kwargs ({exc}): correct them")


@lru_cache(maxsize=1)
def _checkers() -> dict[str, Any]:
    """Return the checkers by instruction. Blocks for seconds the first time.

    The package would download missing data of nltk on import: downloads are disabled, and only instructions that need
    the data fail.
    """
    import langdetect
    import nltk

    fetches = nltk.download
    nltk.download = lambda *_, **__: False
    try:
        tables = [importlib.import_module(f"{PACKAGE}.{name}.instructions_registry") for name in ("ifeval", "ifbench")]
        corrected = importlib.import_module("penstock.workers.rewards.kinds.ifbench_checkers").CHECKERS
    finally:
        nltk.download = fetches
    # It would log every answer whose language it cannot detect.
    vars(importlib.import_module(f"{PACKAGE}.ifeval.instructions"))["logging"] = _silent()
    # Detection is random: without a seed the result may change.
    langdetect.DetectorFactory.seed = 0
    return {name: checker for table in tables for name, checker in table.INSTRUCTION_DICT.items()} | dict(corrected)


def _silent() -> logging.Logger:
    """Return a logger that writes nothing."""
    silent = logging.Logger("if_verifiable")
    silent.disabled = True
    return silent


def load() -> None:
    """Import the checkers."""
    _checkers()
