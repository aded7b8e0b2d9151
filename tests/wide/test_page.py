"""The page in a real browser: every view of a run that goes on and of one that is over, dark, light, large, small."""

import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.history.row import Use
from penstock.history.writer import HistoryWriter
from penstock.protocol import scripts
from penstock.protocol.scripts import run
from penstock.records.causes import BatchNotCut, UserWait
from penstock.records.codec import pack
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer, write_address
from tests import missing
from tests.integration import play
from tests.integration.parts import wait_record
from tests.unit.console.read.trace.samples import sample
from tests.unit.console.web.run_files import lines, make_run, step
from tests.unit.penstock.history.rows import row

VIEWS = ("overview", "curves", "queue", "samples", "evals", "trace", "fleet", "weights", "settings")
#: What is there of a run that is over, too.
KEPT = ("overview", "curves", "samples", "evals", "trace", "settings")
HOSTILE = "<img src=x onerror=\"document.title='taken'\">\x1b[31m\u202eevil\x00"
SIZES = {"desktop": {"width": 1360, "height": 900}, "phone": {"width": 390, "height": 844}}
#: What `penstock fleet` shows of itself, one process of it with words of others.
FLEET = {
    "host": "node0",
    "groups": {"policy.engines": {"worker_type": "regular", "engines": 3, "leaving": 0, "refused": HOSTILE}},
    "processes": [{"name": "w7", "kind": "worker", "host": "node1", "state": "failed", "starts": 3, "why": HOSTILE}],
    "endpoints": {"policy": "http://node0:8000"},
    "autoscale": {
        "group": "policy.engines", "engines": 3, "wanted": 3, "binds": "demand", "capacity_tokens_per_s": 640.0,
        "terms": {"backlog": 9, "demand": 3, "fresh": 5},
        "decisions": [{"at": 1.0, "before": 1, "engines": 3, "wanted": 3, "binds": "demand", "terms": {"demand": 3}}],
    },
}  # fmt: skip
#: Longest wait for something to be seen: the machine may be slow.
PATIENCE_MS = 60_000


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a run that goes on, ``live``, and two that are over, ``over`` and ``other``."""
    directory = tmp_path_factory.mktemp("page") / "runs"
    for name, seed in (("over", 1), ("other", 2)):
        course(make_run(directory, name), seed)
        history(directory / name)
    config = directory / "other" / "config.yaml"
    config.write_text(config.read_text().replace("0.001", "0.01"))
    course(make_run(directory, "live", state="running"), 3)
    history(directory / "live")
    server = RedisServer(directory.parent / "redis")
    server.start()
    try:
        write_address(directory / "live", server.url)
        with redis.Redis.from_url(server.url) as client:
            fill(client, Keys("live"), directory)
        yield directory
    finally:
        server.stop()


def history(folder: Path) -> None:
    """Samples of a few prompts, and an evaluation of some versions."""
    writer = HistoryWriter(folder / "history", 1, max_bytes=2**30)
    drawn = [sample(f"math/0/{line}", k, reward=k / 4, answer=f"It is {k}.") for line in range(20) for k in range(4)]
    writer.write(drawn, [Use(one.job, one.k, "actor", 7, version=5, staleness=2, loss_tokens=2) for one in drawn])
    writer.write([row("math/1/0", answer=HOSTILE, reward=-1.0, fate="filtered", reason="zero_std")])
    held = [row(f"heldout/{v}/{line}", lane="eval", reward=v / 5, answer=f"{v}", reward_info={"category": kind})
            for v in range(5) for line, kind in enumerate((HOSTILE, "plain", "plain"))]  # fmt: skip
    writer.write(held)
    writer.close()


def course(folder: Path, seed: int) -> None:
    """A run of 60 steps that learns."""
    chance = random.Random(seed)
    reward = [1 - 0.9 * 0.95**n + chance.uniform(-0.03, 0.03) for n in range(60)]
    rows = [
        step(n, reward_mean=reward[n], time_s=1000.0 + 2 * n, entropy=2 * 0.96**n, grad_norm=chance.uniform(0.5, 1.5))
        | {"staleness_mean": chance.uniform(0.5, 2), "loss": chance.gauss(0, 0.01), "ratio_p50": 1.0, "ratio_p99": 1.04}
        for n in range(60)
    ]
    lines(folder / "steps.jsonl", rows)
    held = (
        {"dataset": "heldout", "version": n, "accuracy": reward[n], "time_s": 1000.0 + 2 * n} for n in range(0, 60, 10)
    )
    lines(folder / "eval.jsonl", held)
    queue = ({"time_s": 1000.0 + t, "queued": chance.randint(5, 30), "leased": 16, "ready": chance.randint(0, 9),
              "tokens_per_s": chance.uniform(800, 1200)} for t in range(120))  # fmt: skip
    lines(folder / "queue.jsonl", queue)


def fill(client: redis.Redis, keys: Keys, directory: Path) -> None:
    """Jobs in every state, workers, a trainer, waits; what others say is hostile."""
    scripts.ensure_lanes(client, keys)
    play.subscribe(client, keys, mode="async", size=2)
    play.join(client, keys)
    play.publish(client, keys, 1, 0)
    play.admit(client, keys, [*(play.job(i) for i in range(119)), Job(id="d/0/119", n=2, prompt=HOSTILE, label="x")])
    held = play.lease(client, keys, "w1", most=12, version=1)
    for one in held[:4]:
        play.commit(client, keys, one, [0, 1], version=1)
    for one in held[4:7]:
        run(client, scripts.fail(keys, one.job, one.token, "w1", reason="reward_raised", detail=f"Traceback\n{HOSTILE}",
                                 max_attempts=0, retry_ms=1))  # fmt: skip
    renew(client, keys)


def renew(client: redis.Redis, keys: Keys) -> None:
    """What those that are there show of themselves, for an hour to come."""
    now = time.time() + 3600
    for at in range(60):
        worker = {
            "name": f"w{at}.x",
            "at": now,
            "host": f"node{at // 8}",
            "engine": "sglang 0.5",
            "version": at % 2,
            "slots": 64,
        }
        worker |= {
            "state": "serving" if at else "crash loop",
            "why": "" if at else HOSTILE,
            "running": at,
            "tokens_per_s": 99.5,
            "gpus": [
                {
                    "name": str(at % 8),
                    "model": "NVIDIA H200",
                    "use": 0.87,
                    "used_bytes": 121 * 10**9,
                    "size_bytes": 150 * 10**9,
                }
            ],
        }
        client.hset(keys.workers, worker["name"], pack(worker))
    client.hset(keys.fleet, "state", pack(FLEET | {"at": now}))
    client.hset(keys.trainers, "actor/0", pack({"name": "actor", "rank": 0, "at": now, "step": 3, "wait_share": 0.5}))
    for who, cause in (("trainer:actor", BatchNotCut("actor", 1)), ("producer", UserWait(f"the gate {HOSTILE}"))):
        client.hset(keys.waits, who, wait_record(cause, now - 3605, now))


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    code = [sys.executable, "-m", "penstock.cli", "web", "--port", "0", "--actions", "--directory", str(runs)]
    with subprocess.Popen(code, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address, token = process.stdout.readline().split()[0], process.stdout.readline().split()[-1]
        (runs.parent / "token").write_text(token)
        yield address
        process.terminate()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    missing.need("chromium", "browser")
    with missing.module("playwright.sync_api").sync_playwright() as playwright:
        # Without a sandbox of its own: as root, as in CI, chromium refuses to start with one.
        path = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


class Tab:
    """A page of the browser that collects what went wrong in it."""

    def __init__(self, browser: Any, address: str, *, dark: bool = False, size: str = "desktop") -> None:
        scheme = "dark" if dark else "light"
        self.context = browser.new_context(color_scheme=scheme, viewport=SIZES[size], bypass_csp=False)
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.address = address
        self.trouble: list[str] = []
        self.page.on("console", lambda one: self.trouble.append(one.text) if one.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.page.on(
            "request", lambda one: None if one.url.startswith((address, "data:")) else self.trouble.append(one.url)
        )

    def show(self, run: str, view: str, other: str = "") -> Any:
        """The view, drawn to its end."""
        self.page.goto("about:blank")
        asked = f"with={other}" if other else "of=math/0/3" if view == "trace" else ""
        self.page.goto(f"{self.address}/#/{run}/{view}{asked and f'?{asked}'}")
        for wanted in SHOWN[view if run == "live" or view in KEPT else "none"]:
            self.page.wait_for_selector(wanted)
        return self.page


#: What is seen when a view is drawn; ``none``: a run that is over has no queue.
SHOWN = {
    "overview": (".figures div", ".chart path"),
    "curves": (".chart path",),
    "queue": (".scroll table", "text=Dead letters"),
    "samples": (".scroll table",),
    "evals": (".scroll table", ".chart path"),
    "fleet": ("[aria-label=Workers] tbody tr", "[aria-label=Decisions] tbody tr"),
    "weights": (".scroll table",),
    "trace": (".waterfall rect", ".scroll table"),
    "settings": (".scroll table",),
    "none": (".none",),
}


@pytest.fixture
def tab(browser: Any, address: str, request: pytest.FixtureRequest) -> Iterator[Tab]:
    tab = Tab(browser, address, **getattr(request, "param", {}))
    yield tab
    tab.context.close()


def reads(field: Any, value: str) -> None:
    """Wait until a field says so: the view that a link leads to is made before it is filled."""
    missing.module("playwright.sync_api").expect(field).to_have_value(value, timeout=PATIENCE_MS)


def holds(rows: Any, count: int) -> None:
    """Wait until there are so many."""
    missing.module("playwright.sync_api").expect(rows).to_have_count(count, timeout=PATIENCE_MS)


def barriers(page: Any) -> list[str]:
    """What axe finds that keeps somebody from using the page, serious or worse."""
    axe = missing.module("axe_playwright_python.sync_playwright").Axe()
    grave = [one for one in axe.run(page).response["violations"] if one["impact"] in ("serious", "critical")]
    return [f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in grave]


LOOKS = [{"dark": dark, "size": size} for dark in (False, True) for size in SIZES]


@pytest.mark.parametrize("tab", LOOKS, indirect=True, ids=str)
@pytest.mark.parametrize("run", ["live", "over"])
def test_every_view_is_drawn_without_an_error_and_can_be_used_by_all(tab: Tab, run: str) -> None:
    found = {}
    for view in VIEWS:
        page = tab.show(run, view)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{view} is wider than the screen"
        found[view] = barriers(page)
    assert {view: one for view, one in found.items() if one} == {}
    assert tab.trouble == []


def test_words_of_others_are_shown_and_do_nothing(tab: Tab) -> None:
    page = tab.show("live", "fleet")
    cell = page.locator("bdi.said", has_text="<img src=x").first
    cell.wait_for()
    shown = cell.text_content()
    assert "\\u001b[31m\\u202eevil\\u0000" in shown
    assert not set(shown) & {"\x1b", "\u202e", "\x00"}
    page.goto(f"{tab.address}/#/live/queue")
    page.get_by_label("Job", exact=True).last.fill("0/119")
    page.get_by_role("button", name="d/0/119").first.click()
    page.locator(".detail bdi", has_text="<img src=x").first.wait_for()
    assert page.title() == "live · penstock"
    assert page.locator("main img").count() == 0


def test_a_sample_is_found_and_looked_into(tab: Tab) -> None:
    page = tab.show("over", "samples")
    page.get_by_label("Fate").select_option("filtered")
    page.get_by_role("button", name="math/1/0/0").click()
    page.locator(".detail .text bdi", has_text="<img src=x").wait_for()
    page.locator(".token").first.wait_for()
    page.get_by_role("button", name="Version").click()
    page.locator(".token.v0").first.wait_for()
    page.locator(".detail").get_by_role("link", name="All samples of its group").click()
    reads(page.get_by_label("Group", exact=True), "math/1/0")
    holds(page.locator(".group li"), 1)
    assert tab.trouble == []


def test_a_sample_is_followed_to_its_batch(tab: Tab) -> None:
    page = tab.show("over", "samples")
    page.get_by_role("button", name="math/1/0/0").click()
    page.get_by_role("link", name="Its trace").click()
    reads(page.get_by_label("Of"), "math/1/0/0")
    page.locator(".text bdi", has_text="Add two and three.").wait_for()
    page.get_by_label("Of").fill("math/0/3")
    page.get_by_role("button", name="Trace").click()
    holds(page.locator(".waterfall .water-name"), 7)
    page.get_by_role("link", name="actor:7").click()
    holds(page.get_by_role("region", name="Jobs").locator("tbody tr"), 20)
    assert tab.trouble == []


def test_groups_of_a_batch_stand_beside_one_another(tab: Tab) -> None:
    page = tab.show("over", "samples")
    page.get_by_role("button", name="Newest batch").click()
    reads(page.get_by_label("Batch", exact=True), "7")
    page.get_by_role("button", name="By group").click()
    holds(page.locator(".group"), 13)
    page.get_by_role("button", name="More").click()
    holds(page.locator(".group"), 20)
    rewards = page.locator(".group").first.locator(".reward").all_text_contents()
    assert rewards == ["0.75", "0.5", "0.25", "0"]
    page.get_by_role("button", name="The batch before").click()
    page.get_by_text("No sample is like this.").wait_for()


def test_the_overview_shows_what_the_policy_says(tab: Tab) -> None:
    page = tab.show("over", "overview")
    holds(page.locator(".answers li"), 8)
    page.locator(".answers a").first.click()
    page.locator(".detail .token").first.wait_for()
    assert tab.trouble == []


def test_a_prompt_is_followed_over_versions(tab: Tab) -> None:
    page = tab.show("over", "evals")
    holds(page.locator(".cell"), 15)
    page.get_by_role("region", name="Prompts").get_by_role("button").last.click()
    holds(page.get_by_role("region", name="Answers").locator("tbody tr"), 5)
    assert tab.trouble == []


def test_scores_are_told_by_category_and_words_of_the_data_do_nothing(tab: Tab) -> None:
    page = tab.show("over", "evals")
    rows = page.get_by_role("region", name="By category").locator("tbody tr")
    holds(rows, 2)
    hostile, plain = rows.all_text_contents()
    assert "\\u202eevil\\u0000" in hostile
    assert plain.startswith("plain")
    assert page.locator("main img").count() == 0
    assert tab.trouble == []


def test_an_evaluation_is_seen_without_a_reload(tab: Tab, runs: Path) -> None:
    page = tab.show("live", "evals")
    versions = page.get_by_role("region", name="Scores").locator("tbody tr")
    holds(versions, 5)
    writer = HistoryWriter(runs / "live" / "history", 2, max_bytes=2**30)
    writer.write([row(f"heldout/5/{line}", lane="eval", reward=1.0, answer="5") for line in range(3)])
    writer.close()
    holds(versions, 6)
    holds(page.locator(".cell"), 18)
    assert tab.trouble == []


def test_the_cause_is_marked_and_the_chain_is_told(tab: Tab) -> None:
    page = tab.show("live", "overview")
    page.wait_for_selector(".part.is-cause")
    chains = page.locator(".chain").all_text_contents()
    assert any("trainer:actor has waited" in one for one in chains)
    assert page.locator('[data-part="buffer"] .cause').text_content().startswith("Cause: no buffer is running")


def test_pages_follow_one_another(tab: Tab) -> None:
    page = tab.show("live", "queue")
    jobs = page.locator(".pages").last
    holds(jobs.locator("tbody tr"), 50)
    jobs.get_by_role("button", name="More").click()
    holds(jobs.locator("tbody tr"), 100)
    names = jobs.locator("tbody tr td:first-child").all_text_contents()
    assert len(set(names)) == 100


def test_one_run_is_laid_over_another(tab: Tab) -> None:
    page = tab.show("over", "curves", other="other")
    page.wait_for_selector(".chart path.dashed")
    first = page.locator(".chart").first
    assert first.locator(".legend li").all_text_contents() == ["reward, over", "reward, other"]
    first.locator(".plot").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert first.locator(".tip strong").text_content() == "step 58"
    page = tab.show("over", "settings", other="other")
    assert page.locator("h1").text_content() == "Where the configurations differ"


def test_the_theme_is_switched_and_kept(tab: Tab) -> None:
    page = tab.show("over", "overview")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    page.get_by_role("button", name="Switch between dark and light").click()
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_an_action_is_done_with_the_token_and_refused_without(tab: Tab, runs: Path) -> None:
    page = tab.show("live", "queue")
    page.get_by_role("button", name="Requeue").first.click()
    page.get_by_text("The token is not the one").wait_for()
    page.get_by_label("Token of actions").fill((runs.parent / "token").read_text())
    page.get_by_role("button", name="Requeue").first.click()
    page.get_by_text("is queued again").wait_for()
    page.locator("tr", has_text="eval").get_by_role("button", name="Pause").click()
    page.get_by_text("Lane eval is paused.").wait_for()
    assert [one for one in tab.trouble if "401" not in one] == []


def test_what_comes_is_seen_without_a_reload(tab: Tab, runs: Path) -> None:
    page = tab.show("live", "overview")
    held = json.loads((runs / "live" / "redis.json").read_text())
    with redis.Redis.from_url(held["url"]) as client:
        client.hset(Keys("live").sub("actor"), "cursor", 41)
    page.get_by_text("41 of 50").wait_for()
