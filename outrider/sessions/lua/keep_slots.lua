-- Renews the leases of some slots of a caller, and frees others. A slot allows one generation.
-- KEYS: the caller's slots
-- ARGV: lease_ms, number of slots to free, names of these slots, names of slots to renew
local time = redis.call('TIME')
local until_ms = string.format('%.0f', time[1] * 1000 + time[2] / 1000 + ARGV[1])
local num_free = tonumber(ARGV[2])

-- While Redis' memory is full, it refuses ZADD in a script that has not written yet.
if #ARGV > 2 + num_free then redis.call('PEXPIRE', KEYS[1], ARGV[1]) end
for i = 3, 2 + num_free do redis.call('ZREM', KEYS[1], ARGV[i]) end
for i = 3 + num_free, #ARGV do redis.call('ZADD', KEYS[1], until_ms, ARGV[i]) end
if #ARGV > 2 + num_free then redis.call('PEXPIRE', KEYS[1], ARGV[1]) end
return 1
