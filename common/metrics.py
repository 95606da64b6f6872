"""What the workers count, for Prometheus. One place, so that a name means one thing.

Labels: `target` is a node or one of its evaluations; `reason` is a refusal's word. Role and run are the scrape's labels.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

reconnects = Counter("grapevine_reconnects_total", "Times the server was away and this worker joined again.")

# Generators.
tokens_generated = Counter("grapevine_tokens_generated_total", "Completion tokens sampled.", ["target"])
groups_answered = Counter("grapevine_groups_answered_total", "Orders answered with a raw group.", ["target"])
orders_skipped = Counter("grapevine_orders_skipped_total", "Orders skipped, no longer open or past their deadline.")
policies_loaded = Counter("grapevine_policies_loaded_total", "Policy versions taken into the engine.", ["target"])
policy_swap_seconds = Histogram("grapevine_policy_swap_seconds", "Seconds in which the engine took on a policy.")
orders_in_flight = Gauge("grapevine_orders_in_flight", "Orders being answered by this generator.")
engine_seconds = Counter("grapevine_engine_seconds_total", "Seconds in which this generator's engine was sampling.")
policies_refused = Counter("grapevine_policies_refused_total", "Policies not loaded; the old one went on.", ["reason"])

# Verifiers.
groups_scored = Counter("grapevine_groups_scored_total", "Raw groups scored, by reward tag.", ["tag"])
messages_refused = Counter("grapevine_messages_refused_total", "Messages quarantined.", ["stream", "reason"])
scoring_faults = Counter("grapevine_scoring_faults_total", "Completions whose scoring failed.", ["task", "fault"])
scoring_seconds = Histogram("grapevine_scoring_seconds", "Seconds to score one group.", ["task"])

# Learners.
rounds = Gauge("grapevine_round", "Rounds completed by this node.", ["target"])
own_reward = Gauge("grapevine_own_reward", "Mean reward over the own groups of the last round, before filters.", ["target"])
heldout_reward = Gauge("grapevine_heldout_reward", "Mean reward on held-out questions, last evaluation.", ["target"])
staleness = Gauge("grapevine_staleness_steps", "Mean policy steps between sampling and training, own groups.", ["target"])
swarm_groups = Gauge("grapevine_swarm_groups", "Swarm groups in the last round.", ["target"])
books = Gauge("grapevine_books", "The ledger's books of a target, by column.", ["target", "column"])
update_seconds = Histogram("grapevine_update_seconds", "Seconds of one round's parts.", ["part"])
tokens_trained = Counter("grapevine_tokens_trained_total", "Completion tokens in updates.", ["origin"])
updates_skipped = Counter("grapevine_updates_skipped_total", "Optimizer steps skipped: exploding or not finite.", ["node"])
rollbacks = Counter("grapevine_rollbacks_total", "Returns to the last good checkpoint.", ["node"])

# Control jobs.
jobs = Gauge("grapevine_jobs", "Control jobs by status.", ["status"])
job_failures = Counter("grapevine_job_failures_total", "Tries of control jobs that failed.", ["kind"])
