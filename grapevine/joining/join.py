"""`grapevine join`: this machine's part of a run that another machine hosts.

Guarantees: the node that joins is a site of its own, with its own generators, verifiers, policies and folder, so it trusts
the run's other machines with text only; what all machines must agree on comes from the run and is never overruled; a name
that another node has is refused before anything is started; running the same command again continues.
"""

from __future__ import annotations

import difflib
import time
from pathlib import Path
from typing import Any

import redis
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape

from common.clock import ServerClock
from common.directory import NameTaken
from common.files import write_whole
from common.identity import Identity
from common.keys import Keys
from common.ledger import Ledger
from common.run import open_run
from common.sections import NodeSettings
from common.server import PasswordRefused, ServerRefused, address, connect
from common.settings import Settings, SettingsError, from_tree, merged, read_tree
from common.worker import TRANSIENT
from grapevine.joining.guests import is_up, split_url
from grapevine.joining.invitation import Facts, read_facts
from grapevine.running.local import set_aside, up
from grapevine.screen.view import plain

CLOCKS_APART_SECONDS = 5.0


def join(
    url: str,
    node: str,
    config: Path | None,
    flags: list[str] | None,
    generators: int | None,
    verifiers: int | None,
    fresh: bool,
    console: Console,
) -> int:
    """Take part until the node is complete; the exit code (0 complete, 130 interrupted).

    Raises SettingsError, ServerRefused, NameTaken, each in one sentence.
    """
    server_url, run = split_url(url)
    tree = read_tree(config, flags, joins=True)
    facts = ask(server_url, run)
    for section, replicas in (("generators", generators), ("verifiers", verifiers)):
        if replicas is not None:
            tree = merged(tree, {section: {"replicas": replicas}})
    settings = settings_of(facts, tree, node, config).model_copy(update={"redis_url": server_url})
    folder = settings.run_folder
    if is_up(folder):
        raise SettingsError(
            f"{folder} is in use by another process; give this node a folder of its own with --set folder=PATH"
        )
    _check_name(settings, facts, node, fresh)
    if fresh:
        set_aside(folder, console)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "begun", facts.begun)
    own = settings.for_node(node)
    model = escape(own.model)
    console.print(
        f"joining run [bold]{run}[/bold] at {address(server_url)} as node {node}: model {model}, {own.rounds} rounds",
        highlight=False,
        soft_wrap=True,
    )
    try:
        return up(settings, fresh=False, lockstep=False, console=console, joined=True)
    except PasswordRefused:
        raise ServerRefused(
            f"run {run} at {address(server_url)} no longer takes this invitation; what this machine did is kept in {folder} "
            f"and goes on with a new one"
        ) from None


def ask(server_url: str, run: str) -> Facts:
    """The facts of the run at this server. Raises SettingsError, ServerRefused."""
    client = connect(server_url, socket_timeout=10.0)
    ledger = Ledger(client, Keys(run), ServerClock(client))
    where = address(server_url)
    try:
        facts = read_facts(ledger)
        if facts is None:
            raise SettingsError(f"no run {run} at {where} takes guests{_nearest(run, _runs(client))}")
        _compare_clocks(client)
        return facts
    except redis.exceptions.NoPermissionError:
        meant = [server_url.partition("//")[2].partition(":")[0].removeprefix("guest-")]
        raise SettingsError(f"this invitation is not for a run {run}{_nearest(run, meant)}") from None
    except PasswordRefused:
        raise ServerRefused(
            f"the server at {where} does not take this invitation: it was revoked or belongs to an earlier beginning of "
            f"the run; ask for what `grapevine invite` prints there now"
        ) from None
    except TRANSIENT as error:
        raise ServerRefused(
            f"the server of run {run} does not answer at {where} ({error}); is the run up there, and does its firewall let "
            f"this machine in?"
        ) from None
    finally:
        client.close()


def _runs(client: redis.Redis) -> list[str]:
    """The runs at a server that take guests, as far as this account may know."""
    server: Any = client
    try:
        found = list(server.scan_iter(match=Keys("*").invitation(), count=1000))
    except redis.exceptions.NoPermissionError:
        return []
    return sorted(key.decode().partition("{")[2].partition("}")[0] for key in found)


def _nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1) or names[:1]
    return f"; did you mean {near[0]}?" if near else "; is it up, and not in lockstep?"


def _compare_clocks(client: redis.Redis) -> None:
    """Heartbeats carry the time of the machine they come from: with clocks far apart each takes the other for gone."""
    server: Any = client
    seconds, micros = server.time()
    apart = time.time() - (seconds + micros / 1e6)
    if abs(apart) > CLOCKS_APART_SECONDS:
        way = "ahead of" if apart > 0 else "behind"
        raise SettingsError(f"this machine's clock is {abs(apart):.0f} s {way} the server's; set both by NTP")


def settings_of(facts: Facts, tree: dict[str, Any], node: str, config: Path | None) -> Settings:
    """This machine's settings: the run's facts, with the tree of CONFIG and flags on top where a node may choose.

    Raises SettingsError where they contradict the run, or where this machine cannot do as the host does.
    """
    common = {"run": facts.run, "seed": facts.seed, "shards": facts.shards, "site": node}
    limits = {"quota": facts.quota, "max_age": facts.max_age}
    given = {**tree, **{f"swarm.{key}": value for key, value in _section(tree, "swarm").items()}}
    for key, value in {**common, **{f"swarm.{key}": value for key, value in limits.items()}}.items():
        if given.get(key, value) != value:
            reasons = {"site": "a node that joins is a site of its own"}
            why = reasons.get(key, f"run {facts.run} has {value} on all machines")
            raise SettingsError(f"setting {key}={given[key]} cannot be had: {why}; leave it out")
    own = _section(_section(tree, "nodes"), node)
    shared = {**facts.node, "model": facts.model or "starter"}
    try:
        NodeSettings.model_validate(shared)
    except ValidationError:
        raise SettingsError(
            f"the node settings of run {facts.run}, kept by grapevine {facts.version}, are not those of this release; "
            f"install the same on both machines"
        ) from None
    if facts.model is None and "model" not in merged(_section(tree, "node"), own):
        raise SettingsError(
            f"the model of run {facts.run} is a folder on its host; name one that this machine has: --set node.model=..."
        )
    below = {"node": shared, "generators": {"replicas": 1}, "verifiers": {"replicas": 1}}
    # What only a host has is left out, so that one file of settings can serve all machines.
    kept = {key: value for key, value in tree.items() if key not in ("listen", "control", "redis_url", "nodes")}
    whole = {**merged(below, kept), **common, "swarm": limits, "nodes": {node: own}}
    try:
        return from_tree(whole, config)
    except SettingsError as error:
        missing = [name for name in facts.own_tasks if name not in (tree.get("own_tasks") or {})]
        said = plain(str(error), 1000)  # the host's values stand in it
        if any(name in said for name in missing):
            raise SettingsError(
                f"{said}; run {facts.run} has tasks of its own ({', '.join(missing)}), and code does not travel: define "
                f"them under own_tasks in your settings, or choose other tasks with --set node.tasks=..."
            ) from None
        raise SettingsError(said) from None


def _section(tree: dict[str, Any], name: str) -> dict[str, Any]:
    """A part of a tree that nobody has checked yet; empty where there is none."""
    part = tree.get(name)
    return part if isinstance(part, dict) else {}


def _check_name(settings: Settings, facts: Facts, node: str, fresh: bool) -> None:
    """Raises NameTaken when the run knows the name as another's, SettingsError when our folder is of another beginning."""
    if node in facts.nodes:
        raise NameTaken(f"run {facts.run} has a node {node} on its host; choose another name with --node")
    folder = settings.run_folder
    begun = folder / "begun"
    if not fresh and begun.exists() and begun.read_text().strip() != facts.begun:
        raise SettingsError(
            f"run {facts.run} was begun anew since this machine joined it; begin anew too with --fresh, which sets {folder} "
            f"aside"
        )
    ledger, _ = open_run(settings)
    holder = ledger.redis.hget(ledger.keys.identities(), f"node:{node}")
    if holder is None:
        return
    key = folder / "nodes" / node / "key"
    if fresh or not key.exists() or Identity.kept("node", node, node, key).key != holder.decode():
        raise NameTaken(
            f"run {facts.run} knows a node {node} already; choose another name with --node"
            + ("" if fresh else ", or join in the folder where that node's key lies")
        )
