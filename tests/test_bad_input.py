"""What a user gets wrong ends in one sentence and a telling exit code, with nothing half done.

Through the real command line: in this process where that is enough, in processes of their own where it is not.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import redis
import structlog
import yaml
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from common.messages import SCHEMA, Envelope, encode
from common.settings import SettingsError, load
from grapevine.cli import main
from grapevine.disk import disk_trouble
from grapevine.server import EmbeddedServer
from learners.journal import read
from tests.site import Site
from tests.test_up import environment

GRAPEVINE = [sys.executable, "-m", "grapevine"]
Command = Callable[..., tuple[int | str | None, str]]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """`grapevine` in this process and an empty folder: exit code and what went to standard error."""

    def call(*arguments: str) -> tuple[int | str | None, str]:
        monkeypatch.setattr(sys, "argv", ["grapevine", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capfd.readouterr().err

    for name in [name for name in os.environ if name.upper().startswith("GRAPEVINE_") or name == "REDIS_URL"]:
        monkeypatch.delenv(name)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    yield call
    structlog.reset_defaults()  # the command line points the log at a stream that ends with this test


def sentence(said: tuple[int | str | None, str], code: int = 2) -> str:
    """The one sentence of a refusal."""
    found, errors = said
    *before, last = errors.splitlines() or [""]
    assert found == code, errors
    assert last.startswith("grapevine: "), errors
    assert not any(line.startswith("grapevine: ") for line in before), errors
    return last.removeprefix("grapevine: ")


# --- settings that contradict one another ---


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["node.mix.tags=[]"], ["setting node.mix.tags names no tag", "node.mix.swarm is 8", "set node.mix.swarm=0"]),
        (["node.learner=none", "node.share.fraction=0"], ["node.learner is none and node.share.fraction is 0"]),
        (
            ["nodes={a: {learner: none}, b: null}", "node.share.tags=[]"],
            ["setting nodes.a.learner is none and node.share.tags is empty", "set nodes.a.learner=train"],
        ),
        (["node.reward.accuracy=0"], ["node.reward.accuracy, node.reward.format and node.reward.length are all 0"]),
        (["node.max_staleness=0"], ["node.ahead=2", "node.max_staleness to at least 1, or node.ahead to at most 1"]),
        (["nodes={a: {ahead: 12}}"], ["setting nodes.a.ahead=12", "node.max_staleness to at least 11"]),
        (["node.mix.swarm=-3"], ["setting node.mix.swarm: a whole number of groups, 0 or more, or auto (got -3)"]),
        (["node.mix.swarm=Auto"], ["setting node.mix.swarm: a whole number of groups, 0 or more, or auto (got 'Auto')"]),
        (
            ["node.mix.weights={easy: 2}", "node.mix.tags=[hard]"],
            ["node.mix.weights weighs easy, which node.mix.tags does not"],
        ),
        (["node.mix.weights={hrad: 2}"], ["setting node.mix.weights: 'hrad' is none of 'failed', 'hard', 'mixed', 'easy'"]),
        (
            ["node.update.lora={rank: 4, targets: q_proj}"],
            ["node.update.lora.targets: input should be a list (got 'q_proj')"],
        ),
        (["node.mix.own_filter=refill", "node.mix.refill_most=1"], ["set node.mix.refill_most to at least 2"]),
        (["node.learner=none", "node.mix.own_filter=refill"], ["generates more for training that never comes"]),
        (["node.update.warmup_rounds=200"], ["node.update.warmup_rounds=200 is no shorter than node.rounds=200"]),
        (
            ["node.update.skip_grad_norm=1"],
            ["node.update.skip_grad_norm=1 skips gradients that node.update.max_grad_norm=1"],
        ),
        (["node.update={objective: gspo, epochs: 2}"], ["set node.update.clip_low=3e-4 and node.update.clip_high=4e-4"]),
        (["node.update.lora={rank: 4, targets: []}"], ["node.update.lora.targets names no module"]),
        (["generators.target=node-9"], ["generators.target: node-9 is none of the nodes; did you mean node-"]),
        (["generators.target=elsewhere"], ["nodes are node-0, node-1, node-2, node-3", "generators.target=auto"]),
        (["nodes={auto: null}"], ["no node can be called auto"]),
    ],
)
def test_contradictions_name_all_keys_and_the_fix(command: Command, flags: list[str], words: list[str]) -> None:
    arguments = [part for flag in flags for part in ("--set", flag)]
    said = sentence(command("up", *arguments))
    assert all(word in said for word in words), said
    assert list(Path().iterdir()) == [], "nothing was begun"


@pytest.mark.parametrize(
    "flags",
    [
        ["node.mix.swarm=0", "node.mix.tags=[]"],
        ["node.update.correction=successes", "node.mix.swarm=0"],
        ["node.evaluate.questions=0"],
        ["node.max_staleness=0", "node.ahead=1"],
        ["node.learner=none", "node.reward.accuracy=0"],
        ["generators.target=eval-7"],
    ],
)
def test_what_is_merely_unusual_passes(command: Command, flags: list[str]) -> None:
    # The task is refused after everything else was looked at.
    arguments = [part for flag in flags for part in ("--set", flag)]
    said = sentence(command("up", *arguments, "--set", "node.tasks=[gdc]"))
    assert said == "node-0: task 'gdc' is unknown; did you mean 'gcd'?"


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("GRAPEVINE_NODEE__MIX__OWN", "did you mean GRAPEVINE_NODE__MIX__OWN?"),
        ("grapevine_sede", "did you mean GRAPEVINE_SEED?"),
        ("GRAPEVINE_CASHE", "did you mean GRAPEVINE_CACHE?"),
        ("GRAPEVINE_XYZ", "see `grapevine settings`"),
        ("GRAPEVINE_NODE__MIX__OWNN", "did you mean node.mix.own?"),
    ],
)
def test_a_misspelt_variable(command: Command, monkeypatch: pytest.MonkeyPatch, variable: str, words: str) -> None:
    monkeypatch.setenv(variable, "1")
    assert words in sentence(command("up"))


def test_variables_of_kubernetes_services_are_no_settings(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SERVICE_HOST", "SERVICE_PORT_METRICS", "PORT", "REDIS_PORT_6379_TCP_ADDR", "REDIS_PORT_6379_TCP"):
        monkeypatch.setenv(f"GRAPEVINE_{name}", "10.0.0.1")
    assert "task 'gdc' is unknown" in sentence(command("up", "--set", "node.tasks=[gdc]"))


# --- the server ---


@contextmanager
def fake_server(answer: Callable[[bytes], bytes], tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """A server on loopback that answers what it reads with `answer`; its port."""

    def serve(connection: socket.socket) -> None:
        with suppress(OSError, ssl.SSLError), connection:
            stream = tls.wrap_socket(connection, server_side=True) if tls else connection
            while data := stream.recv(65536):
                stream.sendall(answer(data))

    def listen() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=listen, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def old_redis(data: bytes) -> bytes:
    """Redis 6.2, as far as a greeting goes."""
    return server_of(data, b"redis_version:6.2.14")


def server_of(data: bytes, facts: bytes) -> bytes:
    """The greeting of a server that says this of itself."""
    info = b"# Server\r\n" + facts + b"\r\nrun_id:x\r\n"
    return b"".join(
        b"$%d\r\n%s\r\n" % (len(info), info) if command.upper().startswith(b"INFO") else b"+OK\r\n"
        for command in data.split(b"*")[1:]
        for command in [command.split(b"\r\n", 2)[2]]
    )


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    """TLS with a certificate that nobody signed."""
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + datetime.timedelta(1))
    file = tmp_path_factory.mktemp("tls") / "server.pem"
    file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ) + builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    return context


def refusal(command: Command, url: str) -> str:
    """What a worker says of a server: it would retry for ever where retrying could help."""
    return sentence(command("worker", "verifier", "v", "--set", f"redis_url={url}"))


def test_a_server_too_old(command: Command) -> None:
    with fake_server(old_redis) as port:
        said = refusal(command, f"redis://:secret@127.0.0.1:{port}/0")
    assert said == f"the server at 127.0.0.1:{port} is version 6.2.14; grapevine needs Redis or Valkey 7 or newer"


def test_what_answers_is_another_service(command: Command) -> None:
    with fake_server(lambda _: b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        said = refusal(command, f"redis://127.0.0.1:{port}/0")
    assert f"127.0.0.1:{port} does not speak the Redis protocol; correct redis_url" in said


def test_encryption_on_one_side_only(command: Command, certificate: ssl.SSLContext) -> None:
    with fake_server(old_redis, certificate) as port:
        untrusted = refusal(command, f"rediss://:secret@127.0.0.1:{port}/0")
    assert "cannot be trusted" in untrusted
    assert "?ssl_ca_certs=" in untrusted
    with fake_server(lambda _: b"-ERR unknown command\r\n") as port:
        plain = refusal(command, f"rediss://:secret@127.0.0.1:{port}/0")
    assert f"127.0.0.1:{port} does not answer with TLS" in plain
    assert "redis:// instead of rediss://" in plain
    assert "secret" not in untrusted + plain


def test_a_cluster_is_refused(command: Command) -> None:
    with fake_server(lambda data: server_of(data, b"redis_version:7.2.4\r\nredis_mode:cluster")) as port:
        said = refusal(command, f"redis://:secret@127.0.0.1:{port}/0")
    assert "is a Redis Cluster; grapevine needs one that stands alone" in said


def test_a_user_without_rights(command: Command, server: EmbeddedServer) -> None:
    client = redis.Redis.from_url(server.url)
    client.execute_command("ACL", "SETUSER", "guest", "on", ">word", "~other:*", "+@all")
    client.execute_command("ACL", "SETUSER", "mute", "on", ">word", "~*", "-@all", "+auth")
    try:
        for user in ("guest", "mute"):
            said = refusal(command, f"redis://{user}:word@{server.url.rpartition('@')[2]}")
            assert "may not do what grapevine needs" in said
            assert "ACL SETUSER" in said
            assert ":word" not in said
    finally:
        client.execute_command("ACL", "DELUSER", "guest", "mute")
        client.close()


def test_a_server_that_is_not_there_and_one_with_another_password(command: Command, server: EmbeddedServer) -> None:
    said = sentence(command("up", "--set", "redis_url=redis://:secret@127.0.0.1:1/0"))
    assert "does not answer at 127.0.0.1:1: " in said
    assert "leave redis_url and REDIS_URL out" in said
    said = refusal(command, server.url.replace("redis://:", "redis://:not"))
    port = server.url.rpartition(":")[2].partition("/")[0]
    assert f"another password than redis_url has for 127.0.0.1:{port}" in said
    assert "correct redis_url, or REDIS_URL: redis://user:password@host:port/0" in said


def test_a_port_in_use(command: Command) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = ("worker", "verifier", "v", "--set", "redis_url=redis://127.0.0.1:1/0", "--port", str(port))
        said = sentence(command(*arguments))
    assert said == f"--port {port} cannot be served: it is in use; choose another port, or 0 for none"


# --- models ---


def spoilt(model: Path, folder: Path, fault: str) -> Path:
    """A copy of a model folder with something wrong with it."""
    shutil.copytree(model, folder)
    config, weights = folder / "config.json", folder / "model.safetensors"
    facts, tensors = json.loads(config.read_text()), load_file(weights)
    if fault == "empty":
        shutil.rmtree(folder)
        folder.mkdir()
    elif fault == "no weights":
        weights.unlink()
    elif fault == "broken configuration":
        config.write_text(config.read_text()[:-20])
    elif fault == "unknown architecture":
        config.write_text(json.dumps({**facts, "model_type": "nosuch"}))
    elif fault == "wider":
        config.write_text(json.dumps({**facts, "intermediate_size": 2 * facts["intermediate_size"]}))
    elif fault == "more layers":
        config.write_text(json.dumps({**facts, "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}))
    elif fault == "fewer layers":
        config.write_text(json.dumps({**facts, "num_hidden_layers": 1, "layer_types": ["full_attention"]}))
    elif fault == "one tensor gone":
        save_file({name: tensor for name, tensor in tensors.items() if "layers.0.mlp.up" not in name}, weights)
    elif fault == "cut short":
        os.truncate(weights, weights.stat().st_size - 100)
    elif fault == "broken tokenizer":
        (folder / "tokenizer.json").write_text("{")
    return folder


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("empty", "it has no config.json"),
        ("no weights", "holds no weights (*.safetensors)"),
        ("broken configuration", "config.json is not valid JSON"),
        ("unknown architecture", "the configuration of"),
        ("wider", "is 64 x 128 in the file and 64 x 256 by the configuration"),
        ("more layers", "tensors that its config.json describes are missing, model.layers.2."),
        ("fewer layers", "tensors are more than its config.json describes, model.layers.1."),
        ("one tensor gone", "1 of the tensors that its config.json describes are missing, model.layers.0.mlp.up"),
        ("cut short", "model.safetensors are damaged or cut short"),
        ("broken tokenizer", "the tokenizer of"),
    ],
)
def test_a_folder_that_is_no_model(command: Command, tiny_model: Path, tmp_path: Path, fault: str, words: str) -> None:
    model = spoilt(tiny_model, tmp_path / "model", fault)
    flags = ("--set", f"node.model={model}", "--set", "redis_url=redis://127.0.0.1:1/0")
    said = sentence(command("worker", "learner", "node-0", *flags))
    assert said.startswith(f"the model {model} of node-0 cannot be loaded: ")
    assert words in said
    assert not list(Path().rglob("checkpoints")), "no checkpoint was begun"


@pytest.mark.parametrize(
    ("change", "words"),
    [("seed=1", "began with seed = 0 and cannot go on with 1"), ("node.model=OTHER", "began with node.model of node-0 = ")],
)
def test_a_run_goes_on_as_itself(command: Command, tiny_model: Path, tmp_path: Path, change: str, words: str) -> None:
    other = shutil.copytree(tiny_model, tmp_path / "other")
    run = Path("runs/swarm")
    run.mkdir(parents=True)
    (run / "settings.json").write_text(json.dumps({"seed": 0, "shards": 1, "node": {"model": str(tiny_model)}, "nodes": 4}))
    flags = ("--set", f"node.model={tiny_model}", "--set", change.replace("OTHER", str(other)))
    said = sentence(command("up", *flags))
    assert words in said
    assert "begin anew with --fresh" in said
    assert not (run / "server").exists()


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_run_keeps_its_nodes(command: Command, tiny_model: Path, lockstep: bool) -> None:
    run = Path("runs/swarm")
    for node in ("node-0", "node-1"):
        (run / "nodes" / node).mkdir(parents=True)
    if lockstep:
        (run / "barriers").mkdir()
        (run / "barriers" / "000000003").write_bytes(b"")
    kept = load(None, [f"node.model={tiny_model}", "nodes=2"]).model_dump_json()
    (run / "settings.json").write_text(kept)
    said = sentence(command("up", "--resume", "swarm", "--set", "nodes={node-0: null}"))
    if lockstep:
        assert said.startswith("setting nodes: the run has node-0, node-1; in lockstep they stay the same")
        assert said == sentence(command("up", "--resume", "swarm", "--set", "nodes=3"))
    else:
        assert said.startswith("setting nodes: run swarm has a node node-1, with a folder of its own, that is left out")
    assert (run / "settings.json").read_text() == kept, "what is refused leaves no trace"


@pytest.mark.parametrize("change", ["run=other", "folder=elsewhere"])
def test_a_run_is_resumed_where_it_is(command: Command, tiny_model: Path, change: str) -> None:
    run = Path("runs/swarm")
    run.mkdir(parents=True)
    (run / "settings.json").write_text(load(None, [f"node.model={tiny_model}"]).model_dump_json())
    assert "--resume goes on with a run where it is" in sentence(command("up", "--resume", "swarm", "--set", change))
    assert not Path("elsewhere").exists() and not Path("runs/other").exists()


def test_a_key_that_is_damaged(command: Command, tiny_model: Path) -> None:
    key = Path("runs/swarm/nodes/node-0/key")
    key.parent.mkdir(parents=True)
    key.write_bytes(b"short")
    said = sentence(
        command(
            "worker", "learner", "node-0", "--set", f"node.model={tiny_model}", "--set", "redis_url=redis://127.0.0.1:1/0"
        )
    )
    assert said == f"the key of node-0, {key}, is damaged; restore it from a copy, or begin anew with --fresh"
    assert key.read_bytes() == b"short"


def test_a_servers_damaged_files(command: Command, tmp_path: Path) -> None:
    folder = Path("runs/swarm/server")
    first = EmbeddedServer(folder)
    assert (folder / "password").stat().st_mode & 0o777 == 0o600
    for name, text in (("port", "gar:bage"), ("password", "")):
        (folder / name).write_text(text)
        said = sentence(command("status", "swarm"))
        assert said.startswith(f"runs/swarm/server/{name} is damaged; `grapevine up` makes a new one")
        first = EmbeddedServer(folder)  # makes it anew
    (folder / "guest.json").write_text("{")
    (folder / "appendonlydir").mkdir()
    (folder / "appendonlydir" / "appendonly.aof.manifest").write_text("nonsense")
    with pytest.raises(SettingsError, match=r"the run's own server does not start; .*server\.log ends: "):
        first.start()


# --- the disk ---


def test_only_an_error_of_the_disk_is_one(tmp_path: Path) -> None:
    full, there = OSError(errno.ENOSPC, "No space left on device"), FileExistsError(errno.EEXIST, "File exists", "x")
    assert "there is no room left" in (disk_trouble(full) or "")
    assert disk_trouble(there) is None
    try:
        try:
            raise full
        except OSError:
            raise ValueError("a bug while it was told")  # noqa: B904
    except ValueError as bug:
        assert disk_trouble(bug) is None
    try:
        raise ValueError("could not save") from full
    except ValueError as told:
        assert "there is no room left" in (disk_trouble(told) or "")


def test_a_file_in_the_place_of_the_folder(command: Command, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = sentence(command("up", "--set", f"folder={tmp_path / 'file'}", "--set", f"node.model={tiny_model}"))
    assert "cannot be written" in said
    assert "--set folder=PATH" in said


def small_run(tmp_path: Path, model: Path, rounds: int) -> list[str]:
    """`grapevine up` of one node, without evaluations."""
    config = tmp_path / "small.yaml"
    node = {
        "model": str(model), "rounds": rounds, "group_size": 4, "sampling": {"max_new_tokens": 8},
        "mix": {"own": 2, "swarm": 0}, "evaluate": {"questions": 0},
        "reward": {"length": 1.0}, "update": {"learning_rate": 1e-3},
    }  # fmt: skip
    tree = {"run": "small", "folder": str(tmp_path / "runs"), "nodes": 1, "generators": {"replicas": 1}, "node": node}
    config.write_text(yaml.safe_dump(tree))
    return [*GRAPEVINE, "up", str(config)]


def call(arguments: list[str], limit: int | None = None) -> subprocess.CompletedProcess[str]:
    """A command to its end; `limit`: no file may grow beyond so many bytes, as if the disk had no room for more."""

    def without_room() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.run(
        arguments, env=environment(), capture_output=True, text=True, timeout=120, preexec_fn=without_room if limit else None
    )  # fmt: skip


def test_a_full_disk_ends_the_run_and_room_lets_it_go_on(tmp_path: Path, tiny_model: Path) -> None:
    up = small_run(tmp_path, tiny_model, rounds=2)
    folder = tmp_path / "runs" / "small"
    weights = (tiny_model / "model.safetensors").stat().st_size
    done = call(up, limit=weights + 100_000)  # room for a policy, none for the optimizer's state
    said = sentence((done.returncode, done.stderr))
    assert said.startswith(f"node-0 cannot run: there is no room left to write in {folder}")
    assert "run the same command again" in said
    assert not list(folder.rglob("*.part"))
    assert not (folder / "events.jsonl").exists(), "starting again would not help"

    done = call(up)
    assert done.returncode == 0, done.stderr
    assert [line["round"] for line in read(folder / "nodes" / "node-0" / "rounds.jsonl")] == [1, 2]
    (book,) = json.loads((folder / "ledger.json").read_text())["books"].values()
    assert book["lost"] == 0


def test_with_no_whole_checkpoint_nothing_begins_anew(command: Command, tiny_model: Path) -> None:
    checkpoints = Path("runs/swarm/nodes/node-0/checkpoints")
    for name in ("000001-000000001", "000001-000000002"):
        (checkpoints / name).mkdir(parents=True)
        (checkpoints / name / "state.json").write_text("{}")
    before = sorted(checkpoints.rglob("*"))
    flags = ("--set", f"node.model={tiny_model}")
    learner = ("worker", "learner", "node-0", *flags, "--set", "redis_url=redis://127.0.0.1:1/0")
    for arguments in (("up", *flags), learner):
        said = sentence(command(*arguments))
        assert said.startswith(f"none of the 2 checkpoints in {checkpoints} is whole; put a copy of one there, or begin")
        assert sorted(checkpoints.rglob("*")) == before


def test_resuming_and_beginning_anew_are_two_things(command: Command) -> None:
    assert "--resume takes the run's own settings" in sentence(command("up", "--resume", "swarm", "--fresh"))


# --- one node, two learners ---


def test_two_learners_that_claim_one_node(tmp_path: Path, tiny_model: Path, server: EmbeddedServer) -> None:
    """Another key is turned away at the door; the same folder started again takes over, and the older one ends."""
    client = redis.Redis.from_url(server.url)
    started: list[subprocess.Popen[str]] = []

    def learner(folder: str) -> subprocess.Popen[str]:
        flags = [
            "run=claimed", f"folder={tmp_path / folder}", f"node.model={tiny_model}", "node.order_seconds=1",
            "node.evaluate.questions=0", "nodes=1",
        ]  # fmt: skip
        arguments = [*GRAPEVINE, "worker", "learner", "node-0", *(part for flag in flags for part in ("--set", flag))]
        variables = environment(REDIS_URL=server.url)
        started.append(subprocess.Popen(arguments, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    def until_incarnation(number: int) -> None:
        deadline = time.monotonic() + 60
        while number > max(_incarnations(client), default=0):
            assert time.monotonic() < deadline, f"no learner of incarnation {number}"
            assert started[-1].poll() is None
            time.sleep(0.05)

    def last_words(process: subprocess.Popen[str]) -> str:
        _, errors = process.communicate(timeout=60)
        said = [line for line in errors.splitlines() if line.startswith("grapevine: ")]
        assert (process.returncode, len(said)) == (2, 1), errors
        return said[0]

    try:
        first = learner("here")
        until_incarnation(1)
        stranger = learner("elsewhere")
        assert "node-0 is registered with another key; choose another node name" in last_words(stranger)
        assert first.poll() is None
        second = learner("here")
        until_incarnation(2)
        assert "this node was taken over by a later learner" in last_words(first)
        assert second.poll() is None
        second.terminate()
        _, errors = second.communicate(timeout=60)
        assert second.returncode == 0, errors
    finally:
        for process in started:
            process.kill()
            process.communicate()
        client.close()


def _incarnations(client: redis.Redis) -> list[int]:
    """Incarnations of the announced policies of the run `claimed`."""
    found = [client.get(key) for key in client.scan_iter(match="gv:{claimed*policy*")]
    return [json.loads(policy)["version"][0] for policy in found if isinstance(policy, bytes)]


# --- messages of a newer release ---


def test_newer_messages_are_said_once_and_stay(tmp_path: Path, server: EmbeddedServer) -> None:
    site = Site(tmp_path, server.url, "newer-said")
    raw = site.ledger.raw(0)
    for _ in range(3):
        site.ledger.redis.xadd(raw, {"m": encode(Envelope(SCHEMA + 1, "?", b"", b""))})
    with capture_logs() as logs:
        site.verify()
        site.verify()
    said = [line for line in logs if "newer" in line["event"]]
    assert [(line["log_level"], line["stream"]) for line in said] == [("warning", "raw")]
    assert site.ledger.redis.xpending(raw, "verifiers")["pending"] == 3
    assert site.refused("raw") == {}
