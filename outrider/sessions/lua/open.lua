-- Creates a session at epoch 1, or finds that its owner has created it already.
-- KEYS: session, tokens, logprobs
-- ARGV: lease_ms, ttl_ms, token bytes, then field, value, field, value ... of the new session
-- Returns 1, or 0 if another session has the id.
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

if redis.call('EXISTS', KEYS[1]) == 1 then
  for _, name in ipairs({'tenant', 'owner', 'seed', 'rule', 'parameters', 'prompt_length'}) do
    local given
    for i = 4, #ARGV, 2 do
      if ARGV[i] == name then given = ARGV[i + 1] end
    end
    if redis.call('HGET', KEYS[1], name) ~= given then return 0 end
  end
  return 1
end

redis.call('DEL', KEYS[2], KEYS[3])
redis.call('HSET', KEYS[1], unpack(ARGV, 4))
redis.call('HSET', KEYS[1], 'lease_until_ms', string.format('%.0f', now_ms + ARGV[1]))
redis.call('SET', KEYS[2], ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return 1
