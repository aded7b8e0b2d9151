"""Section ``data``: prompts to train on and to evaluate."""

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from penstock.config.hooks import EnvironmentName, RewardName
from penstock.config.reading.dataset_path import code_name, hub_name, parse_path
from penstock.config.sampling import Sampling
from penstock.config.section import Positive, Section, is_a_name
from penstock.names import MAX_ANSWERS

#: Most places after which the order of a mixture repeats: it is kept in memory.
MAX_PLACES = 100_000


def shares_of(weights: Sequence[float]) -> list[int]:
    """Convert weights to the smallest integer ratio, such as ``[0.7, 0.3]`` to ``[7, 3]``, exact in decimal notation.

    Raises:
        ValueError: their sum is more than ``MAX_PLACES``.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    whole = lcm(*(one.denominator for one in exact))
    shares = [int(one * whole) for one in exact]
    shares = [one // gcd(*shares) for one in shares]
    if sum(shares) > MAX_PLACES:
        raise ValueError(
            f"the weights {', '.join(f'{one:g}' for one in weights)} need a round of {sum(shares)} prompts, "
            f"but at most {MAX_PLACES} are allowed: use rounder weights, such as 2 and 1 for two thirds and one"
        )
    return shares


Share = Annotated[float, Field(ge=0, le=1)]
#: Default number of rows of a stream that are read, and shuffled, together.
STREAM_WINDOW = 1024
#: Default reward from which on an answer is right.
RIGHT_FROM = 1.0


class CurriculumConfig(Section):
    """Selection of prompts by the results of their groups in earlier epochs."""

    #: Skip a prompt as easy if at least this share of its answers is right; None: never.
    skip_above: Share | None = 1.0
    #: Skip a prompt as hard if at most this share of its answers is right; None: never.
    skip_below: Share | None = None
    #: Number of latest groups over which the share is averaged; prompts with fewer groups are not skipped.
    groups: Annotated[int, Field(ge=1, le=8)] = 1
    #: Share of the skipped prompts that are admitted anyway, different ones in each epoch, so that no prompt is skipped
    #: forever.
    revisit: Annotated[float, Field(gt=0, le=1)] = 0.1
    #: Minimum reward of a right answer.
    right_from: float = RIGHT_FROM

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.skip_above is not None and self.skip_below is not None and self.skip_below >= self.skip_above:
            raise ValueError(
                f"skip_below ({self.skip_below:g}) and skip_above ({self.skip_above:g}) skip every prompt: lower "
                "skip_below, or raise skip_above"
            )
        if self.skip_above is None and self.skip_below is None:
            raise ValueError(
                "skip_above and skip_below are both null, so no prompt is skipped: set one, or remove the curriculum"
            )
        if self.revisit == 1:
            raise ValueError(
                "revisit 1 has every prompt come that is to be skipped, so none is: lower it, or remove the curriculum"
            )
        return self


class DatasetConfig(Section):
    """Prompts from one source."""

    #: Name of the dataset; it is part of job ids.
    name: Annotated[str, is_a_name("dataset")]
    #: JSONL (``.jsonl``, ``.jsonl.gz``) or parquet file; ``hf:FOLDER_OR_NAME`` for data that the package datasets
    #: reads; ``python:module:Class`` for your own class. ``path@[a:b]`` selects a slice of the lines.
    path: str
    #: Split of ``hf:`` data; None: the only split.
    split: str | None = None
    #: With ``hf:``: read rows only when they are needed; their number is unknown until the end.
    streaming: bool = False
    #: Keyword arguments for the class of ``python:``.
    source_args: dict[str, Any] = Field(default_factory=dict)
    #: Column of the prompt: text, or a list of chat messages.
    input_key: str = "prompt"
    #: Column of the images for each ``<image>`` in the texts of messages: bytes, data: URIs or paths, or a list of
    #: these. None: images are parts of the messages.
    image_key: str | None = None
    #: Folder that contains the images; None: the folder of the dataset's file.
    image_folder: str | None = None
    #: Column of the reference for the reward, any JSON value; None: no label.
    label_key: str | None = "label"
    #: Column of given answers: text, token ids, or a list of either. None: all answers are generated.
    answer_key: str | None = None
    #: Column of the metadata that rewards receive; None: no metadata.
    metadata_key: str | None = None
    #: For held-out prompts: entry of the metadata that contains the category; scores are also reported by category.
    category_key: str | None = None
    #: Render chat messages with the model's chat template.
    apply_chat_template: bool = False
    #: System prompt for conversations that do not begin with one; None: none.
    system_prompt: str | None = None
    #: Arguments for the chat template, such as ``enable_thinking: false``.
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    #: Column of the tools for the chat template: a list of maps, or such a list as JSON text. None: no tools.
    tools_key: str | None = None
    #: Maximum number of tokens of a prompt, counted by the producer with the model's tokenizer; None: the engine's
    #: limit.
    max_prompt_tokens: Positive | None = None
    #: Handling of longer prompts: stop the producer and report the line's number, or skip and count the prompt.
    on_long_prompt: Literal["error", "skip"] = "error"
    #: Handling of lines that cannot be read, have no prompt, or have a held-out prompt: stop the producer and report
    #: the line's number, or skip and count it.
    on_bad_line: Literal["error", "skip"] = "error"
    #: Share of the training prompts from this dataset, relative to the weights of the other datasets: 3 and 1, or 0.75
    #: and 0.25. If all datasets have a weight, each has its own epochs; if none has one, an epoch is one pass over all
    #: datasets.
    weight: Annotated[float, Field(gt=0)] | None = None
    #: For training prompts: skip prompts that are too easy or too hard, judged by the results of their groups. None:
    #: skip none.
    curriculum: CurriculumConfig | None = None
    #: Shuffle again in each epoch, by ``seed``; a stream is shuffled within its windows.
    shuffle: bool = True
    #: Overrides of ``rollout.sampling`` for this dataset.
    sampling: Sampling = Field(default_factory=dict)
    #: Answers per prompt for this dataset; None: ``rollout.n`` (train) or 1 (eval).
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    #: Reward of this dataset; None: ``reward.function``.
    reward: RewardName | None = None
    #: Environment that responds between turns; None: samples have one turn.
    environment: EnvironmentName | None = None

    @field_validator("path")
    @classmethod
    def _check_path(cls, path: str) -> str:
        parse_path(path)
        name = code_name(path)
        if name is not None and not all(name.partition(":")):
            raise ValueError(f"{path!r} does not name a class: write python:module:Class")
        if hub_name(path) == "":
            raise ValueError(f"{path!r} does not name a folder: write hf:FOLDER, or hf:NAME")
        return path

    @model_validator(mode="after")
    def _check_source_keys(self) -> Self:
        if self.split is not None and hub_name(self.path) is None:
            raise ValueError(
                "split requires a Hugging Face dataset (path hf:FOLDER_OR_NAME): remove split, or change path"
            )
        if self.streaming and hub_name(self.path) is None:
            raise ValueError(
                "streaming requires a Hugging Face dataset (path hf:FOLDER_OR_NAME): remove streaming, or change path"
            )
        if self.source_args and code_name(self.path) is None:
            raise ValueError(
                "source_args requires a class (path python:module:Class): remove source_args, or change path"
            )
        return self

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_template_kwargs(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        if ours := sorted({"conversation", "tools", "tokenize", "return_dict", "return_tensors"} & kwargs.keys()):
            raise ValueError(
                f"penstock sets {', '.join(ours)} itself: remove it from chat_template_kwargs (for tools set tools_key)"
            )
        return kwargs

    @model_validator(mode="after")
    def _check_category(self) -> Self:
        if self.category_key is not None and self.metadata_key is None:
            raise ValueError(
                "category_key names an entry of the metadata: set metadata_key to the column of the metadata"
            )
        return self

    @model_validator(mode="after")
    def _check_template(self) -> Self:
        of_it = ("system_prompt", "chat_template_kwargs", "tools_key", "image_key", "image_folder")
        given = [key for key in of_it if getattr(self, key)]
        if given and not self.apply_chat_template:
            raise ValueError(f"{', '.join(given)} needs a chat template: set apply_chat_template: true, or remove it")
        return self

    @model_validator(mode="after")
    def _check_long_prompts(self) -> Self:
        if self.on_long_prompt == "skip" and self.max_prompt_tokens is None:
            raise ValueError(
                "on_long_prompt skip goes by max_prompt_tokens, and that is not set: set it, or remove on_long_prompt"
            )
        return self

    @model_validator(mode="after")
    def _check_curriculum(self) -> Self:
        if self.curriculum is not None and self.answer_key is not None:
            raise ValueError(
                "curriculum requires answers that the policy generates, but answer_key provides them: remove one"
            )
        return self


class DataConfig(Section):
    train: list[DatasetConfig] = Field(min_length=1)
    eval: list[DatasetConfig] = Field(default_factory=list)
    #: Number of passes over the training data, after which the run ends; None: prompts repeat as long as a trainer
    #: runs. With weights, the number of prompts is that of these passes, divided by weight. Between starts the value
    #: may be raised, or lowered if no later prompt was admitted yet.
    epochs: Positive | None = None
    #: Handling of groups at the end of the data that do not fill a batch. ``drop`` leaves them untrained, so every step
    #: has the batch size for which the learning rate was chosen; ``train`` makes one smaller batch.
    last_batch: Literal["train", "drop"] = "drop"
    #: Number of versions between evaluations; the first and the last version are always evaluated. 0: only these two.
    eval_every: Annotated[int, Field(ge=0)] = 0
    #: Load new weights only after a running evaluation has finished, so that one version generates the complete
    #: evaluation. Meanwhile training continues with this version's groups as far as the bound allows, and then waits.
    eval_pinned: bool = False

    @model_validator(mode="after")
    def _check_categories(self) -> Self:
        if named := [one.name for one in self.train if one.category_key is not None]:
            raise ValueError(f"category_key of training dataset {named[0]!r} has no effect: remove it")
        return self

    @model_validator(mode="after")
    def _check_curricula(self) -> Self:
        if named := [one.name for one in self.eval if one.curriculum is not None]:
            raise ValueError(f"held-out dataset {named[0]!r} is always evaluated completely: remove its curriculum")
        return self

    @model_validator(mode="after")
    def _check_streams(self) -> Self:
        if held := [one.name for one in self.eval if one.streaming]:
            raise ValueError(f"held-out dataset {held[0]!r} is always read completely: remove its streaming")
        streams = [one.name for one in self.train if one.streaming]
        if streams and len(self.train) > 1 and any(one.weight is None for one in self.train):
            raise ValueError(
                f"dataset {streams[0]!r} is a stream, and where it ends, for others to follow, is not known: give each "
                "dataset a weight"
            )
        if streams and len(self.train) > 1 and self.epochs is not None:
            raise ValueError(
                f"data.epochs counts passes over all lines, and how many the stream {streams[0]!r} has is known at its "
                "end: remove it (trainer.steps ends a run), or train on the stream alone"
            )
        return self

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if held := [one.name for one in self.eval if one.weight is not None]:
            raise ValueError(f"weight of held-out dataset {held[0]!r} has no effect: remove it")
        weights = [one.weight for one in self.train if one.weight is not None]
        if weights and len(weights) < len(self.train):
            without = next(one.name for one in self.train if one.weight is None)
            raise ValueError(f"dataset {without!r} has no weight, but others do: set its weight, or remove all weights")
        if weights:
            shares_of(weights)
        return self

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = [dataset.name for dataset in (*self.train, *self.eval)]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two datasets are named {name!r}, but job ids require unique names: rename one")
        return self
