"""What every section of the configuration is made of."""

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from penstock.errors import ConfigError
from penstock.names import check_name

Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """Unknown keys and numbers that are not numbers (NaN, infinity) are refused; nothing changes after it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    #: Fields whose value follows other keys where it is not given: the resolved file leaves them away then, so that a
    #: key that is changed on top of it takes them along.
    FOLLOWING: ClassVar[frozenset[str]] = frozenset()

    def following(self) -> dict[str, Any]:
        """Those that were not given, with the values that they took."""
        return {name: getattr(self, name) for name in sorted(self.FOLLOWING - self.model_fields_set)}

    def is_default(self, key: str) -> bool:
        """Whether a field has its default, by value: a resolved file spells every key."""
        return bool(getattr(self, key) == type(self).model_fields[key].get_default(call_default_factory=True))

    def _follow(self, **values: Any) -> None:
        """Give fields values of other keys, while this is being made; they do not count as given."""
        # The model is frozen for its users; this is still its making.
        self.__dict__.update(values)


def checked_name(kind: str, name: str) -> str:
    try:
        return check_name(kind, name)
    except ConfigError as exc:
        raise ValueError(str(exc)) from exc
