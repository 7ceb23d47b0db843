-- Reads a session. Follows layout.lua.
-- KEYS: session, tokens, logprobs
-- Returns the result of `read`, or {'missing', 0}.
if redis.call('EXISTS', KEYS[1]) == 0 then return {'missing', 0} end
return read()
