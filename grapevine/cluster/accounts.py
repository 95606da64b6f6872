"""The server's accounts: which keys and which commands each role has. One table, from which the ACL file is made.

Guarantees: an account sees one run only (but for rq's keys, which control workers of all runs share) and of it what its
role touches; no account but `admin` can list keys, configure
the server, or see what others do; a site's accounts write in the name of that site's nodes only. What a script is handed
needs all rights on its key (the server cannot know what scripts do), so there the commands are the limit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from common.keys import jobs_of

# What every connection of ours begins with and every script needs.
CONNECTION = ("ping", "select", "info", "time", "evalsha", "script|load", "script|exists")
READ_GROUP = ("xreadgroup", "xgroup|create", "xack", "xdel")
REDELIVER = ("xrange", "xpending", "xclaim", "xinfo|consumers", "xgroup|delconsumer", "xadd", "hincrby", "lpush", "ltrim")
DIRECTORY = ("hget", "hset", "hsetnx", "hgetall", "hdel")

COMMANDS: dict[str, tuple[str, ...]] = {
    "learner": (
        *CONNECTION, *READ_GROUP, *REDELIVER, *DIRECTORY, "get", "set", "del", "hmget", "hkeys", "xlen", "xrevrange",
        "zrangebyscore",
    ),
    "generator": (*CONNECTION, *READ_GROUP, *REDELIVER, *DIRECTORY, "get", "hmget", "xlen"),
    "verifier": (
        *CONNECTION, *READ_GROUP, *REDELIVER, *DIRECTORY, "xlen", "xtrim", "pexpire", "zadd", "zremrangebyscore",
    ),
    "exporter": (
        *CONNECTION, *DIRECTORY, "get", "hmget", "hkeys", "hlen", "hincrby", "xlen", "xpending", "llen", "zrangebyscore",
        "memory|usage", "multi", "exec", "discard",
    ),
    # KEDA asks for a hash's length in a script of its own, and for a stream's as such.
    "keda": ("ping", "select", "hello", "eval", "type", "hlen", "llen", "scard", "zcard", "xlen"),
}  # fmt: skip
COMMANDS["control"] = (*COMMANDS["learner"], "exists")
ROLES = ("learner", "generator", "verifier", "control", "exporter", "keda")

# What rq does with keys and channels of its own.
RQ_COMMANDS = (
    "get", "set", "del", "exists", "expire", "pexpire", "persist", "ttl", "hget", "hset", "hgetall", "hmget", "hdel",
    "hincrby", "hincrbyfloat", "hexists", "sadd", "srem", "smembers", "scard", "sismember", "zadd", "zrem", "zrange",
    "zscore", "zcard", "zrangebyscore", "zremrangebyscore", "zremrangebyrank", "lpush", "rpush", "lrem", "lrange", "llen",
    "lpos", "lpop", "lmove", "blmove", "blpop", "rename", "xadd", "xdel", "xlen", "xread", "xrange", "xrevrange", "xtrim",
    "eval", "evalsha", "script|load", "script|exists", "multi", "exec", "discard", "watch", "unwatch", "publish",
    "subscribe", "unsubscribe", "info", "ping", "select", "time", "client|list", "client|setname",
)  # fmt: skip
RQ = f"({' '.join(f'+{name}' for name in RQ_COMMANDS)} ~rq:* &rq:*)"


@dataclass(frozen=True)
class Scope:
    """Whose accounts they are: `nodes` is a pattern of the site's node names, `prefix` begins the accounts' names."""

    run: str
    site: str = "local"
    nodes: str = "*"
    prefix: str = ""

    def keys(self, role: str) -> tuple[str, ...]:
        """Key patterns of a role, as an ACL writes them: `~` all rights, `%R~` reading only."""
        wanted = {
            "learner": (
                self._directory() + self._target() + self._counts() + self._swarm_reading() + self._shard("~", "open")
            ),
            "generator": (
                self._directory() + self._counts() + self._shard("~", *self._of_nodes("orders"), f"raw:{self.site}")
                + self._shard("%R~", "open", *self._of_nodes("policy")) + self._run("~", "assignments")
            ),
            "verifier": (
                self._directory(targets=False) + self._counts() + self._shard("~", "open", f"raw:{self.site}")
                + self._shard("~", *self._of_nodes("own"), *self._of_nodes("swarm-*"), "authors:*")
            ),
            "exporter": (
                self._shard("%R~", "open", "raw:*", "orders:*", "own:*", "books:*", "swarm-*", "authors:*", "quarantine")
                + self._run("%R~", "targets") + self._run("~", "workers", "assignments") + self._shard("~", "counts")
            ),
            "keda": (*self._shard("~", "open", f"raw:{self.site}"), f"~rq:queue:{jobs_of(self.run, self.site)}"),
        }  # fmt: skip
        wanted["control"] = wanted["learner"]
        return wanted[role]

    def rules(self, role: str) -> str:
        """All of a role's rules but its password."""
        keys, commands = " ".join(self.keys(role)), " ".join(f"+{name}" for name in sorted(set(COMMANDS[role])))
        return f"resetchannels {keys} -@all {commands}" + (f" {RQ}" if role == "control" else "")

    def user(self, role: str) -> str:
        """The account's name."""
        return f"{self.prefix}{role}"

    def _directory(self, targets: bool = True) -> tuple[str, ...]:
        return self._run("~", "identities", "workers", *(["targets"] if targets else []))

    def _counts(self) -> tuple[str, ...]:
        return self._shard("~", "counts", "quarantine")

    def _target(self) -> tuple[str, ...]:
        return self._shard("~", *(one for name in ("orders", "own", "books", "policy") for one in self._of_nodes(name)))

    def _swarm_reading(self) -> tuple[str, ...]:
        return self._shard("%R~", "swarm-*", "authors:*")

    def _of_nodes(self, name: str) -> tuple[str, ...]:
        # Evaluations are targets as well, of the site's nodes or of its control workers.
        return (f"{name}:{self.nodes}",) if self.nodes == "*" else (f"{name}:{self.nodes}", f"{name}:eval-{self.nodes}")

    def _shard(self, mode: str, *names: str) -> tuple[str, ...]:
        return tuple(f"{mode}gv:{{{self.run}:*}}:{name}" for name in names)

    def _run(self, mode: str, *names: str) -> tuple[str, ...]:
        return tuple(f"{mode}gv:{{{self.run}}}:{name}" for name in names)


def acl_lines(scope: Scope, *passwords: Mapping[str, str]) -> Iterator[str]:
    """The lines of a site's accounts in an ACL file; passwords, by role, appear as their SHA-256 only.

    With several sets of passwords each of them is accepted.
    """
    for role in ROLES:
        yield f"user {scope.user(role)} on {_hashes(role, passwords)} {scope.rules(role)}"


def acl_file(scope: Scope, *passwords: Mapping[str, str]) -> str:
    """A whole ACL file: nobody without a name, the roles, `admin` for people, and `health`, which can only PING."""
    lines = [
        "user default off",
        f"user admin on {_hashes('admin', passwords)} ~* &* +@all",
        "user health on nopass -@all +ping",
        *acl_lines(scope, *passwords),
    ]
    return "\n".join(lines) + "\n"


def _hashes(role: str, passwords: Sequence[Mapping[str, str]]) -> str:
    return " ".join(f"#{digest(one[role])}" for one in passwords)


def digest(password: str) -> str:
    """How a server keeps a password."""
    return hashlib.sha256(password.encode()).hexdigest()
