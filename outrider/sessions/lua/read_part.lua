-- Reads a part of a session's tokens or log-probabilities.
-- KEYS: session, one of its strings; ARGV: first byte, last byte
-- Returns {epoch, '1' where the string is about to be replaced, bytes}, or {'missing', 0}. Under one
-- epoch and one such mark a string is only ever appended to.
local stored = redis.call('HMGET', KEYS[1], 'epoch', 'rewrite')
if not stored[1] then return {'missing', 0} end
return {stored[1], stored[2] or '', redis.call('GETRANGE', KEYS[2], ARGV[1], ARGV[2])}
