"""What must not be shown is masked, however it is written; what penstock advises stays readable."""

import json
import logging
from collections.abc import Iterator

import pytest

from penstock import text as redaction
from penstock.system.logs import MAX_ENTRY, set_up
from penstock.text import is_secret, know, know_url, redact


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_known", [])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a redis://u:hu@sh@h:1/0 b", "a redis://u:***@h:1/0 b"),
        ("redis://:pa ss\"w'd@h:1/0", "redis://:***@h:1/0"),
        ('at redis://:a b@h:1 and redis://:c"d@h:2', "at redis://:***@h:1 and redis://:***@h:2"),
        ("redis://h:1?PASSWORD=hush", "redis://h:1?PASSWORD=***"),
        (
            '{"url": "redis+sentinel://h/n?sentinel_password=hush"}',
            '{"url": "redis+sentinel://h/n?sentinel_password=***"}',
        ),
        ("https://h/x?a=1&api_key=hush&b=2", "https://h/x?a=1&api_key=***&b=2"),
        ("https://h/x?Token=hu'sh.", "https://h/x?Token=***."),
        ("https://h/x?sv=2024&sig=hu%2Fsh&sp=r", "https://h/x?sv=2024&sig=***&sp=r"),
        ("https://h/x?X-Amz-Signature=hush", "https://h/x?X-Amz-Signature=***"),
        ("https://h/x?design=2&significance=0.05", "https://h/x?design=2&significance=0.05"),
        # What penstock itself advises, and what holds no secret.
        ("write redis://[:PASSWORD@]HOST:PORT/DB", "write redis://[:PASSWORD@]HOST:PORT/DB"),
        ("redis.url (redis://:PASSWORD@HOST:PORT)", "redis.url (redis://:PASSWORD@HOST:PORT)"),
        ("redis://h:6379/0 knows no job d@0", "redis://h:6379/0 knows no job d@0"),
        ("https://h/x?page=2", "https://h/x?page=2"),
    ],
)
def test_secrets_in_addresses_are_masked(text: str, shown: str) -> None:
    assert redact(text) == shown


def test_a_secret_that_is_known_is_masked_however_it_is_quoted() -> None:
    secret = "p\" s'@/ü"
    know(secret)
    for way in (f"refused {secret}!", json.dumps({"x": secret}), repr([secret]), "redis://:p%22%20s%27%40%2F%C3%BC@h"):
        assert "***" in redact(way)
        assert not {'p"', "p%22", 'p\\"'} & set(redact(way).replace("***", " ").split())
    know_url("redis://:a%20b%22c@h:1/0")
    assert redact('the password is a b"c or a%20b%22c') == "the password is *** or ***"
    know("abc")
    assert redact("abcdef") == "abcdef", "too short to be told from a word"


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        *(
            (name, "x", True)
            for name in ("HF_TOKEN", "DATABASE_DSN", "WANDB_API_KEY", "AWS_ACCESS_KEY_ID", "SIGNING_KEY")
        ),
        *((name, "x", True) for name in ("api-key", "PGPASSWORD", "MYSECRET", "DB_PASS", "KEY", "BASIC_AUTH")),
        *((name, "x", False) for name in ("TOKENIZERS_PARALLELISM", "max-total-tokens", "tokenizer-path", "KEYBOARD")),
        *((name, "x", False) for name in ("MONKEY", "PATH", "PASSAGE", "NCCL_DEBUG")),
        ("DATABASE", "postgres://me:hush@h/db", True),
        ("DATABASE", "postgres://h/db", False),
    ],
)
def test_names_and_values_that_are_secret(name: str, value: str, secret: bool) -> None:
    assert is_secret(name, value) is secret


@pytest.fixture
def root_logging() -> Iterator[None]:
    before = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:], logging.root.level = before[0], before[1]


@pytest.mark.usefixtures("root_logging")
def test_logs_and_their_tracebacks_mask_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    know("hush hush")
    set_up("part")
    try:
        raise ValueError("hush hush")
    except ValueError:
        logging.getLogger("x").exception("the word is %s", "hush hush")
    said = capsys.readouterr().err
    assert "the word is ***" in said
    assert "ValueError: ***" in said
    assert "hush" not in said


@pytest.mark.parametrize("unit", ["://:", " ://x:y ", "a://b:", "a://b:c@", "?key=", "&a-key", "?a.", "?" + "key" * 9])
def test_a_text_of_any_length_is_looked_through_once(unit: str) -> None:
    """Whoever raises or answers with such a text must not stop who logs it: this took hours."""
    text = "redis://user:hunter22@host " + unit * (2**20 // len(unit))
    assert "hunter22" not in redact(text)


def test_the_name_of_a_secret_is_found_in_a_name_of_any_length() -> None:
    assert not is_secret("A_" * 100_000 + "SECRE", "x")
    assert is_secret("A_" * 100_000 + "SECRET", "x")


@pytest.mark.usefixtures("root_logging")
def test_an_entry_of_the_log_is_bounded_and_without_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    know("hunter2222")
    set_up("part")
    try:
        raise ValueError("hunter2222" + "x" * 10**7)
    except ValueError:
        logging.getLogger("test").exception("it raised %s", "y" * 10**7)
    said = capsys.readouterr().err
    assert "hunter2222" not in said
    assert said.endswith("x\n")
    assert len(said) <= MAX_ENTRY + 1000
