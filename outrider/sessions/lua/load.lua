-- Reads a session at one moment.
-- KEYS: session, tokens, logprobs
-- Returns {fields and values, token bytes, logprobs}, or {'missing', 0}.
if redis.call('EXISTS', KEYS[1]) == 0 then return {'missing', 0} end
return {redis.call('HGETALL', KEYS[1]), redis.call('GET', KEYS[2]) or '',
  redis.call('GET', KEYS[3]) or ''}
