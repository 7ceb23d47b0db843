-- Makes `owner` the owner under the next epoch, once the lease has run out or is its own.
-- Begins with layout.lua.
-- KEYS: session, tokens, logprobs; ARGV: owner, lease_ms, ttl_ms
-- Returns {fields and values, token bytes, logprobs}, or {'missing', 0}, or {'leased', ms left}.
-- One call changes the owner; ended after it, the session is taken over and its time to live shorter.
local stored = redis.call('HMGET', KEYS[1], 'epoch', 'owner', 'state', 'lease_until_ms')
if not stored[1] then return {'missing', 0} end

if stored[3] == 'running' then
  local time = redis.call('TIME')
  local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
  local left_ms = stored[4] - now_ms
  if stored[2] ~= ARGV[1] and left_ms > 0 then return {'leased', left_ms} end
  -- The new owner goes on from what is stored, whichever owner wrote it.
  redis.call('HSET', KEYS[1], 'epoch', string.format('%.0f', stored[1] + 1), 'owner', ARGV[1],
    'rewrite', '0', 'lease_until_ms', string.format('%.0f', now_ms + ARGV[2]))
  prolong(ARGV[3])
end
return read()
