"""`grapevine doctor`: can a run of these settings work here, and what to do where it cannot.

Guarantees: nothing of the run is touched (a trial server lives in a folder of its own and is gone afterwards); every
finding that is not in order says what to do; one check's failure keeps no other from being made.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from common.settings import Settings, SettingsError
from common.tasks import TaskRefused
from grapevine.setup.doctor_server import examine_server
from grapevine.setup.findings import Finding, State
from grapevine.setup.packages import missing_by_role

MARKS: dict[State, str] = {"ok": "[green]✓[/green]", "warning": "[yellow]![/yellow]", "failure": "[red]✗[/red]"}
GB = 2**30
LITTLE_DISK = 2 * GB
GPU_PROBE = (
    "import json, torch; print(json.dumps([[torch.cuda.get_device_name(i), torch.cuda.mem_get_info(i)] "
    "for i in range(torch.cuda.device_count())]))"
)


def examine(settings: Settings) -> Iterator[Finding]:
    """All checks, cheap ones first; each is made when it is asked for."""
    yield from _python()
    gpu_memory = 0
    for finding, memory in _machine():
        gpu_memory = max(gpu_memory, memory)
        yield finding
    yield from _engine(settings)
    yield from _folder(settings.run_folder)
    yield from examine_server(settings)
    yield from _models(settings, gpu_memory)
    yield from _tasks(settings)


def show(findings: Iterable[Finding], console: Console, as_json: bool) -> int:
    """Print findings as they come, then the verdict. The exit code: 1 when something failed."""
    if as_json:
        made = list(findings)
        print(json.dumps([finding._asdict() for finding in made], indent=2))
        return int(any(finding.state == "failure" for finding in made))
    counts: dict[State, int] = {"ok": 0, "warning": 0, "failure": 0}
    console.print("Can a run work here? ✓ in order, ! works but look at it, ✗ must be mended\n", soft_wrap=True)
    for finding in findings:
        counts[finding.state] += 1
        console.print(f"{MARKS[finding.state]} [bold]{finding.name:<12}[/bold] {escape(finding.found)}", soft_wrap=True)
        if finding.fix:
            console.print(f"  {'':<12} → {escape(finding.fix)}", soft_wrap=True, highlight=False)
    if counts["failure"]:
        verdict = f"[red]No[/red]: {counts['failure']} to mend first (the lines with ✗)."
    else:
        verdict = "[green]Yes[/green]: grapevine up can start."
    console.print(f"\n{verdict}" + (f" {counts['warning']} to look at (!)." if counts["warning"] else ""), soft_wrap=True)
    return int(counts["failure"] > 0)


# --- this machine ---


def _python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield Finding("ok", "Python", f"{version} in {sys.prefix}")
    missing = missing_by_role()
    if missing is None:
        yield Finding(
            "failure", "packages", "grapevine-rl is not installed here", "run make setup, or pip install -e .[all]"
        )
        return
    able = [role for role, packages in missing.items() if not packages]
    yield Finding("ok" if able else "failure", "roles", f"can run here: {', '.join(able) or 'none'}")
    for role, packages in missing.items():
        if packages:
            fix = f"for this role: pip install 'grapevine-rl[{role}]'"
            yield Finding("warning", role, f"cannot run here, missing: {', '.join(packages)}", fix)


def _machine() -> Iterator[tuple[Finding, int]]:
    """Findings, each with the largest GPU's free memory in bytes (0: none)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    total, free = memory()
    fix = "" if cores > 1 else "with one core use --lockstep, or few generators"
    found = f"{cores} cores, {free / GB:.1f} of {total / GB:.1f} GB memory free"
    yield Finding("ok" if cores > 1 else "warning", "machine", found, fix), 0
    # In a process of its own: torch takes seconds and keeps hold of the GPU.
    try:
        done = subprocess.run([sys.executable, "-c", GPU_PROBE], capture_output=True, text=True, timeout=120)
        gpus = json.loads(done.stdout) if done.returncode == 0 else None
    except (subprocess.TimeoutExpired, ValueError):
        gpus = None
    if gpus is None:
        yield Finding("warning", "GPU", "torch cannot be asked", "only verifiers can run without torch"), 0
    elif not gpus:
        yield Finding("ok", "GPU", "none that torch sees; models run on the CPU, fit for small ones"), 0
    else:
        names = ", ".join(f"{name} ({free / GB:.0f} of {total / GB:.0f} GB free)" for name, (free, total) in gpus)
        yield Finding("ok", "GPU", names), max(free for _, (free, _) in gpus)


def memory() -> tuple[int, int]:
    """Bytes of memory this process may use: in all, and free now. In a container, the container's."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    free = total
    facts = Path("/proc/meminfo")
    if facts.exists():
        lines = dict(line.split(":", 1) for line in facts.read_text().splitlines() if ":" in line)
        free = 1024 * int(lines.get("MemAvailable", f"{free // 1024} kB").split()[0])
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and limit.read_text().strip().isdigit():
        total = min(total, int(limit.read_text()))
        free = min(free, max(0, total - int(used.read_text())))
    return total, free


def _engine(settings: Settings) -> Iterator[Finding]:
    from grapevine.engines import engine_kind

    try:
        kind = engine_kind(settings)
    except SettingsError as error:
        yield Finding("failure", "engine", str(error), "set generators.engine=transformers, or install vLLM")
        return
    if kind == "paced":
        yield Finding("warning", "engine", "paced: answers are made up", "set generators.engine=auto to train on real ones")
        return
    chosen = " (auto: vLLM is not installed)" if settings.generators.engine == "auto" and kind == "transformers" else ""
    yield Finding("ok", "engine", f"generators run {kind}{chosen}")


def _folder(folder: Path) -> Iterator[Finding]:
    place = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=place) as probe:
            probe.write(b"\0" * 65536)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        fix = "make it writable or make room, or choose another place with --set folder=PATH"
        yield Finding("failure", "run folder", f"{folder} cannot be written: {error.strerror}", fix)
        return
    free = shutil.disk_usage(place).free
    found = f"{folder} can be written, {free / GB:.1f} GB free"
    if free < LITTLE_DISK:
        yield Finding("warning", "run folder", found, "checkpoints and policies may not fit; make room")
    else:
        yield Finding("ok", "run folder", found)


# --- what the run is made of ---


def _models(settings: Settings, gpu_memory: int) -> Iterator[Finding]:
    """Each distinct model once, then the memory that all workers of `up` need together."""
    if (missing_by_role() or {}).get("learner"):
        return
    from grapevine.models import bytes_to_train, examine_model, size
    from grapevine.running.local import with_models

    resolved = with_models(settings)
    users: dict[str, list[str]] = {}
    for name in resolved.node_names():
        users.setdefault(resolved.for_node(name).model, []).append(name)
    training, sizes = 0, []
    for model, names in users.items():
        who = f"{len(names)} nodes" if len(names) > 1 else names[0]
        try:
            facts = examine_model(model)
        except SettingsError as error:
            yield Finding("failure", "model", f"{error} ({who})", "correct node.model, or fetch the model again")
            continue
        template = "chat template" if facts.has_template else "no chat template, a plain prompt is used"
        found = f"{model} ({who}): {facts.architecture}, {size(facts)} parameters, {template}"
        yield Finding("ok", "model", found)
        training += sum(bytes_to_train(facts, resolved.for_node(name).update) for name in names)
        sizes.append(facts.parameters)
    each = 2 if settings.generators.dtype == "bfloat16" else 4
    # A generator may have the largest ones open together.
    kept = sum(sorted(sizes)[-settings.generators.models_kept :])
    needed = training + settings.generators.replicas * each * kept
    room = gpu_memory or memory()[1]
    where = "GPU memory" if gpu_memory else "memory"
    found = f"at least {_amount(needed)} for all nodes and generators here, besides activations; {_amount(room)} free"
    if needed > room:
        fix = "spread the nodes over machines, take fewer nodes or generators, or a smaller model"
        yield Finding("warning", where, found, fix)
    elif needed:
        yield Finding("ok", where, found)


def _tasks(settings: Settings) -> Iterator[Finding]:
    """A question of every task, and its right answer scored as an answer of a model would be."""
    from common.tasks import build, draw, resolve_tasks, seed_base_of
    from grapevine.roles import make_scorer
    from verifiers.sandbox import SandboxUnavailable

    specs = {}
    for name in settings.node_names():
        for spec in resolve_tasks(settings.for_node(name).tasks):
            specs[json.dumps([spec.name, spec.settings], sort_keys=True)] = spec
    sandbox = make_scorer(settings)
    try:
        for spec in specs.values():
            try:
                question = draw((spec,), seed_base_of(settings.seed, "doctor", held_out=False), 0, held_out=False)
                answer = build(question).answer
                verdict = sandbox.score(question, [f"<answer>{answer}</answer>"], settings.verifiers.max_characters)
            except (TaskRefused, SandboxUnavailable) as error:
                yield Finding("failure", "task", f"{spec.name}: {error}", "correct node.tasks, or choose another task")
                continue
            shown = _short(verdict.text, 70)
            score, fault = verdict.components[0].accuracy, verdict.faults[0]
            found = f"{spec.name}: “{shown}”, right answer “{_short(answer, 30)}” scores {score:g}"
            if not answer:
                yield Finding("ok", "task", f"{spec.name}: “{shown}”, its answers are checked without a given one")
            elif score == 1.0:
                yield Finding("ok", "task", found)
            else:
                fix = "raise verifiers.answer_seconds or verifiers.memory_megabytes" if fault else "choose another task"
                yield Finding("failure", "task", found + (f" ({fault})" if fault else ""), fix)
    finally:
        sandbox.close()


def _short(text: str, length: int) -> str:
    """A text on one line, cut."""
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[:length]}..."


def _amount(number: int) -> str:
    """Bytes for people."""
    return f"{number / GB:.1f} GB" if number >= GB else f"{number / 2**20:.0f} MB"
