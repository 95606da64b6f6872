"""*Swarm*: is it learning, and who helps whom?"""

from __future__ import annotations

from grafana_foundation_sdk.models import dashboard as model

from tools.dashboards.panels import (
    COUNT,
    NEUTRAL,
    NODES,
    ORIGIN_COLOURS,
    PER_MINUTE,
    PER_SECOND,
    RATE,
    REWARD,
    RUN,
    SHARE,
    STEPS,
    TAG_COLOURS,
    TOKENS,
    Query,
    bars,
    lines,
    made,
    matrix,
    number,
)


def swarm() -> model.Dashboard:
    """Rewards, progress, and what nodes take from one another."""
    used = f"max by (node, author, tag) (grapevine_groups_used_total{{{NODES}}})"
    rate_used = f"sum by (node, author) (rate(grapevine_groups_used_total{{{NODES}}}{RATE}))"
    itself = f'label_replace(group by (node) ({used}), "author", "$1", "node", "(.*)")'
    of_others = f'sum by (node) (rate(grapevine_tokens_trained_total{{{NODES},origin="swarm"}}{RATE}))'
    of_all = f"sum by (node) (rate(grapevine_tokens_trained_total{{{NODES}}}{RATE}))"
    learning = [
        number(
            "Own reward", "Mean over the nodes of their own reward in the last round, before anything is filtered.",
            f"avg(max by (node) (grapevine_own_reward{{{NODES}}}))", REWARD, decimals=3, steps=NEUTRAL,
        ),
        number(
            "Held-out accuracy", "Mean over the nodes: share of right answers to questions that no node trains on, sampled.",
            f"avg(max by (node) (grapevine_heldout_reward{{{NODES}}}))", SHARE, decimals=1, steps=NEUTRAL,
        ),
        number(
            "Rounds done", "Rounds done of those planned, over all nodes whose learner is up.",
            f"sum(max by (node) (grapevine_round{{{NODES}}})) / sum(max by (node) (grapevine_rounds_planned{{{NODES}}}))",
            SHARE, decimals=0, least=0, most=1, steps=NEUTRAL,
        ),
        number(
            "Nodes with rounds left", "Nodes that are not complete, whether their learner is up or not.",
            f"count(max by (node) (grapevine_rounds_left{{{NODES}}}) > 0) or vector(0)", COUNT, decimals=0, steps=NEUTRAL,
        ),
        number(
            "Training from others", "Share of the tokens trained that other nodes sampled.",
            f"sum({of_others}) / sum({of_all})", SHARE, decimals=0, steps=NEUTRAL,
        ),
        number(
            "Tokens trained", "Completion tokens in updates per second, own and swarm, all nodes together.",
            f"sum({of_all})", TOKENS, steps=NEUTRAL,
        ),
        lines(
            "Own reward by node",
            "The curve to watch: mean reward of a round's own groups, before anything is filtered. The thick line is "
            "the mean of all.",
            (
                Query(f"max by (node) (grapevine_own_reward{{{NODES}}})", "{{node}}"),
                Query(f"avg(max by (node) (grapevine_own_reward{{{NODES}}}))", "mean"),
            ),
            REWARD, w=12, h=9, decimals=2, thick="mean", links=True,
        ),
        lines(
            "Held-out accuracy by node",
            "Right answers to questions that no node ever trains on, as of each node's last evaluation: sampled, and greedy "
            "(dashed). Rewards that rise while these fall are learnt by heart.",
            (
                Query(f"max by (node) (grapevine_heldout_reward{{{NODES}}})", "{{node}}"),
                Query(f"max by (node) (grapevine_heldout_greedy{{{NODES}}})", "{{node}} greedy"),
            ),
            SHARE, w=12, h=9, least=0, most=1, dashed="/ greedy$/", links=True,
        ),
    ]  # fmt: skip
    progress = [
        bars(
            "Rounds done by node", "Rounds done of those planned. Nodes need not keep step: none waits for another.",
            Query(
                f"max by (node) (grapevine_round{{{NODES}}}) / max by (node) (grapevine_rounds_planned{{{NODES}}})",
                "{{node}}",
            ),
            SHARE, least=0, most=1, decimals=0, steps=NEUTRAL, links=True,
        ),
        lines(
            "Rounds per minute by node", "How fast each node goes through its rounds.",
            Query(f'60 * sum by (node) (rate(grapevine_round_seconds_count{{{NODES},phase="update"}}{RATE}))', "{{node}}"),
            PER_MINUTE, links=True,
        ),
        lines(
            "Tokens trained, own and from others", "Completion tokens in updates per second, by who sampled them.",
            Query(f"sum by (origin) (rate(grapevine_tokens_trained_total{{{NODES}}}{RATE}))", "{{origin}}"),
            TOKENS, stack="normal", colours=ORIGIN_COLOURS,
        ),
    ]  # fmt: skip
    helping = [
        matrix(
            "Whose groups each node trained on",
            "Rows are nodes, columns the authors of the groups they used since they began; the diagonal is their own. A "
            "column of small figures is an author that shares little, or little with a tag that is asked for.",
            "sum by (node, author) (max by (node, author, tag) "
            f"(max_over_time(grapevine_groups_used_total{{{NODES}}}[$__range])))",
            COUNT, "node", "author", w=12, h=10, decimals=0, least=0,
        ),
        lines(
            "Training from others, by node", "Share of each node's trained tokens that others sampled.",
            Query(f"{of_others} / {of_all}", "{{node}}"), SHARE, w=12, h=10, least=0, most=1, links=True,
        ),
        lines(
            "Authors that others learn from", "Groups per minute that other nodes used, by author.",
            Query(f"60 * sum by (author) ({rate_used} unless on (node, author) {itself})", "{{author}}"),
            PER_MINUTE, w=6, stack="normal",
        ),
        lines(
            "Groups to draw from", "Groups that lie in the swarm streams, by tag.",
            Query(f"max by (tag) (grapevine_swarm_groups{{{RUN}}})", "{{tag}}"), COUNT, w=6, stack="normal",
            colours=TAG_COLOURS,
        ),
        lines(
            "Authors to draw from", "Nodes that shared a group with this tag within the swarm's maximum age.",
            Query(f"max by (tag) (grapevine_swarm_authors{{{RUN}}})", "{{tag}}"), COUNT, w=6, colours=TAG_COLOURS,
        ),
        lines(
            "Wanted and not found",
            "Swarm groups per minute that rounds wanted and that were not there: others share too little with the tags that "
            "are asked for, or are slower.",
            Query(f"60 * sum by (node) (rate(grapevine_swarm_missing_total{{{NODES}}}{RATE}))", "{{node}}"),
            PER_MINUTE, w=6, links=True,
        ),
    ]  # fmt: skip
    material = [
        lines(
            "Groups used, by tag",
            "How hard the groups were that rounds trained on, own and swarm. In those that failed or are solved, all "
            "answers are equally right.",
            Query(f"sum by (tag) (rate(grapevine_groups_used_total{{{NODES}}}{RATE}))", "{{tag}}"),
            PER_SECOND, stack="percent", colours=TAG_COLOURS,
        ),
        lines(
            "Informative groups", "Share of a round's own groups whose rewards are not all alike: the others teach nothing.",
            Query(f"max by (node) (grapevine_informative_share{{{NODES}}})", "{{node}}"), SHARE, least=0, most=1, links=True,
        ),
        lines(
            "Staleness",
            "Mean policy steps between sampling and training of a round's own groups. Bounded by `max_staleness`.",
            Query(f"max by (node) (grapevine_staleness_steps{{{NODES}}})", "{{node}}"), STEPS, decimals=1, links=True,
        ),
    ]  # fmt: skip
    return made(
        "swarm", "swarm", "Is it learning, and who helps whom?", "many",
        [
            ("Is it learning?", learning), ("How far is it?", progress), ("Who helps whom?", helping),
            ("What does it learn from?", material),
        ],
    )  # fmt: skip
