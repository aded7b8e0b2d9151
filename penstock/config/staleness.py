"""Section ``staleness``: how old what is trained on may be."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from penstock.config.section import Section

#: Most versions between drawing and training that a mode allows; async takes what is given.
MODE_BOUND = {"sync": 0, "one_step": 1}


class StalenessConfig(Section):
    """The policy object of gate and cut (docs/truth.md, T2 to T5)."""

    #: sync: a batch is drawn by the version that is trained on it; one_step: by the one before; async: by any version
    #: within ``bound``.
    mode: Literal["sync", "one_step", "async"] = "async"
    #: Most versions between drawing a token and training it; sync means 0 and one_step 1.
    bound: Annotated[int, Field(ge=0)] = 4
    #: What happens to what would be too old: wait for what is due, mask tokens, or drop groups. None: by mode.
    on_expiry: Literal["wait", "mask", "drop"] | None = None

    FOLLOWING: ClassVar[frozenset[str]] = frozenset({"bound"})

    @model_validator(mode="after")
    def _bound_by_mode(self) -> Self:
        if "bound" not in self.model_fields_set and self.mode in MODE_BOUND:
            self._follow(bound=MODE_BOUND[self.mode])
        return self

    @model_validator(mode="after")
    def _bound_fits_mode(self) -> Self:
        wanted = MODE_BOUND.get(self.mode, self.bound)
        if self.bound != wanted:
            raise ValueError(
                f"mode {self.mode} means bound {wanted}, and bound is {self.bound}: remove bound, or choose mode async"
            )
        return self
