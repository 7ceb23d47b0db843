-- Marks a session finished.
-- KEYS: session, tokens, logprobs; ARGV: epoch, ttl_ms, then field, value ... of the final state
-- Returns the stored length in tokens, or {'missing', 0}, or {'stale', stored epoch}.
local stored = redis.call('HMGET', KEYS[1], 'epoch', 'state', 'rewrite')
if not stored[1] then return {'missing', 0} end

local epoch, stored_epoch = tonumber(ARGV[1]), tonumber(stored[1])
if epoch < stored_epoch then return {'stale', stored_epoch} end
local rewrite = stored[3] == '1'
if epoch > stored_epoch then
  -- The store lost a take-over: see append.lua.
  redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'rewrite', '1')
  rewrite = true
end

if epoch > stored_epoch or stored[2] ~= 'finished' then
  redis.call('HSET', KEYS[1], 'lease_until_ms', '0', unpack(ARGV, 3))
  for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ARGV[2]) end
end
return rewrite and 0 or redis.call('STRLEN', KEYS[2]) / 4
