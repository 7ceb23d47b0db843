-- Returns how long an owner's lease still lasts, ms; negative where it has none.
-- KEYS: the lease
return redis.call('PTTL', KEYS[1])
