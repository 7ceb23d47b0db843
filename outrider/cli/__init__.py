"""The command line. The module of a command is imported only when that command runs."""

from outrider.services import secure

secure()
