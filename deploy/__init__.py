"""Starting and stopping Outrider: the launcher on Ray and the command line."""
