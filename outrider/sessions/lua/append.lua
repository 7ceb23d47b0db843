-- Compare-and-append under an epoch. Begins with admit.lua.
-- KEYS: session, tokens, logprobs
-- ARGV: epoch, owner, lease_ms, ttl_ms, expected_length, token bytes, logprobs,
--       then field, value, field, value ... to set if the tokens are appended
-- Returns the stored length in tokens, or {'missing', 0}, or {'stale', stored epoch}.
local session, refusal = admit(KEYS[1], ARGV[1], ARGV[2], ARGV[3])
if not session then return refusal end

local length = session.rewrite and 0 or redis.call('STRLEN', KEYS[2]) / 4
if length == tonumber(ARGV[5]) and #ARGV[6] > 0 then
  if session.rewrite then
    redis.call('DEL', KEYS[2], KEYS[3])
    redis.call('HDEL', KEYS[1], 'rewrite')
  end
  length = redis.call('APPEND', KEYS[2], ARGV[6]) / 4
  if #ARGV[7] > 0 then redis.call('APPEND', KEYS[3], ARGV[7]) end
  redis.call('HSET', KEYS[1], unpack(ARGV, 8))
end

-- The time to live is only written when it has run below its least: an append is one write.
if session.state == 'running' and redis.call('PTTL', KEYS[1]) < tonumber(ARGV[4]) then
  local ttl_ms = string.format('%.0f', ARGV[4] * 61 / 60)
  for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ttl_ms) end
end
for i = 2, 3 do
  if redis.call('PTTL', KEYS[i]) == -1 then
    redis.call('PEXPIRE', KEYS[i], redis.call('PTTL', KEYS[1]))
  end
end
return length
