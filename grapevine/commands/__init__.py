"""The subcommands of `grapevine`, one file per subject. Each imports what it needs when it is called: `--help` is quick."""
