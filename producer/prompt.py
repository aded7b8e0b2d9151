"""A prompt of a run, made from a row of a dataset; or an error that says what is wrong with the row.

Values that could not be admitted later are refused here: text that is not Unicode (lone surrogates), numbers and
nesting that no record can have.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.config import DatasetConfig
from penstock.errors import ProtocolError
from penstock.producer.pictures import take_images, with_images
from penstock.producer.sources.rows import BadLine
from penstock.protocol.records.codec import pack, unpack


@dataclass(frozen=True, slots=True)
class Template:
    """Renders chat messages, and counts tokens."""

    #: (messages, keywords of the template) -> the prompt; None: not available.
    render: Callable[..., str] | None = None
    #: Digest of the template: equal digests render alike.
    digest: str = ""
    #: Tokens of a prompt; None: not counted here.
    count: Callable[[str], int] | None = None


class LongPrompt(BadLine):
    """A prompt has more than ``max_prompt_tokens``."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a dataset."""

    #: Line or row number in the file, from 0; part of the job's id.
    index: int
    text: str | None
    ids: list[int] | None
    #: Any JSON value.
    label: Any
    metadata: dict[str, Any]
    #: Given answers: text or token ids.
    answers: list[Any] = field(default_factory=list)
    #: Image files, in the order of their placeholders.
    images: list[bytes] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Bytes of its text, of its ids as 8 bytes each, and of its images."""
        return len(self.text or "") + 8 * len(self.ids or ()) + sum(map(len, self.images))

    @property
    def digest(self) -> bytes:
        """Digest of the prompt alone: equal prompts have equal digests (T18)."""
        content = self.text if self.text is not None else json.dumps(self.ids)
        digest = hashlib.blake2b(content.encode(), digest_size=12)
        for image in self.images:
            digest.update(hashlib.blake2b(image, digest_size=12).digest())
        return digest.digest()


def read_prompt(config: DatasetConfig, template: Template | None, index: int, row: dict[str, Any]) -> Prompt:
    """Make the prompt of a row.

    Args:
        template: renders chat messages; needed if prompts are lists of messages.

    Raises:
        BadLine: the row has none; names dataset and line.
    """
    where = f"dataset {config.name}, line {index + 1}"
    if config.input_key not in row:
        raise BadLine(f"{where}: there is no {config.input_key!r}; set the dataset's input_key.")
    tools = _tools(config, row, where)
    text, ids, images = _render(config, template, row, tools, where)
    label = _label(config, row, where)
    metadata = row.get(config.metadata_key) if config.metadata_key else None
    if metadata is not None and not isinstance(metadata, dict):
        raise BadLine(f"{where}: {config.metadata_key!r} is not a map.")
    answers = _answers(config, row, where)
    if tools:
        metadata = {"tools": tools, **(metadata or {})}
    check_writable([text, ids, label, metadata, answers], where)
    prompt = Prompt(index, text, ids, label, metadata or {}, answers, images)
    _check_length(config, template, prompt, where)
    return prompt


def _check_length(config: DatasetConfig, template: Template | None, prompt: Prompt, where: str) -> None:
    most = config.max_prompt_tokens
    num = _num_tokens(template, prompt) if most is not None else None
    if most is not None and num is not None and num > most:
        raise LongPrompt(
            f"{where}: its prompt has {num} tokens, and max_prompt_tokens is {most}: raise that, take the line out, or "
            "set the dataset's on_long_prompt: skip."
        )


def _label(config: DatasetConfig, row: dict[str, Any], where: str) -> Any:
    """Return the label as the file has it; '' if the configuration names none."""
    key = config.label_key
    if key is None:
        return ""
    if row.get(key) is None:
        raise BadLine(
            f"{where}: {'its' if key in row else 'there is no'} {key!r}{' is null' if key in row else ''}; set the "
            "dataset's label_key, or `label_key: null` where the reward needs none."
        )
    label = row[key]
    try:
        json.dumps(label)
    except RecursionError:
        pass  # reported below, as of the whole line
    except (TypeError, ValueError) as exc:
        raise BadLine(f"{where}: its {key!r} is not a label: it holds what JSON cannot represent ({exc}).") from exc
    return label


def _answers(config: DatasetConfig, row: dict[str, Any], where: str) -> list[Any]:
    key = config.answer_key
    if key is None:
        return []
    if key not in row:
        raise BadLine(f"{where}: there is no {key!r}; set the dataset's answer_key, or give null for none.")
    value = row[key] if row[key] is not None else []
    answers = [value] if isinstance(value, str) or _is_ids(value) else value
    if not isinstance(answers, list) or not all(isinstance(one, str) or _is_ids(one) for one in answers):
        raise BadLine(f"{where}: {key!r} is not an answer: give text, a list of token ids, or a list of those.")
    return answers


def _num_tokens(template: Template | None, prompt: Prompt) -> int | None:
    """Return the tokens of a prompt; None if they are not counted here."""
    if prompt.ids is not None:
        return len(prompt.ids)
    if template is None or template.count is None or prompt.text is None:
        return None
    return template.count(prompt.text)


def _tools(config: DatasetConfig, row: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Return the tools for the chat template; [] if a row names none."""
    key = config.tools_key
    if key is None:
        return []
    if key not in row:
        raise BadLine(f"{where}: there is no {key!r}; set the dataset's tools_key, or give null for none.")
    tools = row[key] or []
    try:
        tools = (json.loads(tools) or []) if isinstance(tools, str) else tools
    except (ValueError, RecursionError) as exc:
        raise BadLine(f"{where}: {key!r} is text that is not JSON ({exc}).") from exc
    if not isinstance(tools, list) or not all(isinstance(one, dict) for one in tools):
        raise BadLine(f"{where}: {key!r} is not a list of maps.")
    return tools


def _render(
    config: DatasetConfig, template: Template | None, row: dict[str, Any], tools: list[dict[str, Any]], where: str
) -> tuple[str | None, list[int] | None, list[bytes]]:
    """Render the prompt as text or as ids; return it with its images."""
    value = row[config.input_key]
    if isinstance(value, str):
        if not config.apply_chat_template:
            return value, None, []
        value = [{"role": "user", "content": value}]
    if _is_ids(value):
        return None, value, []
    if isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
        if template is None or template.render is None:
            raise BadLine(f"{where}: chat messages need apply_chat_template: true for this dataset.")
        if config.system_prompt and value[0].get("role") != "system":
            value = [{"role": "system", "content": config.system_prompt}, *value]
        value, images = take_images(config, with_images(config, value, row, where), where)
        keywords = {**config.chat_template_kwargs, **({"tools": tools} if tools else {})}
        try:
            return template.render(value, **keywords), None, images
        except Exception as exc:  # a template may raise anything
            raise BadLine(f"{where}: the model's chat template refuses these messages ({exc}).") from exc
    raise BadLine(f"{where}: a prompt is text, a list of messages or a list of token ids.")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(v) is int for v in value)


def check_writable(value: Any, where: str) -> None:
    """Raise BadLine, which begins with ``where``, if a record cannot hold a value."""
    try:
        # In a record it is a few levels deeper.
        unpack(pack([[[value]]]), where)
    except UnicodeEncodeError as exc:
        raise BadLine(
            f"{where}: it holds half of a surrogate pair ({exc.object[exc.start : exc.end]!a}), which is not text; "
            "correct the escapes."
        ) from exc
    except OverflowError as exc:
        raise BadLine(f"{where}: it holds an integer beyond 64 bits; write it as text.") from exc
    except TypeError as exc:
        raise BadLine(f"{where}: it holds what JSON cannot represent ({exc}).") from exc
    except (ValueError, RecursionError, ProtocolError) as exc:
        why = exc.__cause__ if isinstance(exc, ProtocolError) else exc
        raise BadLine(f"{where}: it is nested too deeply, or too large, for a record ({why}).") from exc
