-- Compare-and-append under an epoch.
-- KEYS: session, tokens, logprobs
-- ARGV: epoch, owner ('' = any), lease_ms, ttl_ms, expected_length, token bytes, logprobs,
--       then field, value, field, value ... to set if the tokens are appended
-- Returns the stored length in tokens, or {'missing', 0}, or {'stale', stored epoch}.
local stored = redis.call('HMGET', KEYS[1], 'epoch', 'owner', 'state', 'rewrite')
if not stored[1] then return {'missing', 0} end

local epoch, stored_epoch = tonumber(ARGV[1]), tonumber(stored[1])
if epoch < stored_epoch then return {'stale', stored_epoch} end
if epoch == stored_epoch and ARGV[2] ~= '' and ARGV[2] ~= stored[2] then
  return {'stale', stored_epoch}
end

local running = stored[3] == 'running'
local rewrite = stored[4] == '1'
if epoch > stored_epoch then
  -- A take-over was lost with the store's tail. What is stored may be of an older owner, so it
  -- counts as nothing until this one has sent everything; till then it stays readable.
  local time = redis.call('TIME')
  local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
  local owner = ARGV[2] ~= '' and ARGV[2] or stored[2]
  redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'owner', owner, 'state', 'running',
    'finish_reason', '', 'rewrite', '1',
    'lease_until_ms', string.format('%.0f', now_ms + ARGV[3]))
  running, rewrite = true, true
end

local length = rewrite and 0 or redis.call('STRLEN', KEYS[2]) / 4
if length == tonumber(ARGV[5]) and #ARGV[6] > 0 then
  if rewrite then
    redis.call('DEL', KEYS[2], KEYS[3])
    redis.call('HDEL', KEYS[1], 'rewrite')
  end
  length = redis.call('APPEND', KEYS[2], ARGV[6]) / 4
  if #ARGV[7] > 0 then redis.call('APPEND', KEYS[3], ARGV[7]) end
  redis.call('HSET', KEYS[1], unpack(ARGV, 8))
end

-- The time to live is only written when it has run below its least: an append is one write.
if running and redis.call('PTTL', KEYS[1]) < tonumber(ARGV[4]) then
  local ttl_ms = string.format('%.0f', ARGV[4] * 61 / 60)
  for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ttl_ms) end
end
for i = 2, 3 do
  if redis.call('PTTL', KEYS[i]) == -1 then
    redis.call('PEXPIRE', KEYS[i], redis.call('PTTL', KEYS[1]))
  end
end
return length
