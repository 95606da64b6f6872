"""A run as Prometheus sees it: the figures that lie on the server, the alerts, a Prometheus on this machine."""
