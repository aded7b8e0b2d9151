"""Functions of a user of slime's, named by its flags."""

import json
from pathlib import Path
from typing import Any


def takes_loss_off(args: Any, groups: list[list[Any]]) -> None:
    """``--rollout-sample-filter-path``: nothing of each group's first sample is trained."""
    for group in groups:
        group[0].remove_sample = True


def keeps_a_list(args: Any, groups: list[list[Any]], data_source: Any) -> None:
    """``--rollout-all-samples-process-path``: what was seen, beside the folder of weights."""
    seen = [[sample.index, sample.label, sample.remove_sample] for group in groups for sample in group]
    Path(args.update_weight_disk_dir).with_name("all_samples.json").write_text(json.dumps(seen))
