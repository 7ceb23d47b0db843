"""Sessions: the state of a session at its owner, and the session store in Redis."""
