-- Reads a part of a session's tokens or log-probabilities.
-- KEYS: session, one of its strings; ARGV: first byte, last byte
-- Returns {epoch, owner, '1' if the string is about to be replaced, bytes}, or {'missing', 0}. As
-- long as the first three values stay the same, bytes are only appended. A comparison of epochs
-- alone is not enough, because Redis may lose a take-over and give the same epoch to another owner.
local stored = redis.call('HMGET', KEYS[1], 'epoch', 'owner', 'rewrite')
if not stored[1] then return {'missing', 0} end
return {stored[1], stored[2], stored[3] or '', redis.call('GETRANGE', KEYS[2], ARGV[1], ARGV[2])}
