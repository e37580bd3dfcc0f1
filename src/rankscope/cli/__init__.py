"""The command line: one typed function a command."""
