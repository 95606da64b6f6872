"""What a cluster needs besides its manifests: server accounts, passwords, a folder to keep one's own settings in."""
