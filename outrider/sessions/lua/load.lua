-- Reads a session at one moment. Begins with layout.lua.
-- KEYS: session, tokens, logprobs
-- Returns what `read` does, or {'missing', 0}.
if redis.call('EXISTS', KEYS[1]) == 0 then return {'missing', 0} end
return read()
