-- Keeps a value under a key that has none, or the one that it replaces; begins its time to live anew.
-- KEYS: key; ARGV: value (empty = only asks), the value that it replaces, ttl_ms
-- Returns what the key has now; empty = nothing.
local found = redis.call('GET', KEYS[1]) or ''
if ARGV[1] ~= '' and (found == '' or found == ARGV[2]) then found = ARGV[1] end
if found ~= '' then redis.call('SET', KEYS[1], found, 'PX', ARGV[3]) end
return found
