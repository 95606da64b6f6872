"""The Grafana dashboards of k8s/components/monitoring, as code."""
