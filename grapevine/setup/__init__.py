"""What one needs before a first run: a settings file, a check of the machine, the reference of settings."""
