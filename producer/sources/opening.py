"""Opening of the source that a dataset names."""

from penstock.config import DatasetConfig
from penstock.config.reading.dataset_path import code_name, hub_name, parse_path
from penstock.errors import ConfigError
from penstock.producer.sources.code import CodeRows
from penstock.producer.sources.hub import open_hub
from penstock.producer.sources.hub_stream import open_stream
from penstock.producer.sources.jsonl import JsonLines
from penstock.producer.sources.parquet import open_parquet
from penstock.producer.sources.rows import Rows
from penstock.producer.sources.stream import Stream


def open_rows(config: DatasetConfig) -> Rows | Stream:
    """Open all rows of a dataset, before slicing. Blocks for one pass over the bytes, except for streams.

    Raises:
        ConfigError: it does not exist, or cannot be read.
    """
    if name := code_name(config.path):
        return CodeRows(name, config)
    if name := hub_name(config.path):
        return open_stream(name, config) if config.streaming else open_hub(name, config)
    path, _, _ = parse_path(config.path)
    if not path.is_file():
        raise ConfigError(f"dataset {config.name}: there is no file {path}; correct its path.")
    if path.suffix == ".parquet":
        return open_parquet(path, config)
    return JsonLines(path, config.name)
