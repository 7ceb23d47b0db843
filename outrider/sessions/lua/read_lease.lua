-- Returns the remaining time of an owner's lease, ms; negative if it has none. An owner with a lease
-- gets the request of another one.
-- KEYS: the lease, requests of others to this owner
-- ARGV: the session (with the prefix `cancel:` to end it), lease_ms
local left_ms = redis.call('PTTL', KEYS[1])
if left_ms >= 0 then
  -- A server that refuses writes (memory full, too few replicas) still reports the time.
  redis.pcall('SADD', KEYS[2], ARGV[1])
  redis.pcall('PEXPIRE', KEYS[2], ARGV[2])
end
return left_ms
