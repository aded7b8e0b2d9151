"""Of which groups answers and tokens are kept, and what their tokens say."""

import logging
from collections import OrderedDict
from collections.abc import Sequence

from consumers.history.retired import Retired
from penstock.config import HistoryConfig
from penstock.errors import ConfigError
from penstock.weights.tokenizer import TextOf, load_text_of

log = logging.getLogger(__name__)

#: Versions whose groups are counted; older ones do not come any more.
MAX_VERSIONS = 1024


class Choice:
    """Which groups keep their answers (``history.keep_every``, ``keep_per_version``)."""

    def __init__(self, config: HistoryConfig) -> None:
        self._config = config
        self._kept: OrderedDict[int, int] = OrderedDict()

    def keeps(self, group: Retired) -> bool:
        """Whether the group's answers are kept; counts it where they are."""
        if self._config.keep_every > 1 and group.seq % self._config.keep_every != 0:
            return False
        most = self._config.keep_per_version
        if most is None:
            return True
        version = max((sample.newest for sample in group.samples), default=-1)
        count = self._kept.get(version, 0)
        if count >= most:
            return False
        self._kept[version] = count + 1
        if len(self._kept) > MAX_VERSIONS:
            self._kept.popitem(last=False)
        return True


class Texts:
    """What tokens say, by the tokenizer of the run's model; '' where there is none."""

    def __init__(self, model_path: str) -> None:
        self._path = model_path
        self._text_of: TextOf | None = None
        self._looked = False

    def of(self, tokens: Sequence[int], *, special: bool) -> str:
        """Text of tokens. ``special``: with those that stand for no text, such as the end of a turn."""
        if not self._looked:
            self._looked = True
            self._text_of = self._load()
        if self._text_of is None or not len(tokens):
            return ""
        return self._text_of(tokens, special)

    def _load(self) -> TextOf | None:
        try:
            return load_text_of(self._path)
        except ConfigError as exc:
            log.warning("rows of the history have tokens and no text: %s", exc)
            return None
