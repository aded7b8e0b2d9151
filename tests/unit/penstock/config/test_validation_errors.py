"""Validation errors are explained by their type and context: every type that a model of penstock can raise."""

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, core_schema

import penstock.console.web.app  # noqa: F401 its request models
from penstock.config import Config
from penstock.config.data import DatasetConfig
from penstock.config.engine import EngineConfig
from penstock.config.fleet import FleetConfig, MemberConfig
from penstock.config.reading.validation_errors import explain
from penstock.config.run import HistoryConfig
from penstock.config.serving import ServingConfig
from penstock.config.subscription import Definition, SubscriptionConfig
from penstock.config.trainer import TrainerConfig
from penstock.config.worker import WorkerConfig

DIGITS = "9" * 5000
#: Error type -> a model, a field (None: all of it), a refused value, and the sentence.
TABLE: dict[str, tuple[type[BaseModel], str | None, Any, str]] = {
    "bool_parsing": (HistoryConfig, "enabled", "maybe", "it should be true or false, not VALUE"),
    "bool_type": (HistoryConfig, "enabled", [1], "it should be true or false, not VALUE"),
    "dict_type": (EngineConfig, "env", 3, "it should be a map of keys, not VALUE"),
    "enum": (SubscriptionConfig, "unit", "litres", "it should be 'groups', 'samples' or 'tokens', not VALUE"),
    "extra_forbidden": (WorkerConfig, "slot", 3, "there is no such key"),
    "finite_number": (TrainerConfig, "lr", float("nan"), "it should be a finite number, not VALUE"),
    "float_parsing": (TrainerConfig, "lr", "fast", "it should be a number, not VALUE"),
    "float_type": (TrainerConfig, "lr", [1], "it should be a number, not VALUE"),
    "greater_than": (WorkerConfig, "slots", 0, "it should be greater than 0, not VALUE"),
    "greater_than_equal": (TrainerConfig, "lr", -1, "it should be greater than or equal to 0, not VALUE"),
    "int_from_float": (WorkerConfig, "slots", 9.5, "it should be an integer, not VALUE"),
    "int_parsing": (WorkerConfig, "slots", "many", "it should be an integer, not VALUE"),
    "int_parsing_size": (WorkerConfig, "slots", DIGITS, "it should be an integer with fewer digits, not VALUE"),
    "int_type": (WorkerConfig, "slots", [1], "it should be an integer, not VALUE"),
    "invalid_key": (WorkerConfig, None, {3: 4}, "a key should be a string: put it in quotes"),
    "less_than": (Config, "seed", 2**63, "it should be less than 9223372036854775808, not VALUE"),
    "less_than_equal": (TrainerConfig, "clip_low", 2, "it should be less than or equal to 1, not VALUE"),
    "list_type": (TrainerConfig, "report_to", 7, "it should be a list, not VALUE"),
    "literal_error": (
        MemberConfig,
        "worker_type",
        "both",
        "it should be 'regular', 'prefill' or 'decode', not VALUE",
    ),
    "missing": (DatasetConfig, None, {}, "it is missing"),
    "model_type": (TrainerConfig, "kl", 4, "it should be a map of keys, not VALUE"),
    "path_type": (ServingConfig, "folder", 4, "it should be a path, not VALUE"),
    "string_pattern_mismatch": (Definition, "lanes", ["a,b"], "it should be a string that matches ^[^,]+$, not VALUE"),
    "string_too_short": (
        SubscriptionConfig,
        "priority",
        "",
        "it should be a string of 1 or more characters, not VALUE",
    ),
    "string_type": (MemberConfig, "url", 3, "it should be a string, not VALUE"),
    "string_unicode": (MemberConfig, "url", b"\xff", "it should be a string of valid UTF-8, not VALUE"),
    "too_long": (FleetConfig, "ports", (1, 2, 3), "it should be a list of 2 or fewer entries, not VALUE"),
    "too_short": (Config, "data", {"train": []}, "it should be a list of 1 or more entries, not VALUE"),
    "tuple_type": (Definition, "lanes", 3, "it should be a list, not VALUE"),
    "value_error": (
        MemberConfig,
        None,
        {"url": "http://h:1", "worker_type": "prefill"},
        "http://h:1: bootstrap_port is required for worker_type prefill, and only for it: add or remove it",
    ),
}


def errors_of(model: type[BaseModel], field: str | None, value: Any) -> list[ErrorDetails]:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(value if field is None else {field: value})
    return caught.value.errors()


@pytest.mark.parametrize("kind", TABLE)
def test_an_error_is_explained_by_its_type(kind: str) -> None:
    model, field, value, sentence = TABLE[kind]
    error = next(one for one in errors_of(model, field, value) if one["type"] == kind)
    error["msg"] = "a message of another release of pydantic"

    assert explain(error, "VALUE") == sentence
    assert explain(error) == sentence.removesuffix(", not VALUE")


def test_an_unknown_type_shows_the_message_of_pydantic() -> None:
    assert explain({"type": "new", "loc": (), "msg": "Input should be new", "input": 1}, "1") == "Input should be new"


def test_every_type_that_a_model_of_penstock_can_raise_is_in_the_table() -> None:
    raised = {kind for model in _models(BaseModel) for kind in _error_types(model.__pydantic_core_schema__)}

    assert raised == TABLE.keys()
    assert raised - {"path_type"} <= set(get_args(core_schema.ErrorType))


def _models(base: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for model in base.__subclasses__():
        if model.__module__.startswith("penstock."):
            yield model
        yield from _models(model)


#: Node of a schema -> error types that it raises by itself.
NODES = {
    "any": (),
    "bool": ("bool_type", "bool_parsing"),
    "default": (),
    "definition-ref": (),
    "definitions": (),
    "dict": ("dict_type",),
    "enum": ("enum",),
    "float": ("float_type", "float_parsing", "finite_number"),
    "function-after": ("value_error",),
    "function-before": ("value_error",),
    "int": ("int_type", "int_parsing", "int_parsing_size", "int_from_float", "finite_number"),
    "is-instance": ("is_instance_of",),
    "json-or-python": (),
    "lax-or-strict": (),
    "list": ("list_type",),
    "literal": ("literal_error",),
    "model": ("model_type",),
    "model-field": (),
    "model-fields": ("missing", "extra_forbidden", "invalid_key"),
    "nullable": (),
    "str": ("string_type", "string_unicode"),
    "tuple": ("tuple_type",),
    "union": (),
}
#: Constraint of a node -> the error type it raises, by the node.
LIMITS = {
    "ge": "greater_than_equal",
    "gt": "greater_than",
    "le": "less_than_equal",
    "lt": "less_than",
    "pattern": "string_pattern_mismatch",
}


def _error_types(schema: Any) -> Iterator[str]:
    """Yield the error types that a core schema can raise; KeyError at a node that this test does not know."""
    if isinstance(schema, list | tuple):
        for entry in schema:
            yield from _error_types(entry)
        return
    if not isinstance(schema, dict):
        return
    if "custom_error_type" in schema:  # raised in place of the errors of its members
        yield schema["custom_error_type"]
        return
    node = schema.get("type")
    if isinstance(node, str):
        yield from NODES[node]
        yield from (LIMITS[limit] for limit in LIMITS.keys() & schema.keys())
        if "min_length" in schema:
            yield "string_too_short" if node == "str" else "too_short"
        if node == "tuple" and "variadic_item_index" not in schema:
            yield from ("missing", "too_long")
    skipped = {"type", "function", "metadata", "serialization", "default", "strict_schema", "json_schema", "expected"}
    for name, inner in schema.items():
        if name not in skipped and name not in ("members", "computed_fields", "config"):
            yield from _error_types(inner)
