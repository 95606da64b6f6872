"""The server's accounts: what is not in a role's table is refused by a real server, under the rules that a cluster has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import redis

from common.keys import Keys
from common.server import connect
from grapevine.cluster.accounts import COMMANDS, ROLES, RQ_COMMANDS, Scope, acl_file
from grapevine.server import EmbeddedServer

RUN = "swarm"
PASSWORDS = {role: f"password of {role}" for role in ("admin", *ROLES)}
EAST = {role: f"password of east's {role}" for role in ("admin", *ROLES)}

# Of the keys of a run: w = all rights, r = reading, nothing = none. The order is that of ROLES.
TABLE = {
    #              learner generator verifier control exporter keda
    "open":         ("w", "r", "w", "w", "r", "w"),
    "raw":          ("", "w", "w", "", "r", "w"),
    "counts":       ("w", "w", "w", "w", "w", ""),
    "quarantine":   ("w", "w", "w", "w", "r", ""),
    "authors":      ("r", "", "w", "r", "r", ""),
    "orders":       ("w", "w", "", "w", "r", ""),
    "own":          ("w", "", "w", "w", "r", ""),
    "books":        ("w", "", "", "w", "r", ""),
    "policy":       ("w", "r", "", "w", "", ""),
    "swarm":        ("r", "", "w", "r", "r", ""),
    "identities":   ("w", "w", "w", "w", "", ""),
    "targets":      ("w", "w", "", "w", "r", ""),
    "workers":      ("w", "w", "w", "w", "w", ""),
    "invitation":   ("", "", "", "", "", ""),
    "assignments":  ("", "w", "", "", "w", ""),
}  # fmt: skip
# What a server lets any connection do, since it is how one says who one is.
FOR_ALL = ("auth", "hello", "quit", "reset")


def keys_of(keys: Keys, site: str, node: str) -> dict[str, str]:
    """One key of every kind."""
    shard = keys.shard_of(node)
    return {
        "open": keys.open(shard), "raw": keys.raw(shard, site), "counts": keys.counts(shard),
        "quarantine": keys.quarantine(shard), "authors": keys.authors(shard, "easy"), "orders": keys.orders(node),
        "own": keys.own(node), "books": keys.books(node), "policy": keys.policy(node), "swarm": keys.swarm(node, "easy"),
        "identities": keys.identities(), "targets": keys.targets(), "workers": keys.workers(),
        "invitation": keys.invitation(), "assignments": keys.assignments(),
    }  # fmt: skip


class Guarded:
    """A server with an ACL file, and what it says of its users."""

    def __init__(self, server: EmbeddedServer, folder: Path) -> None:
        self.admin: Any = redis.Redis.from_url(server.url)
        self._url = server.url
        lines = acl_file(Scope(RUN), PASSWORDS).splitlines()
        lines += [line for line in acl_file(Scope(RUN, "east", "east-*", "east-"), EAST).splitlines() if " east-" in line]
        for line in lines:
            _, name, *rules = line.split(" ")
            if name in ("default", "admin", "health"):
                continue  # they would lock this test's own way in
            self.admin.execute_command("ACL", "SETUSER", name, "reset", *_with_selectors(rules))

    def may(self, user: str, *command: str) -> bool:
        """Whether a user may do this. Raises for a command that is none."""
        answer = self.admin.execute_command("ACL", "DRYRUN", user, *command)
        return bool(answer in (b"OK", "OK", True))

    def login(self, user: str, password: str) -> redis.Redis:
        return connect(self._url.replace("redis://:", f"redis://{user}:").replace(self._password, quote(password)))

    @property
    def _password(self) -> str:
        return self._url.split("@")[0].rpartition(":")[2]

    def commands(self) -> Iterator[tuple[str, ...]]:
        """Every command that there is, with as many words as it wants at least; containers by their subcommands."""
        for facts in self.admin.execute_command("COMMAND").values():
            yield from _words(facts)


def _with_selectors(rules: list[str]) -> list[str]:
    """Rules as SETUSER takes them: a selector in parentheses is one argument."""
    text, found = " ".join(rules), []
    while "(" in text:
        before, _, rest = text.partition("(")
        inner, _, text = rest.partition(")")
        found += [*before.split(), f"({inner})"]
    return [*found, *text.split()]


def _words(facts: Any) -> Iterator[tuple[str, ...]]:
    subcommands = facts.get("subcommands") or []
    name, arity = facts["name"], facts["arity"]
    if not subcommands:
        words = tuple(name.split("|"))
        yield (*words, *["x"] * (abs(arity) - len(words)))
    for sub in subcommands:
        fields = [one.decode() if isinstance(one, bytes) else one for one in sub[:2]] if isinstance(sub, list) else None
        if fields:
            words = tuple(str(fields[0]).split("|"))
            yield (*words, *["x"] * (abs(int(fields[1])) - len(words)))
        else:
            yield from _words(sub)


@pytest.fixture(scope="module")
def guarded(server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Guarded:
    return Guarded(server, tmp_path_factory.mktemp("accounts"))


@pytest.mark.parametrize("role", ROLES)
def test_every_other_command_is_refused(role: str, guarded: Guarded) -> None:
    granted = {name.replace("|", " ") for name in (*COMMANDS[role], *(RQ_COMMANDS if role == "control" else ()))}
    checked, wrong = 0, []
    for words in guarded.commands():
        if words[0] in FOR_ALL or not granted.isdisjoint((" ".join(words[:2]), words[0])):
            continue
        checked += 1
        # On a key that the role has all rights on, so that the command alone decides.
        key = key_of_ones_own(role)
        if guarded.may(role, *(key if word == "x" else word for word in words)):
            wrong.append(" ".join(words))
    assert checked > 150
    assert wrong == []


@pytest.mark.parametrize("role", ROLES)
def test_every_command_of_the_table_exists_and_is_granted(role: str, guarded: Guarded) -> None:
    known = {" ".join(words[:2]): words for words in guarded.commands()} | {words[0]: words for words in guarded.commands()}
    key = key_of_ones_own(role)
    for name in COMMANDS[role]:
        words = known[name.replace("|", " ")]
        words = (name, "x", "1", key) if name.startswith("eval") else tuple(key if one == "x" else one for one in words)
        assert guarded.may(role, *words), name


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("shards", [1, 3])
def test_every_other_key_is_refused(role: str, shards: int, guarded: Guarded) -> None:
    for name, key in keys_of(Keys(RUN, shards), "local", "node-0").items():
        right = TABLE[name][ROLES.index(role)]
        assert can_read(guarded, role, key) == (right in ("r", "w")), f"{role} reads {name}"
        assert can_write(guarded, role, key) == (right == "w"), f"{role} writes {name}"


@pytest.mark.parametrize("role", ROLES)
def test_other_runs_other_sites_and_other_programs_are_out_of_reach(role: str, guarded: Guarded) -> None:
    strange = [
        *keys_of(Keys("swarm-2"), "local", "node-0").values(), *keys_of(Keys("other"), "local", "node-0").values(),
        "sessions", "gv:", f"gv:{{{RUN}}}", f"gv:{{{RUN}:0}}:anything", f"gv:{{{RUN}}}:anything", "x}:open",
    ]  # fmt: skip
    raw_of_others = Keys(RUN).raw(0, "east")
    if role != "exporter":  # which looks at all sites and writes to none
        strange.append(raw_of_others)
    assert not can_write(guarded, role, raw_of_others)
    for key in strange:
        assert not can_read(guarded, role, key), key
        assert not can_write(guarded, role, key), key
    # rq's keys belong to those who work with it.
    assert can_write(guarded, role, "rq:job:1") == (role == "control")
    assert guarded.may(role, "subscribe", "rq:pubsub:1") == (role == "control")
    assert not guarded.may(role, "subscribe", "anything")


@pytest.mark.parametrize("role", ROLES)
def test_a_site_writes_in_the_name_of_its_own_nodes_only(role: str, guarded: Guarded) -> None:
    user, keys = f"east-{role}", Keys(RUN)
    for node in ("west-node-0", "node-0", "eastern", "eval-west-node-0-5"):
        for name in ("orders", "own", "books", "policy", "swarm"):
            assert not can_write(guarded, user, keys_of(keys, "east", node)[name]), (user, name, node)
    for node in ("east-node-0", "eval-east-node-0-5"):
        for name in ("orders", "own", "books", "policy"):
            right = TABLE[name][ROLES.index(role)]
            assert can_write(guarded, user, keys_of(keys, "east", node)[name]) == (right == "w"), (user, name, node)
    if role == "learner":
        assert can_read(guarded, user, keys.swarm("west-node-0", "easy")), "what sharing is about"
    assert can_write(guarded, user, keys.raw(0, "east")) == (TABLE["raw"][ROLES.index(role)] == "w")
    assert not can_write(guarded, user, keys.raw(0, "west"))


def test_nobody_gets_in_without_a_password_and_the_probe_can_do_nothing(tmp_path: Path) -> None:
    lines = acl_file(Scope(RUN), PASSWORDS).splitlines()
    assert lines[0] == "user default off"
    assert not [password for password in PASSWORDS.values() if password in "\n".join(lines)]
    assert [line for line in lines if "nopass" in line] == ["user health on nopass -@all +ping"]


@pytest.mark.parametrize("role", ROLES)
def test_what_would_hurt_most_is_really_refused(role: str, guarded: Guarded) -> None:
    client = guarded.login(role, PASSWORDS[role])
    client.connection_pool.connection_kwargs["redis_connect_func"] = None  # KEDA's may not even ask for INFO
    client.connection_pool.reset()
    attempts = (
        ("FLUSHALL",), ("FLUSHDB",), ("KEYS", "*"), ("SCAN", "0"), ("CONFIG", "GET", "*"), ("ACL", "LIST"),
        ("ACL", "SETUSER", role, "allkeys"), ("SHUTDOWN", "NOSAVE"), ("MONITOR",), ("SCRIPT", "FLUSH"), ("SWAPDB", "0", "1"),
        ("MIGRATE", "h", "1", "k", "0", "1"), ("CLIENT", "KILL", "TYPE", "normal"),
        ("REPLICAOF", "h", "1"), ("RESTORE", "k", "0", "x"), ("RENAME", "a", "b"),
    )  # fmt: skip
    for attempt in attempts:
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.execute_command(*attempt)


def key_of_ones_own(role: str) -> str:
    """A key that the role has all rights on."""
    name = next(name for name, rights in TABLE.items() if rights[ROLES.index(role)] == "w")
    return keys_of(Keys(RUN), "local", "node-0")[name]


def can_read(guarded: Guarded, user: str, key: str) -> bool:
    role = user.removeprefix("east-")
    words = ("hlen", key) if role == "keda" else ("hget", key, "x")
    return guarded.may(user, *words)


def can_write(guarded: Guarded, user: str, key: str) -> bool:
    role = user.removeprefix("east-")
    # Whoever has a script run on a key needs all rights on it, and KEDA has no other command that does.
    words = ("eval", "return 1", "1", key) if role == "keda" else ("hset", key, "x", "1")
    return guarded.may(user, *words)
