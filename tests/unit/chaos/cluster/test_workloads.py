"""Every workload is a configuration that penstock takes, and its trainers are seats that fit together."""

import pytest

from penstock.config import Config
from penstock.config.subscription import Definition, SubscriptionConfig
from tests.chaos.cluster.workloads import WORKLOADS, Workload, merged


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=lambda one: one.name)
def test_its_configuration_is_taken(workload: Workload) -> None:
    config = Config.model_validate(workload.resolved())

    for seats in workload.trainers:
        SubscriptionConfig.of({**config.trainer.subscription.model_dump(), **seats.subscription}, seats.name)
        Definition(**seats.definition)


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=lambda one: one.name)
def test_one_role_of_one_trainer_drives(workload: Workload) -> None:
    driving = [seats for seats in workload.trainers if seats.drives]

    assert len(driving) == 1
    assert driving[0].role == (driving[0].roles[0] if driving[0].roles else "")
    assert len({seats.group for seats in workload.trainers}) == len(workload.trainers)


def test_what_is_none_is_left_out_of_a_configuration() -> None:
    one = Workload("one", {"staleness": {"bound": None}})

    assert one.resolved()["staleness"] == {"mode": "async"}
    assert merged({"a": {"b": 1}}, {"a": {"c": 2}}) == {"a": {"b": 1, "c": 2}}
