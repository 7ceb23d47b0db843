-- Makes `owner` the owner under the next epoch, once the lease has run out or is its own.
-- KEYS: session, tokens, logprobs; ARGV: owner, lease_ms, ttl_ms, bytes of tokens and
--   logprobs to return at most
-- Returns what load.lua returns, or {'leased', ms left}.
local stored = redis.call('HMGET', KEYS[1], 'epoch', 'owner', 'state', 'lease_until_ms')
if not stored[1] then return {'missing', 0} end

if stored[3] == 'running' then
  local time = redis.call('TIME')
  local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
  local left_ms = stored[4] - now_ms
  if stored[2] ~= ARGV[1] and left_ms > 0 then return {'leased', left_ms} end
  redis.call('HSET', KEYS[1], 'epoch', string.format('%.0f', stored[1] + 1), 'owner', ARGV[1],
    'lease_until_ms', string.format('%.0f', now_ms + ARGV[2]))
  -- The new owner goes on from what is stored, whoever wrote it.
  redis.call('HDEL', KEYS[1], 'rewrite')
  if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[3]) then
    local ttl_ms = string.format('%.0f', ARGV[3] * 61 / 60)
    for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ttl_ms) end
  end
end
local num_tokens, num_logprobs = redis.call('STRLEN', KEYS[2]), redis.call('STRLEN', KEYS[3])
if num_tokens + num_logprobs > tonumber(ARGV[4]) then
  return {redis.call('HGETALL', KEYS[1]), num_tokens, num_logprobs}
end
return {redis.call('HGETALL', KEYS[1]), redis.call('GET', KEYS[2]) or '',
  redis.call('GET', KEYS[3]) or ''}
