-- Renews or ends the lease of an owner of sessions.
-- KEYS: the lease, requests of other owners to this owner
-- ARGV: lease_ms (0 = end the lease)
-- Returns the requests, sorted, and deletes them.
-- The lease is a key with a time to live, so this script reads no clock.
if ARGV[1] == '0' then
  redis.call('DEL', KEYS[1])
-- PEXPIRE comes first, because a server whose memory is full allows PEXPIRE, but not SET.
elseif redis.call('PEXPIRE', KEYS[1], ARGV[1]) == 0 then
  redis.call('SET', KEYS[1], '1', 'PX', ARGV[1])
end
-- An error of the next commands must not hide that the lease was renewed.
local wanted = redis.pcall('SMEMBERS', KEYS[2])
if wanted.err then return {} end
if wanted[1] then redis.pcall('DEL', KEYS[2]) end
table.sort(wanted)
return wanted
