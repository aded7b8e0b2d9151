"""What an account says of files in a folder of payloads."""

from pathlib import Path

from penstock.payloads.folder import PayloadFolder
from penstock.payloads.run_files import FREED, PENDING, WRITING, file_of
from tests.chaos.cluster.collect import DAY_S, payload_files

KEY = "penstock:{r}:payload:sums/2/80/0:0fed916235339dea363a8b60.3"


def test_what_nobody_made_permanent_goes_one_day_whoever_died_of_writing_it(tmp_path: Path) -> None:
    """A file that its writer has not ended is named by that writer too: seed 172 took one for a payload."""
    store = PayloadFolder(f"file://{tmp_path}")
    store.put([(KEY, b"payload")])
    path = file_of(tmp_path, KEY)
    name = KEY.partition(":{r}:")[2]
    assert dict(payload_files(tmp_path)) == {name: DAY_S}

    for ending in (f"{WRITING}326f-41d50f4f-37", PENDING, FREED):
        Path(path + PENDING).rename(path + ending)
        assert dict(payload_files(tmp_path)) == {name: DAY_S}
        Path(path + ending).rename(path + PENDING)

    Path(path + PENDING).rename(path)
    assert dict(payload_files(tmp_path)) == {name: -1}
