"""The base class of all sections of the configuration."""

from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from penstock.errors import ConfigError
from penstock.names import check_name

Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """A section: refuses unknown keys and numbers that are not finite; immutable after it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    #: Fields that follow other keys if they are not given: the resolved file leaves them out then, so that a
    #: changed key changes them too.
    FOLLOWING: ClassVar[frozenset[str]] = frozenset()

    def following(self) -> dict[str, Any]:
        """Return the fields that were not given, with their values."""
        return {name: getattr(self, name) for name in sorted(self.FOLLOWING - self.model_fields_set)}

    def is_default(self, key: str) -> bool:
        """Return whether a field has its default, by value: a resolved file contains every key."""
        return bool(getattr(self, key) == type(self).model_fields[key].get_default(call_default_factory=True))

    def _follow(self, **values: Any) -> None:
        """Set fields from other keys during validation; they do not count as given."""
        # The model is frozen, but validation is still part of its construction.
        self.__dict__.update(values)


def is_a_name(kind: str, *, or_empty: bool = False) -> AfterValidator:
    """Return the validator of a name of something of this kind."""

    def check(name: str) -> str:
        try:
            return name if or_empty and not name else check_name(kind, name)
        except ConfigError as exc:
            raise ValueError(str(exc)) from exc

    return AfterValidator(check)
