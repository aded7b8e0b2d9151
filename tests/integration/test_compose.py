"""docker-compose.yml and the Dockerfile, held without Docker: schema, commands, ports and names against the package."""

import contextlib
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import redis
import typer
import yaml
from compose_pydantic import ComposeSpecification

from penstock.config.load import load_config
from penstock.console.cli import main as cli
from penstock.errors import QueueUnavailable
from penstock.redis.connect import connect
from penstock.redis.server import find_binary
from tests.integration.parts import until

ROOT = Path(__file__).parents[2]
#: Where the Dockerfile puts the project.
HOME = "/penstock"


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "docker-compose.yml").read_text()))


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return dict(compose["services"])


def parts(services: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Commands of the services that are parts of penstock."""
    return {
        name: shlex.split(service["command"])
        for name, service in services.items()
        if service["image"].startswith("penstock")
    }


def stages() -> dict[str, str]:
    """Text of each stage of the Dockerfile."""
    text = (ROOT / "Dockerfile").read_text()
    found = re.split(r"(?m)^FROM \S+ AS (\S+)\n", text)
    return dict(zip(found[1::2], found[2::2], strict=True))


def copied() -> dict[str, str]:
    """Source -> target of what goes into the image."""
    lines = [line.split()[1:] for line in stages()["penstock"].splitlines() if line.startswith("COPY ")]
    return {source: target for *sources, target in lines for source in sources}


def test_it_is_what_the_compose_specification_takes(compose: dict[str, Any]) -> None:
    ComposeSpecification.model_validate({key: value for key, value in compose.items() if not key.startswith("x-")})


def test_names_refer_to_what_is_there(compose: dict[str, Any], services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        for other, condition in service.get("depends_on", {}).items():
            assert other in services, name
            if condition["condition"] == "service_healthy":
                assert services[other]["healthcheck"]["test"], other
            if condition["condition"] == "service_completed_successfully":
                assert "restart" not in services[other], f"{other} is waited for to end"
        for volume in service.get("volumes", []):
            source, _, target = volume.partition(":")
            assert source in compose["volumes"], name
            assert target.startswith((HOME + "/", "/data")), name
        if build := service.get("build"):
            assert build["target"] in stages()
            assert (ROOT / build["context"] / "Dockerfile").is_file()
    built = {service["image"] for service in services.values() if "build" in service}
    assert {service["image"] for service in services.values() if service["image"].startswith("penstock")} == built


def test_every_command_is_one_of_penstocks_with_a_configuration_that_loads(services: dict[str, dict[str, Any]]) -> None:
    group: Any = typer.main.get_command(cli.app)
    commands = parts(services)
    assert {argv[0] for argv in commands.values()} >= {"prepare", "producer", "worker", "buffer", "trainer"}
    for name, (command, *options) in commands.items():
        group.commands[command].make_context(command, list(options), resilient_parsing=False)
        path = ROOT / options[options.index("--config") + 1]
        environment = {str(key): str(value) for key, value in services[name].get("environment", {}).items()}
        config = load_config(path, [], environment)
        assert str(path).startswith(str(ROOT / "examples")), "only examples are in the image"
        if command == "prepare":
            continue
        assert config.redis.url is not None
        host, port = re.fullmatch(r"redis://(\w+):(\d+)/0", config.redis.url).groups()  # type: ignore[union-attr]
        assert (services[host]["image"].partition(":")[0], port) == ("redis", "6379")
        assert config.directory.name == "runs"
        assert f"runs:{HOME}/{config.directory.name}" in services[name]["volumes"], "weights are published as files"


def test_data_of_prepare_reach_the_parts(services: dict[str, dict[str, Any]]) -> None:
    data = services["prepare"]["volumes"]
    config = load_config(ROOT / "examples" / "digits" / "run.yaml", [], {})
    made = {str(Path(one.path.partition("@")[0]).parent.relative_to(ROOT)) for one in config.data.train}
    assert {volume.partition(":")[2] for volume in data} == {f"{HOME}/{folder}" for folder in made}
    for name in parts(services).keys() - {"prepare"}:
        assert set(data) <= set(services[name]["volumes"]), name


def connected(url: str) -> redis.Redis | None:
    with contextlib.suppress(QueueUnavailable):
        return connect(url)
    return None


def test_the_redis_of_the_containers_is_one_that_penstock_takes(
    services: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    service = services["redis"]
    assert tuple(map(int, service["image"].partition(":")[2].partition("-")[0].split("."))) >= (6, 2)
    assert [port for port in service["ports"] if not port.startswith("127.0.0.1:")] == []
    program, *options = shlex.split(service["command"])
    assert program == "redis-server"
    assert "--port" not in options, "the parts ask at 6379"
    socket = tmp_path / "redis.sock"
    argv = [str(find_binary()), *options, "--port", "0", "--unixsocket", str(socket), "--dir", str(tmp_path)]
    server = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    try:
        with until(lambda: connected(f"unix://{socket}"), "Redis to answer") as client:
            assert client.info("persistence")["aof_enabled"] == 1
    finally:
        server.kill()
        server.wait()


def test_the_image_has_all_packages_and_nothing_that_is_ignored() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    sources = copied()
    assert packages <= sources.keys()
    assert all((ROOT / source).exists() for source in sources)
    taken = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sources.keys() <= taken, "what .dockerignore leaves out cannot be copied"
    assert f"WORKDIR {HOME}\n" in stages()["penstock"]
    assert 'ENTRYPOINT ["penstock"]' in stages()["penstock"]
    assert "torch==2.13.0" in stages()["penstock"]
    script = re.search(r"RUN bash (\S+) (\S+)", stages()["worker"])
    assert script is not None
    assert (ROOT / script[1]).is_file()
    engine = load_config(ROOT / "examples" / "digits" / "run.yaml", [], {}).engine
    assert engine.python.endswith(f"{script[2]}/bin/python"), "where the example looks for its engine"
