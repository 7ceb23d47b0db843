-- Stores a value under a key that has no value, or that has the value to replace. Restarts the
-- key's time to live.
-- KEYS: key; ARGV: value (empty = only read), the value to replace, ttl_ms
-- Returns the key's value, empty if there is none.
local found = redis.call('GET', KEYS[1]) or ''
if ARGV[1] ~= '' and (found == '' or found == ARGV[2]) then found = ARGV[1] end
if found ~= '' then redis.call('SET', KEYS[1], found, 'PX', ARGV[3]) end
return found
