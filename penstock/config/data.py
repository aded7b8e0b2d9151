"""Section ``data``: prompts to train on and to evaluate."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from penstock.config.code_names import EnvironmentName, RewardName
from penstock.config.reading.dataset_path import parse_path
from penstock.config.sampling_names import check_sampling
from penstock.config.section import Positive, Seconds, Section, checked_name
from penstock.names import MAX_ANSWERS


class DatasetConfig(Section):
    """Prompts from one file."""

    #: Name in job ids.
    name: str
    #: JSONL (``.jsonl``, ``.jsonl.gz``) or parquet file; ``path@[a:b]`` takes a slice of its lines.
    path: str
    #: Column of the prompt: text, or a list of chat messages.
    input_key: str = "prompt"
    #: Column of what the reward compares with, any JSON value; None: there is none.
    label_key: str | None = "label"
    #: Column of answers that are given: text, token ids, or a list of those; None: all are drawn.
    answer_key: str | None = None
    #: Column handed through to rewards; None: none.
    metadata_key: str | None = None
    #: Render chat messages with the model's chat template.
    apply_chat_template: bool = False
    #: In another order in each epoch, which follows from ``seed``.
    shuffle: bool = True
    #: Overrides of ``rollout.sampling`` for this dataset.
    sampling: dict[str, Any] = Field(default_factory=dict)
    #: Answers per prompt for this dataset; None takes ``rollout.n`` (train) or 1 (eval).
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    #: Reward of this dataset; None: ``reward.function``.
    reward: RewardName | None = None
    #: Environment that answers between turns; None: one turn.
    environment: EnvironmentName | None = None

    @field_validator("name")
    @classmethod
    def _name_is_a_name(cls, name: str) -> str:
        return checked_name("dataset", name)

    @field_validator("path")
    @classmethod
    def _slice_holds_lines(cls, path: str) -> str:
        parse_path(path)
        return path

    @field_validator("sampling")
    @classmethod
    def _sampling_is_known(cls, sampling: dict[str, Any]) -> dict[str, Any]:
        check_sampling(sampling)
        return sampling


class DataConfig(Section):
    train: list[DatasetConfig] = Field(min_length=1)
    eval: list[DatasetConfig] = Field(default_factory=list)
    #: Passes over the train data, after which the run ends; null: prompts come again for as long as somebody trains.
    #: May be raised from one start to the next, and lowered to what was not admitted yet.
    epochs: Positive | None = None
    #: What becomes of the groups that are left at the end of the data and are fewer than a batch: ``drop`` leaves
    #: them untrained, so that every step is of the size that the learning rate was chosen for; ``train`` makes one
    #: smaller batch of them.
    last_batch: Literal["train", "drop"] = "drop"
    #: Evaluate at every so many versions, and at the first and the last; 0: only first and last.
    eval_every: Annotated[int, Field(ge=0)] = 0
    #: Weights that come while a version is being evaluated are loaded when its evaluation is through, so that it alone
    #: draws it. Training goes on with what the version draws, as far as the bound allows, and waits then.
    eval_pinned: bool = False
    #: Longest wait for the last evaluation; the trainer then ends with exit code 1, and one that is started again waits
    #: for the same evaluation. None: it waits, and `penstock why` says for what.
    eval_timeout_s: Seconds | None = None

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [dataset.name for dataset in (*self.train, *self.eval)]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two datasets are named {name!r}, and job ids need names that differ: rename one")
        return self
