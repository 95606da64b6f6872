"""Log lines for people or, in containers, as JSON (GRAPEVINE_LOG=json). GRAPEVINE_LOG_LEVEL chooses how much."""

from __future__ import annotations

import logging
import os
import sys

import structlog


def configure_logs(console: bool) -> None:
    """`console`: this process's log is its standard error; otherwise only warnings are shown."""
    level = os.environ.get("GRAPEVINE_LOG_LEVEL", "info" if console else "warning").upper()
    as_json = os.environ.get("GRAPEVINE_LOG") == "json"
    last = structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([structlog.processors.dict_tracebacks] if as_json else []),
            last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    # It tells of every attempt to reach the hub; what came of them is told once, by whoever asked.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
