-- Renews the lease of an owner of sessions, or ends it.
-- KEYS: the lease; ARGV: lease_ms (0 = ends it)
-- Redis itself counts the time down: no clock is read and no point in time is stored.
if ARGV[1] == '0' then return redis.call('DEL', KEYS[1]) end
-- A server whose memory is full allows PEXPIRE, but not SET.
if redis.call('PEXPIRE', KEYS[1], ARGV[1]) == 0 then
  redis.call('SET', KEYS[1], '1', 'PX', ARGV[1])
end
return 1
