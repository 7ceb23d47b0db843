-- Returns how long an owner's lease still lasts, ms; negative where it has none. An owner that has one
-- is told what another one asks for.
-- KEYS: the lease, what others asked this owner for
-- ARGV: the session (`cancel:` before it = to end it), lease_ms
local left_ms = redis.call('PTTL', KEYS[1])
if left_ms >= 0 then
  -- A server that takes no writes, its memory full or too few replicas with it, still tells the time.
  redis.pcall('SADD', KEYS[2], ARGV[1])
  redis.pcall('PEXPIRE', KEYS[2], ARGV[2])
end
return left_ms
