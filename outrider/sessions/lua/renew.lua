-- Ensures that an unfinished session lives on. Follows layout.lua.
-- KEYS: session, tokens, logprobs; ARGV: ttl_ms
if redis.call('HGET', KEYS[1], 'state') == 'running' then prolong(KEYS, ARGV[1]) end
return 1
