-- Reads a session at one moment.
-- KEYS: session, tokens, logprobs; ARGV: bytes of tokens and logprobs to return at most
-- Returns {fields and values, token bytes, logprobs}, or, where these are longer, their lengths in
-- bytes in their place (see read_part.lua), or {'missing', 0}.
if redis.call('EXISTS', KEYS[1]) == 0 then return {'missing', 0} end
local num_tokens, num_logprobs = redis.call('STRLEN', KEYS[2]), redis.call('STRLEN', KEYS[3])
if num_tokens + num_logprobs > tonumber(ARGV[1]) then
  return {redis.call('HGETALL', KEYS[1]), num_tokens, num_logprobs}
end
return {redis.call('HGETALL', KEYS[1]), redis.call('GET', KEYS[2]) or '',
  redis.call('GET', KEYS[3]) or ''}
