"""A swarm on this machine: workers as processes or in lockstep, restarted, resumed."""
