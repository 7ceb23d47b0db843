"""The command line. The module of a command is imported only when that command runs."""
