-- Reads a text that sessions share. KEYS: the text. Returns the text, empty if it is not stored.
return redis.call('GET', KEYS[1]) or ''
