-- Renews the lease of an owner of sessions, or ends it.
-- KEYS: the lease, what others asked this owner for
-- ARGV: lease_ms (0 = ends it)
-- Returns what they asked for, sorted, and forgets it.
-- Redis itself counts the time down: no clock is read and no point in time is stored.
if ARGV[1] == '0' then
  redis.call('DEL', KEYS[1])
-- A server whose memory is full allows PEXPIRE, but not SET.
elseif redis.call('PEXPIRE', KEYS[1], ARGV[1]) == 0 then
  redis.call('SET', KEYS[1], '1', 'PX', ARGV[1])
end
-- Whatever is wrong with them, the lease is renewed.
local wanted = redis.pcall('SMEMBERS', KEYS[2])
if wanted.err then return {} end
if wanted[1] then redis.pcall('DEL', KEYS[2]) end
table.sort(wanted)
return wanted
