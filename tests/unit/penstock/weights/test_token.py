"""A run's token is made once, is read by its user alone, and is masked."""

import multiprocessing.pool
import stat
from pathlib import Path

import pytest

from penstock.config import Config
from penstock.errors import ConfigError
from penstock.text import MASK, redact
from penstock.weights.serving import TOKEN_FILE, is_authorized, token_of


def config_in(folder: Path, **serving: object) -> Config:
    return Config.model_validate(
        {
            "run": "r",
            "directory": folder,
            "model": {"path": "m"},
            "data": {"train": [{"name": "d", "path": "d.jsonl"}]},
            "serving": serving,
        }
    )


def test_any_number_of_parts_find_one_token_that_their_user_alone_can_read(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    with multiprocessing.pool.ThreadPool(8) as pool:
        found = pool.map(lambda _: token_of(config), range(16))
    assert len(set(found)) == 1
    assert len(found[0]) >= 40
    file = config.run_dir / TOKEN_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [one.name for one in config.run_dir.iterdir()] == [TOKEN_FILE]
    assert redact(f"Bearer {found[0]}") == f"Bearer {MASK}"


def test_a_token_that_others_may_read_or_that_is_none_is_refused(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    token_of(config)
    file = config.run_dir / TOKEN_FILE
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="others may read"):
        token_of(config)
    file.chmod(0o600)
    file.write_text("short\n")
    with pytest.raises(ConfigError, match="holds no token"):
        token_of(config)


def test_the_configuration_may_bring_one_and_it_is_not_repeated(tmp_path: Path) -> None:
    config = config_in(tmp_path, token="secret-of-sixteen")
    assert token_of(config) == "secret-of-sixteen"
    assert not config.run_dir.exists()
    with pytest.raises(ValueError, match="16 to 256 printable") as refused:
        config_in(tmp_path, token="too short")
    assert "serving.token is invalid" in str(refused.value)


def test_what_is_shown_of_a_token_is_none(tmp_path: Path) -> None:
    """As a token it would be known to everybody."""
    with pytest.raises(ConfigError, match=r"serving\.token is masked .* PENSTOCK_SERVING__TOKEN"):
        token_of(config_in(tmp_path, token=MASK))
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "bearer abc", "Bearer abcd", "Basic abc", "Bearer \u00e9"]
)
def test_only_the_token_itself_is_the_token(header: str | None) -> None:
    assert not is_authorized(header, "abc")
    assert is_authorized("Bearer abc", "abc")
