"""A prompt of a run, made from a row of a dataset; or an error that says what is wrong with the row.

Values that could not be admitted later are refused here: text that is not Unicode (lone surrogates), numbers and
nesting that no record can have.
"""

import base64
import binascii
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.config import DatasetConfig
from penstock.config.reading.dataset_path import parse_path
from penstock.errors import ConfigError, ProtocolError
from penstock.producer.sources.rows import BadLine
from penstock.protocol.images import MAX_IMAGE_BYTES, MAX_IMAGES, check_images
from penstock.records.codec import pack, unpack
from penstock.text import safe_repr

#: Placeholder of the next image of the row in a text of a message.
MARK = "<image>"
#: Key of a file's digest in a part of a message, or an entry of the column.
DIGEST = "sha256"
_KEYS = ("image", "image_url", "url", "path")
#: Types of image parts, and of parts that no prompt may have: a template would add placeholders for them anyway.
_IMAGES = ("image", "image_url")
_PARTS = "a prompt has parts of type text and of type image; make it one of these, or take it out."
_OTHERS = ("audio", "audio_url", "file", "input_audio", "input_file", "input_image", "video", "video_url")

Messages = list[dict[str, Any]]


def with_images(config: DatasetConfig, messages: Messages, row: dict[str, Any], where: str) -> Messages:
    """Add the images of a row to its messages, as parts with bytes. Raises BadLine if marks and images differ.

        {"type": "image", "image": PATH | data:image/...;base64,... | bytes}     a part of a message
        image_key: a column of such images      used for each <image> in texts, in their order

    With ``sha256`` beside it a replaced file is a bad line: changed rows are detected at a start, changed files
    are not. A path is below the dataset's folder of images, links followed; no URL is ever opened. Workers receive
    bytes, so a record names nothing that could be opened.
    """
    if config.image_key is None:
        return messages
    if config.image_key not in row:
        raise BadLine(f"{where}: there is no {config.image_key!r}; set the dataset's image_key, or give null for none.")
    held = row[config.image_key]
    images = list(held) if isinstance(held, list | tuple) else [] if held is None else [held]
    left = iter(images)
    placed = [_placed(message, left) for message in messages]
    marks = sum(text.count(MARK) for message in messages for text in _texts_of(message))
    if marks != len(images):
        often = "once" if marks == 1 else f"{marks} times"
        raise BadLine(f"{where}: its messages say {MARK} {often}, and {config.image_key!r} holds {len(images)}.")
    return placed


def take_images(config: DatasetConfig, messages: Messages, where: str) -> tuple[Messages, list[bytes]]:
    """Replace images in messages by marks, as a chat template needs them, and return these and the images' bytes.

    Blocks for the disk if an image is a path.

    Raises:
        BadLine: an image cannot be read, is not below the folder, is larger than a job's may be, or does
            not match its digest.
    """
    images: list[bytes] = []
    bare = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            parts = [_taken(config, part, images, where) for part in content]
            message = {**message, "content": parts}
        bare.append(message)
    try:
        check_images(images, where)
    except ConfigError as exc:
        raise BadLine(str(exc)) from exc
    return bare, images


def folder_of(config: DatasetConfig) -> Path | None:
    """Return the folder of image paths: the configured one, or that of the dataset's file; None without one."""
    if config.image_folder is not None:
        return Path(config.image_folder)
    path = Path(parse_path(config.path)[0])
    return path.parent if path.is_file() else None


def _texts_of(message: dict[str, Any]) -> list[str]:
    """Return the texts of a message that may have image marks."""
    content = message.get("content")
    if isinstance(content, list):
        return [_marked(part) for part in content]
    return [content] if isinstance(content, str) else []


def _marked(part: Any) -> str:
    """Return the text of a text part, else ''."""
    if not isinstance(part, dict) or part.get("type") not in (None, "text"):
        return ""
    text = part.get("text")
    return text if isinstance(text, str) else ""


def _placed(message: dict[str, Any], left: Iterator[Any]) -> dict[str, Any]:
    if not any(MARK in text for text in _texts_of(message)):
        return message
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    out: list[Any] = []
    for part in parts:
        out += _split(part, text, left) if (text := _marked(part)) else [part]
    return {**message, "content": out}


def _split(part: dict[str, Any], text: str, left: Iterator[Any]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for number, piece in enumerate(text.split(MARK)):
        if number:
            out.append({"type": "image", "image": next(left, None)})
        if piece:
            out.append({**part, "text": piece})
    return out


def _taken(config: DatasetConfig, part: Any, images: list[bytes], where: str) -> Any:
    """Convert a part of a message; an image becomes a mere mark, its bytes go to ``images``."""
    if not isinstance(part, dict):
        return part
    # In tables all parts have all keys, and templates check which exist.
    part = {key: value for key, value in part.items() if value is not None}
    if (kind := part.get("type", next((key for key in _IMAGES if key in part), "text"))) not in _IMAGES:
        if found := {str(kind), *part} & {*_IMAGES, *_OTHERS}:
            raise BadLine(f"{where} has a part of type {safe_repr(kind)} with {', '.join(sorted(found))}: {_PARTS}")
        return part
    value = next((part[key] for key in _KEYS if key in part), None)
    if len(images) == MAX_IMAGES:
        raise BadLine(f"{where} has more images than the {MAX_IMAGES} of one prompt: take some out.")
    what = f"{where}, image {len(images) + 1}"
    data = _bytes_of(config, value, what)
    for holder in (part, value):
        if isinstance(holder, dict) and (told := holder.get(DIGEST)) is not None:
            _check_digest(data, told, what)
    images.append(data)
    return {"type": "image"}


def _check_digest(data: bytes, told: Any, what: str) -> None:
    found = hashlib.sha256(data).hexdigest()
    if not isinstance(told, str) or told.lower() != found:
        raise BadLine(
            f"{what} does not match its row: {DIGEST} is {found}, and {safe_repr(told)} is expected. Put the "
            "image back, or begin a new run with the rows corrected."
        )


def _bytes_of(config: DatasetConfig, value: Any, what: str) -> bytes:
    if isinstance(value, dict):
        # As in OpenAI's messages, and as Hugging Face datasets stores images in parquet.
        value = value.get("bytes") or value.get("url") or value.get("path")
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if not isinstance(value, str) or not value:
        raise BadLine(f"{what}: give the bytes of a file, a data: URI, or a path below the folder of images.")
    if value.startswith("data:"):
        return _inline(value, what)
    if "://" in value:
        raise BadLine(f"{what} is a URL, and none is opened: keep the file beside the dataset, and name its path.")
    return _read(folder_of(config), value, what)


def _inline(value: str, what: str) -> bytes:
    head, comma, body = value.partition(",")
    if not comma or not head.endswith(";base64"):
        raise BadLine(f"{what}: its data: URI is not in base64.")
    if len(body) > 2 * MAX_IMAGE_BYTES:
        raise BadLine(f"{what} has more than {MAX_IMAGE_BYTES:,} bytes: make it smaller.")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise BadLine(f"{what}: its data: URI is not in base64 ({exc}).") from exc


def _read(folder: Path | None, value: str, what: str) -> bytes:
    if folder is None:
        raise BadLine(f"{what} is a path, and the dataset has no folder of images: set its image_folder.")
    try:
        root = folder.resolve(strict=True)
        path = (root / value).resolve(strict=True)
        if not path.is_relative_to(root):
            raise BadLine(f"{what} ({value}) lies elsewhere than below {folder}: move it there, or set image_folder.")
        # Opened without blocking: a pipe has no writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            data = file.read(MAX_IMAGE_BYTES + 1)
    except (OSError, ValueError) as exc:
        why = getattr(exc, "strerror", None) or exc
        raise BadLine(
            f"{what} ({value}) cannot be read below {folder} ({why}): correct the path, or set image_folder."
        ) from exc
    return data


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
