"""Data of nltk's by which sentences are told apart, as little as there can be: no abbreviation is known."""

from pathlib import Path

FILES = ("abbrev_types.txt", "collocations.tab", "ortho_context.tab", "sent_starters.txt")


def make_punkt(folder: Path) -> Path:
    """Write it below a folder, which ``nltk.data.path`` may name."""
    english = folder / "tokenizers" / "punkt_tab" / "english"
    english.mkdir(parents=True)
    for name in FILES:
        (english / name).touch()
    return folder
