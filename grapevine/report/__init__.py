"""What a run came to: figures and pictures, from the files it left behind."""
