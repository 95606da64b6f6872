"""*Node*: all about one node."""

from __future__ import annotations

from grafana_foundation_sdk.models import dashboard as model

from tools.dashboards.panels import (
    ANY_IS_BAD,
    COUNT,
    NEUTRAL,
    NODE,
    PER_MINUTE,
    RATE,
    REWARD,
    SECONDS,
    SHARE,
    STEPS,
    TAG_COLOURS,
    TOKENS,
    WAIT_COLOURS,
    Query,
    lines,
    made,
    number,
    numbers,
)


def node() -> model.Dashboard:
    """One node, from its reward to its books."""
    gauge = "max(grapevine_{0}{{" + NODE + "}})"
    pace = f'sum(rate(grapevine_round_seconds_count{{{NODE},phase="update"}}[10m]))'
    stands = [
        number("Rounds done", "Rounds that the node completed.", gauge.format("round"), COUNT, decimals=0, steps=NEUTRAL),
        number(
            "Rounds left", "Rounds until the node is complete, whether its learner is up or not.",
            gauge.format("rounds_left"), COUNT, decimals=0, steps=NEUTRAL,
        ),
        number(
            "Time left", "Rounds left at the pace of the last ten minutes.",
            f"max(grapevine_rounds_left{{{NODE}}}) / {pace}", SECONDS, decimals=0, steps=NEUTRAL,
        ),
        number(
            "Own reward", "Mean reward of the last round's own groups, before anything is filtered.",
            gauge.format("own_reward"), REWARD, decimals=3, steps=NEUTRAL,
        ),
        number(
            "Held-out accuracy", "Right answers to questions that no node trains on, sampled, last evaluation.",
            gauge.format("heldout_reward"), SHARE, decimals=1, steps=NEUTRAL,
        ),
        number(
            "Groups lost", "Ordered groups that are nowhere in the books. Always 0.",
            f'max(abs(grapevine_books{{{NODE},column="lost"}}))', COUNT, decimals=0, steps=ANY_IS_BAD,
        ),
    ]  # fmt: skip
    learning = [
        lines(
            "Reward", "Mean reward of a round's own groups, and accuracy on held-out questions: sampled and greedy.",
            (
                Query(gauge.format("own_reward"), "own reward"),
                Query(gauge.format("heldout_reward"), "held-out"),
                Query(gauge.format("heldout_greedy"), "held-out, greedy"),
            ),
            REWARD, w=12, h=9, decimals=2, dashed="/greedy$/",
        ),
        lines(
            "Reward by task", "Mean reward of the own groups of each task, in the last round that had the task.",
            Query(f"max by (task) (grapevine_task_reward{{{NODE}}})", "{{task}}"), REWARD, w=12, h=9, decimals=2,
        ),
        lines("Loss", "Loss of each update.", Query(gauge.format("loss"), "loss"), REWARD, w=6),
        lines(
            "Gradient", "Norm of each update's gradient, before it was shortened. Spikes come before skipped updates.",
            Query(gauge.format("grad_norm"), "norm"), REWARD, w=6,
        ),
        lines(
            "Informative groups", "Share of a round's own groups whose rewards are not all alike: the others teach nothing.",
            Query(gauge.format("informative_share"), "informative"), SHARE, w=6, least=0, most=1,
        ),
        lines(
            "Staleness", "Mean policy steps between sampling and training of a round's own groups.",
            Query(gauge.format("staleness_steps"), "steps"), STEPS, w=6, decimals=1,
        ),
    ]  # fmt: skip
    material = [
        lines(
            "Groups used, by author",
            "Groups per minute that its rounds used, by who sampled them; the node itself among them.",
            Query(f"60 * sum by (author) (rate(grapevine_groups_used_total{{{NODE}}}{RATE}))", "{{author}}"), PER_MINUTE,
            stack="normal",
        ),
        lines(
            "Groups used, by tag", "How hard the groups were that its rounds trained on, own and swarm.",
            Query(f"60 * sum by (tag) (rate(grapevine_groups_used_total{{{NODE}}}{RATE}))", "{{tag}}"), PER_MINUTE,
            stack="normal", colours=TAG_COLOURS,
        ),
        lines(
            "Tokens", "Completion tokens per second: sampled for this node, and trained, its own and those of others.",
            (
                Query(f"sum(rate(grapevine_tokens_generated_total{{{NODE}}}{RATE}))", "generated"),
                Query(f"sum by (origin) (rate(grapevine_tokens_trained_total{{{NODE}}}{RATE}))", "trained, {{origin}}"),
            ),
            TOKENS,
        ),
    ]  # fmt: skip
    mine = f'sum(rate(grapevine_round_seconds_count{{{NODE},phase="update"}}{RATE}))'
    phases = f"sum by (phase) (rate(grapevine_round_seconds_sum{{{NODE}}}{RATE}))"
    work = [
        lines(
            "Where a round's time goes", "Seconds of a round by phase: wait for own groups, draw, update, finish.",
            Query(f"{phases} / on () group_left () {mine}", "{{phase}}"),
            SECONDS, stack="normal",
        ),
        lines(
            "Whom it waits for", "Share of the time in which its learner waits for own groups, by whom it waits for.",
            Query(f"sum by (on) (rate(grapevine_waiting_seconds_total{{{NODE}}}{RATE}))", "{{on}}"), SHARE, least=0, most=1,
            stack="normal", colours=WAIT_COLOURS,
        ),
        lines(
            "Orders and generators",
            "Its orders that wait, those in a generator's hands, its groups that wait to be trained, and the generators "
            "that serve it.",
            (
                Query(f'max(grapevine_backlog{{{NODE},stream="orders"}})', "orders waiting"),
                Query(f'max(grapevine_pending{{{NODE},stream="orders"}})', "orders in hand"),
                Query(f'max(grapevine_backlog{{{NODE},stream="own"}})', "own groups waiting"),
                Query(gauge.format("generators_assigned"), "generators"),
            ),
            COUNT,
        ),
        lines(
            "Wanted and not found", "Swarm groups per minute that its rounds wanted and that were not there.",
            Query(f"60 * sum(rate(grapevine_swarm_missing_total{{{NODE}}}{RATE}))", "missing"), PER_MINUTE, w=6,
        ),
        lines(
            "Policies", "Policy versions per minute that generators took on, and files that this node sent them over HTTP.",
            (
                Query(f"60 * sum(rate(grapevine_policies_loaded_total{{{NODE}}}{RATE}))", "taken on"),
                Query(f"60 * sum(rate(grapevine_policies_served_total{{{NODE}}}{RATE}))", "sent over HTTP"),
            ),
            PER_MINUTE, w=6,
        ),
        lines(
            "Updates that failed", "Optimizer steps skipped, and returns to the last good checkpoint, since the node began.",
            (
                Query(gauge.format("updates_skipped_total"), "updates skipped"),
                Query(gauge.format("rollbacks_total"), "rollbacks"),
            ),
            COUNT, w=6, decimals=0, steps=ANY_IS_BAD,
        ),
        lines(
            "Books, over time", "Orders that are open, and groups that wait to be trained.",
            Query(f'max by (column) (grapevine_books{{{NODE},column=~"open|waiting"}})', "{{column}}"), COUNT, w=6,
        ),
        numbers(
            "Books", "Ordered = trained + filtered + expired + open + waiting; lost is what is missing.",
            Query(f"max by (column) (grapevine_books{{{NODE}}})", "{{column}}"), COUNT, w=24, h=4, decimals=0, steps=NEUTRAL,
        ),
    ]  # fmt: skip
    return made(
        "node", "node", "One node: what it learns, from whom, how fast, and its books.", "one",
        [
            ("Where it stands", stands), ("What it learns", learning), ("What it learns from", material),
            ("How it works", work),
        ],
    )  # fmt: skip
