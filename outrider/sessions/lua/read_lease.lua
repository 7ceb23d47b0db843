-- Returns the remaining time of an owner's lease, ms; negative without a lease. If there is a
-- lease, stores a request to its owner.
-- KEYS: the lease, requests of other owners to this owner
-- ARGV: id of the requested session (after `cancel:` if it should be cancelled), lease_ms
local left_ms = redis.call('PTTL', KEYS[1])
if left_ms >= 0 then
  -- A server that refuses writes (memory full, too few replicas) still reports the time.
  redis.pcall('SADD', KEYS[2], ARGV[1])
  redis.pcall('PEXPIRE', KEYS[2], ARGV[2])
end
return left_ms
