-- Ensures that a text is stored, and lives for at least ttl_ms.
-- KEYS: the text; ARGV: ttl_ms, text (empty = only restart the time to live of a stored text)
-- Returns 1 if the text is stored, otherwise 0.
local left_ms = redis.call('PTTL', KEYS[1])
if left_ms < 0 and ARGV[2] == '' then return 0 end
if left_ms < 0 then
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[1])
elseif left_ms < tonumber(ARGV[1]) then
  redis.call('PEXPIRE', KEYS[1], ARGV[1])
end
return 1
