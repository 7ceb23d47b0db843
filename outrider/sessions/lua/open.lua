-- Creates a session at epoch 1, unless its owner has created it already. Follows layout.lua.
-- KEYS: session, tokens, logprobs
-- ARGV: ttl_ms, token bytes, then field, value, field, value ... of the new session
-- Returns 1, or 0 if another session has the id.
-- If Redis aborts this script before the hash is set, there is no session, and the tokens expire.
-- If Redis aborts it later, the hash has no time to live until the session is written or opened
-- again.
if redis.call('EXISTS', KEYS[1]) == 1 then
  for _, name in ipairs({'owner', 'opened'}) do
    local given
    for i = 3, #ARGV, 2 do
      if ARGV[i] == name then given = ARGV[i + 1] end
    end
    if redis.call('HGET', KEYS[1], name) ~= given then return 0 end
  end
else
  put(KEYS[2], 0, ARGV[2], ARGV[1])
  redis.call('HSET', KEYS[1], 'tokens_start', '0', 'tokens_end', #ARGV[2],
    'logprobs_start', '0', 'logprobs_end', '0', unpack(ARGV, 3))
end
if redis.call('PTTL', KEYS[1]) < 0 then redis.call('PEXPIRE', KEYS[1], ARGV[1]) end
return 1
