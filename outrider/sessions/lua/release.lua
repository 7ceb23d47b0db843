-- Releases a session that its owner no longer runs. Follows layout.lua and admit.lua.
-- KEYS: session, tokens, logprobs; ARGV: epoch, owner, name of the released owner
-- Returns 1, or {'missing', 0}, or {'stale', stored epoch}.
-- A finished session stays unchanged, even if its stored epoch is lower.
write_when_full(KEYS[1])
local session, refusal = admit(KEYS[1], ARGV[1], ARGV[2], true)
if not session then return refusal end
if session.state == 'running' then redis.call('HSET', KEYS[1], 'owner', ARGV[3]) end
return 1
