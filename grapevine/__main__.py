"""`python -m grapevine`."""

from grapevine.cli import main

main()
