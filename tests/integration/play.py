"""Short hands for playing the parts of the protocol by verbs, without their processes."""

import uuid
from collections.abc import Sequence
from dataclasses import replace

import redis

from penstock.protocol import scripts
from penstock.protocol.scripts import Leadership, RawLease, run
from penstock.protocol.tokens import LaneTokens, of_training, tokens_of
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.records.manifest import Manifest
from penstock.records.publication import Offer, Whole
from penstock.records.sample_meta import SampleMeta, iter_metas

MODEL = "policy"


def job(index: int, n: int = 2, dataset: str = "d", epoch: int = 0) -> Job:
    return Job(id=f"{dataset}/{epoch}/{index}", n=n, prompt=f"p{index}", label="x")


def admit(
    client: redis.Redis,
    keys: Keys,
    jobs: Sequence[Job],
    *,
    lane: str = "train",
    position: int | None = None,
    gate: tuple[int, Sequence[str]] | None = None,
    source: str = "train",
    cohorts: bool = False,
    model: str = MODEL,
) -> scripts.Admission:
    at = int(client.hget(keys.source, source) or 0) if position is None else position
    pairs = [(one, one.to_bytes()) for one in jobs]
    return run(
        client,
        scripts.admit(keys, pairs, lane=lane, source=source, position=at, model=model, gate=gate, cohorts=cohorts),
    )


def lease(
    client: redis.Redis, keys: Keys, worker: str = "w1", most: int = 1, version: int = 0, suspects: int = 1
) -> list[RawLease]:
    return run(client, scripts.lease(keys, worker, uuid.uuid4().hex[:8], most=most, version=version, suspects=suspects))


def meta(k: int, token: str, version: int = 0, reward: float = 1.0) -> SampleMeta:
    return SampleMeta(
        k=k,
        token=token,
        server="control",
        checksum=0,
        num_bytes=1,
        length=3,
        prompt_length=1,
        num_generated=2,
        temperature=1.0,
        loss_by_version=[[version, 2]],
        oldest=version,
        newest=version,
        reward=reward,
        status="completed",
        finish_reason="stop",
    )


def commit(
    client: redis.Redis,
    keys: Keys,
    held: RawLease,
    ks: Sequence[int],
    version: int = 0,
    *,
    with_reward: bool = False,
) -> scripts.Committed:
    samples = [(k, version, meta(k, held.token, version).to_bytes()) for k in ks]
    for k in ks:
        client.set(keys.payload(f"{held.job}/{k}", held.token), b"x", nx=True, ex=600)
    return run(client, scripts.commit(keys, held.job, held.token, samples, with_reward=with_reward))


def reward(client: redis.Redis, keys: Keys, held: RawLease, number: float = 9.0) -> str:
    """Give every sample of a group this reward, as the holder of its lease."""
    found = iter_metas(client.get(keys.meta(held.job)) or b"", held.job)
    records = [replace(one, reward=number).to_bytes() for one in found]
    return run(client, scripts.reward(keys, held.job, held.token, records))


def complete(client: redis.Redis, keys: Keys, count: int, n: int = 2, version: int = 0) -> list[str]:
    """Lease and commit ``count`` jobs."""
    held = lease(client, keys, most=count, version=version)
    for one in held:
        assert commit(client, keys, one, range(n), version).outcome == "ready"
    return [one.job for one in held]


def lead(client: redis.Redis, keys: Keys, token: str = "leader-1", lease_ms: int = 600_000) -> Leadership:
    epoch = run(client, scripts.lead(keys, token, lease_ms))
    assert epoch > 0
    return Leadership(epoch, token)


def subscribe(client: redis.Redis, keys: Keys, sub: str = "actor", **over: scripts.Value) -> int:
    definition: dict[str, scripts.Value] = {
        "lanes": "train", "mode": "async", "bound": 1, "gb": 4, "reuse": 1, "sampler": "fifo", "driving": 1,
    }  # fmt: skip
    return run(client, scripts.subscribe(keys, sub, definition | over))


def join(client: redis.Redis, keys: Keys, owner: str = "owner-1", sub: str = "actor") -> scripts.Joined:
    return run(client, scripts.join(keys, sub, owner, 60_000))


def revision(client: redis.Redis, keys: Keys) -> int:
    return int(client.hget(keys.subs, "rev") or 0)


def manifest(n: int, sub: str = "actor", train_version: int = 1) -> bytes:
    return Manifest(
        sub=sub, n=n, train_version=train_version, bound=1, on_expiry="mask", mode="async", mask_below=-1, rows=[],
        num_loss_tokens=0, num_samples=0, num_groups=0, num_first_use=0, staleness_max=0, staleness_mean=0.0,
    ).to_bytes()  # fmt: skip


def cut(
    client: redis.Redis,
    keys: Keys,
    leader: Leadership,
    n: int,
    jobs: Sequence[str],
    *,
    sub: str = "actor",
    oldest_allowed: int = -1,
    version: int | None = None,
    rev: int | None = None,
) -> scripts.CutAnswer:
    data = manifest(n, sub)
    return run(
        client,
        scripts.cut(
            keys,
            leader,
            sub,
            revision=revision(client, keys) if rev is None else rev,
            n=n,
            manifest=data,
            digest=Manifest.digest(data),
            consumes=len(jobs),
            model="" if version is None else MODEL,
            version=version or 0,
            oldest_allowed=oldest_allowed,
            jobs=jobs,
            of_use="1:-1:0:",
        ),
    )


def keep(client: redis.Redis, keys: Keys, leader: Leadership, jobs: Sequence[str], n: int = 2) -> int:
    return run(client, scripts.keep(keys, leader, [(one, n) for one in jobs]))


def commit_batch(
    client: redis.Redis, keys: Keys, n: int, *, owner: str = "owner-1", gen: int = 0, rank: int = 0, ranks: int = 1
) -> scripts.BatchCommit:
    digest = Manifest.digest(manifest(n))
    return run(
        client,
        scripts.commit_batch(keys, "actor", owner=owner, gen=gen, n=n, digest=digest, rank=rank, ranks=ranks),
    )


def publish(
    client: redis.Redis, keys: Keys, version: int, through: int, *, owner: str = "owner-1", gen: int = 0
) -> int:
    return run(
        client,
        scripts.publish(
            keys, "actor", owner=owner, gen=gen, model=MODEL, version=version, through=through, step=version,
            record=b"record",
        ),
    )  # fmt: skip


def whole(
    client: redis.Redis, keys: Keys, version: int, path: str = "/w", *, owner: str = "owner-1", gen: int = 0
) -> str:
    told = Whole(version, path, f"index of {path}")
    return run(client, scripts.whole(keys, "actor", owner=owner, gen=gen, model=MODEL, told=told))


def offer(
    client: redis.Redis,
    keys: Keys,
    record: Offer,
    *,
    ttl_ms: int = scripts.OFFER_MS,
    owner: str = "owner-1",
    gen: int = 0,
) -> str:
    call = scripts.offer_weights(keys, "actor", MODEL, record, owner=owner, gen=gen, ttl_ms=ttl_ms)
    return run(client, call)


def rewind(client: redis.Redis, keys: Keys, n: int, *, gen: int = 0) -> scripts.Rewound:
    return run(client, scripts.rewind(keys, "actor", owner="owner-1", gen=gen, n=n, model=MODEL))


def seal(
    client: redis.Redis, keys: Keys, leader: Leadership, jobs: Sequence[str], subs: Sequence[str] = ("actor",)
) -> list[str] | None:
    return run(client, scripts.seal(keys, leader, revision=revision(client, keys), subs=subs, jobs=jobs))


def in_contact(client: redis.Redis, keys: Keys) -> None:
    """The leader has looked without a break for longer than any lease, as after a quiet hour."""
    seconds, micros = client.time()
    now = 1000 * int(seconds) + int(micros) // 1000
    server = str(client.info("server")["run_id"])
    subs = [field.decode()[4:] for field in client.hkeys(keys.subs) if field.startswith(b"sub:")]
    for who in ("reclaim", *(f"park:{sub}" for sub in subs)):
        record = {f"server:{who}": server, f"last:{who}": now, f"since:{who}": 0}
        client.hset(keys.of("contact"), mapping=record)


def state(client: redis.Redis, keys: Keys, job: str) -> str:
    return (client.hget(keys.group(job), "st") or b"gone").decode()


def counter(client: redis.Redis, keys: Keys, name: str) -> int:
    return int(client.hget(keys.counters, name) or 0)


def drawn_to_train(client: redis.Redis, keys: Keys) -> LaneTokens:
    """The ledger of lane train."""
    return of_training(tokens_of(client.hgetall(keys.tokens), client.hgetall(keys.counters)))


def assert_conserved(client: redis.Redis, keys: Keys) -> None:
    """I1 by recount, and every group against its container."""
    assert run(client, scripts.recount(keys)).difference == 0
    for key in client.scan_iter(match=keys.group("*").replace("{", "[{]")):
        name = key.decode().removeprefix(keys.group(""))
        assert run(client, scripts.check_group(keys, name)) == ""
