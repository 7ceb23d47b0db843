-- Marks a session as finished if it has the stated length. Follows layout.lua and admit.lua.
-- KEYS: session, tokens, logprobs
-- ARGV: epoch, owner, ttl_ms, length (-1 = any), then field, value ... of the final state
-- Returns the stored length in tokens, or {'missing', 0}, or {'stale', stored epoch}.
-- If Redis aborts this script at any call, the script has at most raised the epoch (admit.lua), or
-- finished a session without shortening its time to live.
write_when_full(KEYS[1])  -- An end always fits.
local session, refusal = admit(KEYS[1], ARGV[1], ARGV[2])
if not session then return refusal end

local length = length_of(session, KEYS[2])
local expected = tonumber(ARGV[4])
local is_whole = expected == length and not session.rewrite
if session.state == 'running' and (expected == -1 or is_whole) then
  redis.call('HSET', KEYS[1], unpack(ARGV, 5))
  for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ARGV[3]) end
end
return length
