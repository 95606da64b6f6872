"""*Safety*: what was refused, repeated, restarted, or is about to be full?"""

from __future__ import annotations

from grafana_foundation_sdk.models import dashboard as model

from tools.dashboards.panels import (
    ANY_IS_BAD,
    BYTES,
    COUNT,
    NEUTRAL,
    NODES,
    PER_MINUTE,
    RATE,
    RUN,
    SHARE,
    Query,
    bars,
    lines,
    made,
    number,
    or_none,
)


def safety() -> model.Dashboard:
    """What was refused, what was done twice, who died, and what fills up."""
    refused = f"max by (stream, reason) (rate(grapevine_quarantined_total{{{RUN}}}{RATE}))"
    totals = f"max by (stream, reason) (increase(grapevine_quarantined_total{{{RUN}}}[$__range]))"
    faults = f"60 * sum by (task, fault) (rate(grapevine_scoring_faults_total{{{RUN}}}{RATE}))"
    by_reader = f"60 * sum by (role, stream) (rate(grapevine_messages_refused_total{{{RUN}}}{RATE}))"
    failures = f"60 * sum by (kind) (rate(grapevine_job_failures_total{{{RUN}}}{RATE}))"
    bytes_used = f"max(grapevine_server_memory_bytes{{{RUN}}})"
    stands = [
        number(
            "Alerts", "Alerts of grapevine that fire for this run.",
            f'count(ALERTS{{{RUN},alertname=~"Grapevine.*",alertstate="firing"}}) or vector(0)', COUNT, decimals=0,
            steps=ANY_IS_BAD,
        ),
        number(
            "Server", "1 when the run's server answers.",
            f"max(grapevine_server_up{{{RUN}}})", COUNT, decimals=0, steps=(("red", None), ("green", 1)),
        ),
        number(
            "Groups lost", "Ordered groups that are nowhere in the books of any node. Always 0.",
            f'sum(max by (node) (abs(grapevine_books{{{NODES},column="lost"}})))', COUNT, decimals=0, steps=ANY_IS_BAD,
        ),
        number(
            "Refused", "Messages that went into quarantine within the time shown.",
            f"sum({totals})", COUNT, decimals=0,
            steps=(("green", None), ("yellow", 1), ("red", 100)),
        ),
        number(
            "Starts of workers", "Workers started within the time shown, for the first time or again.",
            f"sum(round(max by (worker_role) (increase(grapevine_workers_started_total{{{RUN}}}[$__range]))))", COUNT,
            decimals=0, steps=NEUTRAL,
        ),
        number(
            "Rollbacks", "Returns to the last good checkpoint since the nodes began.",
            f"sum(max by (node) (grapevine_rollbacks_total{{{NODES}}}))", COUNT, decimals=0, steps=ANY_IS_BAD,
        ),
    ]  # fmt: skip
    messages = [
        lines(
            "Refused, by stream", "Messages per minute that went into quarantine. Nothing refused is ever used.",
            Query(f"60 * sum by (stream) ({refused})", "{{stream}}"), PER_MINUTE, stack="normal",
        ),
        lines(
            "Refused, by reason", "Messages per minute that went into quarantine, by why.",
            Query(or_none(f"60 * sum by (reason) ({refused}) > 0", "reason"), "{{reason}}"), PER_MINUTE, stack="normal",
        ),
        bars(
            "Most refused", "The ten combinations of stream and reason that were refused most within the time shown.",
            Query(or_none(f"sort_desc(topk(10, {totals} > 0))", "stream", "reason"), "{{stream}}: {{reason}}"),
            COUNT, decimals=0, steps=(("green", None), ("yellow", 1), ("red", 100)), least=0,
        ),
        lines(
            "Refused, by the role that read it", "Messages per minute that workers who are up refused, by their role.",
            Query(or_none(by_reader, "role", "stream"), "{{role}}: {{stream}}"),
            PER_MINUTE,
        ),
        lines(
            "Scoring that failed",
            "Completions per minute whose scoring hung, crashed or raised; they score 0 and cost no other answer anything.",
            Query(or_none(faults, "task", "fault"), "{{task}}: {{fault}}"),
            PER_MINUTE,
        ),
        lines(
            "Policies refused",
            "Policies per minute that generators did not load: missing, with a wrong checksum, of another shape.",
            Query(f"60 * sum by (reason) (rate(grapevine_policies_refused_total{{{RUN}}}{RATE}))", "{{reason}}"), PER_MINUTE,
        ),
    ]  # fmt: skip
    workers = [
        lines(
            "Done again, done twice",
            "Entries per minute taken over from workers that fell silent, and answers to orders that another had answered.",
            (
                Query(f"60 * max(rate(grapevine_redelivered_total{{{RUN}}}{RATE}))", "taken over"),
                Query(f"60 * max(rate(grapevine_duplicates_total{{{RUN}}}{RATE}))", "duplicates"),
            ),
            PER_MINUTE,
        ),
        lines(
            "Starts of workers, by role", "Workers started within the last ten minutes, for the first time or again.",
            Query(
                f"round(max by (worker_role) (increase(grapevine_workers_started_total{{{RUN}}}[10m])))", "{{worker_role}}"
            ),
            COUNT, decimals=0,
        ),
        lines(
            "Connections lost", "Times per minute that workers lost the server and joined again, by role.",
            Query(f"60 * sum by (role) (rate(grapevine_reconnects_total{{{RUN}}}{RATE}))", "{{role}}"), PER_MINUTE,
        ),
        lines(
            "Groups lost, by node", "Ordered groups that are nowhere in the books. Always 0.",
            Query(f'max by (node) (grapevine_books{{{NODES},column="lost"}})', "{{node}}"), COUNT, decimals=0,
            steps=ANY_IS_BAD, links=True,
        ),
        lines(
            "Updates skipped, by node", "Optimizer steps skipped since the node began: exploding or not finite.",
            Query(f"max by (node) (grapevine_updates_skipped_total{{{NODES}}})", "{{node}}"), COUNT, decimals=0, links=True,
        ),
        lines(
            "Rollbacks, by node", "Returns to the last good checkpoint since the node began.",
            Query(f"max by (node) (grapevine_rollbacks_total{{{NODES}}})", "{{node}}"), COUNT, decimals=0, links=True,
        ),
    ]  # fmt: skip
    memory = [
        number(
            "Memory of the server", "Share of its limit that the server uses; of 4 GiB where it has none.",
            f"{bytes_used} / (max(grapevine_server_memory_limit_bytes{{{RUN}}}) > 0 or vector(4294967296))", SHARE,
            w=6, h=8, decimals=0, least=0, most=1, steps=(("green", None), ("yellow", 0.6), ("red", 0.8)),
        ),
        lines(
            "Memory of the server, over time",
            "What the server uses for its data, of all its runs, and what it may use (0: no limit).",
            (
                Query(bytes_used, "used"),
                Query(f"max(grapevine_server_memory_limit_bytes{{{RUN}}})", "limit"),
            ),
            BYTES, w=9, dashed="/^limit$/",
        ),
        lines(
            "Memory of the streams", "What this run's streams take on the server.",
            Query(f"max by (stream) (grapevine_stream_bytes{{{RUN}}})", "{{stream}}"), BYTES, w=9, stack="normal",
        ),
    ]  # fmt: skip
    jobs = [
        lines(
            "Jobs, by status", "Jobs of the control workers.",
            Query(f"max by (status) (grapevine_jobs{{{RUN}}})", "{{status}}"), COUNT, w=12, decimals=0,
            colours={"failed": "red", "started": "blue", "finished": "green"},
        ),
        lines(
            "Tries of jobs that failed", "Failed tries per minute, by kind of job.",
            Query(or_none(failures, "kind"), "{{kind}}"), PER_MINUTE, w=12,
        ),
    ]  # fmt: skip
    return made(
        "safety", "safety", "Is all well: what was refused, lost, done again, and what fills up?", "many",
        [
            ("Is all well?", stands), ("Messages, answers and policies that were refused", messages),
            ("Workers and updates", workers), ("Memory", memory), ("Jobs", jobs),
        ],
    )  # fmt: skip
