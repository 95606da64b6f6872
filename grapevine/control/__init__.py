"""Control jobs: what a run is asked to do beside training. They travel on rq, always as JSON."""
