-- Renews the lease of an owner of sessions, or ends it.
-- KEYS: the lease; ARGV: lease_ms (0 = ends it)
-- Redis itself counts the time down: no clock is read and no point in time is stored.
if ARGV[1] == '0' then return redis.call('DEL', KEYS[1]) end
redis.call('SET', KEYS[1], '1', 'PX', ARGV[1])
return 1
