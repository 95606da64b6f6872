"""Learners: own and swarm groups in, policies out."""
