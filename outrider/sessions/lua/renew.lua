-- Renews the leases of many sessions of one owner.
-- KEYS: session, tokens, logprobs of each; ARGV: owner, lease_ms, ttl_ms, then one epoch each
-- Returns the indices, from 0, of the sessions that are not this owner's any more, or whose keys
-- hold something else than a session: the others are renewed all the same.
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local lease_until_ms = string.format('%.0f', now_ms + ARGV[2])
local ttl_ms = string.format('%.0f', ARGV[3] * 61 / 60)
local lost = {}

for i = 0, #KEYS / 3 - 1 do
  local key = KEYS[3 * i + 1]
  local epoch = tonumber(ARGV[4 + i])
  local stored = redis.pcall('HMGET', key, 'epoch', 'owner', 'state')
  if stored.err then
    if not string.find(stored.err, 'WRONGTYPE', 1, true) then return stored end
    stored = {}
  end
  local stored_epoch = tonumber(stored[1] or -1) or -1
  if stored_epoch >= 0 and epoch > stored_epoch then
    -- The store lost a take-over: see append.lua.
    redis.call('HSET', key, 'epoch', ARGV[4 + i], 'owner', ARGV[1], 'state', 'running',
      'finish_reason', '', 'rewrite', '1')
    stored_epoch, stored[2], stored[3] = epoch, ARGV[1], 'running'
  end
  if stored_epoch ~= epoch or stored[2] ~= ARGV[1] then
    lost[#lost + 1] = i
  elseif stored[3] == 'running' then
    redis.call('HSET', key, 'lease_until_ms', lease_until_ms)
    if redis.call('PTTL', key) < tonumber(ARGV[3]) then
      for k = 1, 3 do redis.call('PEXPIRE', KEYS[3 * i + k], ttl_ms) end
    end
  end
end
return lost
