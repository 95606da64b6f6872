"""The roof: command line, local launcher, control jobs, experiments and reports."""
