"""Code without a subject of its own: files, clocks, turns, caches, settings, log files."""
