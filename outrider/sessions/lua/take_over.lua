-- Makes `owner` the owner under the next epoch, if the session's epoch and owner are still those
-- that were read. The caller has checked that the former owner's lease has ended. Follows
-- layout.lua.
-- KEYS: session, tokens, logprobs
-- ARGV: epoch and owner that were read, owner, ttl_ms
-- Returns the result of `read`, or {'missing', 0}, or {'changed', epoch}.
-- One call (HSET) changes the owner. If Redis aborts this script after that call, the session keeps
-- its former time to live.
local stored = redis.call('HMGET', KEYS[1], 'epoch', 'owner', 'state')
if not stored[1] then return {'missing', 0} end

if stored[3] == 'running' then
  if stored[1] ~= ARGV[1] or stored[2] ~= ARGV[2] then return {'changed', tonumber(stored[1])} end
  write_when_full(KEYS[1])  -- Otherwise a session of a lost owner could not be cancelled.
  -- The new owner continues from the stored tokens, whichever owner wrote them.
  redis.call('HSET', KEYS[1], 'epoch', string.format('%.0f', stored[1] + 1), 'owner', ARGV[3],
    'rewrite', '0')
  prolong(KEYS, ARGV[4])
end
return read()
