"""Makes garbage collections of Python short."""

import gc


def skip_what_exists() -> None:
    """Makes later collections skip all objects that exist now. Most of them belong to imported
    modules, and stay. A collection of all objects would stop the process for 0.2 s or more."""
    gc.collect()
    gc.freeze()
